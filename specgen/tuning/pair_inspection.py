"""Looking at a pair by its files: configs, tokenizers and the headers of the weights, none of which takes long to read."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from specgen import methods
from specgen.engine.devices import free_memory, pick_dtype
from specgen.engine.exit_files import find_exit
from specgen.engine.exit_layer import missing_part
from specgen.engine.kv_cache import bytes_per_token
from specgen.engine.model_loading import NO_LIMIT, ModelSource, PreparedModel, context_limit, prepare, skeleton
from specgen.engine.timing import target_pass_seconds
from specgen.engine.tokenizer import Tokenizer, check_same
from specgen.errors import SpecgenError
from specgen.pair import Pair
from specgen.speedup_model import WIDTHS, SpeedupModel
from specgen.tuning.pair_report import PROBES, ModelFacts, PairReport, TokenizerFacts, all_methods, first_differences
from specgen.types import SamplingParams

CONTEXT_LENGTH = 256  # tokens behind which passes are timed, less where the model's context is shorter


def look(
    target: ModelSource,
    draft: ModelSource | None,
    devices: tuple[torch.device, torch.device],
    dtype: str,
    announce: Callable[[str], None],
    *,
    exit_layer: Path | None = None,
) -> PairReport:
    """A report of the pair, without reading its weights. A draft whose tokenizer differs is reported, not refused.

    Raises SpecgenError where a model cannot be used at all.
    """
    ours = prepare(target, announce)
    theirs = None if draft is None else prepare(draft, announce)
    tokenizers = None if theirs is None else _compared(ours, theirs)
    refusal = None if tokenizers is None else tokenizers.refusal
    return PairReport(
        _facts(ours, devices[0], dtype),
        None if theirs is None else _facts(theirs, devices[1], dtype),
        tokenizers,
        free_memory(devices[0]),
        all_methods(
            has_draft=theirs is not None, refusal=refusal, no_exit=_no_exit(ours, exit_layer), unlike_llama=_unlike_llama(ours)
        ),
    )


def _no_exit(target: PreparedModel, named: Path | None) -> tuple[str, str] | None:
    """Why there is no exit layer and the way to one, as far as small files tell; None where one is named or found."""
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
    """Time passes of a loaded pair, on caches of their own."""
    limits = [model.context_limit for model in (pair.target, pair.draft) if model is not None]
    length = max(1, min(CONTEXT_LENGTH, min(limits) - max(WIDTHS)))
    widths = [width for width in WIDTHS if length + width <= min(limits)] or [1]
    announce(f"timing passes over {widths[0]} to {widths[-1]} tokens")
    seconds = target_pass_seconds(pair.target.runner(), widths, length)
    drafting = target_pass_seconds(pair.draft.runner(), [1], length)[1] if pair.draft is not None else 0.0
    return SpeedupModel(seconds, drafting, length)


def refusals(pair: Pair) -> dict[str, SpecgenError]:
    """The methods with which this pair cannot even plan a run, and what each says."""
    found = {}
    for name in methods.METHODS:
        try:
            method = methods.METHODS[name]
            known: dict[str, Any] = {"skip": "0"} if method.skips_layers else {}  # a search takes its time, and so does
            like = "sd" if method.is_parallel else name  # a start of what drafts apart: it asks for a draft, too
            pair.plan([1], like, SamplingParams(max_new_tokens=1), **known)
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
    limit = context_limit(prepared.config)
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
    """The family of a model whose layers cannot be run one by one, as far as its config tells; None for all others."""
    model = skeleton(prepared)
    return None if model is None or missing_part(model) is None else str(prepared.config.model_type)


def _parameters(folder: Path) -> int:
    """Counted in the files' headers; a table that two parts share is stored once."""
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
        check_same(target.tokenizer, draft.tokenizer, target.name, draft.name)
        refusal = None
    except SpecgenError as error:
        refusal = error.message
    probe = None if refusal is not None else _differing_probe(target.tokenizer, draft.tokenizer)
    return TokenizerFacts(len(ours), len(theirs), shared, differences, refusal, probe)


def _differing_probe(target: Tokenizer, draft: Tokenizer) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """A text that the two cut differently though their tables fit: another way of splitting words, another beginning."""
    for text in PROBES:
        ours, theirs = tuple(target.encode(text)), tuple(draft.encode(text))
        if ours != theirs:
            return text, ours, theirs
    return None
