"""Held-out names: one in 16 files, functions and questions is never used in training, so that an evaluation can use it.

A checksum of the name decides, so the choice is the same for every seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")
_ONE_IN = 16


def is_held_out(name: str) -> bool:
    """Whether the file, function or question of this name is held out from training."""
    return hashlib.sha256(name.encode()).digest()[0] % _ONE_IN == 0


def draw(
    generators: Sequence[Callable[[random.Random], _Item]],
    rng: random.Random,
    name_of: Callable[[_Item], str],
    *,
    held_out: bool,
) -> _Item:
    """Generate items with random `generators` until one has a name that is held out (`held_out`) or is not (otherwise)."""
    while True:
        item = rng.choice(generators)(rng)
        if is_held_out(name_of(item)) == held_out:
            return item
