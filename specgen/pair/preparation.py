"""Finds two settings by measuring on this machine: PEARL's window and the layers that Self-SD skips (`auto` in both).

PEARL's window needs the seconds of the models' forward passes. The layers to skip are the set with the highest measured decoding
speed (Zhang et al. 2023, section 3.3). A set says of each layer whether its attention, its MLP or both are skipped. The authors
run 1,000 trials of a Bayesian optimiser. This search ends within seconds: it measures good guesses (layers evenly spread, or in
the middle of the model), then changes one or two layers of the best set at a time and keeps what is faster.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specgen import methods
from specgen.base import schema
from specgen.base.errors import SpecgenError
from specgen.base.files import examples_file
from specgen.base.types import Context, Round, SamplingParams
from specgen.engine.devices import device_timer
from specgen.engine.model_loading import LoadedModel
from specgen.engine.parts.own_layers import SkippedLayers
from specgen.methods.pearl import LONGEST_WINDOW, ParallelCosts, time_parallel_passes
from specgen.pair.measurements import Key, Measurements

if TYPE_CHECKING:
    from specgen.decoding.drafting import Setup
    from specgen.workers.worker import DraftWorker

PASSES, SKIPS = "passes", "skips"
"""The kinds of measurements: `ParallelCosts` by `passes_key`, and skipped layers in the notation of the `skip` setting."""
SEARCH_SECONDS = 10.0
# To measure a speed: the number of prompts, the most tokens of a prompt, and the new tokens generated after each. The authors use
# 8 prompts of 32 tokens.
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 32, 32


def passes_key(worker: DraftWorker, sampling: SamplingParams, length: int, *, record: bool, has_penalties: bool) -> Key:
    """Returns what distinguishes runs of PEARL with different pass times, apart from the models and the machine.

    It holds the context length rounded up to a power of two, which processing the logits get (temperature, top-k, top-p,
    penalties), where the draft model runs, and whether its logits are passed on (`record`).
    """
    longest = 1 << (length - 1).bit_length()
    logits = not sampling.greedy, sampling.top_k > 0, sampling.top_p < 1, has_penalties
    return longest, *logits, worker.is_process, worker.threads, record


def measure_passes(target: LoadedModel, draft: LoadedModel, worker: DraftWorker, components: Setup, length: int) -> ParallelCosts:
    """Measures the seconds of passes of both models while both run at once, after a context of about `length` tokens.

    `worker` runs the draft model; waits until it is ready. `components` are those of a run whose times are needed. Times are
    infinite if the draft model cannot follow the context.
    """
    worker.ready()
    drafter = worker.drafter(methods.resolve(methods.METHODS["pearl"], {}), components, LONGEST_WINDOW)
    shortest = min(target.max_tokens(length), draft.context_limit)
    length = max(1, min(length, max(shortest - LONGEST_WINDOW, shortest // 2)))
    widest = max(1, min(LONGEST_WINDOW, shortest - length))
    assert components.target is not None
    timer, context = device_timer(target.device), Context([1] * length)
    return time_parallel_passes(components.target, drafter, context, timer, widest, not worker.is_process)


def find_skips(measurements: Measurements, target: LoadedModel, speed: Callable[[SkippedLayers, list[list[int]]], float]) -> str:
    """Returns the layers to skip for the fastest layer skipping, in the notation of the `skip` setting, such as `3+5a+7m`.

    Searches them if they are not known yet. `speed` measures the tokens per second of decoding with some skipped layers on
    prompts (lists of token ids). Raises SpecgenError if the target's layers cannot be run one by one.
    """

    def search() -> str:
        target.model.check_layers("layer skipping")
        prompts, layers = example_prompts(target), target.model.shape.num_layers
        return search_skips(layers, lambda skips: speed(skips, prompts), SEARCH_SECONDS).skips

    return measurements.get(SKIPS, (), search, str, str, with_draft=False)


def example_prompts(target: LoadedModel) -> list[list[int]]:
    """Returns the prompts (token ids) of short measurements: the first tokens of one example per category.

    Takes the prompts for tuning of the first `PROMPTS` categories, and at most half of the target's context length per prompt.
    """
    longest = min(PROMPT_TOKENS, target.context_limit // 2)
    texts: dict[str, str] = {}
    for entry in schema.parse_yaml(examples_file().read_text(encoding="utf-8"), "examples.yaml")["prompts"]:
        if entry.get("tuning"):  # others are for comparisons
            texts.setdefault(entry["category"], entry["prompt"])
    found = [ids for text in list(texts.values())[:PROMPTS] if (ids := target.tokenizer.encode(text)[:longest])]
    if not found:
        raise SpecgenError("the target's tokenizer has no tokens for the example prompts", "Name the layers: skip=3+5+7")
    return found


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
