"""Measures how long work takes: the one loop with a clock for choices that depend on this machine. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

Key = TypeVar("Key")


def timed(
    work: Mapping[Key, Callable[[], object]],
    warm_up: int,
    seconds: float,
    *,
    fewest: int = 3,
    most: int = 15,
    before: Callable[[], object] = lambda: None,
) -> dict[Key, list[float]]:
    """Returns the seconds of each counted call of each kind of `work`; their median or minimum is the caller's choice.

    The kinds take turns, so that a machine that becomes slower affects all alike. The first `warm_up` turns do not count. After
    about `seconds` the turn that has begun is the last one, but each kind is counted at least `fewest` and at most `most` times.
    `before` is called before each start of the clock (to empty a cache), and `work` has to wait for a GPU itself.
    """
    samples: dict[Key, list[float]] = {key: [] for key in work}
    deadline = time.perf_counter() + seconds
    for turn in range(warm_up + most):
        if turn >= warm_up + fewest and time.perf_counter() > deadline:
            break
        for key, run in work.items():
            before()
            start = time.perf_counter()
            run()
            taken = time.perf_counter() - start
            if turn >= warm_up:
                samples[key].append(taken)
    return samples
