"""Text for the demo pair, made on the spot: no download, and the same documents for the same seed.

Four domains, the ones that speculative-decoding papers evaluate on:

    code   the standard library's own source (PSF licence), as HumanEval is code
    math   word problems with worked answers, as GSM8K
    news   a short article and its one-sentence summary, as XSum
    chat   one or two turns of questions and answers, as MT-Bench

Easy tokens (boilerplate, a phrase begun) and hard ones (a name, a digit, a fact) alternate, which is what a
draft-length policy has to tell apart. Math, news and chat are this project's own sentences and depend on the seed
alone; code depends on the Python that runs, for another version's standard library is another text.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from specgen.demo.facts import (
    ANIMALS,
    BOXES,
    COUNTRIES,
    HOWTOS,
    ITEMS,
    MONTHS,
    NAMES,
    PROFESSIONS,
    SURNAMES,
    TOWNS,
    WEEKDAYS,
)
from specgen.errors import RunError

DOMAINS = ("code", "math", "news", "chat")


@dataclass(frozen=True, slots=True)
class _Scene:
    """Who and what a word problem is about."""

    name: str
    he: str
    other: str
    item: str
    start: int
    each: int
    packs: int
    box: str


@dataclass(frozen=True, slots=True)
class _Problem:
    question: str
    steps: list[str]
    answer: int


def math_problem(rng: random.Random) -> str:
    """A word problem of two to four steps and its worked answer."""
    name = rng.choice(NAMES)
    scene = _Scene(
        name=name,
        he="she" if name[-1] in "aey" else "he",
        other=rng.choice(NAMES),
        item=rng.choice(ITEMS),
        start=rng.randint(5, 60),
        each=rng.randint(2, 12),
        packs=rng.randint(2, 9),
        box=rng.choice(BOXES),
    )
    problem = (_buying_packs, _getting_change, _travelling, _sharing)[rng.randrange(4)](rng, scene)
    return f"Question: {problem.question}\nAnswer: {' '.join(problem.steps)} The answer is {problem.answer}."


def _buying_packs(rng: random.Random, scene: _Scene) -> _Problem:
    name, he, item, box = scene.name, scene.he, scene.item, scene.box
    start, each, packs = scene.start, scene.each, scene.packs
    bought = packs * each
    total = start + bought
    give = min(rng.randint(1, 30), total - 1)
    return _Problem(
        f"{name} has {start} {item}. {he.capitalize()} buys {packs} {box} with {each} {item} in each "
        f"and gives {give} {item} to {scene.other}. How many {item} does {name} have now?",
        [
            f"{name} starts with {start} {item}.",
            f"{packs} {box} of {each} {item} is {packs} * {each} = {bought} {item}.",
            f"So {he} has {start} + {bought} = {total} {item}.",
            f"After giving {give} {item} to {scene.other}, {he} has {total} - {give} = {total - give} {item}.",
        ],
        total - give,
    )


def _getting_change(rng: random.Random, scene: _Scene) -> _Problem:
    name, item = scene.name, scene.item
    price, count = rng.randint(2, 15), rng.randint(2, 9)
    cost = price * count
    paid = (cost // 20 + 1) * 20
    return _Problem(
        f"A shop sells {item} for {price} dollars each. {name} buys {count} of them and pays with {paid} dollars. "
        f"How much change does {scene.he} get?",
        [
            f"The {item} cost {count} * {price} = {cost} dollars.",
            f"{name} pays with {paid} dollars.",
            f"The change is {paid} - {cost} = {paid - cost} dollars.",
        ],
        paid - cost,
    )


def _travelling(rng: random.Random, scene: _Scene) -> _Problem:
    speed, hours, extra = rng.randint(20, 90), rng.randint(2, 8), rng.randint(5, 60)
    distance = speed * hours
    return _Problem(
        f"A train travels at {speed} miles per hour for {hours} hours and then {extra} miles more to "
        f"{rng.choice(TOWNS)}. How far does it travel in total?",
        [
            f"In {hours} hours the train travels {speed} * {hours} = {distance} miles.",
            f"Then it travels {extra} miles more.",
            f"In total that is {distance} + {extra} = {distance + extra} miles.",
        ],
        distance + extra,
    )


def _sharing(rng: random.Random, scene: _Scene) -> _Problem:
    name, item = scene.name, scene.item
    kids, per, left = rng.randint(2, 9), rng.randint(3, 12), rng.randint(0, 5)
    shared = kids * per
    total = shared + left
    return _Problem(
        f"{name} shares {total} {item} equally among {kids} friends and keeps the rest. "
        f"Each friend gets {per} {item}. How many {item} does {name} keep?",
        [
            f"{kids} friends get {per} {item} each.",
            f"That is {kids} * {per} = {shared} {item}.",
            f"{name} keeps {total} - {shared} = {left} {item}.",
        ],
        left,
    )


@dataclass(frozen=True, slots=True)
class _Cast:
    """Who, where, when and how much, in a story."""

    town: str
    other_town: str
    first: str
    last: str
    age: int
    day: str
    month: str
    count: int
    money: int
    role: str


@dataclass(frozen=True, slots=True)
class _Story:
    lead: str
    body: list[str]
    summary: str


def news_story(rng: random.Random) -> str:
    """A short article and its one-sentence summary."""
    town, other_town = rng.sample(TOWNS, 2)
    cast = _Cast(
        town=town,
        other_town=other_town,
        first=rng.choice(NAMES),
        last=rng.choice(SURNAMES),
        age=rng.randint(19, 78),
        day=rng.choice(WEEKDAYS),
        month=rng.choice(MONTHS),
        count=rng.randint(3, 95),
        money=rng.randint(2, 90) * 10,
        role=rng.choice(PROFESSIONS),
    )
    # All four are told and one is taken: the bundled pair learned from this order of draws.
    story = rng.choice([_fire(rng, cast), _marathon(cast), _building(rng, cast), _new_species(rng, cast)])
    rng.shuffle(story.body)
    return f"Article: {story.lead} {' '.join(story.body[: rng.randint(2, 4)])}\nSummary: {story.summary}"


def _fire(rng: random.Random, cast: _Cast) -> _Story:
    place = rng.choice(["school", "factory", "library", "warehouse", "hotel"])
    return _Story(
        f"A fire broke out at a {place} in {cast.town} on {cast.day} night.",
        [
            f"About {cast.count} people had to leave the building, and no one was hurt.",
            f"{cast.first} {cast.last}, a {cast.role} who lives nearby, called the fire service at once.",
            f"The cost of the damage is put at {cast.money} thousand dollars.",
            f"Fire crews from {cast.other_town} helped to put out the fire.",
        ],
        f"About {cast.count} people had to leave a building in {cast.town} after a fire on {cast.day} night.",
    )


def _marathon(cast: _Cast) -> _Story:
    return _Story(
        f"{cast.first} {cast.last}, a {cast.age}-year-old {cast.role} from {cast.town}, "
        f"has won the {cast.month} marathon in {cast.other_town}.",
        [
            f"More than {cast.count} hundred runners took part in the race.",
            f"{cast.last} said the last miles were the hardest.",
            f"The prize of {cast.money} hundred dollars will go to a local hospital.",
            f"The race was held on {cast.day} in light rain.",
        ],
        f"{cast.first} {cast.last}, a {cast.role} from {cast.town}, has won the {cast.month} marathon in {cast.other_town}.",
    )


def _building(rng: random.Random, cast: _Cast) -> _Story:
    project = rng.choice(["bridge", "park", "station", "swimming pool", "museum"])
    return _Story(
        f"The council in {cast.town} has agreed to build a new {project} at a cost of {cast.money} million dollars.",
        [
            f"The plan was passed by {cast.count} votes on {cast.day}.",
            f"{cast.first} {cast.last}, who leads the council, said the work will begin in {cast.month}.",
            f"Some people in {cast.other_town} said the money should be spent on roads.",
            "The work is expected to take two years.",
        ],
        f"The council in {cast.town} has agreed to spend {cast.money} million dollars on a new project.",
    )


def _new_species(rng: random.Random, cast: _Cast) -> _Story:
    kind = rng.choice(["frog", "orchid", "beetle", "fish", "fern"])
    return _Story(
        f"Scientists in {cast.town} have found a new kind of {kind} near {cast.other_town}.",
        [
            f"The team of {cast.count} people was led by {cast.first} {cast.last}, {cast.age}.",
            f"It was seen for the first time in {cast.month}.",
            "They say it lives in only one small valley.",
            f"A fund of {cast.money} thousand dollars will help to protect the valley.",
        ],
        f"Scientists led by {cast.first} {cast.last} have found a new species near {cast.other_town}.",
    )


def chat_turns(rng: random.Random) -> str:
    """One or two turns between a user and an assistant."""
    turns = (_about_country, _about_animal, _how_to, _spelling, _numbers)
    return "\n".join(turns[rng.randrange(len(turns))](rng) for _ in range(rng.randint(1, 2)))


def _about_country(rng: random.Random) -> str:
    country, capital, continent, language, money = rng.choice(COUNTRIES)
    return rng.choice(
        [
            f"User: What is the capital of {country}?\nAssistant: The capital of {country} is {capital}.",
            f"User: Tell me about {country}.\nAssistant: {country} is a country in {continent}. "
            f"Its capital is {capital}. People there speak {language}, and the currency is the {money}.",
            f"User: Which language do people speak in {country}?\nAssistant: Most people in {country} speak {language}.",
            f"User: Where is {capital}?\nAssistant: {capital} is the capital of {country}, a country in {continent}.",
        ]
    )


def _about_animal(rng: random.Random) -> str:
    animal, group, home, food, legs = rng.choice(ANIMALS)
    article = "An" if animal[0] in "aeiou" else "A"
    group = f"an {group}" if group[0] in "aeiou" else f"a {group}"
    return rng.choice(
        [
            f"User: What does {article.lower()} {animal} eat?\nAssistant: {article} {animal} eats {food}.",
            f"User: Tell me about the {animal}.\nAssistant: The {animal} is {group} that lives in {home}. "
            f"It eats {food} and has {legs} legs.",
            f"User: How many legs does {article.lower()} {animal} have?\nAssistant: {article} {animal} has {legs} legs.",
        ]
    )


def _how_to(rng: random.Random) -> str:
    task, steps = rng.choice(sorted(HOWTOS.items()))
    numbered = "\n".join(f"{number}. {step}" for number, step in enumerate(steps.splitlines(), 1))
    return f"User: How do I {task}?\nAssistant: Here is how to {task}:\n{numbered}"


def _spelling(rng: random.Random) -> str:
    word = rng.choice(ITEMS + [row[0] for row in ANIMALS] + [town.lower() for town in TOWNS])
    return rng.choice(
        [
            f"User: How do you spell {word}?\nAssistant: The word {word} is spelled {'-'.join(word.upper())}.",
            f"User: How many letters are in the word {word}?\nAssistant: The word {word} has {len(word)} letters.",
        ]
    )


def _numbers(rng: random.Random) -> str:
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    larger = "They are equal." if a == b else f"{max(a, b)} is larger than {min(a, b)}."
    return rng.choice(
        [
            f"User: What is {a} plus {b}?\nAssistant: {a} + {b} = {a + b}.",
            f"User: Which is larger, {a} or {b}?\nAssistant: {larger}",
            f"User: Count from {a} to {a + 8}.\nAssistant: {', '.join(str(n) for n in range(a, a + 9))}.",
        ]
    )


_NOT_CODE = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "ensurepip", "turtledemo"}
    | {"__pycache__", "encodings", "pydoc_data"}
)


@cache
def code_files() -> tuple[str, ...]:
    """The running Python's standard-library modules in a fixed order; tests, vendored and very large ones are left out.

    Raises RunError where this Python comes without its library's source.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in root.rglob("*.py") if _NOT_CODE.isdisjoint(path.relative_to(root).parts))
    files = tuple(p.read_text(encoding="utf-8", errors="ignore") for p in paths if p.stat().st_size < 200_000)
    if not files:
        raise RunError(f"no Python source under {root}", "Use a Python that was installed with its standard library")
    return files


_TEMPLATES: dict[str, Callable[[random.Random], str]] = {
    "math": math_problem,
    "news": news_story,
    "chat": chat_turns,
}


def documents(domain: str, seed: int) -> Iterator[str]:
    """Endless documents of one domain of DOMAINS; `code` repeats its files in a fresh order each pass."""
    rng = random.Random(f"{domain}-{seed}")
    if domain == "code":
        files = list(code_files())
        while True:
            rng.shuffle(files)
            yield from files
    while True:
        yield _TEMPLATES[domain](rng)
