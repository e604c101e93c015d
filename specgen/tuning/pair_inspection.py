"""Inspects a pair: facts from its files, pass times of the loaded models."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from specgen import methods
from specgen.cost_model import WIDTHS, ParallelCosts, SpeedupModel
from specgen.engine.cached_prefix import NO_LIMIT, context_limits
from specgen.engine.decoder_layers import missing_part
from specgen.engine.devices import free_memory, pick_dtype
from specgen.engine.exit_files import find_exit
from specgen.engine.kv_cache import bytes_per_token
from specgen.engine.model_loading import ModelSource, PreparedModel, check_tokenizers_match, model_without_weights, prepare
from specgen.engine.timing import time_passes
from specgen.engine.tokenizer import Tokenizer
from specgen.errors import SpecgenError
from specgen.pair import Pair
from specgen.tuning.pair_report import PROBES, ModelFacts, PairReport, TokenizerFacts, first_differences, readiness
from specgen.types import SamplingParams

CONTEXT_LENGTH = 256  # tokens in the cache when passes are timed; fewer where a model's context is shorter


def inspect_files(
    target: ModelSource,
    draft: ModelSource | None,
    devices: tuple[torch.device, torch.device],
    dtype: str,
    announce: Callable[[str], None],
    *,
    exit_layer: Path | None = None,
) -> PairReport:
    """Report on the pair from its configs, tokenizers and the headers of its weights. A draft model with another tokenizer is
    reported rather than refused. Raises SpecgenError where a model cannot be used at all."""
    ours = prepare(target, announce)
    theirs = None if draft is None else prepare(draft, announce)
    tokenizers = None if theirs is None else _compared(ours, theirs)
    refusal = None if tokenizers is None else tokenizers.refusal
    known: dict[str, Any] = {"has_draft": theirs is not None, "refusal": refusal, "no_exit": _no_exit(ours, exit_layer)}
    known["unlike_llama"] = _unlike_llama(ours)
    return PairReport(
        _facts(ours, devices[0], dtype),
        None if theirs is None else _facts(theirs, devices[1], dtype),
        tokenizers,
        free_memory(devices[0]),
        {name: readiness(method, **known) for name, method in methods.METHODS.items()},
    )


def _no_exit(target: PreparedModel, named: Path | None) -> tuple[str, str] | None:
    """The reason and the hint where there is no exit layer, without reading weights; None where one is named or found."""
    if named is not None:
        return None
    try:
        found = find_exit(target.name, target.folder, is_bundled=target.source.label == "demo/target")
    except SpecgenError as error:
        return error.message, error.hint
    if found is not None:
        return None
    location = None if target.source.label else target.source.location
    return "no exit layer", f"train one with {methods.training_command(location)}"


def measure(pair: Pair, announce: Callable[[str], None]) -> SpeedupModel:
    """Time passes of each model alone, with new caches."""
    limits = [model.context_limit for model in (pair.target, pair.draft) if model is not None]
    length = max(1, min(CONTEXT_LENGTH, min(limits) - max(WIDTHS)))
    widths = [width for width in WIDTHS if length + width <= min(limits)] or [1]
    announce(f"timing passes over {widths[0]} to {widths[-1]} tokens")
    seconds = time_passes(pair.target.runner(), widths, length)
    drafting = time_passes(pair.draft.runner(), [1], length)[1] if pair.draft is not None else 0.0
    return SpeedupModel(seconds, drafting, length)


def measure_parallel(pair: Pair, announce: Callable[[str], None]) -> ParallelCosts | None:
    """The pass times from which a run with PEARL takes its window; None without a draft model."""
    if pair.draft is None:
        return None
    announce("timing passes with both models running")
    return pair.parallel_costs(min(CONTEXT_LENGTH, pair.target.context_limit, pair.draft.context_limit))


def refusals(pair: Pair) -> dict[str, SpecgenError]:
    """The methods for which planning a run fails on this pair, with their errors."""
    found = {}
    for name, method in methods.METHODS.items():
        try:
            # What is `auto` by default would have to be measured.
            given: dict[str, Any] = {"skip": "0"} if method.skips_layers else {}
            given |= {"window": 1} if method.is_parallel else {}
            pair.plan([1], name, SamplingParams(max_new_tokens=1), **given)
        except SpecgenError as error:
            found[name] = error
    return found


def _facts(prepared: PreparedModel, device: torch.device, dtype: str) -> ModelFacts:
    config = prepared.config.get_text_config()
    weights = pick_dtype(dtype, config, prepared.folder, device)
    size = torch.empty(0, dtype=weights).element_size()
    parameters = _parameters(prepared.folder)
    if not parameters:
        raise SpecgenError(f"{prepared.name} has no safetensors weights", "Convert it to safetensors first")
    limit = context_limits(prepared.config)[0]
    return ModelFacts(
        prepared.name,
        config.model_type,
        parameters,
        config.num_hidden_layers,
        config.hidden_size,
        str(weights).removeprefix("torch."),
        str(device),
        parameters * size,
        bytes_per_token(config, size),
        None if limit >= NO_LIMIT else limit,
        config.vocab_size,
    )


def _unlike_llama(prepared: PreparedModel) -> str | None:
    """The family of a model whose layers cannot be run one by one, by its config; None for all others."""
    model = model_without_weights(prepared)
    return None if model is None or missing_part(model) is None else str(prepared.config.model_type)


def _parameters(folder: Path) -> int:
    """Number of parameters, from the headers of the weights; tied weights are stored and counted once."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118  no mapping
        except Exception as error:  # safetensors' own exceptions share no base that it exports
            raise SpecgenError(f"cannot read the weights {path}: {str(error)[:160]}", "Download or save them anew") from error
    return total


def _compared(target: PreparedModel, draft: PreparedModel) -> TokenizerFacts:
    ours, theirs = target.tokenizer.vocabulary(), draft.tokenizer.vocabulary()
    shared, differences = first_differences(ours, theirs)
    try:
        check_tokenizers_match(target, draft)
        refusal = None
    except SpecgenError as error:
        refusal = error.message
    probe = None if refusal is not None else _differing_probe(target.tokenizer, draft.tokenizer)
    return TokenizerFacts(len(ours), len(theirs), shared, differences, refusal, probe)


def _differing_probe(target: Tokenizer, draft: Tokenizer) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """A text that the tokenizers split differently although their vocabularies match, with the ids of both."""
    for text in PROBES:
        ours, theirs = tuple(target.encode(text)), tuple(draft.encode(text))
        if ours != theirs:
            return text, ours, theirs
    return None
