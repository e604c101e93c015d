"""Checks measured times of drafts and target passes against those of the runs that use them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

FEWEST_ROUNDS = 16  # rounds before anything is concluded
LARGEST_FACTOR = 1.5  # between observed and expected seconds
_LATEST = 64  # rounds that count
_SHORTEST_DRAFT = 0.05  # of the target's pass; the times of shorter drafts, such as copied ones, do not matter


class CostCheck:
    """Compares expected seconds with those of drafts and target passes, over the last rounds of all runs that `add` reports.

    `draft_seconds` returns the expected seconds of a draft of some tokens, `pass_seconds` those of a target pass. `on_mismatch`
    is called once, if the median of either is more than `LARGEST_FACTOR` times as long or as short as expected. What runs decide
    by stays as it is: with sampling, tokens depend on the lengths of drafts, and equal runs have to give equal tokens.
    """

    def __init__(
        self, draft_seconds: Callable[[int], float], pass_seconds: Callable[[int], float], on_mismatch: Callable[[], None]
    ) -> None:
        self._draft_seconds, self._pass_seconds, self._on_mismatch = draft_seconds, pass_seconds, on_mismatch
        self._drafts, self._passes = deque[float](maxlen=_LATEST), deque[float](maxlen=_LATEST)
        self._is_reported = False

    def add(self, drafted: int, draft_seconds: float, width: int, pass_seconds: float) -> None:
        """Adds a round: the number of drafted tokens and the seconds that they took, and those of a pass over `width` tokens."""
        expected_draft, expected_pass = self._draft_seconds(drafted), self._pass_seconds(width)
        if drafted and expected_draft > _SHORTEST_DRAFT * expected_pass:
            self._drafts.append(draft_seconds / expected_draft)
        if expected_pass > 0:
            self._passes.append(pass_seconds / expected_pass)

    def conclude(self) -> None:
        """Calls `on_mismatch` if the costs do not fit the rounds so far, unless it was called before."""
        known = [median(ratios) for ratios in (self._drafts, self._passes) if len(ratios) >= FEWEST_ROUNDS]
        if not self._is_reported and any(not 1 / LARGEST_FACTOR <= ratio <= LARGEST_FACTOR for ratio in known):
            self._is_reported = True
            self._on_mismatch()
