"""The search for settings of methods that no tape can hold, for as long as there is time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specgen.errors import SpecgenError
from specgen.methods import METHODS
from specgen.tuning.candidates import Given, in_turn, written
from specgen.tuning.outcome import Found

if TYPE_CHECKING:
    from specgen.tuning.reruns import Reruns


@dataclass(slots=True)
class Searched:
    """The best settings by method, how many were tried of each, and why others were not."""

    best: dict[str, Found] = field(default_factory=dict)
    tried: Counter[str] = field(default_factory=Counter)
    left_out: dict[str, str] = field(default_factory=dict)


def search(reruns: Reruns, grids: Mapping[str, Sequence[Given]], deadline: float, doing: Callable[[str], None]) -> Searched:
    """Try the methods' settings in turn, each method's first ones first. `deadline` is by `time.perf_counter`.

    A lossy method's output may not be less likely than what it stands in for: of its settings, the fastest whose perplexity is
    not above plain decoding's counts, which is `sd`'s too.
    """
    searched = Searched()
    bar = reruns.plain_perplexity if any(not METHODS[name].lossless for name in grids) else 0.0
    least: dict[str, float] = {}
    for name, given in in_turn(grids):
        if time.perf_counter() > deadline:
            break
        if name in searched.left_out:
            continue
        doing(written(name, given))
        try:
            made = reruns.run(name, given)
        except SpecgenError as error:
            searched.left_out[name] = error.message
            continue
        searched.tried[name] += 1
        lossless, speed = METHODS[name].lossless, made.summary.tokens_per_second or 0.0
        if made.perplexity is not None:
            least[name] = min(made.perplexity, least.get(name, made.perplexity))
        if not lossless and not (made.perplexity is not None and made.perplexity <= bar):
            continue
        if name not in searched.best or speed > searched.best[name].predicted:
            rate = made.summary.acceptance_rate
            searched.best[name] = Found(name, given, lossless, speed, 1, rate, perplexity=made.perplexity)
    for name in grids:
        if name in searched.best or name in searched.left_out:
            continue
        if not searched.tried[name]:
            searched.left_out[name] = "time was short (a larger --budget helps)"
        else:
            lowest = f", the lowest being {least[name]:.2f}" if name in least else ""
            count = searched.tried[name]
            what = f"{count} setting{'s' * (count != 1)}"
            searched.left_out[name] = f"none of {what} keeps sd's perplexity of {bar:.2f}{lowest}"
    return searched
