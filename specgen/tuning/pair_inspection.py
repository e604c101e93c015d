"""Inspects target and draft model for `specgen inspect`: facts from their files, and times of the loaded models' passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from specgen.cost_model.pearl_window import ParallelCosts
from specgen.cost_model.speedup import ACCEPTANCES, WIDTHS, SpeedupModel
from specgen.engine.devices import ThreadChoice, free_memory
from specgen.engine.draft_dtype import choose_draft_dtype
from specgen.engine.dtype_choice import DtypeChoice
from specgen.engine.model_loading import ModelSource, PreparedModel, check_tokenizers_match, check_weight_files, prepare
from specgen.engine.model_shape import NO_LIMIT
from specgen.engine.native.native_model import NativeModel
from specgen.engine.native.products import ProductChoice
from specgen.engine.native.quantised_products import quantised_bytes
from specgen.engine.native.tensor_names import EMBEDDING, HEAD
from specgen.engine.timing import time_passes
from specgen.engine.tokenizer import Tokenizer
from specgen.errors import SpecgenError
from specgen.pair import Pair
from specgen.tuning.method_readiness import NO_PARTS, Readiness, TrainedParts, readiness

_PROBES: Sequence[str] = (
    "def add(a, b):\n    return a + b\n",
    "Where is Oslo? It's in Norway, 59.9° N.",
    "  two spaces,\ttabs\r\nand “quotes” – naïve café",
    "数学は楽しい 🙂 1234567890",
)
_SHOWN_DIFFERENCES = 5  # at most this many differing tokens of two vocabularies are listed
CONTEXT_LENGTH = 256  # tokens in the cache when passes are timed; fewer where a model's context is shorter


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model, read from its files.

    `weight_bytes` is the size of all weights, `cache_bytes` the size of the cached keys and values of one token; both in `dtype`,
    with which the model would run, but for quantised weights, which take as many bytes as their files. `context_limit` is the
    largest number of tokens in a context, None if the config names no limit. `table_rows` is the number of rows of the embedding
    table. `backend` runs the forward pass; `fallback` says why it is transformers, `tokenizer_fallback` why transformers reads
    the tokenizer, both None otherwise. `dtype_reason` says why `dtype` was chosen.
    """

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
    backend: str
    fallback: str | None
    dtype_reason: str
    tokenizer_fallback: str | None


@dataclass(frozen=True, slots=True)
class EngineChoices:
    """What was chosen for the loaded models, and why: the CPU threads (None on an accelerator), and the weights of each model.

    `products` has the choices for the weights of target and draft model, `padded_to` the number of tokens that their shorter
    passes are padded to; both only for models that the native decoder runs.
    """

    threads: ThreadChoice | None
    products: Mapping[str, Sequence[ProductChoice]]
    padded_to: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Returns the choices as an object for the JSON output."""
        return {
            "threads": None if self.threads is None else {**asdict(self.threads), "seconds": _by_text(self.threads.seconds)},
            "padded_to": dict(self.padded_to),
            "products": {role: [_product(choice) for choice in choices] for role, choices in self.products.items()},
        }


def _product(choice: ProductChoice) -> dict[str, Any]:
    seconds = {"dense_seconds": _by_text(choice.dense_seconds), "packed_seconds": _by_text(choice.packed_seconds)}
    return {**asdict(choice), **seconds}


def _by_text(seconds: Mapping[int, float]) -> dict[str, float]:
    return {str(number): taken for number, taken in seconds.items()}


@dataclass(frozen=True, slots=True)
class Difference:
    """A token id to which the two tokenizers give different tokens; None for a tokenizer that does not have the id."""

    token_id: int
    target: str | None
    draft: str | None


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """A comparison of the target's and the draft model's tokenizer.

    Sizes are numbers of tokens; `shared` counts the ids that mean the same token in both. `refusal` says why these tokenizers
    cannot be used together, None if they can. `probe` is a text that they encode differently although their vocabularies match,
    with the token ids from the target's and from the draft's tokenizer; None if they encode all test texts alike.
    """

    target_size: int
    draft_size: int
    shared: int
    differences: tuple[Difference, ...]
    refusal: str | None
    probe: tuple[str, tuple[int, ...], tuple[int, ...]] | None


@dataclass(frozen=True, slots=True)
class PairReport:
    """Everything that `specgen inspect` reports about a target and its draft model.

    `draft` and `tokenizers` (their comparison) are None without a draft model. `free_bytes` is the free memory on the target's
    device, None if the system does not report it. `methods` says for each method whether it can run. `speedup_model` has the pass
    times of each model alone, None if not measured. `parallel_costs` has the pass times while both models run at the same time,
    as in PEARL; None if not measured or without a usable draft model. `choices` are the engine's, None if not measured.
    """

    target: ModelFacts
    draft: ModelFacts | None
    tokenizers: TokenizerFacts | None
    free_bytes: int | None
    methods: Mapping[str, Readiness]
    speedup_model: SpeedupModel | None = None
    parallel_costs: ParallelCosts | None = None
    choices: EngineChoices | None = None

    @property
    def weight_bytes(self) -> int:
        return self.target.weight_bytes + (self.draft.weight_bytes if self.draft else 0)

    @property
    def context_limit(self) -> int | None:
        """The largest number of tokens in prompt and output together: the target's limit. None: the target has no limit.

        If the draft model's limit is smaller, decoding continues beyond it without drafts.
        """
        return self.target.context_limit

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of the cached keys and values of both models for the longest context; None if the target has no context limit."""
        longest = self.context_limit
        if longest is None:
            return None
        models = [self.target] if self.draft is None else [self.target, self.draft]
        return sum(model.cache_bytes * min(model.context_limit or longest, longest) for model in models)

    def as_dict(self) -> dict[str, Any]:
        """Returns what `inspect --json` prints, without the key `type`."""
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
            "engine": None if self.choices is None else self.choices.as_dict(),
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
    parts: TrainedParts = NO_PARTS,
    draft_dtype: str | None = None,
) -> PairReport:
    """Reports on target and draft model from their configs, tokenizers and the headers of their weight files.

    `devices` are the target's and the draft's; `draft_dtype` is the draft's, None for that of both. `parts` are the trained parts
    that the user named. A draft model with another tokenizer is reported, not refused. Raises SpecgenError if a model cannot be
    used at all.
    """
    ours = prepare(target, announce)
    theirs = None if draft is None else prepare(draft, announce)
    tokenizers = None if theirs is None else _compared(ours, theirs)
    of_target = ours.choose_dtype(dtype, devices[0])
    return PairReport(
        _facts(ours, devices[0], of_target),
        None if theirs is None else _facts(theirs, devices[1], choose_draft_dtype(draft_dtype, dtype, theirs, devices[1])),
        tokenizers,
        free_memory(devices[0]),
        readiness(
            ours, parts, has_draft=tokenizers is not None, differs=tokenizers is not None and tokenizers.refusal is not None
        ),
    )


def measure(pair: Pair, announce: Callable[[str], None]) -> SpeedupModel:
    """Measures the pass times of each model while the other is idle, and returns them with the speedups that they allow."""
    limits = [model.context_limit for model in (pair.target, pair.draft) if model is not None]
    length = max(1, min(CONTEXT_LENGTH, min(limits) - max(WIDTHS)))
    widths = [width for width in WIDTHS if length + width <= min(limits)] or [1]
    announce(f"timing passes over {widths[0]} to {widths[-1]} tokens")
    seconds = time_passes(pair.target.runner(), widths, length)
    drafting = time_passes(pair.draft.runner(), [1], length)[1] if pair.draft is not None else 0.0
    return SpeedupModel(seconds, drafting, length)


def engine_choices(pair: Pair) -> EngineChoices:
    """Returns what was chosen for the loaded models of a pair that was warmed up."""
    loaded = {"target": pair.target, "draft": pair.draft}
    models = {role: one.model for role, one in loaded.items() if one is not None}
    native = {role: model for role, model in models.items() if isinstance(model, NativeModel)}
    products = {role: model.product_choices for role, model in native.items()}
    return EngineChoices(pair.thread_choice, products, {role: model.min_rows for role, model in native.items()})


def measure_parallel(pair: Pair, announce: Callable[[str], None]) -> ParallelCosts | None:
    """Measures pass times while both models run at the same time, which decide PEARL's window; None without a draft model."""
    if pair.draft is None:
        return None
    announce("timing passes with both models running")
    return pair.parallel_costs(min(CONTEXT_LENGTH, pair.target.context_limit, pair.draft.context_limit))


def _facts(prepared: PreparedModel, device: torch.device, weights: DtypeChoice) -> ModelFacts:
    shape, size = prepared.shape, weights.dtype.itemsize
    check_weight_files(prepared.folder, prepared.name)
    parameters, weight_bytes = _weights(prepared, device, weights)
    return ModelFacts(
        prepared.name,
        shape.model_type,
        parameters,
        shape.num_layers,
        shape.hidden_size,
        weights.name,
        str(device),
        weight_bytes,
        shape.kv_bytes_per_token(size),
        None if prepared.context_limit >= NO_LIMIT else prepared.context_limit,
        shape.vocab_size,
        prepared.config.backend,
        prepared.config.fallback,
        weights.warning or weights.reason,
        prepared.tokenizer.fallback,
    )


def _weights(prepared: PreparedModel, device: torch.device, weights: DtypeChoice) -> tuple[int, int]:
    """Returns the number of a model's parameters, and the bytes of its weights in memory.

    Quantised weights stay as they are in their files, packed, whose shapes say nothing of the number of parameters. If a draft's
    weights are rounded when they are loaded, its LM head is a table apart from the embedding.
    """
    shapes, in_file = _stored(prepared.folder)
    numbers, size, kind = {name: math.prod(shape) for name, shape in shapes.items()}, weights.dtype.itemsize, weights.quantise
    stored = sum(numbers.values())
    if kind is not None:
        rounded = [name for name, shape in shapes.items() if len(shape) == 2 and not name.endswith(EMBEDDING)]
        kept = stored - sum(numbers[name] for name in rounded)
        rounded += [name for name in shapes if name.endswith(EMBEDDING) and HEAD not in shapes]
        return stored, kept * size + sum(quantised_bytes(kind, numbers[name], shapes[name][0]) for name in rounded)
    quantisation = prepared.quantisation_on(device)
    if quantisation is None:
        return stored, stored * size
    from specgen.engine.transformers_backend.structure import count_parameters

    parameters = count_parameters(prepared.config.transformers_config, prepared.source.trust_remote_code) or stored
    return parameters, parameters * size if quantisation.dequantises else in_file


def _stored(folder: Path) -> tuple[dict[str, list[int]], int]:
    """Returns the shapes of the tensors in the weight files, from their headers, and the bytes of the files."""
    shapes: dict[str, list[int]] = {}
    size = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118  no mapping
            size += path.stat().st_size
        except Exception as error:  # safetensors' own exceptions share no base that it exports
            raise SpecgenError(f"cannot read the weights {path}: {str(error)[:160]}", "Download or save them again") from error
    return shapes, size


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
    """Returns a test text that the tokenizers encode differently, with the ids from each; None if they encode all alike."""
    for text in _PROBES:
        ours, theirs = tuple(target.encode(text)), tuple(draft.encode(text))
        if ours != theirs:
            return text, ours, theirs
    return None
