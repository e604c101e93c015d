"""Tunes a pair of target and draft model: finds the fastest method and settings on this machine.

The steps: record the target's output and the drafts, measure the costs of rounds, simulate all settings, search draft trees and
beams, run the most promising methods on the real models, choose. Each step takes a share of the time that is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.types import SamplingParams
from specgen.decoding.costs.speedup import SpeedupModel
from specgen.methods.method import training_command
from specgen.pair.pair import capture_passes, draft_worker, has_flexible_window, pass_costs, runners
from specgen.pair.request import typical_length
from specgen.tune import draft_dtypes
from specgen.tune.candidates import SEARCHED, SIMULATED, grid, searched_grid
from specgen.tune.confirmation import FEWEST_PROMPTS, confirm
from specgen.tune.outcome import PLAIN, Candidate, TuningOutcome, by_speed, counted, plain_of, shortlist
from specgen.tune.recorded_drafts import RecordedDrafts, Recorder, ReferenceOutput, mean_acceptance, record_reference
from specgen.tune.request import TuningObserver, TuningRequest
from specgen.tune.round_timing import measure_costs
from specgen.tune.settings_search import expected, search, simulate_grids, tuned_skips
from specgen.tune.simulated_runs import SimulatedRuns
from specgen.tune.simulation import PairMeasurements, run_seed

if TYPE_CHECKING:
    from specgen.pair.pair import Pair

# the share that each step takes of the time that is left when it begins
RECORDING, COSTS, SIMULATION, SEARCH, SEARCH_ALONE, SKIPS = 0.15, 0.28, 0.2, 0.45, 0.6, 0.4
SEARCH_PROMPTS = 4  # the search for trees, drafts and beams runs on this many prompts
_DRAFTER_LABELS = {"model": "the draft's", "exit": "the exit layer's"}


@dataclass(frozen=True, slots=True)
class Selection:
    """The methods to tune, grouped by how they are tuned.

    `simulated` methods are simulated on recorded drafts. `searched` methods (trees, several drafts, beams) run their real
    drafters. `skips`: whether to search for layers to skip (`selfsd`). `left_out` gives the reason for each method that cannot be
    tuned.
    """

    simulated: Sequence[str]
    searched: Sequence[str]
    skips: bool
    left_out: Mapping[str, str]

    def without(self, failures: Mapping[str, str]) -> Selection:
        """Returns the selection without the simulated methods that failed.

        `failures` has the reason for each drafter (`model`, `exit`) or kind of rounds (such as `parallel`, PEARL) that failed.
        """
        reasons = {
            name: failures[kind]
            for name in self.simulated
            for kind in (methods.METHODS[name].cost_kind, methods.METHODS[name].drafts)
            if kind in failures
        }
        return replace(
            self, simulated=[name for name in self.simulated if name not in reasons], left_out={**self.left_out, **reasons}
        )


def tune(pair: Pair, request: TuningRequest, observer: TuningObserver, rounded: Pair | None = None) -> TuningOutcome:
    """Finds the pair's fastest method and settings. `rounded` is the same pair with a draft of rounded weights, None to try none.

    Raises SpecgenError if plain decoding fails on a prompt, and if none of the methods that the request names can be tuned:
    mostly before anything is measured.
    """
    _check_named(request.names, select_methods(pair, request.names).left_out)
    selection, measurements = measure_pair(pair, request, observer)
    _check_named(request.names, selection.left_out)
    draft_dtype = None
    if rounded is not None and (names := draft_dtypes.methods_with_draft(selection.simulated)):
        again = replace(request, names=names, deadline=request.deadline.share(draft_dtypes.SHARE))
        assert rounded.draft is not None
        try:
            _, with_rounded = measure_pair(rounded, again, observer, measurements.references)
            if draft_dtypes.is_faster(with_rounded, measurements, names, request.deadline, observer, rounded.draft.dtype_name):
                pair, draft_dtype = rounded, rounded.draft.dtype_name
                measurements = draft_dtypes.merged(measurements, with_rounded)
        except SpecgenError as error:
            selection = replace(selection, left_out={**selection.left_out, f"{rounded.draft.dtype_name} draft": error.message})
    outcome = choose_method(pair, request, selection, measurements, observer)
    _check_named(request.names, outcome.left_out)
    return replace(outcome, draft_dtype=draft_dtype)


def _check_named(names: Sequence[str] | None, left_out: Mapping[str, str]) -> None:
    """Raises SpecgenError if all of the methods that the user named are left out. Plain decoding never is."""
    named = [name for name in names or () if name != PLAIN]
    if named and all(name in left_out for name in named):
        reasons = {reason: [name for name in named if left_out[name] == reason] for reason in map(left_out.get, named) if reason}
        why = "; ".join(f"{', '.join(methods_)}: {reason}" for reason, methods_ in reasons.items())
        raise SpecgenError(f"no method can be tuned: {why}", "Name others with --methods")


def select_methods(pair: Pair, names: Sequence[str] | None) -> Selection:
    """Returns which of the methods `names` (None: all) can be tuned for this pair. Plain decoding is always included."""
    wanted = [name for name in methods.METHODS if names is None or name in (PLAIN, *names)]
    reasons = {name: reason for name in wanted if (reason := _obstacle(pair, name, named=names is not None)) is not None}
    usable = [name for name in wanted if name not in reasons]
    return Selection(
        [name for name in usable if name in SIMULATED], [name for name in usable if name in SEARCHED], "selfsd" in usable, reasons
    )


def _obstacle(pair: Pair, name: str, *, named: bool) -> str | None:
    """Returns why this method cannot be tuned, None if it can. `named`: whether the user named the methods to tune."""
    method = methods.METHODS[name]
    if method.is_yardstick:
        return "it is always slower than plain decoding" if named else None
    if method.uses_draft_model and pair.draft is None:
        return "there is no draft model"
    if method.uses_draft_model and pair.draft is not None and pair.draft.refusal is not None:
        return pair.draft.refusal.message
    if method.needs_exit_layer and pair.parts.load("exit") is None:
        return str(pair.parts.refusal("exit") or "there is no exit layer (specgen tune --train)")
    if method.head and pair.parts.find(method.head) is None:
        return str(pair.parts.refusal(method.head) or f"there is no head ({training_command(method.head, None)})")
    if name == "eesd-cali" and not pair.parts.has_predictor():
        return "the exit layer has no predictor"
    if name == "selfsd" and not named:
        return "its layers are searched for only with --methods selfsd"
    return None


def measure_pair(
    pair: Pair, request: TuningRequest, observer: TuningObserver, references: Sequence[ReferenceOutput] | None = None
) -> tuple[Selection, PairMeasurements]:
    """Records the target's output and the drafts, and measures the costs of rounds. `references` are outputs recorded before.

    Returns the methods to tune, without those that could not be measured, and the measurements.
    """
    selection, sampling = select_methods(pair, request.names), request.seeded_sampling
    if "pearl" in selection.simulated:  # a draft process that starts during a measurement would slow it
        observer.doing("waiting for the draft's process")
        try:
            pair.prepare(pair.request([1], "pearl", SamplingParams(max_new_tokens=1), window=1))
        except SpecgenError as error:
            selection = selection.without({"parallel": error.message})
    if references is None:
        references = record_references(pair, request, observer)
        tokens, seconds = sum(len(each.token_ids) for each in references), sum(each.seconds for each in references)
        observer.done(f"plain decoding gives {tokens / seconds:.1f} tokens/s on {counted(len(references), 'prompt')}")
    observer.doing("recording what the draft model drafts")
    drafts, failures = record_drafts(pair, selection, references, sampling)
    selection = selection.without(failures)
    accepted = [f"{mean:.0%} of {_DRAFTER_LABELS[drafter]} tokens" for drafter, mean in mean_acceptance(drafts).items()]
    if accepted:
        observer.done(f"the target accepts {' and '.join(accepted)}")
    kinds = list(dict.fromkeys(methods.METHODS[name].cost_kind for name in selection.simulated))
    measured = measure_costs(pair, kinds, references, sampling, request.deadline.share(COSTS), observer.doing)
    observer.done(measured.description)
    flags = pair.parts.has_predictor(), has_flexible_window(pair, sampling)
    overlap = None
    if "parallel" in measured.costs and draft_worker(pair).kind == "stream":
        overlap = pass_costs(pair, typical_length(len(references[0].prompt_ids), references[0].limit), sampling)
    measurements = PairMeasurements(
        references, drafts, measured.costs, measured.slowdown, *flags, temperature=sampling.temperature, parallel_costs=overlap
    )
    pair.measurements.tuned_costs = measured.costs
    return selection.without(measured.failures), measurements


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
                warm_up = record_reference(pair, ids, sampling)
                capture_passes(pair, len(ids), len(ids) + warm_up.limit)
            references.append(record_reference(pair, ids, replace(sampling, seed=run_seed(number, sampling.seed or 0))))
        except SpecgenError as error:
            raise type(error)(f"{prompt.label}: {error.message}", error.hint) from error
    return references


def record_drafts(
    pair: Pair, selection: Selection, references: Sequence[ReferenceOutput], sampling: SamplingParams
) -> tuple[dict[str, list[RecordedDrafts]], dict[str, str]]:
    """Records what each drafter (`model`: the draft model, `exit`: the exit layer) drafts along each reference output.

    Returns the recorded drafts by drafter, and for each drafter that failed the reason.
    """
    drafters = {methods.METHODS[name].drafts for name in selection.simulated}
    recorders, drafts, failures = {}, {}, {}
    target, draft = runners(pair)
    if "model" in drafters and draft is not None:
        recorders["model"] = Recorder(target, draft, sampling)
    if "exit" in drafters and pair.parts.load("exit") is not None:
        early = pair.parts.runners(methods.METHODS["eesd"])
        predictor = None if early.predictor is None else early.predictor.predictor
        recorders["exit"] = Recorder(early.target, early.draft, sampling, predictor=predictor)
    for drafter, recorder in recorders.items():
        try:
            drafts[drafter] = [recorder.record(reference) for reference in references]
        except SpecgenError as error:
            failures[drafter] = error.message
    return drafts, failures


def choose_method(
    pair: Pair, request: TuningRequest, selection: Selection, measurements: PairMeasurements, observer: TuningObserver
) -> TuningOutcome:
    """Simulates and searches settings, runs the most promising methods on the real models, and returns the outcome."""
    deadline = request.deadline
    grids = simulate_grids(measurements, selection.simulated, deadline.share(SIMULATION), observer.doing)
    candidates, left_out = grids.candidates, {**selection.left_out, **grids.left_out}
    if speculating := len(candidates) - 1:  # without plain decoding, which has one setting
        simulated = f"{counted(grids.tried - 1, 'setting')} of {counted(speculating, 'method')}"
        observer.done(f"{simulated} simulated; best: {candidates[0].written}")
    candidates, reasons = _search_shapes(pair, request, selection, measurements, candidates, observer)
    left_out |= reasons
    if selection.skips:
        observer.doing("searching for layers to skip")
        try:
            found = tuned_skips(pair, measurements.references, SKIPS * deadline.left)
            candidates = by_speed([*candidates, found])
            observer.done(f"{counted(found.tried, 'set')} of layers to skip really run; best: {found.written}")
        except SpecgenError as error:
            left_out["selfsd"] = error.message
    eligible = [each for each in candidates if each.name != PLAIN and (each.lossless or each.name in (request.names or ()))]
    candidates, reasons = confirm(pair, request, candidates, shortlist(eligible), observer)
    return outcome_of(measurements, candidates, request.sampling, {**left_out, **reasons})


def _search_shapes(
    pair: Pair,
    request: TuningRequest,
    selection: Selection,
    measurements: PairMeasurements,
    candidates: Sequence[Candidate],
    observer: TuningObserver,
) -> tuple[Sequence[Candidate], Mapping[str, str]]:
    """Searches settings of draft trees, several drafts and beams on a few of the prompts.

    Returns all candidates (methods with settings), those found here included, and why methods have none.
    """
    grids = {name: settings for name in selection.simulated if (settings := searched_grid(name))}
    grids |= {name: grid(name) for name in selection.searched}
    if not grids:
        return candidates, {}
    few = _spread(measurements.references, SEARCH_PROMPTS)
    runs = SimulatedRuns(pair, few, request.seeded_sampling, measurements.costs["echo"], clock=request.deadline.clock)
    share = SEARCH_ALONE if list(selection.simulated) == [PLAIN] else SEARCH
    result = search(runs, grids, request.deadline.share(share), observer.doing, request.objective)
    plain_on_few = expected(replace(measurements, references=few), PLAIN, {}).predicted
    scale = plain_of(candidates).predicted / plain_on_few
    merged = {candidate.name: candidate for candidate in candidates}
    for found in result.candidates:
        found = replace(found, predicted=found.predicted * scale)
        if (known := merged.get(found.name)) is not None:  # sd: chains were simulated before
            tried = known.tried + found.tried
            found = replace(max(known, found, key=lambda candidate: candidate.predicted), tried=tried)
        merged[found.name] = found
    merged[PLAIN] = replace(merged[PLAIN], perplexity=result.plain_perplexity)
    if result.tried:
        best = f"; best: {result.candidates[0].written}" if result.candidates else ""
        plain_perplexity = result.plain_perplexity
        lossy = "" if plain_perplexity is None else f", lossy ones by {request.objective.in_words(plain_perplexity)}"
        observer.done(f"{counted(result.tried, 'shape')} of trees, drafts and beams simulated{lossy}{best}")
    left_out = {f"{name} with width" if name == "sd" else name: why for name, why in result.left_out.items()}
    return by_speed(list(merged.values())), left_out


def _spread(references: Sequence[ReferenceOutput], count: int) -> Sequence[ReferenceOutput]:
    """Returns at most `count` of the references, evenly spaced, because prompts of one category follow each other."""
    return references[:: max(1, len(references) // count)][:count]


def outcome_of(
    measurements: PairMeasurements, candidates: Sequence[Candidate], sampling: SamplingParams, left_out: Mapping[str, str]
) -> TuningOutcome:
    """Returns the outcome: the candidates, the measured costs and the acceptance, which explain the choice."""
    model = None
    draft = measurements.costs.get("model", measurements.costs.get("exit"))
    if draft is not None:
        length = min(draft.verification_cost.curves)
        widths = {width: measurements.costs["echo"].verification_cost.at(width, length) for width in range(1, 17)}
        model = SpeedupModel(widths, draft.draft_cost.at(4, length) / 4, length)
    probability = next(iter(mean_acceptance(measurements.drafts).values()), None)
    costs = {kind: cost.as_dict() for kind, cost in measurements.costs.items()}
    return TuningOutcome(candidates, sampling, len(measurements.references), costs, model, probability, left_out)
