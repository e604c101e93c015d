"""Checks the pass times that PEARL's window was computed from against those of the runs that use it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

from specgen.cost_model.pearl_window import ParallelCosts

FEWEST_ROUNDS = 16  # rounds before anything is concluded
LARGEST_FACTOR = 1.5  # between observed and expected seconds
_LATEST = 64  # rounds that count


class CostCheck:
    """Compares `costs` with the seconds of draft and target passes in runs, over the last rounds of all runs that `add` reports.

    `on_mismatch` is called once, if the median of either kind of passes is more than `LARGEST_FACTOR` times as long or as short
    as expected. The costs stay as they are: with sampling, tokens depend on the window, and equal runs have to give equal tokens.
    """

    def __init__(self, costs: ParallelCosts, on_mismatch: Callable[[], None]) -> None:
        self._costs, self._on_mismatch = costs, on_mismatch
        self._drafts, self._passes = deque[float](maxlen=_LATEST), deque[float](maxlen=_LATEST)
        self._is_reported = False

    def add(self, drafted: int, draft_seconds: float, width: int, pass_seconds: float) -> None:
        """Adds a round: the number of drafted tokens and the seconds that they took, and those of a pass over `width` tokens."""
        if drafted:
            self._drafts.append(draft_seconds / drafted / self._costs.draft_pass)
        self._passes.append(pass_seconds / self._costs.pass_seconds(width))

    def conclude(self) -> None:
        """Calls `on_mismatch` if the costs do not fit the rounds so far, unless it was called before."""
        known = [median(ratios) for ratios in (self._drafts, self._passes) if len(ratios) >= FEWEST_ROUNDS]
        if not self._is_reported and any(not 1 / LARGEST_FACTOR <= ratio <= LARGEST_FACTOR for ratio in known):
            self._is_reported = True
            self._on_mismatch()
