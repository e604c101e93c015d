"""Searches the layers that Self-SD skips: the set z with the highest measured speed (Zhang et al. 2023, section 3.3).

The authors run 1,000 trials of a Bayesian optimiser. This search has to end within seconds: it starts from good guesses, evenly
spread or in the middle of the stack, and improves the best one by flipping one or two layers at a time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specgen.engine.layer_skipping import SkippedLayers

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 32, 32  # for measuring a speed; the authors use 8 prompts of 32 tokens


@dataclass(frozen=True, slots=True)
class FoundSkips:
    """The fastest set in the notation of the `skip` setting, its speed, and the number of sets measured."""

    skips: str
    tokens_per_second: float
    tried: int


def search_skips(layers: int, speed: Callable[[SkippedLayers], float], seconds: float, seed: int = 0) -> FoundSkips:
    """Search sets of a stack of `layers` layers for about `seconds`; at least the first guess is measured.

    `speed` measures the tokens per second with a set skipped.
    """
    deadline = time.perf_counter() + seconds
    rng = random.Random(seed)
    speeds: dict[str, float] = {}
    for skips in _guesses(layers):
        if speeds and time.perf_counter() >= deadline:
            break
        speeds.setdefault(str(skips), speed(skips))
    best = max(speeds, key=lambda text: speeds[text])
    while time.perf_counter() < deadline and len(speeds) < 4**layers - 1:
        tried = _flipped(SkippedLayers.parse(best, layers), layers, rng)
        text = str(tried)
        if not text or text in speeds:
            continue
        speeds[text] = speed(tried)
        if speeds[text] > speeds[best]:  # measure both again, so that noise does not decide
            again = speed(SkippedLayers.parse(best, layers)), speed(tried)
            speeds[best], speeds[text] = max(speeds[best], again[0]), min(speeds[text], again[1])
            best = text if speeds[text] > speeds[best] else best
    return FoundSkips(best, speeds[best], len(speeds))


def _guesses(layers: int) -> Iterator[SkippedLayers]:
    """Half of the layers, a third, all but the outer two: each as whole layers and as attentions only, outer layers excluded."""
    inner = range(1, layers - 1) if layers > 2 else range(layers)
    middle = len(inner) // 2
    sets = (
        inner[::2],
        inner[1::2],
        inner[::3],
        inner[middle - middle // 2 : middle + middle // 2 + 1],
        [number for number in inner if number % 3],
        inner,
    )
    for numbers in sets:
        chosen = frozenset(numbers)
        if chosen:
            yield SkippedLayers(chosen, chosen)
            yield SkippedLayers(chosen, frozenset())


def _flipped(skips: SkippedLayers, layers: int, rng: random.Random) -> SkippedLayers:
    """The set with one or two random layers flipped: the attention, the MLP or both."""
    attention, mlp = set(skips.attention), set(skips.mlp)
    for _ in range(rng.choice((1, 1, 2))):
        number = rng.randrange(layers)
        kind = rng.randrange(3)
        if kind != 1:
            attention ^= {number}
        if kind != 0:
            mlp ^= {number}
    return SkippedLayers(frozenset(attention), frozenset(mlp))
