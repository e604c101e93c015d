"""What training never sees, so that an evaluation may ask for it: by a checksum of its own, whatever the seed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

_Thing = TypeVar("_Thing")
_ONE_IN = 16


def is_apart(name: str) -> bool:
    """Whether a file, a function or a question is kept apart from training."""
    return hashlib.sha256(name.encode()).digest()[0] % _ONE_IN == 0


def drawn(
    draws: Sequence[Callable[[random.Random], _Thing]], rng: random.Random, name: Callable[[_Thing], str], *, held_out: bool
) -> _Thing:
    """The next of any of `draws` whose name is kept apart, or with `held_out` false is not."""
    while True:
        thing = rng.choice(draws)(rng)
        if is_apart(name(thing)) == held_out:
            return thing
