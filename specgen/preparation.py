"""Finds two settings by measuring on this machine: PEARL's window and the layers that layer skipping leaves out.

PEARL's window needs the seconds of the models' forward passes; the best layers to skip are searched. Results are stored in files
of the user's cache folder, so that later processes need not measure again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, astuple
from typing import TYPE_CHECKING, Any

import torch

from specgen import measurement_cache, methods
from specgen.cost_model.pearl_window import LONGEST_WINDOW, ParallelCosts
from specgen.decoding.parallel_timing import time_parallel_passes
from specgen.engine.devices import device_name, synchronizer
from specgen.engine.fingerprint import weights_fingerprint
from specgen.environment import machine, versions
from specgen.errors import SpecgenError
from specgen.files import load_yaml
from specgen.paths import examples_file
from specgen.skip_search import PROMPT_TOKENS, PROMPTS, search_skips
from specgen.types import Context, SamplingParams

if TYPE_CHECKING:
    from specgen.decoding.components import Components
    from specgen.decoding.parallel import DraftWorker
    from specgen.engine.deferred_model import DraftModel
    from specgen.engine.layer_skipping import SkippedLayers
    from specgen.engine.model_loading import LoadedModel

SEARCH_SECONDS = 10.0


def parallel_costs(
    target: LoadedModel, draft: DraftModel, worker: DraftWorker, components: Components, length: int, bucket: tuple[Any, ...]
) -> ParallelCosts:
    """Returns the seconds of forward passes of target and draft while both run at once, after a context of about `length` tokens.

    Reads them from the measurement cache, or measures them now. `worker` runs the draft model; waits until the worker is ready.
    `bucket` is part of the cache key: decoding runs with equal buckets share their times.
    """
    worker.ready()
    key = {
        "models": [weights_fingerprint(model.folder) for model in (target, draft)],
        "devices": [device_name(model.device) for model in (target, draft)],
        "dtypes": [model.dtype_name for model in (target, draft)],
        "worker": [worker.kind, worker.threads, torch.get_num_threads()],
        "bucket": list(bucket),
        "versions": versions(),
        "machine": machine(),
    }
    costs = _valid_costs(measurement_cache.find("costs", key))
    if costs is None:
        drafter = worker.drafter(methods.resolve(methods.METHODS["pearl"], {}), components, LONGEST_WINDOW)
        shortest = min(target.max_tokens(length), draft.context_limit)
        length = max(1, min(length, max(shortest - LONGEST_WINDOW, shortest // 2)))
        widest = max(1, min(LONGEST_WINDOW, shortest - length))
        costs = time_parallel_passes(components.target, drafter, Context([1] * length), synchronizer(target.device), widest)
        if max(astuple(costs)) < math.inf:  # infinite where the draft model cannot follow this one context
            measurement_cache.keep("costs", key, asdict(costs))
    return costs


def bucket(context_length: int, sampling: SamplingParams, *, has_penalties: bool, in_process: bool) -> tuple[Any, ...]:
    """Returns a key of measured pass times: decoding runs with equal keys share them.

    It holds the context length rounded up to a power of two, which processing the logits get (temperature, top-k, top-p,
    penalties), and whether the draft model runs in a process of its own.
    """
    longest = 1 << (context_length - 1).bit_length()
    return longest, not sampling.greedy, sampling.top_k > 0, sampling.top_p < 1, has_penalties, in_process


def _valid_costs(found: Any) -> ParallelCosts | None:
    """Returns cached pass times (`found`, as read from JSON), or None if they are missing or not positive finite numbers."""
    try:
        costs = ParallelCosts(**found)
        return costs if min(astuple(costs)) > 0 and max(astuple(costs)) < math.inf else None
    except TypeError:
        return None


def fastest_skips(target: LoadedModel, speed: Callable[[SkippedLayers, list[list[int]]], float]) -> str:
    """Returns the layers to skip for the fastest layer skipping, in the notation of the `skip` setting, such as `3+5a+7m`.

    Reads them from the measurement cache, or searches them now. `speed` measures the tokens per second of decoding with some
    skipped layers on prompts (lists of token ids). Raises SpecgenError if the target's layers cannot be run one by one.
    """
    key = {
        "model": weights_fingerprint(target.folder),
        "device": str(target.device),
        "dtype": target.dtype_name,
        "versions": versions(),
        "machine": machine(),
    }
    found = measurement_cache.find("skips", key)
    if not isinstance(found, str):
        target.model.check_layers("layer skipping")
        prompts, layers = _search_prompts(target), target.model.shape.num_layers
        found = search_skips(layers, lambda skips: speed(skips, prompts), SEARCH_SECONDS).skips
        measurement_cache.keep("skips", key, found)
    return found


def _search_prompts(target: LoadedModel) -> list[list[int]]:
    """Returns the prompts (token ids) on which skipped layers are measured: the first tokens of one example per category.

    Takes the prompts for tuning of the first `PROMPTS` categories, and at most half of the target's context length per prompt.
    """
    longest = min(PROMPT_TOKENS, target.context_limit // 2)
    texts: dict[str, str] = {}
    for entry in load_yaml(examples_file().read_text(encoding="utf-8"))["prompts"]:
        if entry.get("tuning"):  # others are for comparisons
            texts.setdefault(entry["category"], entry["prompt"])
    found = [ids for text in list(texts.values())[:PROMPTS] if (ids := target.tokenizer.encode(text)[:longest])]
    if not found:
        raise SpecgenError("the target's tokenizer has no tokens for the example prompts", "Name the layers: skip=3+5+7")
    return found
