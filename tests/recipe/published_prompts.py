"""The prompts of the published model's draft, from `published_prompts.yaml`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import yaml


@cache
def _written() -> dict[str, Any]:
    text = Path(__file__).with_name("published_prompts.yaml").read_text(encoding="utf-8")
    written: dict[str, Any] = yaml.safe_load(text)
    return written


def prompts() -> list[str]:
    """Returns the prompts for text to learn from, in a fixed order."""
    random = Random(7)
    written = _written()
    made = list(written["single"])
    for group in written["groups"]:
        for subject in group["about"]:
            made += [form.format(subject) for form in random.sample(group["forms"], group["take"])]
    made += [_problem(written["problems"], random) for _ in range(written["problems"]["number"])]
    return sorted(set(made))


def held_out_prompts() -> list[str]:
    """Returns the prompts on which acceptance is measured."""
    held: list[str] = _written()["held_out"]
    return held


def _problem(problems: dict[str, Any], random: Random) -> str:
    """Returns a problem with numbers."""
    first, second = random.sample(problems["names"], 2)
    large, middle, small = random.randint(5, 60), random.randint(2, 12), random.randint(2, 9)
    form: str = random.choice(problems["forms"])
    return form.format(
        n=first,
        m=second,
        i=random.choice(problems["items"]),
        a=large,
        b=middle,
        c=small,
        product=small * middle,
        more=small + 2,
        dividend=large * middle,
        sum=small * large + middle,
        hundreds=50 * middle,
        speed=large + 30,
        below=middle + 1,
    )
