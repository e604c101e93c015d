"""Inspects target and draft model for `specgen inspect`: facts from their files, and times of the loaded models' passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from specgen.base.machine import launch
from specgen.base.types import SamplingParams
from specgen.decoding.costs import ACCEPTANCES, WIDTHS, SpeedupModel
from specgen.engine.devices import free_memory
from specgen.engine.dtype_choice import DtypeChoice, choose_dtypes, weight_bytes
from specgen.engine.model import NO_LIMIT
from specgen.engine.model_loading import ModelSource, PreparedModel, check_weight_files, prepare, translation_between
from specgen.engine.native.native_model import NativeModel
from specgen.engine.native.products import ProductChoice
from specgen.engine.spread.placement import Placement, Stage, place
from specgen.engine.text.token_bytes import NoTokenBytes
from specgen.engine.text.tokenizer import Tokenizer
from specgen.engine.text.translation import TokenOverlap, overlap_of_examples, token_overlap
from specgen.engine.timing import ThreadChoice, time_passes
from specgen.methods.pearl import ParallelCosts
from specgen.pair.pair import Pair, pass_costs
from specgen.pair.preparation import example_prompts
from specgen.tune.method_readiness import NO_PARTS, Readiness, TrainedParts, readiness

_PROBES: Sequence[str] = (
    "def add(a, b):\n    return a + b\n",
    "Where is Oslo? It's in Norway, 59.9° N.",
    "  two spaces,\ttabs\r\nand “quotes” – naïve café",
    "数学は楽しい 🙂 1234567890",
)
_SHOWN_DIFFERENCES = 5  # at most this many differing tokens of two vocabularies are listed
_OUTPUT_TOKENS = 32  # of the target's output to each of some prompts, on which tokenizers are compared
CONTEXT_LENGTH = 256  # tokens in the cache when passes are timed; fewer where a model's context is shorter


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model, read from its files.

    `weight_bytes` is the size of all weights, `cache_bytes` the size of the cached keys and values of one token; both in `dtype`,
    with which the model would run, but for quantised weights, which stay packed as in their files. `context_limit` is the
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


def model_facts(prepared: PreparedModel, device: torch.device, weights: DtypeChoice) -> ModelFacts:
    """Returns what a model's config and the headers of its weight files say. Raises SpecgenError if they cannot be read."""
    shape, size = prepared.shape, weights.dtype.itemsize
    check_weight_files(prepared.folder, prepared.name)
    return ModelFacts(
        prepared.name,
        shape.model_type,
        sum(prepared.parameters.values()),
        shape.num_layers,
        shape.hidden_size,
        weights.name,
        str(device),
        sum(weight_bytes(prepared, device, weights).values()),
        shape.kv_bytes_per_token(size),
        None if prepared.context_limit >= NO_LIMIT else prepared.context_limit,
        shape.vocab_size,
        prepared.backend,
        prepared.fallback,
        weights.warning or weights.reason,
        prepared.tokenizer.fallback,
    )


@dataclass(frozen=True, slots=True)
class EngineChoices:
    """What was chosen for the loaded models, and why: the CPU threads (None on an accelerator), and the weights of each model.

    `products` has the choices for the weights of target and draft model, only for models that the native decoder runs.
    """

    threads: ThreadChoice | None
    products: Mapping[str, Sequence[ProductChoice]]


@dataclass(frozen=True, slots=True)
class Difference:
    """A token id to which the two tokenizers give different tokens; None for a tokenizer that does not have the id."""

    token_id: int
    target: str | None
    draft: str | None


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """A comparison of the target's and the draft model's tokenizer.

    Sizes are numbers of tokens; `shared` counts the ids that mean the same token in both. `refusal` says why drafts cannot be
    translated token by token, None if they can or need not be. `probe` is a text that they encode differently although their
    vocabularies match, with the token ids from the target's and from the draft's tokenizer; None if they encode all test texts
    alike. `overlap` says how much of a text both have as the same tokens, if the vocabularies differ and it can be computed.
    """

    target_size: int
    draft_size: int
    shared: int
    differences: tuple[Difference, ...]
    refusal: str | None
    probe: tuple[str, tuple[int, ...], tuple[int, ...]] | None
    overlap: TokenOverlap | None = None

    @property
    def differ(self) -> bool:
        """Whether the draft model has another vocabulary than the target."""
        return self.refusal is not None or self.overlap is not None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "overlap": None if self.overlap is None else self.overlap.as_dict()}


@dataclass(frozen=True, slots=True)
class PairReport:
    """Everything that `specgen inspect` reports about a target and its draft model.

    `draft` and `tokenizers` (their comparison) are None without a draft model. `free_bytes` is the free memory on the target's
    device, None if the system does not report it; `draft_free_bytes` that on the draft model's, None if it is the same device.
    `methods` says for each method whether it can run. `speedup_model` has the pass
    times of each model alone, None if not measured. `parallel_costs` has the pass times while both models run at the same time,
    as in PEARL; None if not measured or without a usable draft model. `choices` are the engine's, None if not measured.
    `placement` says which part is on which device; None unless they were to be spread over several (`--device auto-map`).
    `ranks` is the number of processes that torchrun started, None without it.
    """

    target: ModelFacts
    draft: ModelFacts | None
    tokenizers: TokenizerFacts | None
    free_bytes: int | None
    methods: Mapping[str, Readiness]
    speedup_model: SpeedupModel | None = None
    parallel_costs: ParallelCosts | None = None
    choices: EngineChoices | None = None
    placement: Placement | None = None
    ranks: int | None = None
    draft_free_bytes: int | None = None

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
        overlap = None if self.tokenizers is None else self.tokenizers.overlap
        kappa = None if overlap is None else overlap.kappa
        return {
            **{name: _as_dict(getattr(self, name)) for name in ("target", "draft", "tokenizers")},
            **{name: getattr(self, name) for name in ("weight_bytes", "cache_bytes", "free_bytes", "draft_free_bytes", "ranks")},
            "placement": None if self.placement is None else _placement(self.placement),
            "methods": {
                name: {"ready": found.ready, "why": found.why, "cure": found.hint} for name, found in self.methods.items()
            },
            "engine": _as_dict(self.choices),
            "measured": None if self.speedup_model is None else _measured(self.speedup_model, self.parallel_costs, kappa),
        }


def _as_dict(facts: Any) -> dict[str, Any] | None:
    if facts is None:
        return None
    return facts.as_dict() if isinstance(facts, TokenizerFacts) else asdict(facts)


def _placement(placement: Placement) -> dict[str, Any]:
    def described(stage: Stage) -> dict[str, Any]:
        layers = [stage.layers.start, stage.layers.stop - 1] if stage.layers else None
        sizes = {name: getattr(stage, name) for name in ("weight_bytes", "cache_bytes", "working_bytes", "draft_bytes")}
        return {"device": str(stage.device), "layers": layers, **sizes, "free_bytes": stage.free}

    draft = None if placement.draft_device is None else str(placement.draft_device)
    return {"context": placement.context, "draft": draft, "devices": [described(stage) for stage in placement.stages]}


def _measured(model: SpeedupModel, parallel: ParallelCosts | None, kappa: float | None = None) -> dict[str, Any]:
    return {
        "context_length": model.context_length,
        "target_seconds": dict(model.target_seconds),
        "draft_seconds": model.draft_seconds or None,
        "cost_ratio": None if parallel is None else parallel.ratio,
        "pearl_window": None if parallel is None else parallel.window.size,
        "pearl_overlap": None if parallel is None else parallel.overlap,
        "pearl_gain_over_sd": None if parallel is None else parallel.gain,
        "pays_from": {k: model.break_even_acceptance(k) for k in model.draft_lengths},
        "expected": [_expected(model, acceptance) for acceptance in ACCEPTANCES],
        "at_kappa": None if kappa is None or not model.draft_lengths else _expected(model, kappa),
    }


def _expected(model: SpeedupModel, acceptance: float) -> dict[str, float]:
    k, speedup = model.best(acceptance)
    return {"acceptance": acceptance, "draft_length": k, "speedup": speedup}


def inspect_files(
    target: ModelSource,
    draft: ModelSource | None,
    devices: tuple[torch.device, torch.device],
    dtypes: tuple[str, str | None],
    announce: Callable[[str], None],
    parts: TrainedParts = NO_PARTS,
    named: tuple[str, str | None] = ("auto", None),
) -> PairReport:
    """Reports on target and draft model from their configs, tokenizers and the headers of their weight files.

    `devices` are the target's and the draft's, `named` the names that the user gave them: for `auto-map`, others are planned.
    `dtypes` are that of both models and that of the draft model, None if it has none of its own. `parts` are the trained parts
    that the user named. A draft model with another tokenizer is reported, not refused. Raises SpecgenError if a model cannot be
    used at all, and RunError if a planned target does not fit.
    """
    launched = launch()
    ours = prepare(target, announce)
    theirs = None if draft is None else prepare(draft, announce)
    tokenizers = None if theirs is None else _compared(ours, theirs)
    models = [model for model in (ours, theirs) if model is not None]
    choices = choose_dtypes(models, devices, dtypes)
    placement = place(named[0], models, choices, named[1])
    if placement is not None:
        devices = placement.device, placement.draft_device or devices[1]
        choices = choose_dtypes(models, devices, dtypes)
    facts = [model_facts(*each) for each in zip(models, devices, choices, strict=False)]
    return PairReport(
        facts[0],
        facts[1] if theirs is not None else None,
        tokenizers,
        free_memory(devices[0]) if placement is None else sum(stage.free for stage in placement.stages),
        readiness(
            ours, parts, has_draft=tokenizers is not None, by_text=tokenizers is not None and tokenizers.refusal is not None
        ),
        placement=placement,
        ranks=None if launched is None else launched.ranks,
        draft_free_bytes=free_memory(devices[1]) if len(facts) == 2 and placement is None and devices[1] != devices[0] else None,
    )


def with_output(facts: TokenizerFacts, pair: Pair, announce: Callable[[str], None]) -> TokenizerFacts:
    """Returns the facts with the overlap on the target's own output to some example prompts, if the vocabularies differ."""
    if facts.overlap is None or pair.draft is None:
        return facts
    announce("generating text to compare the tokenizers on")
    sampling = SamplingParams(max_new_tokens=_OUTPUT_TOKENS)
    outputs = [pair.generate(ids, "ar", sampling).token_ids for ids in example_prompts(pair.target)]
    return replace(facts, overlap=token_overlap(pair.tokenizer, pair.draft.tokenizer, outputs=outputs))


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
    products = {role: model.product_choices for role, model in models.items() if isinstance(model, NativeModel)}
    return EngineChoices(pair.measurements.threads, products)


def measure_parallel(pair: Pair, announce: Callable[[str], None]) -> ParallelCosts | None:
    """Measures pass times while both models run at the same time, which decide PEARL's window.

    None without a draft model, and if its tokens cannot be translated.
    """
    if pair.draft is None or pair.draft.refusal is not None:
        return None
    announce("timing passes with both models running")
    return pass_costs(pair, min(CONTEXT_LENGTH, pair.target.context_limit, pair.draft.context_limit))


def _compared(target: PreparedModel, draft: PreparedModel) -> TokenizerFacts:
    ours, theirs = ({id_: token for token, id_ in model.tokenizer.vocabulary().items()} for model in (target, draft))
    differing = [id_ for id_ in sorted(ours | theirs) if ours.get(id_) != theirs.get(id_)]
    first = tuple(Difference(id_, ours.get(id_), theirs.get(id_)) for id_ in differing[:_SHOWN_DIFFERENCES])
    refusal = probe = overlap = None
    try:
        if translation_between(target, draft) is None:
            probe = _differing_probe(target.tokenizer, draft.tokenizer)
        else:
            overlap = overlap_of_examples(target.tokenizer, draft.tokenizer)
    except NoTokenBytes as error:
        refusal = error.message
    return TokenizerFacts(len(ours), len(theirs), len(ours | theirs) - len(differing), first, refusal, probe, overlap)


def _differing_probe(target: Tokenizer, draft: Tokenizer) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """Returns a test text that the tokenizers encode differently, with the ids from each; None if they encode all alike."""
    for text in _PROBES:
        ours, theirs = tuple(target.encode(text)), tuple(draft.encode(text))
        if ours != theirs:
            return text, ours, theirs
    return None
