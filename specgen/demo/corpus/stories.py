"""Short news articles with a one-sentence summary. Every name and number in the summary occurs in the article."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from string import Template

from specgen.demo.corpus.facts import MONTHS, NAMES, PROFESSIONS, SURNAMES, TOWNS, WEEKDAYS


@dataclass(frozen=True, slots=True)
class _Story:
    """Templates of an article and its summary.

    An article is the `lead` sentence, then the `needed` sentences and some of the `optional` sentences in random order. The
    `summary` uses only facts of the lead and the needed sentences. `choices` has the possible values of the placeholders (names
    with a dollar sign) that only this story uses.
    """

    lead: str
    needed: list[str]
    optional: list[str]
    summary: str
    choices: dict[str, Sequence[object]]


def news_story(rng: random.Random) -> str:
    """Returns a random article followed by its summary."""
    town, other_town = rng.sample(TOWNS, 2)
    values: dict[str, object] = {
        "town": town,
        "other_town": other_town,
        "first": rng.choice(NAMES),
        "last": rng.choice(SURNAMES),
        "age": rng.randint(19, 78),
        "day": rng.choice(WEEKDAYS),
        "month": rng.choice(MONTHS),
        "count": rng.randint(3, 95),
        "money": rng.randint(2, 90) * rng.choice((1, 5, 10)),
        "role": rng.choice(PROFESSIONS),
    }
    story = rng.choice(_STORIES)
    values |= {name: rng.choice(choices) for name, choices in story.choices.items()}
    body = story.needed + rng.sample(story.optional, rng.randint(1, len(story.optional)))
    rng.shuffle(body)
    return Template(f"Article: {story.lead} {' '.join(body)}\nSummary: {story.summary}").substitute(values)


_STORIES = [
    _Story(
        "A fire broke out at a $place in $town on $day night.",
        ["About $count people had to leave the building, and no one was hurt."],
        [
            "$first $last, a $role who lives nearby, called the fire service at once.",
            "The cost of the damage is put at $money thousand dollars.",
            "Fire crews from $other_town helped to put out the fire.",
        ],
        "About $count people had to leave a $place in $town after a fire on $day night.",
        {"place": ["school", "factory", "library", "warehouse", "hotel", "bakery", "theatre", "museum", "farm"]},
    ),
    _Story(
        "$first $last, a $age-year-old $role from $town, has won the $month marathon in $other_town.",
        [],
        [
            "More than $count hundred runners took part in the race.",
            "$last said the last miles were the hardest.",
            "The prize of $money hundred dollars will go to a local hospital.",
            "The race was held on $day in $weather.",
        ],
        "$first $last, a $role from $town, has won the $month marathon in $other_town.",
        {"weather": ["light rain", "strong wind", "bright sunshine", "cold weather", "thick fog"]},
    ),
    _Story(
        "The council in $town has agreed to build a new $project at a cost of $money million dollars.",
        [],
        [
            "The plan was passed by $count votes on $day.",
            "$first $last, who leads the council, said the work will begin in $month.",
            "Some people in $other_town said the money should be spent on roads.",
            "The work is expected to take $years years.",
        ],
        "The council in $town has agreed to spend $money million dollars on a new $project.",
        {
            "project": ["bridge", "park", "station", "swimming pool", "museum", "library", "school", "tram line", "market"],
            "years": ["two", "three", "four", "five"],
        },
    ),
    _Story(
        "Scientists in $town have found a new kind of $kind near $other_town.",
        ["The team of $count people was led by $first $last, $age."],
        [
            "It was seen for the first time in $month.",
            "They say it lives in only one small valley.",
            "A fund of $money thousand dollars will help to protect the valley.",
        ],
        "Scientists led by $first $last have found a new kind of $kind near $other_town.",
        {"kind": ["frog", "orchid", "beetle", "fish", "fern", "moth", "lizard", "bat", "spider", "snail"]},
    ),
    _Story(
        "A $what hit the town of $town on $day morning.",
        ["$count houses were damaged, and many roads are closed."],
        [
            "Power was lost in parts of $other_town as well.",
            "$first $last, a $role, said it was the worst day since $month.",
            "Repairs will cost about $money thousand dollars.",
        ],
        "A $what damaged $count houses in $town on $day.",
        {"what": ["storm", "flood", "heavy snowfall", "hailstorm"]},
    ),
    _Story(
        "A company that makes $makes will open a factory in $town in $month.",
        ["It will give work to $count people."],
        [
            "The company was founded in $other_town by $first $last.",
            "The factory will cost $money million dollars.",
            "The plans were shown to the public on $day.",
        ],
        "A new factory for $makes in $town will give work to $count people.",
        {"makes": ["bicycles", "furniture", "shoes", "tractors", "glass", "toys", "paper", "clocks"]},
    ),
    _Story(
        "$town beat $other_town by $winner to $loser on $day.",
        ["$first $last scored the first goal."],
        [
            "About $count hundred people watched the match.",
            "It was the last match before $month.",
            "The $age-year-old coach said the team had earned it.",
        ],
        "$first $last scored as $town beat $other_town by $winner to $loser.",
        {"winner": range(3, 10), "loser": range(3)},
    ),
    _Story(
        "A $animal that was lost in $town has been found in $other_town after $days days.",
        ["Its owner is $first $last, a $role."],
        [
            "A child saw the $animal near the station on $day.",
            "A reward of $money dollars had been offered.",
            "$last said it was the best day of the year.",
        ],
        "The $animal of $first $last was found in $other_town after $days days.",
        {"animal": ["dog", "cat", "parrot", "horse", "goat", "tortoise"], "days": range(3, 31)},
    ),
    _Story(
        "$first $last has been elected mayor of $town with $count percent of the votes.",
        [],
        [
            "The $age-year-old $role was born in $other_town.",
            "The vote was held on $day.",
            "$last will take office in $month.",
            "The campaign cost $money thousand dollars.",
        ],
        "$first $last is the new mayor of $town, with $count percent of the votes.",
        {},
    ),
    _Story(
        "Police in $town are looking for a $thing that was stolen on $day.",
        ["It is worth $money thousand dollars."],
        [
            "$first $last, a $role, saw two people run away.",
            "A car was later found in $other_town.",
            "The $thing is more than $count years old.",
        ],
        "A $thing worth $money thousand dollars was stolen in $town on $day.",
        {"thing": ["painting", "bell", "statue", "ring", "violin", "map", "crown", "clock"]},
    ),
]
