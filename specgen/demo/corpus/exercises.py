"""Function exercises: a signature, a docstring that says what to do, and the body that does it.

Two thirds are composed functions: random combinations of what is computed (a sum, a count, a list, ...), a condition on the
elements and a change of the elements. Functions with some of these names are held out from training (held_out.py). One third are
well-known functions from the file classics.txt, with varying variable names.
"""

# ruff: noqa: SIM905 (a string of words is easier to read than a list of quoted words)
from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from string import Template
from textwrap import indent

from specgen.demo.corpus.classes import example_class
from specgen.demo.corpus.held_out import draw

_LISTS = "values numbers items data elements entries scores points amounts sizes".split()
_ELEMENTS = "x value n number item element entry".split()
_TEXTS = "text s word line name sentence string".split()
_LETTERS = "c char letter ch".split()
_TABLES = "counts prices ages scores table mapping stock grades".split()
_KEYS = "key name k label".split()
_LIMITS = "limit bound threshold k minimum".split()
_VERBS = ["get", "find", "select", "take", "list"]
_CLASSIC_SHARE = 1 / 3  # of the exercises


@dataclass(frozen=True, slots=True)
class _Part:
    """A building block of a composed function: its code, its words in the docstring, and its words in the function's name.

    `$x` and other names with a dollar sign are placeholders. Code that loops over elements has two more placeholders: `{test}`
    for the condition on an element, and `{value}` for the changed element.
    """

    code: str
    description: str
    name: str


_CONDITIONS = [
    _Part("$x > $limit", "greater than $limit", "above"),
    _Part("$x < $limit", "less than $limit", "below"),
    _Part("$x >= $limit", "at least $limit", "at_least"),
    _Part("$x != $limit", "not equal to $limit", "other_than"),
    _Part("$x == $limit", "equal to $limit", "equal_to"),
    _Part("$x % $limit == 0", "divisible by $limit", "divisible"),
    _Part("$x % 2 == 0", "even", "even"),
    _Part("$x % 2 == 1", "odd", "odd"),
    _Part("$x > 0", "positive", "positive"),
    _Part("$x < 0", "negative", "negative"),
    _Part("$x % $small == 0", "divisible by $small", "divisible_by_${small}"),
    _Part("$x > $large", "greater than $large", "above_${large}"),
    _Part("$x < $large", "less than $large", "below_${large}"),
    _Part("$x is not None", "not None", "present"),
]
_CHANGES = [
    _Part("$x * 2", "doubled", "doubled"),
    _Part("$x * $small", "multiplied by $small", "times_${small}"),
    _Part("$x + $small", "plus $small", "plus_$small"),
    _Part("$x - $small", "minus $small", "minus_$small"),
    _Part("$x ** 2", "squared", "squared"),
    _Part("$x ** 3", "cubed", "cubed"),
    _Part("-$x", "negated", "negated"),
    _Part("abs($x)", "as absolute value", "absolute"),
    _Part("$x // $small", "divided by $small", "divided_by_$small"),
    _Part("str($x)", "as string", "as_strings"),
    _Part("round($x)", "rounded", "rounded"),
]
_LETTER_CONDITIONS = [
    _Part("$x in 'aeiou'", "vowels", "vowels"),
    _Part("$x not in 'aeiou'", "letters that are no vowels", "no_vowels"),
    _Part("$x.isupper()", "uppercase letters", "uppercase"),
    _Part("$x.islower()", "lowercase letters", "lowercase"),
    _Part("$x.isdigit()", "digits", "digits"),
    _Part("$x.isalpha()", "letters", "letters"),
    _Part("$x.isspace()", "spaces", "spaces"),
    _Part("$x == '$letter'", "letters equal to '$letter'", "${letter}"),
    _Part("$x != '$letter'", "letters other than '$letter'", "not_${letter}"),
]
_LOOP = "for $x in $xs:\n    if {test}:\n        "
_TABLE_LOOP = "for $key, $x in $xs.items():\n    if {test}:\n        "
_REDUCTIONS = [
    _Part("$total = 0\n" + _LOOP + "$total += $x\nreturn $total", "the sum of the $xs that are", "sum"),
    _Part("count = 0\n" + _LOOP + "count += 1\nreturn count", "how many of the $xs are", "count"),
    _Part(_LOOP + "return True\nreturn False", "whether any of the $xs is", "any"),
    _Part("for $x in $xs:\n    if not {test}:\n        return False\nreturn True", "whether all of the $xs are", "all"),
    _Part("$total = 1\n" + _LOOP + "$total *= $x\nreturn $total", "the product of the $xs that are", "product"),
    _Part(_LOOP + "return $x\nreturn None", "the first of the $xs that is", "first"),
    _Part(
        "for i, $x in enumerate($xs):\n    if {test}:\n        return i\nreturn -1",
        "the index of the first of the $xs that is",
        "index",
    ),
    _Part(
        "best = None\nfor $x in $xs:\n    if {test} and (best is None or $x > best):\n        best = $x\nreturn best",
        "the largest of the $xs that are",
        "max",
    ),
    _Part(
        "best = None\nfor $x in $xs:\n    if {test} and (best is None or $x < best):\n        best = $x\nreturn best",
        "the smallest of the $xs that are",
        "min",
    ),
]
_REDUCING_EXPRESSIONS = {
    "sum": "return sum($x for $x in $xs if {test})",
    "count": "return sum(1 for $x in $xs if {test})",
    "any": "return any({test} for $x in $xs)",
    "all": "return all({test} for $x in $xs)",
    "max": "return max($x for $x in $xs if {test})",
    "min": "return min($x for $x in $xs if {test})",
    "first": "return next($x for $x in $xs if {test})",
}
_SELECTIONS = [
    "$result = []\n" + _LOOP + "$result.append({value})\nreturn $result",
    "return [{value} for $x in $xs if {test}]",
]
_LETTER_FORMS = [
    _Part("count = 0\n" + _LOOP + "count += 1\nreturn count", "the number of", "count"),
    _Part("return sum(1 for $x in $xs if {test})", "the number of", "count"),
    _Part("return ''.join($x for $x in $xs if {test})", "a string of the", "keep"),
    _Part("$result = ''\n" + _LOOP + "$result += $x\nreturn $result", "a string of the", "keep"),
    _Part("return [$x for $x in $xs if {test}]", "a list of the", "list"),
    _Part(_LOOP + "return True\nreturn False", "whether there are", "has"),
]
_TABLE_FORMS = [
    _Part("$result = []\n" + _TABLE_LOOP + "$result.append($key)\nreturn $result", "the keys of $xs whose values are", "keys"),
    _Part("return [$key for $key, $x in $xs.items() if {test}]", "the keys of $xs whose values are", "keys"),
    _Part("return {{$key: $x for $key, $x in $xs.items() if {test}}}", "a dictionary of the $xs that are", "only"),
    _Part("$result = {{}}\n" + _TABLE_LOOP + "$result[$key] = $x\nreturn $result", "a dictionary of the $xs that are", "only"),
    _Part("return sum($x for $x in $xs.values() if {test})", "the sum of the $xs that are", "total"),
    _Part(
        "count = 0\nfor $x in $xs.values():\n    if {test}:\n        count += 1\nreturn count",
        "the number of $xs that are",
        "number",
    ),
]


def module(rng: random.Random, *, held_out: bool = False) -> str:
    """A small Python file: one to three exercises or a class, sometimes with a module docstring."""
    if rng.random() < 0.2:
        parts = [example_class(rng)]
    else:
        parts = [exercise(rng, held_out=held_out) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    if rng.random() < 0.15:
        subject = rng.choice(["lists", "numbers", "strings", "dictionaries", "counting", "sorting", "text", "data"])
        parts.insert(0, f'"""{rng.choice(["Functions for", "Helpers for", "Exercises with"])} {subject}."""')
    return "\n\n\n".join(parts)


def exercise(rng: random.Random, *, held_out: bool = False) -> str:
    """Returns the text of a function with its docstring and body.

    `held_out` as in composed_function(); it has no effect on functions from classics.txt.
    """
    return _classic(rng) if rng.random() < _CLASSIC_SHARE else composed_function(rng, held_out=held_out)


def composed_function(rng: random.Random, *, held_out: bool = False) -> str:
    """Returns the text of a function that is put together from random building blocks (a computation, a condition, a change).

    With `held_out` its name is one that training never uses; otherwise it is one that training may use. Only the name is held
    out: training may use the same body under another name.
    """
    return draw(_COMPOSED, rng, _signature_start, held_out=held_out)


def _signature_start(function: str) -> str:
    """Returns `def` and the function's name, for example `def sum_even`."""
    return function.split("(", 1)[0]


def _classic(rng: random.Random) -> str:
    names = _names(rng) | {
        "s": rng.choice(_TEXTS),
        "c": rng.choice(_LETTERS),
        "d": rng.choice(_TABLES),
        "key": rng.choice(_KEYS),
        "n": rng.choice(["n", "number", "n", "count"]),
        "i": rng.choice(["i", "i", "index", "j"]),
        "x": rng.choice(["x", "value", "item", "element"]),
    }
    return Template(rng.choice(_classics())).substitute(names)


@cache
def _classics() -> tuple[str, ...]:
    text = (Path(__file__).parent / "classics.txt").read_text(encoding="utf-8")
    return tuple(part.strip() for part in text.split("\n\n"))


def _names(rng: random.Random) -> dict[str, str]:
    """Returns random values for the placeholders (names with a dollar sign) in the text of a function."""
    return {
        "xs": rng.choice(_LISTS),
        "x": rng.choice(_ELEMENTS),
        "limit": rng.choice(_LIMITS),
        "small": str(rng.randint(2, 9)),
        "large": str(rng.randint(10, 99)),
        "letter": rng.choice("abcdefghijklmnoprstuw"),
        "result": rng.choice(["result", "found", "output", "kept"]),
        "total": rng.choice(["total", "result", "answer"]),
        "Return": rng.choice(["Return", "Give back", "Compute", "Return"]),
    }


def _reduction(rng: random.Random) -> str:
    """Returns a function that computes one value from those elements of a list that meet a condition."""
    names, condition, form = _names(rng), rng.choice(_CONDITIONS), rng.choice(_REDUCTIONS)
    if form.name in _REDUCING_EXPRESSIONS and rng.random() < 0.35:
        form = replace(form, code=_REDUCING_EXPRESSIONS[form.name])
    return _conditional(rng, form, condition, names)


def _selection(rng: random.Random) -> str:
    """Returns a function that selects the elements of a list that meet a condition. Some of these functions also change them."""
    names, condition, change, verb = _names(rng), rng.choice(_CONDITIONS), rng.choice(_CHANGES), rng.choice(_VERBS)
    changed = rng.random() < 0.4
    name = f"{verb}_{condition.name}" + (f"_{change.name}" if changed else "")
    doc = f"$Return a list of the $xs that are {condition.description}" + (f", {change.description}." if changed else ".")
    body = rng.choice(_SELECTIONS).format(test=condition.code, value=change.code if changed else "$x")
    return _function(rng, name, doc, body, names)


def _mapping(rng: random.Random) -> str:
    """Returns a function that changes every element of a list."""
    names, change = _names(rng), rng.choice(_CHANGES)
    body = rng.choice(
        [
            f"$result = []\nfor $x in $xs:\n    $result.append({change.code})\nreturn $result",
            f"return [{change.code} for $x in $xs]",
            f"for i in range(len($xs)):\n    $xs[i] = {change.code.replace('$x', '$xs[i]')}\nreturn $xs",
        ]
    )
    name = f"{rng.choice(['all', 'make', 'each'])}_{change.name}"
    return _function(rng, name, f"$Return the $xs, each {change.description}.", body, names)


def _on_text(rng: random.Random) -> str:
    """Returns a function that counts, collects or looks for the letters of a string that meet a condition."""
    names, condition = _names(rng), rng.choice(_LETTER_CONDITIONS)
    names |= {"xs": rng.choice(_TEXTS), "x": rng.choice(_LETTERS)}
    return _conditional(rng, rng.choice(_LETTER_FORMS), replace(condition, description=f"{condition.description} in $xs"), names)


def _on_table(rng: random.Random) -> str:
    """Returns a function that counts, sums or collects the dictionary entries whose values meet a condition."""
    names, condition = _names(rng), rng.choice(_CONDITIONS)
    names |= {"xs": rng.choice(_TABLES), "key": rng.choice(_KEYS), "x": "value"}
    return _conditional(rng, rng.choice(_TABLE_FORMS), condition, names)


def _conditional(rng: random.Random, form: _Part, condition: _Part, names: dict[str, str]) -> str:
    doc = f"$Return {form.description} {condition.description}."
    return _function(rng, f"{form.name}_{condition.name}", doc, form.code.format(test=condition.code), names)


def _function(rng: random.Random, name: str, doc: str, body: str, names: dict[str, str]) -> str:
    """Returns the text of a function. `names` has the values that replace the placeholders in the other arguments."""
    arguments = "$xs, $limit" if "$limit" in body else "$xs"
    quoted = f'"""{doc}"""' if rng.random() < 0.9 else f'"""\n{doc}\n"""'
    text = f"def {name}({arguments}):\n{indent(quoted, '    ')}\n{indent(body, '    ')}"
    return Template(text).substitute(names)


_COMPOSED: list[Callable[[random.Random], str]] = [_reduction, _reduction, _selection, _mapping, _on_text, _on_table]
"""The functions that generate a composed function. One that is listed twice is chosen twice as often."""
