"""Conversations between a user and an assistant: facts, instructions, spelling, small sums, lists of words to repeat."""

from __future__ import annotations

import random
from collections.abc import Callable

from specgen.demo.corpus.facts import ANIMALS, COUNTRIES, HOWTOS, ITEMS, NAMES, PROFESSIONS, SURNAMES, TOWNS


def chat_turns(rng: random.Random) -> str:
    """Returns a conversation of one to three questions of a user, each with the assistant's answer."""
    return "\n".join(rng.choice(_TURNS)(rng) for _ in range(rng.randint(1, 3)))


def fact_turn(rng: random.Random) -> str:
    """Returns one question and its answer about a country, an animal or how to do something."""
    return rng.choice(_FACTS)(rng)


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
    word = rng.choice(ITEMS + PROFESSIONS + [row[0] for row in ANIMALS])
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


def _repeating(rng: random.Random) -> str:
    """Returns a question that asks to repeat words, and its answer. It teaches the model to copy names and numbers."""
    kinds = rng.choice([[NAMES, SURNAMES], [TOWNS], [ITEMS], [NAMES, TOWNS, ITEMS, PROFESSIONS], [[str(n) for n in range(100)]]])
    words = [rng.choice(rng.choice(kinds)) for _ in range(rng.randint(3, 8))]
    listed = ", ".join(words)
    return rng.choice(
        [
            f"User: Repeat these words: {listed}.\nAssistant: {listed}.",
            f"User: Say this backwards: {listed}.\nAssistant: {', '.join(reversed(words))}.",
            f"User: What comes first, and what last: {listed}?\nAssistant: {words[0]} comes first and {words[-1]} last.",
        ]
    )


_FACTS: list[Callable[[random.Random], str]] = [_about_country, _about_country, _about_animal, _how_to]
_TURNS = [*_FACTS, _spelling, _numbers, _repeating]
