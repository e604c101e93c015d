"""Tunes a pair of target and draft model: finds the fastest method and settings on this machine.

The steps: record the target's output, measure the costs of rounds, simulate all settings, run the most promising methods on the
real models, choose. Each step takes a share of the time that is left.

A draft with rounded weights (`--draft-dtype int8`) is tried too: rounding makes a draft pass shorter where it is bound by memory,
and some of what it drafts worse. Both are measured, and simulated runs of one method say which draft gives the larger speedup
over plain decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.types import SamplingParams
from specgen.decoding.costs import SpeedupModel
from specgen.pair.figures import Figures
from specgen.tune.method_readiness import obstacle
from specgen.tune.outcome import (
    AS_FAST,
    PLAIN,
    SEARCHED,
    SIMPLE,
    Candidate,
    Deadline,
    TuningOutcome,
    by_speed,
    counted,
    grid,
    plain_of,
    searched_grid,
    shortlist,
)
from specgen.tune.round_timing import ReferenceOutput, measure_costs, record_reference
from specgen.tune.settings_search import FEWEST_PROMPTS, SOME, best_of_each, confirm, expected, search, tuned_skips
from specgen.tune.simulator import Simulator, run_seed

if TYPE_CHECKING:
    from specgen.pair.pair import Pair
    from specgen.tune.outcome import TuningObserver, TuningRequest

# the share that each step takes of the time that is left when it begins
RECORDING, COSTS, SIMULATION, SEARCH, SEARCH_ALONE, SKIPS, ROUNDED, COMPARED = 0.15, 0.28, 0.3, 0.5, 0.6, 0.4, 0.7, 0.1
SEARCH_PROMPTS = 4  # the search for trees, drafts and beams runs on this many prompts
LEAST_BYTES = 8 << 20  # of the draft's weight files; smaller ones stay in the processor's cache, where rounding gains nothing
_DRAFTERS = {"model": ("sd", "the draft's"), "exit": ("eesd-fixed", "the exit layer's")}  # a method that drafts so, and in words


def tune(pair: Pair, request: TuningRequest, observer: TuningObserver, rounded: Pair | None = None) -> TuningOutcome:
    """Finds the pair's fastest method and settings. `rounded` is the same pair with a draft of rounded weights, None to try none.

    Raises SpecgenError if plain decoding fails on a prompt, and if none of the methods that the request names can be tuned:
    mostly before anything is measured.
    """
    names, left_out = select_methods(pair, request.names)
    _check_named(request.names, left_out)
    references = record_references(pair, request, observer)
    simulator, acceptance, failures = measure_pair(pair, names, references, request, request.deadline, observer)
    names, left_out = [name for name in names if name not in failures], {**left_out, **failures}
    _check_named(request.names, left_out)
    draft_dtype, with_draft = None, [name for name in names if methods.METHODS[name].needs_draft_model and name in SIMPLE]
    if rounded is not None and with_draft:
        assert rounded.draft is not None
        dtype = rounded.draft.dtype_name
        try:
            deadline = request.deadline.share(ROUNDED)
            other, share, _ = measure_pair(rounded, [PLAIN, *with_draft], references, request, deadline, observer)
            if is_faster(other, simulator, (share, acceptance), with_draft, request.deadline.share(COMPARED), observer, dtype):
                other.costs = {**simulator.costs, **other.costs}
                pair, simulator, draft_dtype, acceptance = rounded, other, dtype, share
        except SpecgenError as error:
            left_out[f"{dtype} draft"] = error.message
    candidates, reasons = choose_settings(pair, request, names, simulator, observer)
    left_out |= reasons
    _check_named(request.names, left_out)
    return replace(outcome_of(simulator, candidates, request.sampling, left_out, acceptance), draft_dtype=draft_dtype)


def _check_named(names: Sequence[str] | None, left_out: Mapping[str, str]) -> None:
    """Raises SpecgenError if all of the methods that the user named are left out. Plain decoding never is."""
    named = [name for name in names or () if name != PLAIN]
    if named and all(name in left_out for name in named):
        reasons = {reason: [name for name in named if left_out[name] == reason] for reason in map(left_out.get, named) if reason}
        why = "; ".join(f"{', '.join(methods_)}: {reason}" for reason, methods_ in reasons.items())
        raise SpecgenError(f"no method can be tuned: {why}", "Name others with --methods")


def select_methods(pair: Pair, names: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
    """Returns which of the methods `names` (None: all) can be tuned for this pair, and why others cannot.

    Plain decoding is always included.
    """
    wanted = [name for name in methods.METHODS if names is None or name in (PLAIN, *names)]
    reasons = {name: reason for name in wanted if (reason := _obstacle(pair, name, named=names is not None)) is not None}
    return [name for name in wanted if name not in reasons and not methods.METHODS[name].stands_for], reasons


def _obstacle(pair: Pair, name: str, *, named: bool) -> str | None:
    """Returns why this method cannot be tuned, None if it can. `named`: whether the user named the methods to tune."""
    method = methods.METHODS[name]
    if method.is_yardstick:
        return "it is always slower than plain decoding" if named else None
    if method.skips_layers and not named:
        return f"its layers are searched for only with --methods {name}"
    if method.uses_draft_model and pair.draft is None:  # also if copying would do
        return "there is no draft model"
    if method.uses_draft_model and pair.draft is not None and pair.draft.refusal is not None:
        return pair.draft.refusal.message
    error = obstacle(pair, name)
    return None if error is None else error.message


def worth_rounding(pair: Pair) -> bool:
    """Whether the draft model is so large that its passes may be bound by reading its weights."""
    if pair.draft is None or pair.draft.refusal is not None:  # no tuned method runs one whose tokens cannot be translated
        return False
    return sum(path.stat().st_size for path in pair.draft.folder.glob("*.safetensors")) >= LEAST_BYTES


def is_faster(
    rounded: Simulator,
    stored: Simulator,
    accepted: tuple[float | None, float | None],
    names: Sequence[str],
    deadline: Deadline,
    observer: TuningObserver,
    dtype: str,
) -> bool:
    """Whether the draft with weights rounded to `dtype` is expected to be clearly faster; reports why.

    `accepted` are the shares of the rounded and of the stored draft's tokens that the target accepts. One of the methods `names`
    is simulated with both drafts and the same settings, and compared by its largest speedups over plain decoding.
    """
    name, both, best = "sd" if "sd" in names else names[0], (rounded, stored), [0.0, 0.0]
    plain = [expected(each, PLAIN, {}).predicted for each in both]
    for tried, settings in enumerate(grid(name)):
        if tried and deadline.left < 0:
            break
        best = [max(known, expected(each, name, settings).predicted) for known, each in zip(best, both, strict=True)]
    speedups = [speed / slow for speed, slow in zip(best, plain, strict=True)]
    better = AS_FAST * speedups[0] > speedups[1]
    figures = [
        f"{speedup:.2f}× expected with {share or 0:.0%} accepted" for speedup, share in zip(speedups, accepted, strict=True)
    ]
    observer.done(f"{dtype} draft: {figures[0]}, else {figures[1]}: {'taken' if better else 'not taken'}")
    return better


def record_references(pair: Pair, request: TuningRequest, observer: TuningObserver) -> list[ReferenceOutput]:
    """Returns the target's output, by plain decoding, for as many prompts as there is time for. Each prompt has its own seed.

    Raises SpecgenError, with the prompt's name, if decoding fails.
    """
    references: list[ReferenceOutput] = []
    tokenizer, sampling, deadline = pair.tokenizer, request.seeded_sampling, request.deadline.share(RECORDING)
    for number, prompt in enumerate(request.prompts):
        if len(references) >= FEWEST_PROMPTS and deadline.left < 0:
            break
        observer.doing(f"plain decoding, prompt {len(references) + 1} of {len(request.prompts)}")
        ids = tokenizer.chat(prompt.text, None) if request.chat else tokenizer.encode(prompt.text)
        try:
            if not references:
                record_reference(pair, ids, sampling)  # warms up
            references.append(record_reference(pair, ids, replace(sampling, seed=run_seed(number, sampling.seed or 0))))
        except SpecgenError as error:
            raise type(error)(f"{prompt.label}: {error.message}", error.hint) from error
    tokens, seconds = sum(len(each.token_ids) for each in references), sum(each.seconds for each in references)
    observer.done(f"plain decoding gives {tokens / seconds:.1f} tokens/s on {counted(len(references), 'prompt')}")
    return references


def measure_pair(
    pair: Pair,
    names: Sequence[str],
    references: Sequence[ReferenceOutput],
    request: TuningRequest,
    deadline: Deadline,
    observer: TuningObserver,
) -> tuple[Simulator, float | None, dict[str, str]]:
    """Measures the costs of rounds of the methods `names`.

    Returns what simulates runs with these costs, the mean probability that the target accepts a drafted token (None without
    drafts), and why methods could not be measured.
    """
    sampling, failures = request.seeded_sampling, dict[str, str]()
    kinds = list(dict.fromkeys(methods.METHODS[name].cost_kind for name in names if name in SIMPLE))
    kinds = list(dict.fromkeys(["echo", *kinds]))
    if "parallel" in kinds:  # a draft process that starts during a measurement would slow it
        observer.doing("waiting for the draft's process")
        try:
            pair.prepare(pair.request([1], "pearl", SamplingParams(max_new_tokens=1), window=1))
        except SpecgenError as error:
            kinds.remove("parallel")
            failures["parallel"] = error.message
    observer.doing("running the draft model on the target's output")
    simulator = Simulator(pair, references, sampling, {}, clock=request.deadline.clock)
    accepted: dict[str, float] = {}
    for drafter in dict.fromkeys(methods.METHODS[name].drafts for name in names if name in SIMPLE):
        if drafter in _DRAFTERS:
            try:
                if (share := simulator.acceptance(_DRAFTERS[drafter][0])) is not None:
                    accepted[drafter] = share
            except SpecgenError as error:
                failures[drafter] = error.message
    if shares := [f"{share:.0%} of {_DRAFTERS[drafter][1]} tokens" for drafter, share in accepted.items()]:
        observer.done(f"the target accepts {' and '.join(shares)}")
    timed = [kind for kind in kinds if kind not in failures]
    simulator.costs, not_timed = measure_costs(pair, timed, references, sampling, deadline.share(COSTS), observer.doing)
    target = simulator.costs["echo"].verification_cost
    length = min(target.curves)
    wider = ", ".join(f"{1e3 * target.at(tokens, length):.3g} for {tokens}" for tokens in (6, 16))
    observer.done(f"a target pass takes {1e3 * target.at(1, length):.3g} ms for 1 token, {wider}")
    pair.measurements.tuned_costs = simulator.costs
    failures |= not_timed
    rows = {name: methods.METHODS[name] for name in names if name in SIMPLE}
    reasons = {name: failures[kind] for name, row in rows.items() for kind in (row.cost_kind, row.drafts) if kind in failures}
    return simulator, next(iter(accepted.values()), None), reasons


def choose_settings(
    pair: Pair, request: TuningRequest, names: Sequence[str], simulator: Simulator, observer: TuningObserver
) -> tuple[Sequence[Candidate], dict[str, str]]:
    """Simulates settings of the methods `names`, and runs the most promising methods on the real models.

    Returns each method with its best settings, the fastest expected one first, and why methods or settings were left out.
    """
    deadline, objective = request.deadline, request.objective
    tried, failed = search(
        simulator,
        {name: grid(name) for name in names if name in SIMPLE},
        deadline.share(SIMULATION),
        observer.doing,
        at_least_one=True,
    )
    candidates, left_out = best_of_each(tried, failed, None, objective)
    left_out |= {SOME: failed[SOME]} if SOME in failed else {}
    if speculating := len(candidates) - 1:  # without plain decoding, which has one setting
        count = sum(map(len, tried.values())) - 1
        observer.done(f"{counted(count, 'setting')} of {counted(speculating, 'method')} simulated; best: {candidates[0].written}")
    candidates, reasons = _search_shapes(request, names, simulator, candidates, observer)
    left_out |= reasons
    if "selfsd" in names:
        observer.doing("searching for layers to skip")
        try:
            found = tuned_skips(pair, simulator.references, SKIPS * deadline.left)
            candidates = by_speed([*candidates, found])
            observer.done(f"{counted(found.tried, 'set')} of layers to skip really run; best: {found.written}")
        except SpecgenError as error:
            left_out["selfsd"] = error.message
    eligible = [each for each in candidates if each.name != PLAIN and (each.lossless or each.name in (request.names or ()))]
    confirmed, failures = confirm(pair, request, candidates, shortlist(eligible), observer)
    return confirmed, {**left_out, **failures}


def _search_shapes(
    request: TuningRequest, names: Sequence[str], simulator: Simulator, candidates: Sequence[Candidate], observer: TuningObserver
) -> tuple[list[Candidate], dict[str, str]]:
    """Simulates settings of draft trees, several drafts and beams on a few of the prompts, evenly spread over the categories.

    Returns all candidates (methods with settings), those found here included, and why methods have none.
    """
    grids = {name: settings for name in names if name in SIMPLE and (settings := searched_grid(name))}
    grids |= {name: grid(name) for name in names if name in SEARCHED}
    if not grids:
        return list(candidates), {}
    objective, count = request.objective, len(simulator.references)
    numbers = range(0, count, max(1, count // SEARCH_PROMPTS))[:SEARCH_PROMPTS]
    share = SEARCH_ALONE if not set(names) & set(SIMPLE) - {PLAIN} else SEARCH
    tried, failed = search(simulator, grids, request.deadline.share(share), observer.doing, numbers=numbers)
    any_lossy = any(tried[name] for name in grids if not methods.METHODS[name].lossless)
    perplexity = plain_perplexity(simulator, numbers) if any_lossy else None
    best, left_out = best_of_each(tried, failed, perplexity, objective)
    merged = {candidate.name: candidate for candidate in candidates}
    scale = plain_of(candidates).predicted / expected(simulator, PLAIN, {}, numbers).predicted
    for found in best:
        found = replace(found, predicted=found.predicted * scale)
        if (known := merged.get(found.name)) is not None:  # sd: chains were simulated before
            together = known.tried + found.tried
            found = replace(max(known, found, key=lambda candidate: candidate.predicted), tried=together)
        merged[found.name] = found
    merged[PLAIN] = replace(merged[PLAIN], perplexity=perplexity)
    if total := sum(map(len, tried.values())):
        lossy = "" if perplexity is None else f", lossy ones by {objective.in_words(perplexity)}"
        named = f"; best: {best[0].written}" if best else ""
        observer.done(f"{counted(total, 'shape')} of trees, drafts and beams simulated{lossy}{named}")
    reasons = {f"{name} with width" if name == "sd" else name: why for name, why in left_out.items()}
    return by_speed(list(merged.values())), reasons


def plain_perplexity(simulator: Simulator, numbers: Sequence[int]) -> float:
    """The perplexity of the target's own outputs under the target; a lossless method is expected to have the same."""
    figures = Figures(PLAIN)
    for reference in (simulator.references[number] for number in numbers):
        figures.token_ids += reference.token_ids
        figures.add_log_likelihood(simulator.pair.log_likelihood(reference.prompt_ids, reference.token_ids))
    return figures.perplexity or 0.0


def outcome_of(
    simulator: Simulator,
    candidates: Sequence[Candidate],
    sampling: SamplingParams,
    left_out: Mapping[str, str],
    acceptance: float | None = None,
) -> TuningOutcome:
    """Returns the outcome: the candidates, the measured costs and the acceptance, which explain the choice."""
    model, costs = None, simulator.costs
    draft = costs.get("model", costs.get("exit"))
    if draft is not None:
        length = min(draft.verification_cost.curves)
        widths = {width: costs["echo"].verification_cost.at(width, length) for width in range(1, 17)}
        model = SpeedupModel(widths, draft.draft_cost.at(4, length) / 4, length)
    saved = {kind: cost.as_dict() for kind, cost in costs.items()}
    return TuningOutcome(candidates, sampling, len(simulator.references), saved, model, acceptance, left_out)
