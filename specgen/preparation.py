"""What is measured or searched on this machine before a method can run, kept in the measurement cache for later runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, astuple
from typing import TYPE_CHECKING, Any

import torch

from specgen import measurement_cache, methods
from specgen.cost_model.pearl_window import LONGEST_WINDOW, ParallelCosts
from specgen.decoding.parallel_timing import time_parallel_passes
from specgen.engine.decoder_layers import check_llama_structure
from specgen.engine.devices import device_name, synchronizer
from specgen.engine.fingerprint import weights_fingerprint
from specgen.environment import machine, versions
from specgen.errors import SpecgenError
from specgen.files import load_yaml
from specgen.paths import examples_file
from specgen.skip_search import PROMPT_TOKENS, PROMPTS, search_skips
from specgen.types import Context

if TYPE_CHECKING:
    from specgen.decoding.components import Components
    from specgen.decoding.parallel import DraftWorker
    from specgen.engine.layer_skipping import SkippedLayers
    from specgen.engine.model_loading import LoadedModel

SEARCH_SECONDS = 10.0


def parallel_costs(
    target: LoadedModel, draft: LoadedModel, worker: DraftWorker, components: Components, length: int, bucket: tuple[Any, ...]
) -> ParallelCosts:
    """Pass times after a context of about `length` tokens while both models run: from the cache, or measured now.

    `bucket` is what distinguishes the runs of one pair that need times of their own. Waits until the worker is ready.
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


def _valid_costs(found: Any) -> ParallelCosts | None:
    """The cached pass times, None where they are missing or not positive numbers."""
    try:
        costs = ParallelCosts(**found)
        return costs if min(astuple(costs)) > 0 and max(astuple(costs)) < math.inf else None
    except TypeError:
        return None


def fastest_skips(target: LoadedModel, speed: Callable[[SkippedLayers, list[list[int]]], float]) -> str:
    """The layers with which layer skipping is fastest, as `skip` setting: from the cache, or searched now by their `speed` on
    some prompts.

    Raises SpecgenError where the target's layers cannot be run one by one.
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
        check_llama_structure(target.model, "layer skipping")
        prompts, layers = _search_prompts(target), target.model.config.get_text_config().num_hidden_layers
        found = search_skips(layers, lambda skips: speed(skips, prompts), SEARCH_SECONDS).skips
        measurement_cache.keep("skips", key, found)
    return found


def _search_prompts(target: LoadedModel) -> list[list[int]]:
    """Prompts to measure skipped layers on: the beginning of one example of each category, at most half a context long."""
    longest = min(PROMPT_TOKENS, target.context_limit // 2)
    texts: dict[str, str] = {}
    for entry in load_yaml(examples_file().read_text(encoding="utf-8"))["prompts"]:
        texts.setdefault(entry["category"], entry["prompt"])
    found = [ids for text in list(texts.values())[:PROMPTS] if (ids := target.tokenizer.encode(text)[:longest])]
    if not found:
        raise SpecgenError("the target's tokenizer has no tokens for the example prompts", "Name the layers: skip=3+5+7")
    return found
