"""Inspects target and draft model for `specgen inspect`: facts from their files, which methods can
run, what the others lack, and times of the loaded models' passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.machine import launch
from specgen.base.model_options import ModelOptions
from specgen.base.part_kinds import EXIT, HEADS, MTP, training_command
from specgen.base.types import Context, SamplingParams
from specgen.decoding.costs import ACCEPTANCES, WIDTHS, SpeedupModel
from specgen.decoding.parallel_costs import ParallelCosts, acceptance_of
from specgen.engine.block_runner import LONGEST_DRAFT
from specgen.engine.devices import ThreadChoice, free_memory
from specgen.engine.hub import head_folder
from specgen.engine.kernels import library
from specgen.engine.kernels.operators import kernels_for
from specgen.engine.loaded_model import LoadedModel, translation_between
from specgen.engine.model import NO_LIMIT
from specgen.engine.model_files import ModelFiles, check_weight_files, find_model
from specgen.engine.model_runner import time_passes
from specgen.engine.native.convolved import ConvolvedBranch
from specgen.engine.parts.part import BlockWeights
from specgen.engine.parts.trained_part import open_part
from specgen.engine.precision import Precision, choose_precisions, weight_bytes
from specgen.engine.spread.placement import Placement, Stage, place
from specgen.engine.text.token_bytes import NoTokenBytes
from specgen.engine.text.translation import TokenOverlap, overlap_of_examples, token_overlap
from specgen.methods.pass_times import PassTimes
from specgen.methods.readiness import KnownModels, Readiness
from specgen.methods.skip_search import example_prompts
from specgen.models.parts import PartStore
from specgen.pair.figures import Figures
from specgen.pair.finding import unloaded
from specgen.pair.loading import assistant_folder, model_sources
from specgen.pair.pair import Pair
from specgen.tune.rounding_cost import RoundingCost, rounding_cost

_PROBES: Sequence[str] = (
    "def add(a, b):\n    return a + b\n",
    "Where is Oslo? It's in Norway, 59.9° N.",
    "  two spaces,\ttabs\r\nand “quotes” – naïve café",
    "数学は楽しい 🙂 1234567890",
)
_SHOWN_DIFFERENCES = 5  # at most this many differing tokens of two vocabularies are listed
# new tokens of the target after each example prompt, on which different tokenizers are compared
_OUTPUT_TOKENS = 32
# tokens in the cache when passes are timed; fewer where a model's context is shorter
CONTEXT_LENGTH = 256
# of a trial whether PEARL's passes should overlap: its length, and the most tokens of an output
_TRIAL_SECONDS = 3.0
_TRIAL_TOKENS = 48
_TIMED_PASSES = 9  # of whose shares outside of kernels the median counts
TORCH = "torch"  # in place of kernels


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model, read from its files.

    `dtype` is the one in which the model would run, `dtype_reason` says why. In this dtype, all
    weights take `weight_bytes` (quantised ones stay packed as in their files), and the cached keys
    and values of one token `cache_bytes`. `context_limit` is the largest number of tokens in a
    context, None if the config names no limit. `table_rows` is the number of rows of the embedding
    table. `backend` runs the forward pass. `fallback` says why that is transformers,
    `tokenizer_fallback` why transformers reads the tokenizer; both are None otherwise.
    `tokenizer_warning` is a sentence for the user about a tokenizer that may give other tokens than
    the model's, or None. `kernels` is the set of instructions of our own kernels that compute the
    model's passes, or `torch`; then `no_kernels` says why. `kept_as` says how the weights are in
    memory, `cache_dtype` is the dtype of cached keys and values.
    """

    name: str
    family: str
    parameters: int
    active_parameters: int
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
    tokenizer_warning: str | None = None
    kernels: str = TORCH
    no_kernels: str | None = None
    kept_as: str = ""
    cache_dtype: str = ""


def model_facts(files: ModelFiles, device: torch.device, weights: Precision) -> ModelFacts:
    """Returns what a model's config and the headers of its weight files say. Raises SpecgenError if
    they cannot be read.

    `device` is where the model would run, `weights` the dtype of its weights there.
    """
    shape = files.shape
    size = weights.dtype.itemsize
    check_weight_files(files.folder, files.name)
    no_kernels = _why_no_kernels(files, device, weights)
    stored = None if no_kernels is not None else shape.dtype or "float32"
    return ModelFacts(
        files.name,
        shape.model_type,
        sum(files.parameters.values()),
        files.active_parameters,
        shape.num_layers,
        shape.hidden_size,
        weights.name,
        str(device),
        sum(weight_bytes(files, device, weights).values()),
        shape.kv_bytes_per_token(size),
        None if files.context_limit >= NO_LIMIT else files.context_limit,
        shape.vocab_size,
        files.backend,
        files.fallback,
        weights.warning or weights.reason,
        files.tokenizer.fallback,
        files.tokenizer.warning,
        TORCH if no_kernels is not None else library.kind(),
        no_kernels,
        weights.kept_as(stored) if files.quantisation is None else "quantised, as in their files",
        str(weights.dtype).removeprefix("torch."),
    )


def _why_no_kernels(files: ModelFiles, device: torch.device, weights: Precision) -> str | None:
    """Returns why our own kernels do not run a model; None if they do."""
    if files.architecture is None:
        return "transformers runs the model"
    if device.type != "cpu":
        return f"they are for CPUs, and the model runs on {device}"
    if weights.dtype != torch.float32:
        return f"they compute in float32, and the model in {weights.name}"
    return library.why_none()


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """Facts about a head that the user named: its folder, its kind, and what it is in a few words.

    `on_torch` names what torch computes in its passes where our own kernels compute the rest.
    """

    name: str
    kind: str
    about: str
    on_torch: tuple[str, ...] = ()


class KernelShare(NamedTuple):
    """What of a model's passes is not computed by our own kernels: the `operators` that torch
    computes, as plain names, and the `share` of a pass's time that is spent outside the kernels, in
    torch and in Python."""

    operators: tuple[str, ...]
    share: float


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """A comparison of the target's and the draft model's tokenizer.

    Sizes are numbers of tokens; `shared` counts the ids that mean the same token in both.
    `differences` has the first ids that do not: each `token_id` with its token in `target` and
    `draft`, None where there is none. `refusal` says why drafts cannot be translated token by
    token, None if they can or need not be. `probe` is a text that the tokenizers encode differently
    although their vocabularies match, with its token ids from the target's and from the draft's;
    None if they encode all test texts alike. `overlap` says how much of a text is split into the
    same tokens by both; None if the vocabularies match, or if it cannot be computed.
    """

    target_size: int
    draft_size: int
    shared: int
    differences: Sequence[Mapping[str, Any]]
    refusal: str | None
    probe: tuple[str, tuple[int, ...], tuple[int, ...]] | None
    overlap: TokenOverlap | None = None


class OverlapTrial(NamedTuple):
    """How fast PEARL is with overlapping passes, really run beside `sd` with drafts of `length`
    tokens: `gain` is its speed divided by that of `sd`, `expected_gain` what the times of passes
    predict for this length and for the share `acceptance` of judged tokens that were accepted.
    `prompts` is the number of outputs of each."""

    gain: float
    expected_gain: float
    acceptance: float
    length: int
    prompts: int


@dataclass(frozen=True, slots=True)
class PairReport:
    """Everything that `specgen inspect` reports about a target and its draft model.

    `draft` and `tokenizers` (a comparison of the two) are None without a draft model. `free_bytes`
    is the free memory on the target's device, None if the system does not report it;
    `draft_free_bytes` that on the draft model's, None if it is the same device. `methods` says for
    each method whether it can run. `speedup_model` has the pass times of each model alone, None if
    not measured. `parallel_costs` has the pass times while both models run at the same time, as in
    PEARL; None if not measured or without a usable draft model. `overlap_trial` is a real run of
    PEARL, None where there are no such times of each model alone. `threads` is the chosen number of
    CPU threads, None if not measured. `placement` says which layers are on which device; None
    unless they were to be spread over several (`--device auto-map`). `ranks` is the number of
    processes that torchrun started, None without it. `rounding` says what rounding the target's
    weights costs; None if they are not rounded, or if that was not measured. `on_torch` says for
    `target` and `draft` what torch computes in a pass over one token; None if not measured. `head`
    is the head that the user named, None without one.
    """

    target: ModelFacts
    draft: ModelFacts | None
    tokenizers: TokenizerFacts | None
    free_bytes: int | None
    methods: Mapping[str, Readiness]
    speedup_model: SpeedupModel | None = None
    parallel_costs: ParallelCosts | None = None
    threads: ThreadChoice | None = None
    placement: Placement | None = None
    ranks: int | None = None
    draft_free_bytes: int | None = None
    rounding: RoundingCost | None = None
    on_torch: Mapping[str, KernelShare] | None = None
    head: HeadFacts | None = None
    overlap_trial: OverlapTrial | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns what `inspect --json` prints, without the key `type`.

        `cache_bytes` is the size of both models' caches for the longest context; None if the target
        has no context limit.
        """
        fields = asdict(replace(self, placement=None))
        model = self.speedup_model
        models = [self.target] if self.draft is None else [self.target, self.draft]
        longest = self.target.context_limit
        cache_bytes = None
        if longest is not None:
            lengths = [min(facts.context_limit or longest, longest) for facts in models]
            cache_bytes = sum(
                facts.cache_bytes * length for facts, length in zip(models, lengths, strict=True)
            )
        overlap = None if self.tokenizers is None else self.tokenizers.overlap
        if overlap is not None:
            fields["tokenizers"]["overlap"] = overlap.as_dict()
        kappa = None if overlap is None else overlap.kappa
        return {
            **{name: fields[name] for name in ("target", "draft", "head", "tokenizers")},
            "weight_bytes": sum(facts.weight_bytes for facts in models),
            "cache_bytes": cache_bytes,
            **{name: fields[name] for name in ("free_bytes", "draft_free_bytes", "ranks")},
            "placement": None if self.placement is None else _placement(self.placement),
            "methods": fields["methods"],
            "engine": None if self.threads is None else {"threads": asdict(self.threads)},
            "rounding": None if self.rounding is None else self.rounding._asdict(),
            "on_torch": None
            if self.on_torch is None
            else {role: share._asdict() for role, share in self.on_torch.items()},
            "measured": None
            if model is None
            else _measured(model, self.parallel_costs, kappa, self.overlap_trial),
        }


def _placement(placement: Placement) -> dict[str, Any]:
    def described(stage: Stage) -> dict[str, Any]:
        layers = [stage.layers.start, stage.layers.stop - 1] if stage.layers else None
        sizes = {
            name: getattr(stage, name)
            for name in ("weight_bytes", "cache_bytes", "working_bytes", "draft_bytes")
        }
        return {"device": str(stage.device), "layers": layers, **sizes, "free_bytes": stage.free}

    draft = None if placement.draft_device is None else str(placement.draft_device)
    return {
        "context": placement.context,
        "draft": draft,
        "devices": [described(stage) for stage in placement.stages],
    }


def _measured(
    model: SpeedupModel,
    parallel: ParallelCosts | None,
    kappa: float | None = None,
    trial: OverlapTrial | None = None,
) -> dict[str, Any]:
    def expected(acceptance: float) -> dict[str, float]:
        k, speedup = model.best(acceptance)
        return {"acceptance": acceptance, "draft_length": k, "speedup": speedup}

    return {
        "context_length": model.context_length,
        "target_seconds": dict(model.target_seconds),
        "draft_seconds": model.draft_seconds or None,
        "cost_ratio": None if parallel is None else parallel.ratio,
        "pearl_window": None if parallel is None else parallel.window.size,
        "pearl_overlap": None,  # nothing measures it
        "pearl_gain_over_sd": None if parallel is None else parallel.expected_gain,
        "pearl_trial": None if trial is None else trial._asdict(),
        "pays_from": {k: model.break_even_acceptance(k) for k in model.draft_lengths},
        "expected": [expected(acceptance) for acceptance in ACCEPTANCES],
        "at_kappa": None if kappa is None or not model.draft_lengths else expected(kappa),
    }


def inspect_files(
    options: ModelOptions,
    devices: tuple[torch.device, torch.device],
    announce: Callable[[str], None],
) -> PairReport:
    """Reports on target and draft model from their configs, tokenizers and the headers of their
    weight files.

    `devices` are the target's and the draft's; with `auto-map` this function plans the devices
    itself. A draft model with another tokenizer is reported, not refused. Raises SpecgenError if a
    model or a named head or exit layer cannot be used at all, and RunError if the target does not
    fit on the planned devices.
    """
    launched = launch()
    sources = model_sources(options)
    head = None
    if options.head is not None:
        head = head_folder(options.head, options.offline, announce)
    assistant = assistant_folder(options, announce)
    if assistant is not None:
        head = assistant
        sources = sources[:1]
    models = [find_model(source, announce) for source in sources]
    target = models[0]
    draft = models[1] if len(models) > 1 else None
    tokenizers = None if draft is None else _compared(target, draft)
    library.prepare(announce)
    precisions = choose_precisions(models, devices, options)
    placement = place(models, precisions, options)
    if placement is not None:
        devices = placement.device, placement.draft_device or devices[1]
        precisions = choose_precisions(models, devices, options)
    facts = [model_facts(*each) for each in zip(models, devices, precisions, strict=False)]
    is_apart = draft is not None and placement is None and devices[1] != devices[0]
    store = _named_parts(target, options.exit_layer, head)
    return PairReport(
        facts[0],
        facts[1] if draft is not None else None,
        tokenizers,
        free_memory(devices[0])
        if placement is None
        else sum(stage.free for stage in placement.stages),
        readiness(target, store, tokenizers),
        placement=placement,
        ranks=None if launched is None else launched.ranks,
        draft_free_bytes=free_memory(devices[1]) if is_apart else None,
        head=_head_facts(store, facts[0]),
    )


def with_measurements(
    report: PairReport, pair: Pair, announce: Callable[[str], None]
) -> PairReport:
    """Returns the report with what only loaded models can tell: pass times, threads, what rounding
    costs, the overlap of different tokenizers on the target's output, and methods that fail with
    this pair. Raises SpecgenError or RunError if a model cannot be run."""
    tokenizers = report.tokenizers
    if tokenizers is not None and tokenizers.overlap is not None and pair.draft is not None:
        announce("generating text to compare the tokenizers on")
        sampling = SamplingParams(max_new_tokens=_OUTPUT_TOKENS)
        outputs = [
            pair.generate(ids, "ar", sampling).token_ids for ids in example_prompts(pair.target)
        ]
        tokenizers = replace(
            tokenizers, overlap=token_overlap(pair.tokenizer, pair.draft.tokenizer, outputs=outputs)
        )
    errors = {
        name: obstacle(pair, name) if readiness.ready else None
        for name, readiness in report.methods.items()
    }
    speedup_model = measure(pair, announce)
    parallel_costs = measure_parallel(pair, announce)
    return replace(
        report,
        tokenizers=tokenizers,
        speedup_model=speedup_model,
        threads=pair.measurements.threads,
        parallel_costs=parallel_costs,
        overlap_trial=try_overlapping(pair, parallel_costs, announce),
        rounding=rounding_cost(pair, announce),
        on_torch=measure_kernels(pair),
        methods={
            **report.methods,
            **{name: Readiness.of(error) for name, error in errors.items() if error is not None},
        },
    )


def measure(pair: Pair, announce: Callable[[str], None]) -> SpeedupModel:
    """Measures the pass times of each model while the other is idle, and returns them with the
    speedups that they allow."""
    longest = min(model.context_limit for model in (pair.target, pair.draft) if model is not None)
    length = max(1, min(CONTEXT_LENGTH, longest - max(WIDTHS)))
    widths = [width for width in WIDTHS if length + width <= longest] or [1]
    announce(f"timing passes over {widths[0]} to {widths[-1]} tokens")
    seconds = time_passes(pair.target.runner(), widths, length)
    if pair.draft is None:
        return SpeedupModel(seconds, 0.0, length)
    width = min(LONGEST_DRAFT, max(widths)) if pair.draft.drafts_blocks else 1
    drafting = time_passes(pair.draft.runner(), [width], length)[width]
    return SpeedupModel(seconds, drafting, length, drafts_blocks=pair.draft.drafts_blocks)


def measure_kernels(pair: Pair) -> dict[str, KernelShare]:
    """Measures which part of each model's passes is spent outside of our own kernels."""
    found = {}
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        if model is not None:
            found[role] = KernelShare(model.model.on_torch(), _share_outside_kernels(model))
    return found


def _share_outside_kernels(model: LoadedModel) -> float:
    """Returns the median share of the time of passes over one token that no kernel takes."""
    kernels = kernels_for(model.device, model.dtype)
    if model.files.architecture is None or kernels is None:
        return 1.0
    runner = model.runner()
    context = Context([1] * min(CONTEXT_LENGTH, model.context_limit - 1))
    runner.logits(context)
    shares = []
    for _ in range(_TIMED_PASSES):
        with kernels.timed() as seconds:
            start = time.perf_counter()
            runner.logits(context)
            taken = time.perf_counter() - start
        shares.append(max(0.0, 1 - sum(seconds) / taken))
    runner.clear_cache()
    return median(shares)


def measure_parallel(pair: Pair, announce: Callable[[str], None]) -> ParallelCosts | None:
    """Measures pass times while target and draft model run at the same time, which decide PEARL's
    window.

    Returns None, and measures nothing, without a draft model, if its tokens cannot be translated,
    and if it drafts in one pass.
    """
    if pair.draft is None or pair.draft.refusal is not None or pair.draft.drafts_blocks:
        return None
    announce("timing passes with both models running")
    length = min(CONTEXT_LENGTH, pair.target.context_limit, pair.draft.context_limit)
    return pair.models.kept(PassTimes).costs(length, SamplingParams())


def try_overlapping(
    pair: Pair, costs: ParallelCosts | None, announce: Callable[[str], None]
) -> OverlapTrial | None:
    """Runs PEARL with overlapping passes, and `sd` with the same draft model, in turn on example
    prompts, for about `_TRIAL_SECONDS`. Returns None, and runs nothing, without times of passes of
    one model alone."""
    if costs is None or costs.expected_gain is None:
        return None
    announce("running pearl and sd")
    length = costs.length_in_turn
    settings: dict[str, dict[str, Any]] = {
        "pearl": {"window": costs.window.size},
        "sd": {"k": length},
    }
    figures = {name: Figures(name) for name in settings}
    tokens = round(_TRIAL_SECONDS / (2 * costs.single_pass))
    sampling = SamplingParams(max_new_tokens=min(max(tokens, 8), _TRIAL_TOKENS), ignore_eos=True)
    deadline = time.perf_counter() + _TRIAL_SECONDS
    prompts = example_prompts(pair.target)
    for name, given in settings.items():  # warms up
        pair.generate(prompts[0], name, sampling, **given)

    run = 0
    for prompt in prompts:
        if run and time.perf_counter() >= deadline:
            break
        run += 1
        for name, given in settings.items():
            pair.forget()
            for round_ in pair.rounds(prompt, name, sampling, **given):
                if round_.mode != "prefill":
                    figures[name].add(round_)
    pearl = figures["pearl"]
    acceptance = acceptance_of(pearl.accepted, pearl.rejections)
    speeds = {name: own.new_tokens / own.seconds for name, own in figures.items()}
    return OverlapTrial(
        speeds["pearl"] / speeds["sd"], costs.gain(acceptance, length), acceptance, length, run
    )


def _compared(target: ModelFiles, draft: ModelFiles) -> TokenizerFacts:
    ours, theirs = (
        {id_: token for token, id_ in model.tokenizer.vocabulary().items()}
        for model in (target, draft)
    )
    differing = [id_ for id_ in sorted(ours | theirs) if ours.get(id_) != theirs.get(id_)]
    first = [
        {"token_id": id_, "target": ours.get(id_), "draft": theirs.get(id_)}
        for id_ in differing[:_SHOWN_DIFFERENCES]
    ]
    refusal = probe = overlap = None
    try:
        if translation_between(target, draft) is None:
            for text in _PROBES:
                ids = tuple(target.tokenizer.encode(text))
                theirs_ids = tuple(draft.tokenizer.encode(text))
                if ids != theirs_ids:
                    probe = text, ids, theirs_ids
                    break
        else:
            overlap = overlap_of_examples(target.tokenizer, draft.tokenizer)
    except NoTokenBytes as error:
        refusal = error.message
    return TokenizerFacts(
        len(ours), len(theirs), len(ours | theirs) - len(differing), first, refusal, probe, overlap
    )


def readiness(
    target: ModelFiles, parts: PartStore, tokenizers: TokenizerFacts | None
) -> dict[str, Readiness]:
    """Returns for each method whether it can run, as far as the models' files show. Reads no
    weights of models.

    `parts` are those of `_named_parts`. `tokenizers` is None without a draft model.
    """
    models = KnownModels(
        draft=None if tokenizers is None else "draft",
        draft_refusal=None if tokenizers is None else tokenizers.refusal,
        unlike_llama=_unlike_llama(target),
        missing_parts=_missing_parts(target, parts),
        names_head=any(kind != EXIT for kind in parts.named),
    )
    return {name: method.check(models) for name, method in methods.METHODS.items()}


def _named_parts(target: ModelFiles, exit_layer: Path | None, head: Path | None) -> PartStore:
    """Returns the target's trained parts, with the exit layer and the head that the user named.

    Raises SpecgenError if a named part does not exist, is damaged or belongs to another target.
    """
    part_of = unloaded(target)
    store = PartStore(part_of, is_bundled=target.source.is_bundled)
    if exit_layer is not None:
        store.named[EXIT] = open_part(exit_layer, part_of, is_exit=True)
    if head is not None:
        store.name(head, is_exit=False)
    return store


def _head_facts(parts: PartStore, target: ModelFacts) -> HeadFacts | None:
    """Returns the facts about the head that the user named, None without one."""
    part = next((part for kind, part in parts.named.items() if kind != EXIT), None)
    if part is None:
        return None
    about = part.kind
    on_torch: tuple[str, ...] = ()
    weights = part.load()
    if isinstance(weights, BlockWeights):
        about = weights.about
        if weights.conv_group and target.no_kernels is None:
            on_torch = ConvolvedBranch.on_torch
    return HeadFacts(str(part.path), part.kind, about, on_torch)


def _missing_parts(target: ModelFiles, store: PartStore) -> Mapping[str, Readiness]:
    """Returns the kinds of trained parts (exit layer and heads) that cannot be used with the
    target, each with a reason and what to do."""
    location = None if target.source.is_bundled else target.source.name
    missing: dict[str, Readiness] = {}
    for kind in (EXIT, *HEADS):
        parts = getattr(target.shape, "fixed_parts", None)
        if kind == EXIT and parts is not None:
            missing[kind] = Readiness(
                False,
                f"the target has {parts}, which cannot be trained",
                "take a draft model, or lookup",
            )
        elif store.find(kind) is None:
            why = f"no {'exit layer' if kind == EXIT else 'head'}"
            hint = f"train one with {training_command(kind, location)}"
            if kind == MTP:
                why = "no drafting layers in the target's own files"
                hint = ""
            error = store.refusal(kind)
            missing[kind] = Readiness(False, why, hint) if error is None else Readiness.of(error)
    return missing


def _unlike_llama(files: ModelFiles) -> str | None:
    """Returns the model's family if its layers cannot be run one by one; None if they can, or if
    that is not known."""
    if files.backend == "native":
        return None
    from specgen.engine.transformers.transformers_model import missing_part, model_without_weights

    model = model_without_weights(files.transformers_config, files.source.trust_remote_code)
    return None if model is None or missing_part(model) is None else files.shape.model_type


def obstacle(pair: Pair, name: str) -> SpecgenError | None:
    """Returns the error that keeps the method `name` from decoding with the loaded pair; None if it
    can decode. Measures nothing."""
    method = methods.find(name)
    settings: dict[str, Any] = methods.unmeasured_settings(method)
    if (
        pair.draft is not None
        and pair.draft.refusal is not None
        and "translation" in method.settings
    ):
        settings["translation"] = "text"
    try:
        pair.run(pair.request([1], name, SamplingParams(max_new_tokens=1), **settings))
    except SpecgenError as error:
        return error
    return None
