"""Inspects a pair for `specgen inspect`: facts from its files before anything is run, and pass times of the loaded models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from specgen import methods
from specgen.cost_model.pearl_window import ParallelCosts
from specgen.cost_model.speedup import ACCEPTANCES, WIDTHS, SpeedupModel
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
from specgen.types import SamplingParams

_PROBES: Sequence[str] = (
    "def add(a, b):\n    return a + b\n",
    "Where is Oslo? It's in Norway, 59.9° N.",
    "  two spaces,\ttabs\r\nand “quotes” – naïve café",
    "数学は楽しい 🙂 1234567890",
)
_SHOWN_DIFFERENCES = 5  # of two vocabularies
CONTEXT_LENGTH = 256  # tokens in the cache when passes are timed; fewer where a model's context is shorter


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts from a model's files. `weight_bytes` and `cache_bytes` (keys and values of one token) are in the dtype that it would
    run in; `context_limit` is None where the config has none."""

    name: str
    family: str
    parameters: int
    layers: int
    hidden: int
    dtype: str
    device: str
    weight_bytes: int
    cache_bytes: int
    context_limit: int | None
    table_rows: int


@dataclass(frozen=True, slots=True)
class Difference:
    """A token id for which two tokenizers have different texts; None where one has no such id."""

    token_id: int
    target: str | None
    draft: str | None


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """A comparison of two tokenizers. `refusal` says why the pair cannot be used, None where it can. `probe` is a text that they
    split differently although their vocabularies match, with the ids of both; None where all probes agree."""

    target_size: int
    draft_size: int
    shared: int
    differences: tuple[Difference, ...]
    refusal: str | None
    probe: tuple[str, tuple[int, ...], tuple[int, ...]] | None


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a method can run on this pair; if not, why and what to do."""

    ready: bool
    why: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class PairReport:
    """All of it. `free_bytes` is free memory on the target's device, None where the system does not report it.

    The last two are None until they are measured: pass times of each model alone, and of both at the same time, as PEARL runs
    them (None without a usable draft model too).
    """

    target: ModelFacts
    draft: ModelFacts | None
    tokenizers: TokenizerFacts | None
    free_bytes: int | None
    methods: Mapping[str, Readiness]
    speedup_model: SpeedupModel | None = None
    parallel_costs: ParallelCosts | None = None

    @property
    def weight_bytes(self) -> int:
        return self.target.weight_bytes + (self.draft.weight_bytes if self.draft else 0)

    @property
    def context_limit(self) -> int | None:
        """The longest run in tokens: the target's limit. Beyond a shorter limit of the draft nothing is drafted."""
        return self.target.context_limit

    @property
    def cache_bytes(self) -> int | None:
        """Bytes for keys and values of both models at full context; None where the target has no limit."""
        longest = self.context_limit
        if longest is None:
            return None
        models = [self.target] if self.draft is None else [self.target, self.draft]
        return sum(model.cache_bytes * min(model.context_limit or longest, longest) for model in models)

    def as_dict(self) -> dict[str, Any]:
        """The line of `inspect --json`, without its type."""
        return {
            "target": asdict(self.target),
            "draft": None if self.draft is None else asdict(self.draft),
            "tokenizers": None if self.tokenizers is None else asdict(self.tokenizers),
            "weight_bytes": self.weight_bytes,
            "cache_bytes": self.cache_bytes,
            "free_bytes": self.free_bytes,
            "methods": {
                name: {"ready": found.ready, "why": found.why, "cure": found.hint} for name, found in self.methods.items()
            },
            "measured": None if self.speedup_model is None else _measured(self.speedup_model, self.parallel_costs),
        }


def _measured(model: SpeedupModel, parallel: ParallelCosts | None) -> dict[str, Any]:
    return {
        "context_length": model.context_length,
        "target_seconds": {str(width): seconds for width, seconds in model.target_seconds.items()},
        "draft_seconds": model.draft_seconds or None,
        "cost_ratio": None if parallel is None else parallel.ratio,
        "pearl_window": None if parallel is None else parallel.window.size,
        "pays_from": {str(k): model.break_even_acceptance(k) for k in model.draft_lengths},
        "expected": [
            {"acceptance": acceptance, "draft_length": k, "speedup": speedup}
            for acceptance, (k, speedup) in ((acceptance, model.best(acceptance)) for acceptance in ACCEPTANCES)
        ],
    }


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
    no_exit, unlike_llama = _no_exit(ours, exit_layer), _unlike_llama(ours)
    return PairReport(
        _facts(ours, devices[0], dtype),
        None if theirs is None else _facts(theirs, devices[1], dtype),
        tokenizers,
        free_memory(devices[0]),
        {name: _readiness(method, tokenizers, no_exit, unlike_llama) for name, method in methods.METHODS.items()},
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


def _readiness(
    method: methods.Method, tokenizers: TokenizerFacts | None, no_exit: tuple[str, str] | None, unlike_llama: str | None
) -> Readiness:
    """Whether a method can run, as far as the models' files show. `tokenizers` is None without a draft model."""
    if method.splits_target and unlike_llama is not None:
        why = f"needs a model built as Llama is, and {unlike_llama} is not"
        return Readiness(False, why, "take a draft model, or lookup")
    if method.needs_exit_layer and no_exit is not None:
        return Readiness(False, *no_exit)
    if not method.needs_draft_model:
        return Readiness(True, "needs no draft model")
    if tokenizers is None:
        return Readiness(False, "no draft model", "name one with --draft")
    if tokenizers.refusal is not None:
        return Readiness(False, "the tokenizers differ", "take a draft of the target's family")
    return Readiness(True)


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


def planned(pair: Pair, found: Mapping[str, Readiness]) -> dict[str, Readiness]:
    """The findings, with the errors that planning a run on the loaded pair raises."""
    checked = {}
    for name, method in methods.METHODS.items():
        try:
            # What is `auto` by default would have to be measured.
            given: dict[str, Any] = {"skip": "0"} if method.skips_layers else {"window": 1} if method.is_parallel else {}
            pair.plan([1], name, SamplingParams(max_new_tokens=1), **given)
            checked[name] = found[name]
        except SpecgenError as error:
            checked[name] = Readiness(False, error.message, error.hint) if found[name].ready else found[name]
    return checked


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
    ours, theirs = ({id_: token for token, id_ in model.tokenizer.vocabulary().items()} for model in (target, draft))
    differing = [id_ for id_ in sorted(ours | theirs) if ours.get(id_) != theirs.get(id_)]
    first = tuple(Difference(id_, ours.get(id_), theirs.get(id_)) for id_ in differing[:_SHOWN_DIFFERENCES])
    refusal = None
    try:
        check_tokenizers_match(target, draft)
    except SpecgenError as error:
        refusal = error.message
    probe = None if refusal is not None else _differing_probe(target.tokenizer, draft.tokenizer)
    return TokenizerFacts(len(ours), len(theirs), len(ours | theirs) - len(differing), first, refusal, probe)


def _differing_probe(target: Tokenizer, draft: Tokenizer) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """A text that the tokenizers split differently although their vocabularies match, with the ids of both."""
    for text in _PROBES:
        ours, theirs = tuple(target.encode(text)), tuple(draft.encode(text))
        if ours != theirs:
            return text, ours, theirs
    return None
