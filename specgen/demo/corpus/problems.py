"""Word problems with worked answers, and sums without a story; all numbers are random.

A product of larger factors is split into parts (64 * 5 = 60 * 5 + 4 * 5 = 300 + 20 = 320), because a small model can learn each
part but not the whole in one step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from specgen.demo.corpus.facts import BOXES, ITEMS, NAMES, TOWNS, WEEKDAYS
from specgen.demo.corpus.held_out import draw

_SHEET_SHARE = 0.25  # of the math documents: sheets of sums
_SUM_SHARE = 0.15  # of the others: questions for one sum
_MAX_FACTOR = 12  # the product of two larger factors is split into parts


@dataclass(frozen=True, slots=True)
class _Problem:
    question: str
    steps: list[str]
    answer: int


def math_problem(rng: random.Random, *, held_out: bool = False) -> str:
    """Returns a word problem or a sum with its worked answer, or a sheet of sums.

    `held_out` as in word_problem(); it has no effect on sums.
    """
    if rng.random() < _SHEET_SHARE:
        return _sheet(rng)
    return _document(rng.choice(_SUMS)(rng)) if rng.random() < _SUM_SHARE else word_problem(rng, held_out=held_out)


def word_problem(rng: random.Random, *, held_out: bool = False) -> str:
    """Returns a word problem with its worked answer.

    With `held_out` its question is one that training never uses; otherwise it is one that training may use.
    """
    return _document(draw(_WORD_PROBLEMS, rng, attrgetter("question"), held_out=held_out))


def _sheet(rng: random.Random) -> str:
    """Six to sixteen sums and products, one per line: practice in arithmetic without other text."""
    return "Sums:\n" + "\n".join(rng.choice(_SUMS)(rng).steps[0] for _ in range(rng.randint(6, 16)))


def _document(problem: _Problem) -> str:
    return f"Question: {problem.question}\nAnswer: {' '.join(problem.steps)} The answer is {problem.answer}."


def product(a: int, b: int) -> str:
    """Returns the equation of a product, such as `3 * 4 = 12`. It shows intermediate steps if they are needed (see above)."""
    if max(a, b) <= _MAX_FACTOR or a % 10 == 0 or b % 10 == 0:
        return f"{a} * {b} = {a * b}"
    if a < b:
        return f"{a} * {b} = {b} * {a} = {product(b, a).split(' = ', 1)[1]}"
    tens, ones = a // 10 * 10, a % 10
    return f"{a} * {b} = {tens} * {b} + {ones} * {b} = {tens * b} + {ones * b} = {a * b}"


def _person(rng: random.Random) -> tuple[str, str]:
    """Returns a random first name and its pronoun, he or she."""
    name = rng.choice(NAMES)
    return name, "she" if name[-1] in "aey" else "he"


def _buying_packs(rng: random.Random) -> _Problem:
    (name, he), other, item, box = _person(rng), rng.choice(NAMES), rng.choice(ITEMS), rng.choice(BOXES)
    start, each, packs = rng.randint(5, 60), rng.randint(2, 12), rng.randint(2, 9)
    bought = packs * each
    total = start + bought
    give = min(rng.randint(1, 30), total - 1)
    return _Problem(
        f"{name} has {start} {item}. {he.capitalize()} buys {packs} {box} with {each} {item} in each "
        f"and gives {give} {item} to {other}. How many {item} does {name} have now?",
        [
            f"{name} starts with {start} {item}.",
            f"{packs} {box} of {each} {item} is {product(packs, each)} {item}.",
            f"So {he} has {start} + {bought} = {total} {item}.",
            f"After giving {give} {item} to {other}, {he} has {total} - {give} = {total - give} {item}.",
        ],
        total - give,
    )


def _getting_change(rng: random.Random) -> _Problem:
    (name, he), item = _person(rng), rng.choice(ITEMS)
    price, count = rng.randint(2, 15), rng.randint(2, 9)
    cost = price * count
    paid = (cost // 20 + 1) * 20
    return _Problem(
        f"A shop sells {item} for {price} dollars each. {name} buys {count} of them and pays with {paid} dollars. "
        f"How much change does {he} get?",
        [
            f"The {item} cost {product(price, count)} dollars.",
            f"{name} pays with {paid} dollars.",
            f"The change is {paid} - {cost} = {paid - cost} dollars.",
        ],
        paid - cost,
    )


def _travelling(rng: random.Random) -> _Problem:
    what = rng.choice(["train", "bus", "car", "truck", "boat"])
    speed, hours, extra = rng.randint(20, 90), rng.randint(2, 8), rng.randint(5, 60)
    distance = speed * hours
    return _Problem(
        f"A {what} travels at {speed} miles per hour for {hours} hours and then {extra} miles more to "
        f"{rng.choice(TOWNS)}. How far does it travel in total?",
        [
            f"In {hours} hours the {what} travels {product(speed, hours)} miles.",
            f"Then it travels {extra} miles more.",
            f"In total that is {distance} + {extra} = {distance + extra} miles.",
        ],
        distance + extra,
    )


def _sharing(rng: random.Random) -> _Problem:
    (name, _), item = _person(rng), rng.choice(ITEMS)
    kids, per, left = rng.randint(2, 9), rng.randint(3, 12), rng.randint(0, 5)
    shared = kids * per
    total = shared + left
    return _Problem(
        f"{name} shares {total} {item} equally among {kids} friends and keeps the rest. "
        f"Each friend gets {per} {item}. How many {item} does {name} keep?",
        [
            f"{kids} friends get {per} {item} each.",
            f"That is {product(kids, per)} {item}.",
            f"{name} keeps {total} - {shared} = {left} {item}.",
        ],
        left,
    )


def _collecting(rng: random.Random) -> _Problem:
    (name, he), item = _person(rng), rng.choice(ITEMS)
    first, second = rng.sample(WEEKDAYS, 2)
    a, b = rng.randint(5, 99), rng.randint(5, 99)
    return _Problem(
        f"{name} finds {a} {item} on {first} and {b} {item} on {second}. How many {item} does {he} find?",
        [f"On the two days {he} finds {a} + {b} = {a + b} {item}."],
        a + b,
    )


def _comparing(rng: random.Random) -> _Problem:
    (name, _), other, item = _person(rng), rng.choice(NAMES), rng.choice(ITEMS)
    a, more = rng.randint(5, 80), rng.randint(2, 40)
    return _Problem(
        f"{other} has {a} {item}. {name} has {more} more than {other}. How many {item} do they have together?",
        [f"{name} has {a} + {more} = {a + more} {item}.", f"Together they have {a} + {a + more} = {2 * a + more} {item}."],
        2 * a + more,
    )


def _losing(rng: random.Random) -> _Problem:
    (name, he), item = _person(rng), rng.choice(ITEMS)
    start = rng.randint(40, 120)
    lost, sold = rng.randint(2, 19), rng.randint(2, 20)
    return _Problem(
        f"{name} has {start} {item}. {he.capitalize()} loses {lost} of them and sells {sold}. How many {item} are left?",
        [
            f"After losing {lost}, {he} has {start} - {lost} = {start - lost} {item}.",
            f"After selling {sold}, {he} has {start - lost} - {sold} = {start - lost - sold} {item}.",
        ],
        start - lost - sold,
    )


def _rows_of_chairs(rng: random.Random) -> _Problem:
    item, place = rng.choice(ITEMS), rng.choice(["hall", "shop", "room", "garden", "store"])
    rows, each, broken = rng.randint(3, 9), rng.randint(3, 20), rng.randint(1, 8)
    whole = rows * each
    return _Problem(
        f"There are {rows} rows of {each} {item} in a {place}. {broken} of the {item} are broken. How many are not broken?",
        [
            f"There are {product(rows, each)} {item} in the {place}.",
            f"So {whole} - {broken} = {whole - broken} of them are not broken.",
        ],
        whole - broken,
    )


def _saving(rng: random.Random) -> _Problem:
    (name, he), weeks = _person(rng), rng.randint(2, 9)
    start, each = rng.randint(5, 90), rng.randint(2, 12)
    return _Problem(
        f"{name} has {start} dollars and saves {each} dollars a week. How much does {he} have after {weeks} weeks?",
        [
            f"In {weeks} weeks {name} saves {product(weeks, each)} dollars.",
            f"Then {he} has {start} + {weeks * each} = {start + weeks * each} dollars.",
        ],
        start + weeks * each,
    )


def _sum(rng: random.Random) -> _Problem:
    a, b = rng.randint(1, 400 if rng.random() < 0.5 else 99), rng.randint(1, 99)
    if rng.random() < 0.5:
        return _Problem(f"What is {a} + {b}?", [f"{a} + {b} = {a + b}."], a + b)
    a, b = max(a, b), min(a, b)
    return _Problem(f"What is {a} - {b}?", [f"{a} - {b} = {a - b}."], a - b)


def _product(rng: random.Random) -> _Problem:
    a, b = rng.randint(2, 99), rng.randint(2, 9)
    return _Problem(f"What is {a} * {b}?", [f"{product(a, b)}."], a * b)


_WORD_PROBLEMS: list[Callable[[random.Random], _Problem]] = [
    _buying_packs,
    _getting_change,
    _travelling,
    _sharing,
    _collecting,
    _comparing,
    _losing,
    _rows_of_chairs,
    _saving,
]
_SUMS: list[Callable[[random.Random], _Problem]] = [_sum, _sum, _sum, _product, _product]
