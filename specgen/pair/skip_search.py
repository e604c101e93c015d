"""Searches the set of layers that Self-SD skips with the highest measured decoding speed (Zhang et al. 2023, section 3.3).

A set says of each layer whether its attention, its MLP or both are skipped. The authors run 1,000 trials of a Bayesian optimiser.
This search ends within seconds. It first measures good guesses: layers evenly spread, or in the middle of the model. Then it
changes one or two layers of the best set at a time and keeps what is faster.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from specgen.base.types import Round
from specgen.engine.layer_skipping import SkippedLayers

# To measure a speed: the number of prompts, the most tokens of a prompt, and the new tokens generated after each. The authors use
# 8 prompts of 32 tokens.
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 32, 32


@dataclass(frozen=True, slots=True)
class FoundSkips:
    """The result of a search. `skips` is the fastest set of skipped layers in the notation of the `skip` setting (`3+5a+7m`).

    `tokens_per_second` is the measured speed with this set, `tried` the number of sets measured.
    """

    skips: str
    tokens_per_second: float
    tried: int


def search_skips(layers: int, speed: Callable[[SkippedLayers], float], seconds: float, seed: int = 0) -> FoundSkips:
    """Searches the fastest set of skipped layers of a model with `layers` layers, for about `seconds`.

    `speed` measures the decoded tokens per second with a set of layers skipped. At least one set is measured. `seed` is for the
    random changes.
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
    """Yields the sets that are measured first: half, a third, two thirds or all of the layers between the first and the last.

    Each choice of layers comes twice: with the whole layers skipped, and with only their attention skipped.
    """
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
    """Returns `skips` with one or two random layers changed: the attention, the MLP or both are skipped if they were not, and run
    if they were skipped."""
    attention, mlp = set(skips.attention), set(skips.mlp)
    for _ in range(rng.choice((1, 1, 2))):
        number = rng.randrange(layers)
        kind = rng.randrange(3)
        if kind != 1:
            attention ^= {number}
        if kind != 0:
            mlp ^= {number}
    return SkippedLayers(frozenset(attention), frozenset(mlp))


def speed_without_prefill(rounds: Iterable[Round]) -> float:
    """Returns the tokens per second of all these rounds but prefills; 0 without any other round."""
    counted = [round_ for round_ in rounds if round_.mode != "prefill"]
    seconds = sum(sum(round_.seconds.values()) for round_ in counted)
    return sum(len(round_.token_ids) for round_ in counted) / seconds if seconds else 0.0
