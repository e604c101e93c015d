"""Tunes a pair of target and draft model: finds the fastest method and settings on this machine.

The steps: really run plain decoding, the default method and those that are likeliest to be fast;
measure the costs of rounds; simulate settings, those that are expected to be far behind no further;
really run the most promising methods; choose. The result rests on real runs, however short the time
is. Each step takes a share of the time that is left. Sets of layers to skip cannot be simulated, so
they are tried in real runs.

A draft with rounded weights (`--draft-dtype int8`, with our kernels `int4`) is tried too: rounding
makes a draft pass shorter where it is bound by memory, and some of what it drafts worse. Both are
measured: the costs of rounds, and how much is accepted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.part_kinds import HEADS
from specgen.base.settings import Value, written
from specgen.base.text import counted, significant
from specgen.compare.results import BenchmarkConfig
from specgen.compare.runner import Runner
from specgen.decoding.costs import WIDTHS, SpeedupModel
from specgen.engine.weights import bytes_of_weights
from specgen.methods import METHODS
from specgen.methods.learned_drafting import DraftingCosts
from specgen.methods.selfsd import SelfSpeculativeDecoding
from specgen.methods.skip_search import NEW_TOKENS, PROMPT_TOKENS, PROMPTS, search_skips
from specgen.tune.outcome import (
    AS_FAST,
    PLAIN,
    SHORTLIST_SIZE,
    Candidate,
    TuningOutcome,
    combinations,
    grid,
    is_searched,
    is_simple,
    nearest_to_default,
    plain_of,
    shortlist,
)
from specgen.tune.pair_inspection import obstacle
from specgen.tune.prospects import BEHIND, Prospects, likeliest
from specgen.tune.real_runs import (
    FEWEST_PROMPTS,
    FEWEST_TOKENS,
    LEAST_TOKENS,
    MARGIN,
    MOST_REPEATS,
    WARM_UP_TOKENS,
    PlainSpeed,
    RealRuns,
    plan,
    probe,
)
from specgen.tune.round_timing import ReferenceOutput, measure_costs
from specgen.tune.simulator import AbandonedError, Simulator

if TYPE_CHECKING:
    from specgen.compare.prompts import ListedPrompt
    from specgen.pair.figures import Figures
    from specgen.pair.pair import Pair
    from specgen.tune.outcome import (
        Deadline,
        GivenSettings,
        Objective,
        TuningObserver,
        TuningRequest,
    )

Grids = Mapping[str, Sequence["GivenSettings"]]
Tried = Mapping[str, Sequence[Candidate]]
# the share that each step takes of the time that is left when it begins
TRIAL = 0.4
COSTS = 0.2
SIMULATION = 0.3
SEARCH = 0.4
SKIPS = 0.4
DRAFTS = 0.35
SEARCH_PROMPTS = 4  # the search for trees, drafts and beams runs on this many prompts
TIMED_TOKENS = 8  # rounds can be timed where there is time to decode so many tokens plainly
# of the draft's weight files; smaller ones stay in the processor's cache, where rounding gains
# nothing
LEAST_BYTES = 8 << 20
SOME = "some settings"  # the key in `left_out` that says that not all settings were simulated
TIME_WAS_SHORT = "time was short (a larger --budget helps)"
FAR_BEHIND = "predicted far behind the fastest, so not simulated further"
_DRAFTERS = {"model": "sd", "exit": "eesd"}  # methods that draft chains of fixed length


def tune(
    pair: Pair,
    request: TuningRequest,
    observer: TuningObserver,
    others: Sequence[Callable[[Pair], Pair | None]] = (),
) -> TuningOutcome:
    """Finds the pair's fastest method and settings.

    Each of `others` makes from the best pair so far one with another draft for the same target
    (None: it cannot gain), which is tried too. Raises SpecgenError if plain decoding fails on a
    prompt, and if none of the methods that the request names can be tuned.
    """
    tuner = Tuner(pair, request, observer)
    names = tuner.select()
    references = tuner.try_likeliest(names)
    simulator = None
    acceptance = None
    candidates = tuner.tried
    if references and tuner.has_time_to_simulate():
        simulator, acceptance = tuner.measure(pair, names, references, request.deadline)
        names = [name for name in names if name not in tuner.left_out]
        tuner.check_named()
        if others and "model" in simulator.costs:
            simulator, acceptance = tuner.best_draft(simulator, acceptance, others, names)
        candidates = tuner.confirm(simulator.pair, tuner.choose(simulator, names))
        tuner.check_named()
    else:
        tuner.leave_out(names)
    chosen_pair = pair if simulator is None else simulator.pair
    draft = None if chosen_pair is pair else chosen_pair.draft
    return replace(
        outcome_of(simulator, candidates, tuner.request, tuner.left_out, acceptance),
        pair=chosen_pair,
        draft_dtype=None if draft is None else draft.precision.rounding,
        prompts=max(1, len(references)),
        real_runs=tuner.real_runs,
        simulated=tuner.simulated,
        missing_seconds=tuner.missing_seconds,
        named=request.names,
    )


def further_heads(pair: Pair) -> Mapping[str, Sequence[GivenSettings]]:
    """Returns the settings that name the heads that were found for the target, by kind, but for the
    default ones."""
    by_kind = defaultdict[str, list[dict[str, str]]](list)
    for part in pair.found:
        if part.kind in HEADS and part.folder != pair.parts.beside[part.kind]:
            by_kind[part.kind].append({"head": str(part.folder)})
    return by_kind


def worth_rounding(pair: Pair) -> bool:
    """Whether the draft model is so large that its passes may be bound by reading its weights."""
    # no tuned method runs one whose tokens cannot be translated
    if pair.draft is None or pair.draft.refusal is not None:
        return False
    return bytes_of_weights(pair.draft.folder) >= LEAST_BYTES


class Tuner:
    """The steps of one tuning. `left_out` has the reason for each method that is not tuned, by
    name, and under `SOME` for settings that were not tried. `request` gets the number of new tokens
    for which there is time."""

    def __init__(self, pair: Pair, request: TuningRequest, observer: TuningObserver) -> None:
        self.pair = pair
        self.request = request
        self.observer = observer
        self.left_out: dict[str, str] = {}
        self.tried: list[Candidate] = []  # what was really run first
        self.simulated = 0
        self.missing_seconds = 0.0
        self._speed = PlainSpeed(0.0, 0.0)
        self._runs: RealRuns | None = None
        self._later_runs: RealRuns | None = None  # with another draft

    def check_named(self) -> None:
        """Raises SpecgenError if all of the methods that the user named are left out. Plain
        decoding never is."""
        named = [name for name in self.request.names or () if name != PLAIN]
        if named and all(name in self.left_out for name in named):
            why = "; ".join(f"{name}: {self.left_out[name]}" for name in named)
            raise SpecgenError(f"no method can be tuned: {why}", "Name others with --methods")

    def select(self) -> list[str]:
        """Returns which of the requested methods can be tuned for this pair, plain decoding
        included. Raises as `check_named`."""
        names = self.request.names
        ours = [method.name for method in methods.OURS]
        wanted = [
            name
            for name in METHODS
            if name == PLAIN or (name in (names or ours) and not METHODS[name].tuning.is_yardstick)
        ]
        for name in wanted:
            reason = self._obstacle(name)
            if reason is not None:
                self.left_out[name] = reason
        self.check_named()
        return [name for name in wanted if name not in self.left_out]

    def _obstacle(self, name: str) -> str | None:
        method = METHODS[name]
        if not (is_simple(name) or is_searched(name)) and self.request.names is None:
            return f"its layers are searched for only with --methods {name}"
        part = method.needs if method.needs_exit_layer else method.head
        if part and name not in (self.request.names or ()):
            reason = self.pair.parts.not_chosen(part)
            if reason is not None:
                return f"{reason} (--methods {name} measures it again)"
        draft = method.draft_of(self.pair.models)
        # also where the method could draft by prompt lookup instead
        if method.uses_draft_model and draft is None:
            return "there is no draft model"
        error = None if draft is None else draft.refusal
        error = error or obstacle(self.pair, name)
        return None if error is None else error.message

    def try_likeliest(self, names: Sequence[str]) -> list[ReferenceOutput]:
        """Really runs plain decoding, the default method and the likeliest of `names`, and returns
        plain decoding's outputs.

        Sets the request's number of new tokens to one for which the time is enough, and `tried` to
        the methods with their speeds. Returns no output if there is no time for any run; then
        `tried` only has plain decoding, with the speed of a few tokens. Raises SpecgenError, with
        the prompt's name, if plain decoding fails.
        """
        request = self.request
        wanted = [PLAIN, methods.DEFAULT_METHOD, *likeliest(names, request.names or ())]
        candidates = [Candidate(name, _defaults(name), 0.0) for name in wanted]
        config = BenchmarkConfig([], request.prompts, 1, request.sampling, request.chat)
        Runner(self.pair, config).check()

        self.observer.doing("plain decoding")
        self._speed = probe(self.pair, request)
        left = request.deadline.left
        tokens = request.sampling.max_new_tokens
        fitting = plan(self._speed, TRIAL * left, left, len(candidates), tokens)
        if fitting is None:
            self._report_plain(left)
            return []

        sampling = replace(request.sampling, max_new_tokens=fitting.tokens)
        self.request = replace(request, sampling=sampling)
        self._runs = RealRuns(self.pair, self.request, self.observer, self._speed)
        candidates = candidates[: fitting.methods]
        self._run_first(candidates, self._runs)
        self._note_tried(candidates, self._runs, names)
        references = self._runs.references()
        if not references:
            self.tried = [Candidate(PLAIN, {}, 1 / self._speed.token_seconds)]
            return []

        speeds = ", ".join(f"{candidate.name} {candidate.measured:.1f}" for candidate in self.tried)
        where = f"{counted(len(references), 'prompt')}, {fitting.tokens} tokens each"
        self.observer.done(f"really run, tokens/s: {speeds} ({where})")
        return references

    def _report_plain(self, left: float) -> None:
        """Says that the seconds that are `left` are too few for a run, and how fast plain decoding
        is."""
        speed = self._speed
        least = 2 * MARGIN * (speed.seconds(WARM_UP_TOKENS) + speed.seconds(LEAST_TOKENS))
        self.missing_seconds = max(self.missing_seconds, least - left)
        tokens = self.request.sampling.max_new_tokens
        self.tried = [Candidate(PLAIN, {}, tokens / speed.seconds(tokens))]
        self.observer.done(
            f"plain decoding: {1e3 * speed.token_seconds:.0f} ms a token; no time for more"
        )

    def _run_first(self, candidates: Sequence[Candidate], runs: RealRuns) -> None:
        """Runs the candidates on the first prompt, and on the others those that were fast there."""
        prompts = self.request.prompts
        deadline = self.request.deadline
        is_long = self.request.sampling.max_new_tokens >= FEWEST_TOKENS
        limit = deadline.share(TRIAL if is_long else 1.0)
        runs.run(candidates, prompts[:1], limit)
        if len(prompts) > 1:
            runs.run(self._not_behind(candidates, runs), prompts[1:], limit)
            run_second_prompt(candidates, runs, prompts[1], deadline)

    def _note_tried(
        self, candidates: Sequence[Candidate], runs: RealRuns, names: Sequence[str]
    ) -> None:
        """Sets `tried` to the candidates that ran, and leaves out those of `names` that failed."""
        failures = {name: error.message for name, error in runs.failures.items() if name in names}
        self.left_out |= failures
        measured = [runs.measured(candidate) for candidate in candidates]
        self.tried = [
            replace(candidate, predicted=candidate.measured)
            for candidate in measured
            if candidate.measured
        ]
        for candidate in self.tried:  # the default runs without a draft model too
            self.left_out.pop(candidate.name, None)

    def _not_behind(self, candidates: Sequence[Candidate], runs: RealRuns) -> list[Candidate]:
        """Returns the candidates that are worth further runs: the default, and those that were not
        far behind so far."""
        speeds = {
            candidate.name: runs.measured(candidate).speedup or 0.0 for candidate in candidates
        }
        lossless = [speeds[candidate.name] for candidate in candidates if candidate.lossless]
        floor = BEHIND * max(1.0, *lossless)
        return [
            candidate
            for candidate in candidates
            if speeds[candidate.name] >= floor or candidate.name == methods.DEFAULT_METHOD
        ]

    @property
    def real_runs(self) -> int:
        return sum(runs.count for runs in (self._runs, self._later_runs) if runs is not None)

    def has_time_to_simulate(self) -> bool:
        """Whether rounds can be timed, without which nothing can be simulated, in the share of time
        for this."""
        return COSTS * self.request.deadline.left > MARGIN * self._speed.seconds(TIMED_TOKENS)

    def leave_out(self, names: Sequence[str]) -> None:
        """Says of the methods `names` that did not run that the time was short."""
        ran = {candidate.name for candidate in self.tried}
        missing = [name for name in names if name not in ran]
        self.left_out |= dict.fromkeys(missing, TIME_WAS_SHORT)
        seconds = MARGIN * self._speed.seconds(TIMED_TOKENS) / COSTS
        if missing:
            self.missing_seconds += max(0.0, seconds - self.request.deadline.left)

    def measure(
        self,
        pair: Pair,
        names: Sequence[str],
        references: Sequence[ReferenceOutput],
        deadline: Deadline,
    ) -> tuple[Simulator, float | None]:
        """Measures the seconds of rounds of the methods `names`. Methods whose rounds cannot be
        timed go to `left_out`, unless `pair` has another draft than the one to tune.

        Returns a simulator with these costs, and the share of drafted tokens that the target
        accepts in drafts of one token (None without a draft model or exit layer).
        """
        sampling = self.request.sampling
        observer = self.observer
        kind_of = {name: METHODS[name].tuning.cost_kind for name in names if is_simple(name)}
        kinds = list(dict.fromkeys(["echo", *kind_of.values()]))
        costs, failures = measure_costs(
            pair, kinds, references, sampling, deadline.share(COSTS), observer.doing
        )
        if pair is self.pair:
            self.left_out |= {
                name: failures[kind] for name, kind in kind_of.items() if kind in failures
            }
            target = costs["echo"].verification_cost
            length = min(target.curves)
            wider = ", ".join(
                f"{significant(1e3 * target.at(tokens, length))} for {tokens}" for tokens in (6, 16)
            )
            observer.done(
                f"a target pass takes {significant(1e3 * target.at(1, length))} ms for 1 "
                f"token, {wider}"
            )
        pair.measurements.tuned_costs = costs
        simulator = Simulator(pair, references, sampling, costs, self.request.deadline.clock)
        drafts = "model" if "model" in costs else "exit"
        if drafts not in costs:
            return simulator, None
        observer.doing("running the draft model on the target's output")
        share = simulator.run(_DRAFTERS[drafts], {"policy": "fixed", "k": 1}).acceptance_rate
        if share is not None and pair is self.pair:
            drafter = "draft" if drafts == "model" else "exit layer"
            observer.done(f"the target accepts {share:.0%} of the {drafter}'s tokens")
        return simulator, share

    def best_draft(
        self,
        best: Simulator,
        acceptance: float | None,
        others: Sequence[Callable[[Pair], Pair | None]],
        names: Sequence[str],
    ) -> tuple[Simulator, float | None]:
        """Returns the simulator with the draft with which decoding is expected to be the fastest,
        of the one in `best` and those in `others` (see `tune`), and the share of its tokens that
        the target accepts; `acceptance` is that of the first one's."""
        limit = self.request.deadline.share(DRAFTS)
        one_by_one = [name for name in names if METHODS[name].tuning.cost_kind == "model"]
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
                    best = other
                    acceptance = share
            except SpecgenError as error:
                self.left_out[label] = error.message
        in_parallel = [name for name in names if METHODS[name].is_parallel]
        if best.pair is not self.pair and in_parallel:
            deadline = self.request.deadline.share(COSTS)
            parallel, _ = self.measure(best.pair, in_parallel, best.references, deadline)
            best.costs = {**best.costs, **parallel.costs}
        return best, acceptance

    def is_faster(
        self, other: Simulator, best: Simulator, shares: tuple[float, float], label: str
    ) -> bool:
        """Whether decoding is expected to be faster with the draft of `other`, called `label`, than
        with that of `best`.

        A gain of less than 3 % (`AS_FAST`) does not count. Tells the observer both expected
        speedups. `shares` are the shares of drafted tokens that the target accepts. Raises
        SpecgenError if rounds with the draft of `other` could not be timed.
        """
        if "model" not in other.costs:
            raise SpecgenError("its rounds could not be timed")
        speedups = []
        for simulator, share in zip((other, best), shares, strict=True):
            costs = simulator.costs["model"]
            drafting = DraftingCosts.of_rounds(costs, min(costs.verification_cost.curves))
            speedups.append(1 / drafting.time_per_token(share))
        is_faster = AS_FAST * speedups[0] > speedups[1]
        figures = [
            f"{speedup:.2f}× with {share:.0%} accepted"
            for speedup, share in zip(speedups, shares, strict=True)
        ]
        verdict = "taken" if is_faster else "not taken"
        self.observer.done(f"{label}: {figures[0]} expected, else {figures[1]}: {verdict}")
        return is_faster

    def search(
        self,
        simulator: Simulator,
        grids: Grids,
        deadline: Deadline,
        prospects: Prospects,
        numbers: Sequence[int] | None = None,
    ) -> dict[str, list[Candidate]]:
        """Simulates the settings in `grids` (method: settings to try) until the deadline, on the
        prompts with these `numbers` (None: all).

        Methods take turns, those first whose simulation costs least and that are likeliest to be
        fast. Lossy methods (whose output can differ from the target's) are tried with their first
        settings, and with others at the end, because they are never chosen automatically. Settings
        that turn out to be far behind are left, and after some such settings their method. Settings
        that cannot be simulated put their method into `left_out`. Returns the candidates that were
        simulated to the end, by method, with expected speeds scaled to all prompts. Raises
        SpecgenError if plain decoding cannot be simulated.
        """
        tried: dict[str, list[Candidate]] = {name: [] for name in grids}
        failed = set[tuple[str, Value | None]]()  # methods with policies
        plain_on_all = _expected(simulator, PLAIN, {}).predicted
        plain = _expected(simulator, PLAIN, {}, numbers).predicted
        queue = _in_turn(grids)
        begin = deadline.left
        for position, (name, settings) in enumerate(queue):
            if name != PLAIN and deadline.left < 0:
                left = {other for other, _ in queue[position:] if not tried[other]}
                untried = [other for other in left if not prospects.is_given_up(other)]
                self._miss(len(untried), begin / max(1, position))
                break
            if (name, settings.get("policy")) in failed or prospects.is_given_up(name):
                continue

            candidate = None
            try:
                if prospects.can_reach(name, settings):
                    self.observer.doing(f"simulating {written(name, settings)}")
                    candidate = self._simulated(
                        simulator, name, settings, numbers, deadline, prospects
                    )
            except SpecgenError as error:
                if name == PLAIN:
                    raise
                self.left_out[name] = error.message
                failed.add((name, settings.get("policy")))
                continue

            if candidate is not None:
                speed = candidate.predicted
                prospects.note(name, speed / plain)
                tried[name].append(replace(candidate, predicted=speed * plain_on_all / plain))
            elif deadline.left >= 0:
                prospects.strike(name)
                if not tried[name] and not self._has_run(name):
                    self.left_out[name] = FAR_BEHIND
        return tried

    def _has_run(self, name: str) -> bool:
        """Whether the method was one of those that really ran first."""
        return any(candidate.name == name for candidate in self.tried)

    def _simulated(
        self,
        simulator: Simulator,
        name: str,
        settings: GivenSettings,
        numbers: Sequence[int] | None,
        deadline: Deadline,
        prospects: Prospects,
    ) -> Candidate | None:
        """Simulates the settings. Returns None if they turn out to be far behind, or if the time is
        up in a simulation that runs the models."""
        runs_models = not is_simple(name)

        def goes_on(figures: Figures) -> bool:
            return not prospects.is_behind(name, figures) and not (
                runs_models and deadline.left < 0
            )

        self.simulated += name != PLAIN
        try:
            return _expected(simulator, name, settings, numbers, goes_on)
        except AbandonedError:
            return None

    def _miss(self, untried: int, seconds: float) -> None:
        """Says that the time was too short for some settings, and of so many methods for all. One
        takes about so many seconds."""
        self.left_out[SOME] = f"time was short: {self.simulated} were simulated"
        self.missing_seconds += untried * max(0.0, seconds) / SIMULATION

    def choose(self, simulator: Simulator, names: Sequence[str]) -> list[Candidate]:
        """Simulates settings of the methods `names`, and returns each method with its best
        settings, by expected speed, fastest first.

        Settings with trees, several drafts or beams are simulated on up to `SEARCH_PROMPTS`
        prompts, evenly spread over all.
        """
        deadline = self.request.deadline
        prompts = len(simulator.references)
        numbers = range(0, prompts, max(1, prompts // SEARCH_PROMPTS))[:SEARCH_PROMPTS]
        chains = {name: grid(name) for name in names if is_simple(name)}
        shapes = _shapes(names, further_heads(simulator.pair))
        prospects = self._prospects(simulator)
        tried = self.search(simulator, chains, deadline.share(SIMULATION), prospects)
        self._report(tried, "setting", "simulated")
        if shapes:
            trees = self.search(simulator, shapes, deadline.share(SEARCH), prospects, numbers)
            self._report(trees, "shape", "of trees, drafts and beams simulated")
            for name, candidates in trees.items():
                tried[name] = [*tried.get(name, ()), *candidates]

        candidates = self._best_of_each(simulator, tried, numbers)
        if "selfsd" in names:
            self.observer.doing("searching for layers to skip")
            try:
                candidates.append(tuned_skips(simulator, SKIPS * deadline.left))
            except SpecgenError as error:
                self.left_out["selfsd"] = error.message
        return sorted(candidates, key=lambda candidate: -candidate.predicted)

    def _best_of_each(
        self, simulator: Simulator, tried: Tried, numbers: Sequence[int]
    ) -> list[Candidate]:
        """Returns the best settings of each method that has some. If a lossy one was tried, plain
        decoding gets its perplexity on the prompts with these `numbers`."""
        perplexity = None
        every = [candidate for candidates in tried.values() for candidate in candidates]
        if not all(candidate.lossless for candidate in every):
            perplexity = simulator.run(PLAIN, {}, numbers, perplexity=True).perplexity
        best = []
        for name, candidates in tried.items():
            candidate = self._best(name, candidates, perplexity)
            if candidate is not None and name == PLAIN and perplexity is not None:
                candidate = replace(candidate, perplexity=perplexity)
            if candidate is not None:
                best.append(candidate)
        return best

    def _prospects(self, simulator: Simulator) -> Prospects:
        """Returns what the costs of target passes say of the methods."""
        target = simulator.costs["echo"].verification_cost
        length = min(target.curves)
        return Prospects(
            self.request.names or (), target.at(1, length), lambda tokens: target.at(tokens, length)
        )

    def _report(self, tried: Tried, noun: str, what: str) -> None:
        others = [candidates for name, candidates in tried.items() if name != PLAIN and candidates]
        if others:
            every = [candidate for candidates in others for candidate in candidates]
            best = max(every, key=lambda candidate: candidate.predicted)
            of = counted(len(others), "method")
            self.observer.done(f"{counted(len(every), noun)} of {of} {what}; best: {best.written}")

    def _best(
        self, name: str, tried: Sequence[Candidate], plain_perplexity: float | None
    ) -> Candidate | None:
        """Returns the best of the candidates `tried`, which are all of one method. None, with the
        reason in `left_out`, if none was tried or if none has a perplexity that the objective
        allows."""
        if not tried:
            if not self._has_run(name):
                self.left_out.setdefault(name, TIME_WAS_SHORT)
            return None
        self.left_out.pop(name, None)  # only its trees failed
        if tried[0].lossless:
            return nearest_to_default(tried)
        best = best_lossy(tried, plain_perplexity or 0.0, self.request.objective)
        if best is None:
            limit = self.request.objective.limit(plain_perplexity or 0.0)
            self.left_out[name] = (
                f"no setting had a perplexity of at most {significant(limit)} (--max-perplexity)"
            )
        return best

    def confirm(self, pair: Pair, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Runs plain decoding and as many of the most promising candidates as the time allows.

        Returns one candidate for each method: the given one, unless another of the method ran
        before and is the fastest of all that ran. Those that ran with this pair have measured
        speeds.
        """
        runs = self._runs_with(pair)
        tried = {
            candidate.written: candidate
            for candidate in self.tried
            if runs is self._runs or not METHODS[candidate.name].uses_draft_model
        }

        def with_speed(candidate: Candidate) -> Candidate:
            measured = runs.measured(candidate)
            before = tried.get(candidate.written)
            if measured.measured is not None or before is None:
                return measured
            return replace(before, predicted=candidate.predicted, perplexity=candidate.perplexity)

        chosen = {candidate.written for candidate in candidates}
        ran_before = [candidate for name, candidate in tried.items() if name not in chosen]
        everything = [*candidates, *ran_before]
        usable = [
            with_speed(candidate)
            for candidate in everything
            if candidate.written not in self.left_out
        ]
        selected = worth_running(usable, self.request.names or ())
        affordable = self._affordable(selected, runs)
        if affordable:
            self._run_on_new_prompts(affordable, plain_of(candidates), runs)

        confirmed = [with_speed(candidate) for candidate in everything]
        simulated = {
            candidate.written for candidate in confirmed if candidate.measured is None
        } - set(runs.failures)
        self._note_unconfirmed(
            [candidate for candidate in selected if candidate.written in simulated], runs
        )
        return one_of_each(confirmed)

    def _run_on_new_prompts(
        self, candidates: Sequence[Candidate], plain: Candidate, runs: RealRuns
    ) -> None:
        """Runs the candidates and plain decoding until the deadline, first on prompts that were not
        used yet."""
        used = len(runs.references())
        prompts = [*self.request.prompts[used:], *self.request.prompts[:used]]
        runs.run(candidates, prompts, self.request.deadline, MOST_REPEATS)
        self.left_out |= {spec: error.message for spec, error in runs.failures.items()}
        turns = counted(len(runs.prompts(plain)), "prompt")
        self.observer.done(
            f"{counted(len(candidates), 'method')} and plain decoding really run, on {turns} in all"
        )

    def _note_unconfirmed(self, candidates: Sequence[Candidate], runs: RealRuns) -> None:
        """Says that the time was too short to run these candidates."""
        if not candidates:
            return
        names = ", ".join(candidate.name for candidate in candidates)
        self.left_out["confirmation"] = f"{TIME_WAS_SHORT}; only simulated: {names}"
        seconds = self._seconds_of(len(candidates), runs) / (1 - TRIAL)
        self.missing_seconds += max(0.0, seconds - max(0.0, self.request.deadline.left))

    def _runs_with(self, pair: Pair) -> RealRuns:
        """Returns the real runs so far if they were made with this pair, else new ones."""
        if self._runs is not None and self._runs.pair is pair:
            return self._runs
        self._later_runs = RealRuns(pair, self.request, self.observer, self._speed)
        return self._later_runs

    def _affordable(self, selected: Sequence[Candidate], runs: RealRuns) -> Sequence[Candidate]:
        """Returns the first of the `selected` candidates that the remaining time is enough for."""
        left = self.request.deadline.left
        fitting = (
            count for count in range(len(selected), 0, -1) if self._seconds_of(count, runs) <= left
        )
        return selected[: next(fitting, 0)]

    def _seconds_of(self, count: int, runs: RealRuns) -> float:
        """Returns the seconds of plain decoding and so many other methods on `FEWEST_PROMPTS`
        prompts, after a warm-up."""
        return (count + 1) * (
            MARGIN * self._speed.seconds(WARM_UP_TOKENS) + FEWEST_PROMPTS * runs.run_seconds
        )


def _shapes(
    names: Sequence[str], heads: Mapping[str, Sequence[GivenSettings]]
) -> dict[str, list[GivenSettings]]:
    """Returns the settings with trees, several drafts or beams that are tried, by method. Methods
    that draft with a head also try the further `heads` of its kind."""
    shapes = {}
    for name in names:
        if is_simple(name):
            shapes[name] = combinations(METHODS[name].tuning.shapes)
        if is_searched(name):
            further = ({}, *heads.get(METHODS[name].head, ()))
            shapes[name] = [{**head, **settings} for settings in grid(name) for head in further]
    return {name: settings for name, settings in shapes.items() if settings}


def worth_running(candidates: Sequence[Candidate], named: Collection[str]) -> list[Candidate]:
    """Returns the most promising candidates to run, by their measured or expected speeds.

    `named` are the methods that the user named. Lossy ones of these, and the default method, are
    returned in any case if they have not run: who names a lossy method wants it for its perplexity,
    so a low expected speed is no reason to leave it out.
    """
    plain = plain_of(candidates)
    usable = []
    for candidate in candidates:
        if candidate.name == PLAIN or not (candidate.lossless or candidate.name in named):
            continue
        if candidate.speedup:
            candidate = replace(candidate, predicted=candidate.speedup * plain.predicted)
        usable.append(candidate)

    promising = shortlist(usable)
    listed = {candidate.written for candidate in promising}
    in_any_case = [
        candidate
        for candidate in usable
        if (candidate.name == methods.DEFAULT_METHOD or not candidate.lossless)
        and candidate.measured is None
        and candidate.written not in listed
    ]
    return [*in_any_case, *promising][:SHORTLIST_SIZE]


def run_second_prompt(
    candidates: Sequence[Candidate], runs: RealRuns, prompt: ListedPrompt, deadline: Deadline
) -> None:
    """Runs the default method on a second prompt if it ran on one only, which is too few to compare
    it with plain decoding.

    The fastest of the `candidates` so far runs on it too if it was faster than plain decoding and
    the time is enough for both methods.
    """
    default = [candidate for candidate in candidates if candidate.name == methods.DEFAULT_METHOD]

    def speedup(candidate: Candidate) -> float:
        return runs.measured(candidate).speedup or 0.0

    fastest = max(
        candidates, key=lambda candidate: speedup(candidate) if candidate.lossless else 0.0
    )
    is_fast = fastest not in default and speedup(fastest) > 1
    for wanted in ([*default, fastest] if is_fast else default, default):
        if any(len(runs.prompts(candidate)) == 1 for candidate in default):
            runs.run(wanted, [prompt], deadline)


def one_of_each(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns one of the candidates of each method, by expected speed, fastest first.

    It is the first one of the method, or another one if that is the fastest lossless one of all
    that ran.
    """
    ran = [
        candidate
        for candidate in candidates
        if candidate.speedup is not None and candidate.lossless and candidate.name != PLAIN
    ]
    fastest = max(ran, key=lambda candidate: candidate.rank, default=None)
    by_method: dict[str, Candidate] = {}
    for candidate in candidates:
        if candidate is fastest or candidate.name not in by_method:
            by_method[candidate.name] = candidate
    return sorted(by_method.values(), key=lambda candidate: -candidate.predicted)


def _in_turn(grids: Grids) -> list[tuple[str, GivenSettings]]:
    """Returns (method, settings): the first settings of every method, then the second of every
    lossless method, and so on.

    Further settings of lossy methods come last. Plain decoding comes first, then methods that run
    no model, then the likeliest.
    """
    order = list(dict.fromkeys([PLAIN, *methods.USUAL, *METHODS]))
    names = sorted(grids, key=lambda name: (METHODS[name].runs_model, order.index(name)))
    numbered = [
        (number, name, settings) for name in names for number, settings in enumerate(grids[name])
    ]

    def turn(item: tuple[int, str, GivenSettings]) -> tuple[bool, int]:
        number, name, _ = item
        return number > 0 and not METHODS[name].lossless, number

    numbered.sort(key=turn)  # those of one turn stay in the methods' order
    return [(name, settings) for _, name, settings in numbered]


def _defaults(name: str) -> GivenSettings:
    """Returns the method's default settings, written as in its grid if they are in it."""
    first = grid(name)[0] if is_simple(name) or is_searched(name) else {}
    return {} if methods.distance_from_defaults(METHODS[name], first) else first


def _expected(
    simulator: Simulator,
    name: str,
    settings: GivenSettings,
    numbers: Sequence[int] | None = None,
    goes_on: Callable[[Figures], bool] = lambda _: True,
) -> Candidate:
    """Simulates the method on the prompts with these `numbers` (None: all) and returns it with its
    expected speed."""
    figures = simulator.run(name, settings, numbers, goes_on=goes_on)
    speed = figures.tokens_per_second or 0.0
    return Candidate(name, settings, speed, perplexity=figures.perplexity)


def best_lossy(
    tried: Sequence[Candidate], plain_perplexity: float, objective: Objective
) -> Candidate | None:
    """Returns the candidate that the objective prefers of `tried`, which are all of one lossy
    method.

    That is the fastest one whose perplexity is within the objective's limit; None if there is none.
    If the objective is the lowest perplexity, it is the one with the lowest; where several agree to
    three decimals, the fastest of these.
    """
    limit = objective.limit(plain_perplexity)
    allowed = [
        candidate
        for candidate in tried
        if candidate.perplexity is not None and candidate.perplexity <= limit
    ]

    def rank(candidate: Candidate) -> tuple[float, float]:
        perplexity = round(candidate.perplexity or 0.0, 3) if objective.lowest_perplexity else 0.0
        return -perplexity, candidate.predicted

    return max(allowed, key=rank, default=None)


def tuned_skips(simulator: Simulator, seconds: float) -> Candidate:
    """Searches for about `seconds` for the layers that Self-SD skips in drafting. Returns the
    method with the fastest set found, and as `predicted` its measured speed.

    Each set is run on the beginnings of some prompts. Raises SpecgenError if the target's layers
    cannot be run one by one, or if the time is too short to try one set.
    """
    pair = simulator.pair
    references = simulator.references
    pair.target.model.check_layers("layer skipping")
    prompts = [reference.prompt_ids[:PROMPT_TOKENS] for reference in references[:PROMPTS]]
    if len(prompts) * NEW_TOKENS * _token_seconds(references) > seconds:
        raise SpecgenError(TIME_WAS_SHORT)
    method = METHODS["selfsd"]
    assert isinstance(method, SelfSpeculativeDecoding)
    layers = pair.target.model.shape.num_layers
    speeds = search_skips(layers, lambda skips: method.speed(pair.models, skips, prompts), seconds)
    fastest = max(speeds, key=lambda skips: speeds[skips])
    return Candidate("selfsd", {"skip": fastest}, speeds[fastest])


def _token_seconds(references: Sequence[ReferenceOutput]) -> float:
    tokens = sum(len(reference.token_ids) for reference in references)
    return sum(reference.seconds for reference in references) / tokens


def outcome_of(
    simulator: Simulator | None,
    candidates: Sequence[Candidate],
    request: TuningRequest,
    left_out: Mapping[str, str],
    acceptance: float | None = None,
) -> TuningOutcome:
    """Returns the tuning's outcome: the candidates, and what explains their speeds. That is the
    measured costs of rounds and `acceptance`, the share of drafted tokens that the target accepts.
    `simulator` None: nothing was simulated."""
    if simulator is None:
        return TuningOutcome(candidates, request.sampling, 1, {}, left_out=left_out)
    model = None
    costs = simulator.costs
    draft = costs.get("model", costs.get("exit"))
    if draft is not None:
        length = min(draft.verification_cost.curves)
        widths = {width: costs["echo"].verification_cost.at(width, length) for width in WIDTHS}
        in_blocks = (
            "model" in costs
            and simulator.pair.draft is not None
            and simulator.pair.draft.drafts_blocks
        )
        seconds = draft.draft_cost.at(4, length) / (1 if in_blocks else 4)
        model = SpeedupModel(widths, seconds, length, drafts_blocks=in_blocks)
    saved = {kind: cost.as_dict() for kind, cost in costs.items()}
    return TuningOutcome(
        candidates, request.sampling, len(simulator.references), saved, model, acceptance, left_out
    )
