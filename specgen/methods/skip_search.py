"""Finds the layers that Self-SD skips (`skip=auto`) by measuring on this machine.

They are the set with the highest measured decoding speed (Zhang et al. 2023, section 3.3). A set
says of each layer whether its attention, its MLP or both are skipped. The authors run 1,000 trials
of a Bayesian optimiser. This search ends within seconds: it measures good guesses (layers evenly
spread, or in the middle of the model), then changes one or two layers of the best set at a time and
keeps what is faster.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from specgen.base import schema
from specgen.base.errors import SpecgenError
from specgen.base.files import examples_file
from specgen.base.measuring import Sample, spread
from specgen.base.skipped_layers import SkippedLayers

if TYPE_CHECKING:
    from specgen.engine.loaded_model import LoadedModel
    from specgen.models.models import Models

# the kind of measurement; its values are layers in the notation of the `skip` setting
SKIPS = "skips"
SEARCH_SECONDS = 10.0
# To measure a speed: the number of prompts, the most tokens of a prompt, and the new tokens
# generated after each. The authors use 8 prompts of 32 tokens.
PROMPTS = 4
PROMPT_TOKENS = 32
NEW_TOKENS = 32


# a function that measures the tokens per second of decoding with these layers skipped, on prompts
# (token ids)
SkippingSpeed = Callable[[SkippedLayers, Sequence[Sequence[int]]], float]


def find_skips(models: Models, speed: SkippingSpeed) -> str:
    """Returns the layers that Self-SD should skip in drafting to be fastest, in the notation of the
    `skip` setting (`3+5a+7m`).

    They are searched, by the measured `speed`, unless they were before. Raises SpecgenError if the
    target's layers cannot be run one by one.
    """
    target = models.target

    def search() -> Sample[str]:
        target.model.check_layers("layer skipping")
        prompts = example_prompts(target)
        layers = target.model.shape.num_layers
        speeds = search_skips(layers, lambda skips: speed(skips, prompts), SEARCH_SECONDS)
        best = max(speeds, key=lambda skips: speeds[skips])
        again = [speed(SkippedLayers.parse(best, layers), prompts) for _ in range(2)]
        return Sample(best, 3, spread([speeds[best], *again]))

    return models.measurements.get(SKIPS, (), search, str, with_draft=False)


def usual_skips(target: LoadedModel) -> str:
    """Returns the layers to skip where nothing may be measured: every second one between the first
    and the last.

    They are the first ones that a search tries. Raises SpecgenError as `find_skips`.
    """
    target.model.check_layers("layer skipping")
    return str(next(_guesses(target.model.shape.num_layers)))


def example_prompts(target: LoadedModel) -> list[list[int]]:
    """Returns the prompts (token ids) of short measurements: the first tokens of one bundled
    example prompt per category.

    They are example prompts for tuning, of the first `PROMPTS` categories. Each is cut to
    `PROMPT_TOKENS` tokens, and to half of the target's context length. Raises SpecgenError if the
    tokenizer has no tokens for any of them.
    """
    examples = schema.parse_yaml(examples_file().read_text(encoding="utf-8"), "examples.yaml")
    texts: dict[str, str] = {}
    for entry in examples["prompts"]:
        if entry.get("tuning"):  # others are for comparisons
            texts.setdefault(entry["category"], entry["prompt"])

    longest = min(PROMPT_TOKENS, target.context_limit // 2)
    encoded = [target.tokenizer.encode(text)[:longest] for text in list(texts.values())[:PROMPTS]]
    prompts = [ids for ids in encoded if ids]
    if not prompts:
        raise SpecgenError(
            "the target's tokenizer has no tokens for the example prompts",
            "Name the layers: skip=3+5+7",
        )
    return prompts


def search_skips(
    layers: int, speed: Callable[[SkippedLayers], float], seconds: float, seed: int = 0
) -> dict[str, float]:
    """Searches the fastest set of skipped layers of a model with `layers` layers, for about
    `seconds`.

    `speed` measures the decoded tokens per second with a set of layers skipped. Returns the
    measured speed of each set that was tried, at least one; the keys are sets in the notation of
    the `skip` setting. `seed` is for the random changes.
    """
    deadline = time.perf_counter() + seconds
    rng = random.Random(seed)
    speeds: dict[str, float] = {}
    for skips in _guesses(layers):
        if speeds and time.perf_counter() >= deadline:
            break
        speeds[str(skips)] = speed(skips)
    while time.perf_counter() < deadline and len(speeds) < 4**layers - 1:
        best = SkippedLayers.parse(max(speeds, key=lambda text: speeds[text]), layers)
        tried = _flipped(best, layers, rng)
        if not str(tried) or str(tried) in speeds:
            continue
        speeds[str(tried)] = speed(tried)
        # measure both again, so that noise does not decide
        if speeds[str(tried)] > speeds[str(best)]:
            speeds[str(best)] = max(speeds[str(best)], speed(best))
            speeds[str(tried)] = min(speeds[str(tried)], speed(tried))
    return speeds


def _guesses(layers: int) -> Iterator[SkippedLayers]:
    """Yields the sets that are measured first: half, a third, two thirds or all of the layers
    between the first and the last.

    Each choice of layers comes twice: with the whole layers skipped, and with only their attention
    skipped.
    """
    inner = range(1, layers - 1) if layers > 2 else range(layers)
    middle = len(inner) // 2
    central = inner[middle - middle // 2 : middle + middle // 2 + 1]
    two_thirds = [number for number in inner if number % 3]
    for numbers in (inner[::2], inner[1::2], inner[::3], central, two_thirds, inner):
        chosen = frozenset(numbers)
        if chosen:
            yield SkippedLayers(chosen, chosen)
            yield SkippedLayers(chosen, frozenset())


def _flipped(skips: SkippedLayers, layers: int, rng: random.Random) -> SkippedLayers:
    """Returns `skips` with one or two random layers changed: the attention, the MLP or both are
    skipped if they were not, and run if they were skipped."""
    attention = set(skips.attention)
    mlp = set(skips.mlp)
    for _ in range(rng.choice((1, 1, 2))):
        number = rng.randrange(layers)
        changed = rng.randrange(3)  # 0: the attention, 1: the MLP, 2: both
        if changed != 1:
            attention ^= {number}
        if changed != 0:
            mlp ^= {number}
    return SkippedLayers(frozenset(attention), frozenset(mlp))
