"""Function exercises: a signature, a docstring that says what to do, and the body that does it.

Most are put together (what to go through, which elements count, what is done with them), and an
evaluation may ask for names that training never sees; the others are the classics, with names that change.
"""

# ruff: noqa: SIM905  (words in a row are read with more ease than quoted ones)
from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from textwrap import indent

from specgen.demo.corpus.classes import example_class
from specgen.demo.corpus.held_out import drawn

_LISTS = "values numbers items data elements entries scores points amounts sizes".split()
_ELEMENTS = "x value n number item element entry".split()
_TEXTS = "text s word line name sentence string".split()
_LETTERS = "c char letter ch".split()
_TABLES = "counts prices ages scores table mapping stock grades".split()
_KEYS = "key name k label".split()
_LIMITS = "limit bound threshold k minimum".split()


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of an exercise: the expression, how a docstring says it, how a function's name does."""

    code: str
    said: str
    named: str


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
_CLASSICS = 1 / 3
"""The share of exercises that are classics."""
_STARTS = ["get", "find", "select", "take", "list"]


def exercise(rng: random.Random, *, held_out: bool = False) -> str:
    """A function with its docstring and body."""
    return _classic(rng) if rng.random() < _CLASSICS else composed(rng, held_out=held_out)


def composed(rng: random.Random, *, held_out: bool = False) -> str:
    """A function that was put together; with `held_out` one whose name no function in training has (others may do the same)."""
    return drawn(_COMPOSED, rng, _name, held_out=held_out)


def module(rng: random.Random, *, held_out: bool = False) -> str:
    """Up to three exercises, or a class, as a small file; sometimes with a docstring of its own in front."""
    if rng.random() < 0.2:
        parts = [example_class(rng)]
    else:
        parts = [exercise(rng, held_out=held_out) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    if rng.random() < 0.15:
        subject = rng.choice(["lists", "numbers", "strings", "dictionaries", "counting", "sorting", "text", "data"])
        parts.insert(0, f'"""{rng.choice(["Functions for", "Helpers for", "Exercises with"])} {subject}."""')
    return "\n\n\n".join(parts)


def _name(function: str) -> str:
    return function.split("(", 1)[0]


def _names(rng: random.Random) -> dict[str, str]:
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


def _function(rng: random.Random, name: str, arguments: str, doc: str, body: str, names: dict[str, str]) -> str:
    quoted = f'"""{doc}"""' if rng.random() < 0.9 else f'"""\n{doc}\n"""'
    text = f"def {name}({arguments}):\n{indent(quoted, '    ')}\n{indent(body, '    ')}"
    # Twice: what is put in has places of its own.
    return Template(Template(text).substitute(names)).substitute(names)


def _arguments(first: str, *parts: _Part) -> str:
    return first + (", $limit" if any("$limit" in part.code for part in parts) else "")


def _reducing(rng: random.Random) -> str:
    """One number of a list: how many, which sum, whether all."""
    names, which = _names(rng), rng.choice(_CONDITIONS)
    kind, said = rng.choice(
        [
            ("sum", "the sum of the $xs that are"),
            ("count", "how many of the $xs are"),
            ("any", "whether any of the $xs is"),
            ("all", "whether all of the $xs are"),
            ("product", "the product of the $xs that are"),
            ("first", "the first of the $xs that is"),
            ("index", "the index of the first of the $xs that is"),
            ("max", "the largest of the $xs that are"),
            ("min", "the smallest of the $xs that are"),
        ]
    )
    loops = {
        "sum": "$total = 0\nfor $x in $xs:\n    if {c}:\n        $total += $x\nreturn $total",
        "count": "count = 0\nfor $x in $xs:\n    if {c}:\n        count += 1\nreturn count",
        "any": "for $x in $xs:\n    if {c}:\n        return True\nreturn False",
        "all": "for $x in $xs:\n    if not {c}:\n        return False\nreturn True",
        "product": "$total = 1\nfor $x in $xs:\n    if {c}:\n        $total *= $x\nreturn $total",
        "first": "for $x in $xs:\n    if {c}:\n        return $x\nreturn None",
        "index": "for i, $x in enumerate($xs):\n    if {c}:\n        return i\nreturn -1",
        "max": "best = None\nfor $x in $xs:\n    if {c} and (best is None or $x > best):\n        best = $x\nreturn best",
        "min": "best = None\nfor $x in $xs:\n    if {c} and (best is None or $x < best):\n        best = $x\nreturn best",
    }
    short = {
        "sum": "return sum($x for $x in $xs if {c})",
        "count": "return sum(1 for $x in $xs if {c})",
        "any": "return any({c} for $x in $xs)",
        "all": "return all({c} for $x in $xs)",
        "max": "return max($x for $x in $xs if {c})",
        "min": "return min($x for $x in $xs if {c})",
        "first": "return next($x for $x in $xs if {c})",
    }
    body = short[kind] if kind in short and rng.random() < 0.35 else loops[kind]
    doc = f"$Return {said} {which.said}."
    return _function(rng, f"{kind}_{which.named}", _arguments("$xs", which), doc, body.format(c=which.code), names)


def _selecting(rng: random.Random) -> str:
    """A list of some elements, perhaps changed."""
    names, which, change = _names(rng), rng.choice(_CONDITIONS), rng.choice(_CHANGES)
    start = rng.choice(_STARTS)
    changed = rng.random() < 0.4
    value = change.code if changed else "$x"
    doc = f"$Return a list of the $xs that are {which.said}" + (f", {change.said}." if changed else ".")
    name = f"{start}_{which.named}" + (f"_{change.named}" if changed else "")
    body = rng.choice(
        [
            "$result = []\nfor $x in $xs:\n    if {c}:\n        $result.append({v})\nreturn $result",
            "return [{v} for $x in $xs if {c}]",
        ]
    ).format(c=which.code, v=value)
    return _function(rng, name, _arguments("$xs", which), doc, body, names)


def _changing(rng: random.Random) -> str:
    """A list with every element changed."""
    names, change = _names(rng), rng.choice(_CHANGES)
    body = rng.choice(
        [
            "$result = []\nfor $x in $xs:\n    $result.append({v})\nreturn $result",
            "return [{v} for $x in $xs]",
            "for i in range(len($xs)):\n    $xs[i] = {w}\nreturn $xs",
        ]
    ).format(v=change.code, w=change.code.replace("$x", "$xs[i]"))
    doc = f"$Return the $xs, each {change.said}."
    return _function(rng, f"{rng.choice(['all', 'make', 'each'])}_{change.named}", "$xs", doc, body, names)


def _letters(rng: random.Random) -> str:
    """What is in a string."""
    names, which = _names(rng), rng.choice(_LETTER_CONDITIONS)
    names |= {"xs": rng.choice(_TEXTS), "x": rng.choice(_LETTERS)}
    kind, said, body = rng.choice(
        [
            ("count", "the number of", "count = 0\nfor $x in $xs:\n    if {c}:\n        count += 1\nreturn count"),
            ("count", "the number of", "return sum(1 for $x in $xs if {c})"),
            ("keep", "a string of the", "return ''.join($x for $x in $xs if {c})"),
            ("keep", "a string of the", "$result = ''\nfor $x in $xs:\n    if {c}:\n        $result += $x\nreturn $result"),
            ("list", "a list of the", "return [$x for $x in $xs if {c}]"),
            ("has", "whether there are", "for $x in $xs:\n    if {c}:\n        return True\nreturn False"),
        ]
    )
    doc = f"$Return {said} {which.said} in $xs."
    return _function(rng, f"{kind}_{which.named}", "$xs", doc, body.format(c=which.code), names)


def _tables(rng: random.Random) -> str:
    """What is in a dictionary."""
    names, which = _names(rng), rng.choice(_CONDITIONS)
    names |= {"xs": rng.choice(_TABLES), "key": rng.choice(_KEYS), "x": "value"}
    kind, said, body = rng.choice(
        [
            (
                "keys",
                "the keys of $xs whose values are",
                "$result = []\nfor $key, $x in $xs.items():\n    if {c}:\n        $result.append($key)\nreturn $result",
            ),
            ("keys", "the keys of $xs whose values are", "return [$key for $key, $x in $xs.items() if {c}]"),
            ("only", "a dictionary of the $xs that are", "return {{$key: $x for $key, $x in $xs.items() if {c}}}"),
            (
                "only",
                "a dictionary of the $xs that are",
                "$result = {{}}\nfor $key, $x in $xs.items():\n    if {c}:\n        $result[$key] = $x\nreturn $result",
            ),
            ("total", "the sum of the $xs that are", "return sum($x for $x in $xs.values() if {c})"),
            (
                "number",
                "the number of $xs that are",
                "count = 0\nfor $x in $xs.values():\n    if {c}:\n        count += 1\nreturn count",
            ),
        ]
    )
    doc = f"$Return {said} {which.said}."
    return _function(rng, f"{kind}_{which.named}", _arguments("$xs", which), doc, body.format(c=which.code), names)


@cache
def _classics() -> tuple[str, ...]:
    text = (Path(__file__).parent / "classics.txt").read_text(encoding="utf-8")
    return tuple(part.strip() for part in text.split("\n\n"))


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


_COMPOSED: list[Callable[[random.Random], str]] = [_reducing, _reducing, _selecting, _changing, _letters, _tables]
