"""Decides which parts of the generated corpus are held out: never used in training, so that an evaluation can use them.

Held out are about one in 16 files of Python's standard library, one in 16 names of generated functions and one in 16 questions of
word problems. A checksum of the file's path, the function's name or the question decides, so all seeds have the same choice.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")
_ONE_IN = 16


def is_held_out(name: str) -> bool:
    """Whether a document is held out from training.

    `name` identifies it: the path of a file, `def NAME` for a single function, or the full text of a question."""
    return hashlib.sha256(name.encode()).digest()[0] % _ONE_IN == 0


def draw(
    generators: Sequence[Callable[[random.Random], _Item]],
    rng: random.Random,
    name_of: Callable[[_Item], str],
    *,
    held_out: bool,
) -> _Item:
    """Generates items until `is_held_out` of an item's name is `held_out`, and returns this item.

    Each item comes from a random one of the `generators`. `name_of` returns the name of an item.
    """
    while True:
        item = rng.choice(generators)(rng)
        if is_held_out(name_of(item)) == held_out:
            return item
