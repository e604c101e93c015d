"""Tunes a pair of target and draft model: finds the fastest method and settings on this machine.

The steps: really run plain decoding, the default method and those that are likeliest to be fast;
measure the costs of rounds; simulate settings, those that are expected to be far behind no further;
really run the most promising methods; choose. The result rests on real runs, however short the time
is. Each step takes a share of the time that is left. Sets of layers to skip cannot be simulated, so
they are tried in real runs.

A draft with rounded weights (`--draft-dtype int8`) is tried too: rounding makes a draft pass
shorter where it is bound by memory, and some of what it drafts worse. Both are measured: the costs
of rounds, and how much is accepted.
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
from specgen.decoding.costs import SpeedupModel
from specgen.engine.weights import bytes_of_weights
from specgen.methods import METHODS
from specgen.methods.base import SKIPPED_LAYERS
from specgen.methods.learned_drafting import DraftingCosts
from specgen.methods.selfsd import SelfSpeculativeDecoding
from specgen.methods.skip_search import NEW_TOKENS, PROMPT_TOKENS, PROMPTS, search_skips
from specgen.tune.outcome import (
    AS_FAST,
    PLAIN,
    SEARCHED,
    SHORTLIST_SIZE,
    SIMPLE,
    Candidate,
    TuningOutcome,
    combinations,
    distance_from_defaults,
    grid,
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
    from specgen.compare.prompts import Prompt
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
    found = outcome_of(simulator, candidates, tuner.request, tuner.left_out, acceptance)
    chosen_pair = pair if simulator is None else simulator.pair
    draft = chosen_pair.draft
    return replace(
        found,
        pair=chosen_pair,
        draft_dtype=None if chosen_pair is pair or draft is None else draft.precision.rounding,
        prompts=max(1, len(references)),
        real_runs=tuner.real_runs,
        simulated=tuner.simulated,
        missing_seconds=tuner.missing_seconds,
        named=request.names,
    )


def further_heads(pair: Pair) -> Mapping[str, Sequence[GivenSettings]]:
    """Returns the settings that name the heads that were found for the target, by kind, but for the
    default ones."""
    found = defaultdict[str, list[dict[str, str]]](list)
    for each in pair.found:
        if each.kind in HEADS and each.folder != pair.parts.beside[each.kind]:
            found[each.kind].append({"head": str(each.folder)})
    return found


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
        wanted = [
            name
            for name in METHODS
            if name == PLAIN
            or (name in (names or METHODS) and not METHODS[name].tuning.is_yardstick)
        ]
        for name in wanted:
            if (reason := self._obstacle(name)) is not None:
                self.left_out[name] = reason
        self.check_named()
        return [name for name in wanted if name not in self.left_out]

    def _obstacle(self, name: str) -> str | None:
        method = METHODS[name]
        draft = self.pair.draft
        if method.needs == SKIPPED_LAYERS and self.request.names is None:
            return f"its layers are searched for only with --methods {name}"
        # also where the method could draft by prompt lookup instead
        if method.uses_draft_model and draft is None:
            return "there is no draft model"
        refusal = draft.refusal if method.uses_draft_model and draft is not None else None
        error = refusal or obstacle(self.pair, name)
        return None if error is None else error.message

    def try_likeliest(self, names: Sequence[str]) -> list[ReferenceOutput]:
        """Really runs plain decoding, the default method and the likeliest of `names`, and returns
        plain decoding's outputs.

        Sets the request's number of new tokens to one for which the time is enough, and `tried` to
        the methods with their speeds. Returns no output if there is no time for any run; then
        `tried` only has plain decoding, with the speed of a few tokens. Raises SpecgenError, with
        the prompt's name, if plain decoding fails.
        """
        request, deadline = self.request, self.request.deadline
        wanted = [PLAIN, methods.DEFAULT_METHOD, *likeliest(names, request.names or ())]
        candidates = [Candidate(name, _defaults(name), 0.0) for name in wanted]
        Runner(
            self.pair, BenchmarkConfig([], request.prompts, 1, request.sampling, request.chat)
        ).check()
        self.observer.doing("plain decoding")
        self._speed = speed = probe(self.pair, request)
        left = deadline.left
        found = plan(speed, TRIAL * left, left, len(candidates), request.sampling.max_new_tokens)
        if found is None:
            least = 2 * MARGIN * (speed.seconds(WARM_UP_TOKENS) + speed.seconds(LEAST_TOKENS))
            self.missing_seconds = max(self.missing_seconds, least - left)
            tokens = request.sampling.max_new_tokens
            self.tried = [Candidate(PLAIN, {}, tokens / speed.seconds(tokens))]
            self.observer.done(
                f"plain decoding: {1e3 * speed.token_seconds:.0f} ms a token; no time for more"
            )
            return []
        self.request = request = replace(
            request, sampling=replace(request.sampling, max_new_tokens=found.tokens)
        )
        self._runs = RealRuns(self.pair, request, self.observer, speed)
        limit = deadline.share(TRIAL if found.tokens >= FEWEST_TOKENS else 1.0)
        first = request.prompts[:1]
        others = request.prompts[1:]
        self._runs.run(candidates[: found.methods], first, limit)
        if others:
            self._runs.run(self._not_behind(candidates[: found.methods], self._runs), others, limit)
            run_second_prompt(candidates[: found.methods], self._runs, others[0], deadline)
        self.left_out |= {
            name: error.message for name, error in self._runs.failures.items() if name in names
        }
        measured = map(self._runs.measured, candidates[: found.methods])
        self.tried = [replace(each, predicted=each.measured) for each in measured if each.measured]
        for each in self.tried:  # the default runs without a draft model too
            self.left_out.pop(each.name, None)
        references = self._runs.references()
        if not references:
            self.tried = [Candidate(PLAIN, {}, 1 / speed.token_seconds)]
            return []
        ran = ", ".join(f"{each.name} {each.measured:.1f}" for each in self.tried)
        where = f"{counted(len(references), 'prompt')}, {found.tokens} tokens each"
        self.observer.done(f"really run, tokens/s: {ran} ({where})")
        return references

    def _not_behind(self, candidates: Sequence[Candidate], runs: RealRuns) -> list[Candidate]:
        """Returns the candidates that are worth further runs: the default, and those that were not
        far behind so far."""
        speeds = {each.name: runs.measured(each).speedup or 0.0 for each in candidates}
        floor = BEHIND * max(
            1.0, *(speed for name, speed in speeds.items() if METHODS[name].lossless)
        )
        return [
            each
            for each in candidates
            if speeds[each.name] >= floor or each.name == methods.DEFAULT_METHOD
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
        ran = {each.name for each in self.tried}
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
        rows = [METHODS[name] for name in names if name in SIMPLE]
        kinds = list(dict.fromkeys(["echo", *(row.tuning.cost_kind for row in rows)]))
        costs, failures = measure_costs(
            pair, kinds, references, sampling, deadline.share(COSTS), observer.doing
        )
        if pair is self.pair:
            self.left_out |= {
                row.name: failures[row.tuning.cost_kind]
                for row in rows
                if row.tuning.cost_kind in failures
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
        kind = "model" if "model" in costs else "exit"
        if kind not in costs:
            return simulator, None
        observer.doing("running the draft model on the target's output")
        share = simulator.run(_DRAFTERS[kind], {"policy": "fixed", "k": 1}).acceptance_rate
        if share is not None and pair is self.pair:
            observer.done(
                f"the target accepts {share:.0%} of the "
                f"{'draft' if kind == 'model' else 'exit layer'}'s tokens"
            )
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
            found, _ = self.measure(
                best.pair, in_parallel, best.references, self.request.deadline.share(COSTS)
            )
            best.costs = {**best.costs, **found.costs}
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
            speedups.append(
                1
                / DraftingCosts.of_rounds(
                    costs, min(costs.verification_cost.curves)
                ).time_per_token(share)
            )
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
        that turn out to be far behind are left, and after some such settings their method. Returns
        what was tried, by method; its expected speed is scaled to all prompts.
        """
        tried: dict[str, list[Candidate]] = {name: [] for name in grids}
        failed = set[tuple[str, Value | None]]()  # methods with policies
        plain = [_expected(simulator, PLAIN, {}, some).predicted for some in (None, numbers)]
        queue = _in_turn(grids)
        begin = deadline.left
        for position, (name, settings) in enumerate(queue):
            if name != PLAIN and deadline.left < 0:
                untried = [
                    each
                    for each, _ in queue[position:]
                    if not tried[each] and not prospects.is_given_up(each)
                ]
                self._miss(len(set(untried)), begin / max(1, position))
                break
            if (name, settings.get("policy")) in failed or prospects.is_given_up(name):
                continue
            found = None
            try:
                if prospects.can_reach(name, settings):
                    self.observer.doing(f"simulating {written(name, settings)}")
                    found = self._simulated(simulator, name, settings, numbers, deadline, prospects)
            except SpecgenError as error:
                if name == PLAIN:
                    raise
                self.left_out[name] = error.message
                failed.add((name, settings.get("policy")))
                continue
            if found is not None:
                prospects.note(name, found.predicted / plain[1])
                tried[name].append(replace(found, predicted=found.predicted * plain[0] / plain[1]))
            elif deadline.left >= 0:
                prospects.strike(name)
                if not tried[name] and name not in (each.name for each in self.tried):
                    self.left_out[name] = FAR_BEHIND
        return tried

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
        runs_models = not METHODS[name].tuning.recorded

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
        heads = further_heads(simulator.pair)
        chains = {name: grid(name) for name in names if name in SIMPLE}
        shapes = {
            name: combinations(METHODS[name].tuning.shapes)
            for name in chains
            if METHODS[name].tuning.shapes
        }
        shapes |= {
            name: [
                {**more, **each}
                for each in grid(name)
                for more in ({}, *heads.get(METHODS[name].head, ()))
            ]
            for name in names
            if name in SEARCHED
        }
        prospects = self._prospects(simulator)
        tried = self.search(simulator, chains, deadline.share(SIMULATION), prospects)
        self._report(tried, "setting", "simulated")
        numbers = range(0, prompts, max(1, prompts // SEARCH_PROMPTS))[:SEARCH_PROMPTS]
        if shapes:
            found = self.search(simulator, shapes, deadline.share(SEARCH), prospects, numbers)
            self._report(found, "shape", "of trees, drafts and beams simulated")
            tried = {
                name: [*tried.get(name, ()), *found.get(name, ())] for name in (*tried, *found)
            }
        is_lossy = any(settings for name, settings in tried.items() if not METHODS[name].lossless)
        perplexity = (
            simulator.run(PLAIN, {}, numbers, perplexity=True).perplexity if is_lossy else None
        )
        best = {name: self._best(name, settings, perplexity) for name, settings in tried.items()}
        candidates = [each for each in best.values() if each is not None]
        if perplexity is not None:
            candidates = [
                replace(each, perplexity=perplexity) if each.name == PLAIN else each
                for each in candidates
            ]
        if "selfsd" in names:
            self.observer.doing("searching for layers to skip")
            try:
                candidates.append(tuned_skips(simulator, SKIPS * deadline.left))
            except SpecgenError as error:
                self.left_out["selfsd"] = error.message
        return sorted(candidates, key=lambda candidate: -candidate.predicted)

    def _prospects(self, simulator: Simulator) -> Prospects:
        """Returns what the costs of target passes say of the methods."""
        target = simulator.costs["echo"].verification_cost
        length = min(target.curves)
        return Prospects(
            self.request.names or (), target.at(1, length), lambda tokens: target.at(tokens, length)
        )

    def _report(self, tried: Tried, noun: str, what: str) -> None:
        found = [each for candidates in tried.values() for each in candidates if each.name != PLAIN]
        if found:
            best = max(found, key=lambda each: each.predicted)
            of = counted(len({each.name for each in found}), "method")
            self.observer.done(f"{counted(len(found), noun)} of {of} {what}; best: {best.written}")

    def _best(
        self, name: str, tried: Sequence[Candidate], plain_perplexity: float | None
    ) -> Candidate | None:
        """Returns the best of the candidates `tried`, which are all of one method. None, with the
        reason in `left_out`, if none was tried or if none has a perplexity that the objective
        allows."""
        if not tried:
            if name not in (each.name for each in self.tried):
                self.left_out.setdefault(name, TIME_WAS_SHORT)
            return None
        self.left_out.pop(name, None)  # only its trees failed
        if METHODS[name].lossless:
            return nearest_to_default(tried)
        found = best_lossy(tried, plain_perplexity or 0.0, self.request.objective)
        if found is None:
            limit = self.request.objective.limit(plain_perplexity or 0.0)
            self.left_out[name] = (
                f"no setting had a perplexity of at most {significant(limit)} (--max-perplexity)"
            )
        return found

    def confirm(self, pair: Pair, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Really runs plain decoding and as many of the most promising candidates as the time
        allows.

        Returns one candidate for each method, of the given ones and those that ran before: the
        given one, or the one that ran before if it is the fastest of all that ran. Those that ran
        with this pair have measured speeds.
        """
        runs = self._runs_with(pair)
        deadline = self.request.deadline
        tried = {
            each.written: each
            for each in self.tried
            if runs is self._runs or not METHODS[each.name].uses_draft_model
        }

        def with_speed(candidate: Candidate) -> Candidate:
            found = runs.measured(candidate)
            before = tried.get(candidate.written)
            if found.measured is not None or before is None:
                return found
            return replace(before, predicted=candidate.predicted, perplexity=candidate.perplexity)

        given = {each.written for each in candidates}
        everything = [*candidates, *(each for each in tried.values() if each.written not in given)]
        usable = [with_speed(each) for each in everything if each.written not in self.left_out]
        selected = worth_running(usable, self.request.names or ())
        listed = self._affordable(selected, runs)
        if listed:
            used = len(runs.references())
            prompts = [*self.request.prompts[used:], *self.request.prompts[:used]]  # new ones first
            runs.run(listed, prompts, deadline, MOST_REPEATS)
            self.left_out |= {spec: error.message for spec, error in runs.failures.items()}
            turns = counted(len(runs.prompts(plain_of(candidates))), "prompt")
            self.observer.done(
                f"{counted(len(listed), 'method')} and plain decoding really run, on {turns} in all"
            )
        found = [with_speed(each) for each in everything]
        only_simulated = {each.written for each in selected} - set(runs.failures)
        only_simulated &= {each.written for each in found if each.measured is None}
        if only_simulated:
            names = ", ".join(each.name for each in selected if each.written in only_simulated)
            self.left_out["confirmation"] = f"{TIME_WAS_SHORT}; only simulated: {names}"
            seconds = self._seconds_of(len(only_simulated), runs) / (1 - TRIAL)
            self.missing_seconds += max(0.0, seconds - max(0.0, deadline.left))
        return one_of_each(found)

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


def worth_running(known: Sequence[Candidate], named: Collection[str]) -> list[Candidate]:
    """Returns the most promising candidates to run, by their measured or expected speeds.

    `named` are the methods that the user named. Lossy ones of these, and the default method, are
    returned in any case if they have not run: who names a lossy method wants it for its perplexity,
    so a low expected speed is no reason to leave it out.
    """
    plain = plain_of(known)
    usable = [
        each for each in known if each.name != PLAIN and (each.lossless or each.name in named)
    ]
    speeds = {
        each.written: (each.speedup * plain.predicted if each.speedup else each.predicted)
        for each in usable
    }
    found = shortlist([replace(each, predicted=speeds[each.written]) for each in usable])
    promising = {each.written for each in found}
    missing = [each for each in usable if each.measured is None and each.written not in promising]
    first = [each for each in missing if each.name == methods.DEFAULT_METHOD or not each.lossless]
    return [*first, *found][:SHORTLIST_SIZE]


def run_second_prompt(
    candidates: Sequence[Candidate], runs: RealRuns, prompt: Prompt, deadline: Deadline
) -> None:
    """Runs the default method on a second prompt if it ran on one only, which is too few to compare
    it with plain decoding.

    The fastest of the `candidates` so far runs on it too if it was faster than plain decoding and
    the time is enough for both.
    """
    default = [each for each in candidates if each.name == methods.DEFAULT_METHOD]
    speeds = {each.written: runs.measured(each).speedup or 0.0 for each in candidates}
    fastest = max(candidates, key=lambda each: METHODS[each.name].lossless * speeds[each.written])
    is_fast = fastest not in default and speeds[fastest.written] > 1
    for wanted in ([*default, fastest] if is_fast else default, default):
        if any(len(runs.prompts(each)) == 1 for each in default):
            runs.run(wanted, [prompt], deadline)


def one_of_each(found: Sequence[Candidate]) -> list[Candidate]:
    """Returns one of the candidates of each method, by expected speed, fastest first.

    It is the first one of the method, or another one if that is the fastest lossless one of all
    that ran.
    """
    ran = [
        each for each in found if each.speedup is not None and each.lossless and each.name != PLAIN
    ]
    fastest = max(ran, key=lambda each: each.rank, default=None)
    first: dict[str, Candidate] = {}
    for each in found:
        if each is fastest or each.name not in first:
            first[each.name] = each
    return sorted(first.values(), key=lambda each: -each.predicted)


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
    # stable
    numbered.sort(key=lambda each: (each[0] > 0 and not METHODS[each[1]].lossless, each[0]))
    return [(name, settings) for _, name, settings in numbered]


def _defaults(name: str) -> GivenSettings:
    """Returns the method's default settings, written as in its grid if they are in it."""
    first = grid(name)[0] if name in SIMPLE or name in SEARCHED else {}
    return {} if distance_from_defaults(name, first) else first


def _expected(
    simulator: Simulator,
    name: str,
    settings: GivenSettings,
    numbers: Sequence[int] | None = None,
    goes_on: Callable[[Figures], bool] = lambda _: True,
) -> Candidate:
    """Simulates the method on the prompts with these `numbers` (None: all) and returns it with its
    expected speed."""
    found = simulator.run(name, settings, numbers, goes_on=goes_on)
    return Candidate(name, settings, found.tokens_per_second or 0.0, perplexity=found.perplexity)


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
    kept = [each for each in tried if each.perplexity is not None and each.perplexity <= limit]

    def rank(candidate: Candidate) -> tuple[float, float]:
        perplexity = round(candidate.perplexity or 0.0, 3) if objective.lowest_perplexity else 0.0
        return -perplexity, candidate.predicted

    return max(kept, key=rank, default=None)


def tuned_skips(simulator: Simulator, seconds: float) -> Candidate:
    """Searches for about `seconds` for the layers that Self-SD skips in drafting, and returns it
    with the fastest set found.

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
    return sum(each.seconds for each in references) / sum(
        len(each.token_ids) for each in references
    )


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
        widths = {
            width: costs["echo"].verification_cost.at(width, length) for width in range(1, 17)
        }
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
