"""Short articles with a one-sentence summary that the article's own words decide: what to copy is what there is to learn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from specgen.demo.corpus.facts import MONTHS, NAMES, PROFESSIONS, SURNAMES, TOWNS, WEEKDAYS


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
    """The `lead` and the `needed` sentences tell all that the summary says; of the `others` some are told."""

    lead: str
    needed: list[str]
    others: list[str]
    summary: str


def news_story(rng: random.Random) -> str:
    """A short article and its summary."""
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
        money=rng.randint(2, 90) * rng.choice((1, 5, 10)),
        role=rng.choice(PROFESSIONS),
    )
    story = rng.choice(_STORIES)(rng, cast)
    body = story.needed + rng.sample(story.others, rng.randint(1, len(story.others)))
    rng.shuffle(body)
    return f"Article: {story.lead} {' '.join(body)}\nSummary: {story.summary}"


def _fire(rng: random.Random, cast: _Cast) -> _Story:
    place = rng.choice(["school", "factory", "library", "warehouse", "hotel", "bakery", "theatre", "museum", "farm"])
    return _Story(
        f"A fire broke out at a {place} in {cast.town} on {cast.day} night.",
        [f"About {cast.count} people had to leave the building, and no one was hurt."],
        [
            f"{cast.first} {cast.last}, a {cast.role} who lives nearby, called the fire service at once.",
            f"The cost of the damage is put at {cast.money} thousand dollars.",
            f"Fire crews from {cast.other_town} helped to put out the fire.",
        ],
        f"About {cast.count} people had to leave a {place} in {cast.town} after a fire on {cast.day} night.",
    )


def _marathon(rng: random.Random, cast: _Cast) -> _Story:
    weather = rng.choice(["light rain", "strong wind", "bright sunshine", "cold weather", "thick fog"])
    return _Story(
        f"{cast.first} {cast.last}, a {cast.age}-year-old {cast.role} from {cast.town}, "
        f"has won the {cast.month} marathon in {cast.other_town}.",
        [],
        [
            f"More than {cast.count} hundred runners took part in the race.",
            f"{cast.last} said the last miles were the hardest.",
            f"The prize of {cast.money} hundred dollars will go to a local hospital.",
            f"The race was held on {cast.day} in {weather}.",
        ],
        f"{cast.first} {cast.last}, a {cast.role} from {cast.town}, has won the {cast.month} marathon in {cast.other_town}.",
    )


def _building(rng: random.Random, cast: _Cast) -> _Story:
    project = rng.choice(["bridge", "park", "station", "swimming pool", "museum", "library", "school", "tram line", "market"])
    return _Story(
        f"The council in {cast.town} has agreed to build a new {project} at a cost of {cast.money} million dollars.",
        [],
        [
            f"The plan was passed by {cast.count} votes on {cast.day}.",
            f"{cast.first} {cast.last}, who leads the council, said the work will begin in {cast.month}.",
            f"Some people in {cast.other_town} said the money should be spent on roads.",
            f"The work is expected to take {rng.choice(['two', 'three', 'four', 'five'])} years.",
        ],
        f"The council in {cast.town} has agreed to spend {cast.money} million dollars on a new {project}.",
    )


def _new_species(rng: random.Random, cast: _Cast) -> _Story:
    kind = rng.choice(["frog", "orchid", "beetle", "fish", "fern", "moth", "lizard", "bat", "spider", "snail"])
    return _Story(
        f"Scientists in {cast.town} have found a new kind of {kind} near {cast.other_town}.",
        [f"The team of {cast.count} people was led by {cast.first} {cast.last}, {cast.age}."],
        [
            f"It was seen for the first time in {cast.month}.",
            "They say it lives in only one small valley.",
            f"A fund of {cast.money} thousand dollars will help to protect the valley.",
        ],
        f"Scientists led by {cast.first} {cast.last} have found a new kind of {kind} near {cast.other_town}.",
    )


def _storm(rng: random.Random, cast: _Cast) -> _Story:
    what = rng.choice(["storm", "flood", "heavy snowfall", "hailstorm"])
    return _Story(
        f"A {what} hit the town of {cast.town} on {cast.day} morning.",
        [f"{cast.count} houses were damaged, and many roads are closed."],
        [
            f"Power was lost in parts of {cast.other_town} as well.",
            f"{cast.first} {cast.last}, a {cast.role}, said it was the worst day since {cast.month}.",
            f"Repairs will cost about {cast.money} thousand dollars.",
        ],
        f"A {what} damaged {cast.count} houses in {cast.town} on {cast.day}.",
    )


def _company(rng: random.Random, cast: _Cast) -> _Story:
    makes = rng.choice(["bicycles", "furniture", "shoes", "tractors", "glass", "toys", "paper", "clocks"])
    return _Story(
        f"A company that makes {makes} will open a factory in {cast.town} in {cast.month}.",
        [f"It will give work to {cast.count} people."],
        [
            f"The company was founded in {cast.other_town} by {cast.first} {cast.last}.",
            f"The factory will cost {cast.money} million dollars.",
            f"The plans were shown to the public on {cast.day}.",
        ],
        f"A new factory for {makes} in {cast.town} will give work to {cast.count} people.",
    )


def _match(rng: random.Random, cast: _Cast) -> _Story:
    winner, loser = rng.randint(3, 9), rng.randint(0, 2)
    return _Story(
        f"{cast.town} beat {cast.other_town} by {winner} to {loser} on {cast.day}.",
        [f"{cast.first} {cast.last} scored the first goal."],
        [
            f"About {cast.count} hundred people watched the match.",
            f"It was the last match before {cast.month}.",
            f"The {cast.age}-year-old coach said the team had earned it.",
        ],
        f"{cast.first} {cast.last} scored as {cast.town} beat {cast.other_town} by {winner} to {loser}.",
    )


def _missing_dog(rng: random.Random, cast: _Cast) -> _Story:
    animal = rng.choice(["dog", "cat", "parrot", "horse", "goat", "tortoise"])
    days = rng.randint(3, 30)
    return _Story(
        f"A {animal} that was lost in {cast.town} has been found in {cast.other_town} after {days} days.",
        [f"Its owner is {cast.first} {cast.last}, a {cast.role}."],
        [
            f"A child saw the {animal} near the station on {cast.day}.",
            f"A reward of {cast.money} dollars had been offered.",
            f"{cast.last} said it was the best day of the year.",
        ],
        f"The {animal} of {cast.first} {cast.last} was found in {cast.other_town} after {days} days.",
    )


def _election(rng: random.Random, cast: _Cast) -> _Story:
    return _Story(
        f"{cast.first} {cast.last} has been elected mayor of {cast.town} with {cast.count} percent of the votes.",
        [],
        [
            f"The {cast.age}-year-old {cast.role} was born in {cast.other_town}.",
            f"The vote was held on {cast.day}.",
            f"{cast.last} will take office in {cast.month}.",
            f"The campaign cost {cast.money} thousand dollars.",
        ],
        f"{cast.first} {cast.last} is the new mayor of {cast.town}, with {cast.count} percent of the votes.",
    )


def _theft(rng: random.Random, cast: _Cast) -> _Story:
    thing = rng.choice(["painting", "bell", "statue", "ring", "violin", "map", "crown", "clock"])
    return _Story(
        f"Police in {cast.town} are looking for a {thing} that was stolen on {cast.day}.",
        [f"It is worth {cast.money} thousand dollars."],
        [
            f"{cast.first} {cast.last}, a {cast.role}, saw two people run away.",
            f"A car was later found in {cast.other_town}.",
            f"The {thing} is more than {cast.count} years old.",
        ],
        f"A {thing} worth {cast.money} thousand dollars was stolen in {cast.town} on {cast.day}.",
    )


_STORIES: list[Callable[[random.Random, _Cast], _Story]] = [
    _fire,
    _marathon,
    _building,
    _new_species,
    _storm,
    _company,
    _match,
    _missing_dog,
    _election,
    _theft,
]
