"""Finds two settings by measuring on this machine: PEARL's window and the layers that layer skipping leaves out.

PEARL's window needs the seconds of the models' forward passes; the best layers to skip are searched. Results are stored in files
of the user's cache folder, so that later processes need not measure again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from specgen import methods
from specgen.base import measurement_cache, schema
from specgen.base.errors import SpecgenError
from specgen.base.files import examples_file
from specgen.base.machine import machine, thread_settings, versions
from specgen.base.types import Context, SamplingParams
from specgen.decoding.costs.cost_check import CostCheck
from specgen.decoding.costs.pearl_window import LONGEST_WINDOW, ParallelCosts
from specgen.engine.devices import device_timer
from specgen.engine.fingerprint import weights_fingerprint
from specgen.engine.model_loading import LoadedModel
from specgen.methods.pearl_timing import time_parallel_passes
from specgen.pair.skip_search import PROMPT_TOKENS, PROMPTS, search_skips

if TYPE_CHECKING:
    from specgen.decoding.drafting import Setup
    from specgen.engine.layer_skipping import SkippedLayers
    from specgen.engine.model_loading import LoadedModel
    from specgen.workers.worker import DraftWorker

SEARCH_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """The pass times that PEARL's window is computed from, and a check that they still fit what runs show.

    If they do not, later processes measure again. `check` is None where the draft model cannot follow the context.
    """

    costs: ParallelCosts
    check: CostCheck | None


class PearlCosts:
    """The pass times that PEARL's window is computed from, of one pair of models. Measured once for all runs that share them.

    Runs share them if they have the same `_bucket`. Until the process ends they do not change, so that equal runs stay equal.
    """

    def __init__(self, target: LoadedModel, draft: LoadedModel | None) -> None:
        self._target, self._draft = target, draft
        self._known: dict[tuple[Any, ...], MeasuredCosts] = {}

    def find(self, worker: DraftWorker, sampling: SamplingParams, length: int, *, record: bool) -> MeasuredCosts | None:
        """Returns what `measure` returned for such runs, None if it was not called. Arguments as for `measure`."""
        return self._known.get(self._bucket(worker, sampling, length, record))

    def measure(self, worker: DraftWorker, components: Setup, length: int) -> MeasuredCosts:
        """Returns the seconds of passes of both models while both run at once, after a context of about `length` tokens.

        Reads them from the measurement cache, or measures them now. `worker` runs the draft model; waits until the worker is
        ready. `components` are those of a run whose times are needed.
        """
        bucket = self._bucket(worker, components.sampling, length, components.record)
        if bucket not in self._known:
            self._known[bucket] = self._measured(worker, components, length, bucket)
        return self._known[bucket]

    def _bucket(self, worker: DraftWorker, sampling: SamplingParams, length: int, record: bool) -> tuple[Any, ...]:
        """Returns what distinguishes runs with different pass times, apart from the models and the machine.

        It holds the context length rounded up to a power of two, which processing the logits get (temperature, top-k, top-p,
        penalties), where the draft model runs, and whether its logits are passed on (`record`).
        """
        longest = 1 << (length - 1).bit_length()
        logits = not sampling.greedy, sampling.top_k > 0, sampling.top_p < 1, self._target.has_penalties
        return longest, *logits, worker.kind, record

    def _measured(self, worker: DraftWorker, components: Setup, length: int, bucket: tuple[Any, ...]) -> MeasuredCosts:
        target, draft = self._target, self._draft
        assert draft is not None
        worker.ready()
        key = {**conditions(target, draft), "worker": worker.threads, "bucket": list(bucket)}
        costs = _valid_costs(measurement_cache.find("costs", key))
        if costs is None:
            drafter = worker.drafter(methods.resolve(methods.METHODS["pearl"], {}), components, LONGEST_WINDOW)
            shortest = min(target.max_tokens(length), draft.context_limit)
            length = max(1, min(length, max(shortest - LONGEST_WINDOW, shortest // 2)))
            widest = max(1, min(LONGEST_WINDOW, shortest - length))
            timer = device_timer(target.device)

            def capture() -> None:
                for model in (target, draft) if worker.kind != "process" else (target,):
                    model.model.capture_passes(length, length + widest)

            assert components.target is not None
            costs = time_parallel_passes(
                components.target, drafter, Context([1] * length), timer, widest, worker.kind == "stream", capture
            )
            if max(costs.seconds) == math.inf:  # the draft model cannot follow this one context
                return MeasuredCosts(costs, None)
            measurement_cache.keep("costs", key, asdict(costs))
        drop = partial(measurement_cache.drop, "costs", key)
        return MeasuredCosts(costs, CostCheck(lambda drafted: drafted * costs.draft_pass, costs.pass_seconds, drop))


def conditions(*models: LoadedModel) -> dict[str, Any]:
    """Returns everything but the measured work itself that changes how long the models' passes take: a part of cache keys."""
    translations = [model.translation.digest for model in models if model.translation is not None]
    return {
        **({"translations": translations} if translations else {}),
        "models": [weights_fingerprint(model.folder) for model in models],
        "devices": [model.device_label for model in models],
        "dtypes": [model.dtype_name for model in models],
        "backends": [model.backend for model in models],
        "exact": [model.exact for model in models],
        "threads": [torch.get_num_threads(), thread_settings()],
        "versions": versions(),
        "machine": machine(),
    }


def _valid_costs(found: Any) -> ParallelCosts | None:
    """Returns cached pass times (`found`, as read from JSON), or None if they are missing or not positive finite numbers."""
    try:
        costs = ParallelCosts(**found)
        numbers = *costs.seconds, costs.width, costs.context_length
        alone = costs.overlap, costs.draft_alone, costs.target_alone
        is_complete = alone == (None, None, None) or all(number is not None and math.isfinite(number) for number in alone)
        return costs if min(numbers) > 0 and max(numbers) < math.inf and is_complete else None
    except TypeError:
        return None


def fastest_skips(target: LoadedModel, speed: Callable[[SkippedLayers, list[list[int]]], float]) -> str:
    """Returns the layers to skip for the fastest layer skipping, in the notation of the `skip` setting, such as `3+5a+7m`.

    Reads them from the measurement cache, or searches them now. `speed` measures the tokens per second of decoding with some
    skipped layers on prompts (lists of token ids). Raises SpecgenError if the target's layers cannot be run one by one.
    """
    key = conditions(target)
    found = measurement_cache.find("skips", key)
    if not isinstance(found, str):
        target.model.check_layers("layer skipping")
        prompts, layers = example_prompts(target), target.model.shape.num_layers
        found = search_skips(layers, lambda skips: speed(skips, prompts), SEARCH_SECONDS).skips
        measurement_cache.keep("skips", key, found)
    return found


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
