"""Tunes a pair of target and draft model: finds the fastest method and settings on this machine.

The steps: record the target's output, measure the costs of rounds, simulate settings, run the most promising methods on the real
models, choose. Each step takes a share of the time that is left. Sets of layers to skip cannot be simulated, so they are tried in
real runs.

A draft with rounded weights (`--draft-dtype int8`) is tried too: rounding makes a draft pass shorter where it is bound by memory,
and some of what it drafts worse. Both are measured: the costs of rounds, and how much is accepted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specgen.base.errors import SpecgenError
from specgen.base.settings import Value, written
from specgen.base.text import counted
from specgen.compare.method_specs import parse_spec
from specgen.compare.results import BenchmarkConfig, method_results
from specgen.compare.runner import Runner
from specgen.decoding.costs import SpeedupModel
from specgen.methods import METHODS
from specgen.methods.learned_drafting import DraftingCosts
from specgen.methods.method import HEADS
from specgen.pair.pair import skipping_speed
from specgen.pair.request import messages
from specgen.pair.skip_search import NEW_TOKENS, PROMPT_TOKENS, PROMPTS, search_skips
from specgen.tune.outcome import (
    AS_FAST,
    PLAIN,
    SEARCHED,
    SIMPLE,
    Candidate,
    TuningOutcome,
    combinations,
    grid,
    nearest_to_default,
    plain_of,
    shortlist,
)
from specgen.tune.pair_inspection import obstacle
from specgen.tune.round_timing import ReferenceOutput, measure_costs, record_reference
from specgen.tune.simulator import Simulator, run_seed

if TYPE_CHECKING:
    from specgen.pair.pair import Pair
    from specgen.tune.outcome import Deadline, GivenSettings, Objective, TuningObserver, TuningRequest

Grids = Mapping[str, Sequence["GivenSettings"]]
Tried = Mapping[str, Sequence[Candidate]]
# the share that each step takes of the time that is left when it begins
RECORDING, COSTS, SIMULATION, SEARCH, SKIPS, DRAFTS = 0.15, 0.28, 0.3, 0.5, 0.4, 0.35
SEARCH_PROMPTS = 4  # the search for trees, drafts and beams runs on this many prompts
FEWEST_PROMPTS = 2  # a method is really run on at least this many prompts
MOST_REPEATS = 50  # a method is really run at most this many times on each prompt
MARGIN = 1.2  # real runs may take this many times the expected seconds
LEAST_BYTES = 8 << 20  # of the draft's weight files; smaller ones stay in the processor's cache, where rounding gains nothing
SOME = "some settings"  # the key in `left_out` that says that not all settings were simulated
TIME_WAS_SHORT = "time was short (a larger --budget helps)"
_DRAFTERS = {"model": "sd", "exit": "eesd"}  # methods that draft chains of fixed length


def tune(
    pair: Pair, request: TuningRequest, observer: TuningObserver, others: Sequence[Callable[[Pair], Pair | None]] = ()
) -> TuningOutcome:
    """Finds the pair's fastest method and settings.

    Each of `others` makes from the best pair so far one with another draft for the same target (None: it cannot gain), which is
    tried too. Raises SpecgenError if plain decoding fails on a prompt, and if none of the methods that the request names can be
    tuned.
    """
    tuner = Tuner(pair, request, observer)
    names = tuner.select()
    references = tuner.record()
    simulator, acceptance = tuner.measure(pair, names, references, request.deadline)
    names = [name for name in names if name not in tuner.left_out]
    tuner.check_named()
    if others and "model" in simulator.costs:
        simulator, acceptance = tuner.best_draft(simulator, acceptance, others, names)
    candidates = tuner.confirm(simulator.pair, tuner.choose(simulator, names))
    tuner.check_named()
    found = outcome_of(simulator, candidates, request, tuner.left_out, acceptance)
    draft = simulator.pair.draft
    return replace(found, pair=simulator.pair, draft_dtype=None if simulator.pair is pair or draft is None else draft.quantise)


def further_heads(pair: Pair) -> Mapping[str, Sequence[GivenSettings]]:
    """Returns the settings that name the heads that were found for the target, by kind, but for the default ones."""
    found = defaultdict[str, list[dict[str, str]]](list)
    for each in pair.found:
        if each.kind in HEADS and each.folder != pair.parts.beside[each.kind]:
            found[each.kind].append({"head": str(each.folder)})
    return found


def worth_rounding(pair: Pair) -> bool:
    """Whether the draft model is so large that its passes may be bound by reading its weights."""
    if pair.draft is None or pair.draft.refusal is not None:  # no tuned method runs one whose tokens cannot be translated
        return False
    return sum(path.stat().st_size for path in pair.draft.folder.glob("*.safetensors")) >= LEAST_BYTES


class Tuner:
    """The steps of one tuning. `left_out` has the reason for each method that is not tuned, by name, and under `SOME` for
    settings that were not tried."""

    def __init__(self, pair: Pair, request: TuningRequest, observer: TuningObserver) -> None:
        self.pair, self.request, self.observer = pair, request, observer
        self.left_out: dict[str, str] = {}

    def check_named(self) -> None:
        """Raises SpecgenError if all of the methods that the user named are left out. Plain decoding never is."""
        named = [name for name in self.request.names or () if name != PLAIN]
        if named and all(name in self.left_out for name in named):
            why = "; ".join(f"{name}: {self.left_out[name]}" for name in named)
            raise SpecgenError(f"no method can be tuned: {why}", "Name others with --methods")

    def select(self) -> list[str]:
        """Returns which of the requested methods can be tuned for this pair, plain decoding included. Raises as `check_named`."""
        names = self.request.names
        wanted = [name for name in METHODS if name == PLAIN or (name in (names or METHODS) and not METHODS[name].is_yardstick)]
        for name in wanted:
            if (reason := self._obstacle(name)) is not None:
                self.left_out[name] = reason
        self.check_named()
        return [name for name in wanted if name not in self.left_out]

    def _obstacle(self, name: str) -> str | None:
        method, draft = METHODS[name], self.pair.draft
        if method.skips_layers and self.request.names is None:
            return f"its layers are searched for only with --methods {name}"
        if method.uses_draft_model and draft is None:  # also where the method could draft by prompt lookup instead
            return "there is no draft model"
        refusal = draft.refusal if method.uses_draft_model and draft is not None else None
        error = refusal or obstacle(self.pair, name)
        return None if error is None else error.message

    def record(self) -> list[ReferenceOutput]:
        """Returns the target's output, by plain decoding, for as many prompts as there is time for. Each prompt has its own seed.

        Raises SpecgenError, with the prompt's name, if decoding fails.
        """
        pair, request, references = self.pair, self.request, list[ReferenceOutput]()
        sampling, deadline = request.sampling, request.deadline.share(RECORDING)
        for number, prompt in enumerate(request.prompts):
            if len(references) >= FEWEST_PROMPTS and deadline.left < 0:
                break
            self.observer.doing(f"plain decoding, prompt {len(references) + 1} of {len(request.prompts)}")
            ids = pair.tokenizer.conversation(messages(prompt.text)) if request.chat else pair.tokenizer.encode(prompt.text)
            try:
                if not references:
                    record_reference(pair, ids, sampling)  # warms up
                seeded = replace(sampling, seed=run_seed(number, sampling.seed or 0))
                references.append(record_reference(pair, ids, seeded))
            except SpecgenError as error:
                raise type(error)(f"{prompt.label}: {error.message}", error.hint) from error
        self.observer.done(f"{counted(len(references), 'output')} of plain decoding recorded")
        return references

    def measure(
        self, pair: Pair, names: Sequence[str], references: Sequence[ReferenceOutput], deadline: Deadline
    ) -> tuple[Simulator, float | None]:
        """Measures the seconds of rounds of the methods `names`. Methods whose rounds cannot be timed go to `left_out`, unless
        `pair` has another draft than the one to tune.

        Returns a simulator with these costs, and the share of drafted tokens that the target accepts in drafts of one token (None
        without a draft model or exit layer).
        """
        sampling, observer = self.request.sampling, self.observer
        rows = [METHODS[name] for name in names if name in SIMPLE]
        kinds = list(dict.fromkeys(["echo", *(row.cost_kind for row in rows)]))
        costs, failures = measure_costs(pair, kinds, references, sampling, deadline.share(COSTS), observer.doing)
        if pair is self.pair:
            self.left_out |= {row.name: failures[row.cost_kind] for row in rows if row.cost_kind in failures}
            target = costs["echo"].verification_cost
            length = min(target.curves)
            wider = ", ".join(f"{1e3 * target.at(tokens, length):.3g} for {tokens}" for tokens in (6, 16))
            observer.done(f"a target pass takes {1e3 * target.at(1, length):.3g} ms for 1 token, {wider}")
        pair.measurements.tuned_costs = costs
        simulator = Simulator(pair, references, sampling, costs, self.request.deadline.clock)
        kind = "model" if "model" in costs else "exit"
        if kind not in costs:
            return simulator, None
        observer.doing("running the draft model on the target's output")
        share = simulator.run(_DRAFTERS[kind], {"policy": "fixed", "k": 1}).acceptance_rate
        if share is not None and pair is self.pair:
            observer.done(f"the target accepts {share:.0%} of the {'draft' if kind == 'model' else 'exit layer'}'s tokens")
        return simulator, share

    def best_draft(
        self,
        best: Simulator,
        acceptance: float | None,
        others: Sequence[Callable[[Pair], Pair | None]],
        names: Sequence[str],
    ) -> tuple[Simulator, float | None]:
        """Returns the simulator with the draft with which decoding is expected to be the fastest, of the one in `best` and those
        in `others` (see `tune`), and the share of its tokens that the target accepts; `acceptance` is that of the first one's."""
        limit = self.request.deadline.share(DRAFTS)
        one_by_one = [name for name in names if METHODS[name].cost_kind == "model"]
        for number, make in enumerate(others):
            if limit.left < 0:
                self.left_out["other drafts"] = TIME_WAS_SHORT
                break
            label = "another draft"
            try:
                pair = make(best.pair)
                if pair is None or pair.draft is None or best.pair.draft is None:
                    continue
                is_rounded = pair.draft.folder == best.pair.draft.folder
                label = f"{pair.draft.dtype_name} draft" if is_rounded else pair.draft.name
                deadline = limit.share(1 / (len(others) - number))
                other, share = self.measure(pair, one_by_one, best.references, deadline)
                if self.is_faster(other, best, (share or 0.0, acceptance or 0.0), label):
                    other.costs = {**best.costs, **other.costs}
                    best, acceptance = other, share
            except SpecgenError as error:
                self.left_out[label] = error.message
        in_parallel = [name for name in names if METHODS[name].is_parallel]
        if best.pair is not self.pair and in_parallel:
            found, _ = self.measure(best.pair, in_parallel, best.references, self.request.deadline.share(COSTS))
            best.costs = {**best.costs, **found.costs}
        return best, acceptance

    def is_faster(self, other: Simulator, best: Simulator, shares: tuple[float, float], label: str) -> bool:
        """Whether decoding is expected to be faster with the draft of `other`, called `label`, than with that of `best`.

        A gain of less than 3 % (`AS_FAST`) does not count. Tells the observer both expected speedups. `shares` are the shares of
        drafted tokens that the target accepts. Raises SpecgenError if rounds with the draft of `other` could not be timed.
        """
        if "model" not in other.costs:
            raise SpecgenError("its rounds could not be timed")
        speedups = []
        for simulator, share in zip((other, best), shares, strict=True):
            costs = simulator.costs["model"]
            speedups.append(1 / DraftingCosts.of_rounds(costs, min(costs.verification_cost.curves)).time_per_token(share))
        is_faster = AS_FAST * speedups[0] > speedups[1]
        figures = [f"{speedup:.2f}× with {share:.0%} accepted" for speedup, share in zip(speedups, shares, strict=True)]
        verdict = "taken" if is_faster else "not taken"
        self.observer.done(f"{label}: {figures[0]} expected, else {figures[1]}: {verdict}")
        return is_faster

    def search(
        self,
        simulator: Simulator,
        grids: Grids,
        deadline: Deadline,
        numbers: Sequence[int] | None = None,
        *,
        is_needed: bool = False,
    ) -> dict[str, list[Candidate]]:
        """Simulates the settings in `grids` (method: settings to try) until the deadline, on the prompts with these `numbers`
        (None: all).

        Methods take turns. Lossy methods (whose output can differ from the target's) are tried with their first settings, and
        with others at the end, because they are never chosen automatically. With `is_needed`, the first settings of each method
        are simulated even after the deadline. Returns what was tried, by method; its expected speed is scaled to all prompts.
        """
        tried: dict[str, list[Candidate]] = {name: [] for name in grids}
        failed = set[tuple[str, Value | None]]()  # methods with policies
        plain = [_expected(simulator, PLAIN, {}, some).predicted for some in (None, numbers)]
        for name, settings in _in_turn(grids):
            if deadline.left < 0 and (tried[name] or not is_needed):
                self.left_out[SOME] = f"time was short: {sum(map(len, tried.values()))} were simulated"
                break
            if (name, settings.get("policy")) in failed:
                continue
            self.observer.doing(f"simulating {written(name, settings)}")
            try:
                found = _expected(simulator, name, settings, numbers)
            except SpecgenError as error:
                if name == PLAIN:
                    raise
                self.left_out[name] = error.message
                failed.add((name, settings.get("policy")))
                continue
            tried[name].append(replace(found, predicted=found.predicted * plain[0] / plain[1]))
        return tried

    def choose(self, simulator: Simulator, names: Sequence[str]) -> list[Candidate]:
        """Simulates settings of the methods `names`, and returns each method with its best settings, by expected speed, fastest
        first.

        Settings with trees, several drafts or beams are simulated on up to `SEARCH_PROMPTS` prompts, evenly spread over all.
        """
        deadline, prompts = self.request.deadline, len(simulator.references)
        heads = further_heads(simulator.pair)
        chains = {name: grid(name) for name in names if name in SIMPLE}
        shapes = {name: combinations(METHODS[name].searched_grids) for name in chains if METHODS[name].searched_grids}
        shapes |= {
            name: [{**more, **each} for each in grid(name) for more in ({}, *heads.get(METHODS[name].head, ()))]
            for name in names
            if name in SEARCHED
        }
        tried = self.search(simulator, chains, deadline.share(SIMULATION), is_needed=True)
        self._report(tried, "setting", "simulated")
        numbers = range(0, prompts, max(1, prompts // SEARCH_PROMPTS))[:SEARCH_PROMPTS]
        if shapes:
            found = self.search(simulator, shapes, deadline.share(SEARCH), numbers)
            self._report(found, "shape", "of trees, drafts and beams simulated")
            tried = {name: [*tried.get(name, ()), *found.get(name, ())] for name in (*tried, *found)}
        is_lossy = any(settings for name, settings in tried.items() if not METHODS[name].lossless)
        perplexity = simulator.run(PLAIN, {}, numbers, perplexity=True).perplexity if is_lossy else None
        best = {name: self._best(name, settings, perplexity) for name, settings in tried.items()}
        candidates = [each for each in best.values() if each is not None]
        if perplexity is not None:
            candidates = [replace(each, perplexity=perplexity) if each.name == PLAIN else each for each in candidates]
        if "selfsd" in names:
            self.observer.doing("searching for layers to skip")
            try:
                candidates.append(tuned_skips(simulator, SKIPS * deadline.left))
            except SpecgenError as error:
                self.left_out["selfsd"] = error.message
        return sorted(candidates, key=lambda candidate: -candidate.predicted)

    def _report(self, tried: Tried, noun: str, what: str) -> None:
        found = [each for candidates in tried.values() for each in candidates if each.name != PLAIN]
        if found:
            best = max(found, key=lambda each: each.predicted)
            of = counted(len({each.name for each in found}), "method")
            self.observer.done(f"{counted(len(found), noun)} of {of} {what}; best: {best.written}")

    def _best(self, name: str, tried: Sequence[Candidate], plain_perplexity: float | None) -> Candidate | None:
        """Returns the best of the candidates `tried`, which are all of one method. None, with the reason in `left_out`, if none
        was tried or if none has a perplexity that the objective allows."""
        if not tried:
            self.left_out.setdefault(name, TIME_WAS_SHORT)
            return None
        self.left_out.pop(name, None)  # only its trees failed
        if METHODS[name].lossless:
            return nearest_to_default(tried)
        found = best_lossy(tried, plain_perplexity or 0.0, self.request.objective)
        if found is None:
            limit = self.request.objective.limit(plain_perplexity or 0.0)
            self.left_out[name] = f"no setting had a perplexity of at most {limit:.3g} (--max-perplexity)"
        return found

    def confirm(self, pair: Pair, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Runs plain decoding and as many of the most promising candidates as the time allows on the real models.

        Returns all `candidates`, with measured speeds for those that ran.
        """
        request, named = self.request, self.request.names or ()
        selected = shortlist([each for each in candidates if each.name != PLAIN and (each.lossless or each.name in named)])
        listed, seconds = self._affordable(candidates, selected)
        measured: dict[str, Candidate] = {}
        if listed:
            by_spec = {each.written: each for each in (plain_of(candidates), *listed)}
            specs = [parse_spec(spec) for spec in by_spec]
            runner = Runner(pair, BenchmarkConfig(specs, request.prompts, MOST_REPEATS, request.sampling, request.chat))
            for step in runner.steps():
                self.observer.doing(f"really running {'' if step.spec is None else step.spec.written}")
                if request.deadline.left < seconds:
                    break
            self.left_out |= {spec: error.message for spec, error in runner.results.failures.items()}
            for found in method_results(runner.results):
                if found.prompts and found.summary.new_tokens:
                    each, speed = by_spec[found.spec.written], found.summary.tokens_per_second
                    measured[each.name] = replace(each, measured=speed, speedup=found.speedup, low=found.low, high=found.high)
            turns = counted(len(runner.results.complete_repeats()), "turn")
            self.observer.done(f"{counted(len(listed), 'method')} and plain decoding really run, {turns}")
        if selected and not measured:
            self.left_out["confirmation"] = f"{TIME_WAS_SHORT}: the figures are expected ones"
        return [measured.get(each.name, each) for each in candidates]

    def _affordable(self, candidates: Sequence[Candidate], selected: Sequence[Candidate]) -> tuple[Sequence[Candidate], float]:
        """Returns the first of the `selected` candidates that the remaining time is enough for, and the seconds of one run.

        Each can run on `FEWEST_PROMPTS` prompts, after one warm-up.
        """
        for count in range(len(selected), 0, -1):
            slowest = min(each.predicted for each in (plain_of(candidates), *selected[:count]))
            seconds = MARGIN * self.request.sampling.max_new_tokens / slowest
            if self.request.deadline.left >= (1 + FEWEST_PROMPTS) * (count + 1) * seconds:
                return selected[:count], seconds
        return [], 0.0


def _in_turn(grids: Grids) -> list[tuple[str, GivenSettings]]:
    """Returns (method, settings): the first settings of every method, then the second of every lossless method, and so on.

    Further settings of lossy methods come last.
    """
    numbered = [(number, name, settings) for name, tried in grids.items() for number, settings in enumerate(tried)]
    numbered.sort(key=lambda each: (each[0] > 0 and not METHODS[each[1]].lossless, each[0]))  # stable
    return [(name, settings) for _, name, settings in numbered]


def _expected(simulator: Simulator, name: str, settings: GivenSettings, numbers: Sequence[int] | None = None) -> Candidate:
    """Simulates the method on the prompts with these `numbers` (None: all) and returns it with its expected speed."""
    found = simulator.run(name, settings, numbers)
    return Candidate(name, settings, found.tokens_per_second or 0.0, perplexity=found.perplexity)


def best_lossy(tried: Sequence[Candidate], plain_perplexity: float, objective: Objective) -> Candidate | None:
    """Returns the candidate that the objective prefers of `tried`, which are all of one lossy method.

    That is the fastest one whose perplexity is within the objective's limit; None if there is none. If the objective is the
    lowest perplexity, it is the one with the lowest; where several agree to three decimals, the fastest of these.
    """
    limit = objective.limit(plain_perplexity)
    kept = [each for each in tried if each.perplexity is not None and each.perplexity <= limit]

    def rank(candidate: Candidate) -> tuple[float, float]:
        perplexity = round(candidate.perplexity or 0.0, 3) if objective.lowest_perplexity else 0.0
        return -perplexity, candidate.predicted

    return max(kept, key=rank, default=None)


def tuned_skips(simulator: Simulator, seconds: float) -> Candidate:
    """Searches for about `seconds` for the layers that Self-SD skips in drafting, and returns it with the fastest set found.

    Each set is run on the beginnings of some prompts. Raises SpecgenError if the target's layers cannot be run one by one, or if
    the time is too short to try one set.
    """
    pair, references = simulator.pair, simulator.references
    pair.target.model.check_layers("layer skipping")
    prompts = [reference.prompt_ids[:PROMPT_TOKENS] for reference in references[:PROMPTS]]
    if len(prompts) * NEW_TOKENS * _token_seconds(references) > seconds:
        raise SpecgenError(TIME_WAS_SHORT)
    speeds = search_skips(pair.target.model.shape.num_layers, lambda skips: skipping_speed(pair, skips, prompts), seconds)
    fastest = max(speeds, key=lambda skips: speeds[skips])
    return Candidate("selfsd", {"skip": fastest}, speeds[fastest])


def _token_seconds(references: Sequence[ReferenceOutput]) -> float:
    return sum(each.seconds for each in references) / sum(len(each.token_ids) for each in references)


def outcome_of(
    simulator: Simulator,
    candidates: Sequence[Candidate],
    request: TuningRequest,
    left_out: Mapping[str, str],
    acceptance: float | None = None,
) -> TuningOutcome:
    """Returns the tuning's outcome: the candidates, and what explains their speeds. That is the measured costs of rounds and
    `acceptance`, the share of drafted tokens that the target accepts."""
    model, costs = None, simulator.costs
    draft = costs.get("model", costs.get("exit"))
    if draft is not None:
        length = min(draft.verification_cost.curves)
        widths = {width: costs["echo"].verification_cost.at(width, length) for width in range(1, 17)}
        in_blocks = "model" in costs and simulator.pair.draft is not None and simulator.pair.draft.drafts_blocks
        seconds = draft.draft_cost.at(4, length) / (1 if in_blocks else 4)
        model = SpeedupModel(widths, seconds, length, drafts_blocks=in_blocks)
    saved = {kind: cost.as_dict() for kind, cost in costs.items()}
    return TuningOutcome(candidates, request.sampling, len(simulator.references), saved, model, acceptance, left_out)
