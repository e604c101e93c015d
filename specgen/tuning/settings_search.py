"""The search for settings of methods that no tape can hold, for as long as there is time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from specgen.errors import SpecgenError
from specgen.methods import METHODS
from specgen.tuning.candidates import Given, in_turn, written
from specgen.tuning.outcome import Candidate

if TYPE_CHECKING:
    from specgen.tuning.simulated_runs import SimulatedRun, SimulatedRuns


@dataclass(slots=True)
class Searched:
    """The best settings by method, how many were tried of each, and why others were not.

    A lossy method's output may not be less likely than what it stands in for: `bar` is plain decoding's perplexity, which is
    `sd`'s too, and of the settings that are not above it the fastest counts. `lowest` is what was reached otherwise.
    """

    best: dict[str, Candidate] = field(default_factory=dict)
    tried: Counter[str] = field(default_factory=Counter)
    left_out: dict[str, str] = field(default_factory=dict)
    bar: float = 0.0
    lowest: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, given: Given, made: SimulatedRun) -> None:
        self.tried[name] += 1
        lossless, perplexity = METHODS[name].lossless, made.perplexity
        if perplexity is not None:
            self.lowest[name] = min(perplexity, self.lowest.get(name, perplexity))
        if not lossless and (perplexity is None or perplexity > self.bar):
            return
        speed = made.summary.tokens_per_second or 0.0
        if name not in self.best or speed > self.best[name].predicted:
            self.best[name] = Candidate(name, given, lossless, speed, 1, made.summary.acceptance_rate, perplexity=perplexity)

    def end(self, name: str, short_of_time: str) -> None:
        """Say why there is nothing of a method."""
        if name in self.best or name in self.left_out:
            return
        if not (count := self.tried[name]):
            self.left_out[name] = short_of_time
            return
        lowest = f", the lowest being {self.lowest[name]:.2f}" if name in self.lowest else ""
        settings = f"{count} setting{'s' * (count != 1)}"
        self.left_out[name] = f"none of {settings} keeps sd's perplexity of {self.bar:.2f}{lowest}"


def search(
    reruns: SimulatedRuns, grids: Mapping[str, Sequence[Given]], deadline: float, doing: Callable[[str], None]
) -> Searched:
    """Try the methods' settings in turn, each method's first ones first; lossy methods, of which none is chosen by itself, behind
    all others. `deadline` is by `time.perf_counter`."""
    searched = Searched()
    lossy = {name: settings for name, settings in grids.items() if not METHODS[name].lossless}
    others = {name: settings for name, settings in grids.items() if name not in lossy}
    for name, given in chain(in_turn(others), in_turn(lossy)):
        if time.perf_counter() > deadline:
            break
        if name in searched.left_out:
            continue
        doing(written(name, given))
        if name in lossy and not searched.bar:
            searched.bar = reruns.plain_perplexity
        try:
            searched.add(name, given, reruns.run(name, given))
        except SpecgenError as error:
            searched.left_out[name] = error.message
    for name in grids:
        asked = ", or these --methods alone" if name in lossy and others else ""
        searched.end(name, f"time was short (a larger --budget helps{asked})")
    return searched
