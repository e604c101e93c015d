"""Tuning from its first measurement to its answer, within the time that it is given.

Costs, behaviour and replay say what every method should give; the best of them are then really run, in turn with plain decoding,
and the answer is theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from specgen import methods
from specgen.compare.method_specs import parse_spec
from specgen.compare.results import Results, method_results
from specgen.compare.runner import BenchmarkConfig, Runner
from specgen.cost_model import SpeedupModel
from specgen.errors import SpecgenError
from specgen.tuning.candidates import REPLAYED, RERUN, Given, grid, in_turn, trees
from specgen.tuning.outcome import PLAIN, Candidate, TuningOutcome, better, judged, nearest_to_default, shortlist
from specgen.tuning.recorded_drafts import RecordedDrafts, Recorder, ReferenceOutput, acceptances, record_answer
from specgen.tuning.round_timing import LENGTHS, LOOKING, ParallelProbe, RoundProbe
from specgen.tuning.settings_search import search
from specgen.tuning.simulated_runs import SimulatedRuns
from specgen.tuning.simulation import Behaviour, simulate
from specgen.tuning.skip_tuning import tuned_skips
from specgen.types import SamplingParams

if TYPE_CHECKING:
    from specgen.compare.prompts import Prompt
    from specgen.pair import Pair

T = TypeVar("T")
ANSWERS, COSTS, REPLAY, SKIPS = 0.15, 0.28, 0.2, 0.4  # shares of the time that is left when they begin
RERUNS, ASKED_RERUNS, RERUN_ANSWERS = 0.2, 0.6, 4  # the second where nothing else is asked for
FEWEST_PROMPTS, SHORT = 2, 48
_LADDERS = (LENGTHS, (1, 2, 4, 8, 15), (1, 4, 12), (2, 8))
_SLICES = 2


class TuningObserver(Protocol):
    """Whoever wants to know how it goes. Nothing is timed while it is told."""

    def done(self, what: str, seconds: float) -> None: ...

    def doing(self, what: str, seconds_left: float) -> None: ...


@dataclass(frozen=True, slots=True)
class TuningRequest:
    """What is to be tuned. `deadline` is by `time.perf_counter`; `names` None are all methods that can be."""

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    deadline: float
    names: Sequence[str] | None = None
    chat: bool = False


class Tuner:
    """One tuning of a pair."""

    def __init__(self, pair: Pair, wanted: TuningRequest, watch: TuningObserver) -> None:
        self._pair, self._wanted, self._watch = pair, wanted, watch
        seed = wanted.sampling.seed
        self._sampling = replace(wanted.sampling, seed=0 if seed is None else seed)
        self.left_out: dict[str, str] = {}
        wanted_ones = [name for name in methods.METHODS if self._is_wanted(name)]
        self.names = [name for name in wanted_ones if name not in RERUN]
        self.rerun = [name for name in wanted_ones if name in RERUN]

    @property
    def _left(self) -> float:
        return self._wanted.deadline - time.perf_counter()

    def run(self) -> TuningOutcome:
        """Raises SpecgenError where not even plain decoding can go on from the prompts."""
        if "pearl" in self.names:  # a process that starts beside what is timed would slow it
            self._watch.doing("waiting for the draft's process", self._left)
            try:
                self._pair.prepare([1], "pearl", SamplingParams(max_new_tokens=1), window=1)
            except SpecgenError as error:
                self._leave_out("parallel", error.message)
        answers = self._timed(self._answers)
        behaviour = self._behaviour(answers)
        found = self._timed(lambda: self._replayed(behaviour))
        found = self._timed(lambda: self._with_reruns(behaviour, found))
        found = self._timed(lambda: self._with_skips(answers, found))
        found = self._timed(lambda: self._confirmed(found))
        return self._outcome(behaviour, found)

    def _timed(self, step: Callable[[], tuple[T, str]]) -> T:
        start = time.perf_counter()
        result, said = step()
        if said:
            self._watch.done(said, time.perf_counter() - start)
        return result

    # what can be tuned

    def _is_wanted(self, name: str) -> bool:
        method = methods.METHODS[name]
        if self._wanted.names is not None and name not in (PLAIN, *self._wanted.names):
            return False
        if method.needs_draft_model and self._pair.draft is None:
            self.left_out[name] = "there is no draft model"
        elif method.needs_exit_layer and self._pair.exit_layer is None:
            self.left_out[name] = str(self._pair.exit_refusal or "there is no exit layer (specgen tune --train)")
        elif name == "eesd-cali" and not self._has_predictor:
            self.left_out[name] = "the exit layer has no predictor"
        elif name == "selfsd" and self._wanted.names is not None:
            return False  # no replay: its layers are searched for
        elif name == "selfsd":
            self.left_out[name] = "its layers are searched for where it is asked for (--methods selfsd)"
        else:
            return name in REPLAYED or name in RERUN  # eesd is one of two others
        return False

    @property
    def _has_predictor(self) -> bool:
        return self._pair.exit_layer is not None and self._pair.exit_layer.predictor is not None

    def _kinds(self) -> list[str]:
        return list(dict.fromkeys(methods.METHODS[name].cost_kind for name in self.names))

    # what the target says by itself

    def _answers(self) -> tuple[list[ReferenceOutput], str]:
        deadline = time.perf_counter() + ANSWERS * self._left
        answers: list[ReferenceOutput] = []
        for prompt in self._wanted.prompts:
            if len(answers) >= FEWEST_PROMPTS and time.perf_counter() > deadline:
                break
            self._watch.doing(f"plain decoding, prompt {len(answers) + 1} of {len(self._wanted.prompts)}", self._left)
            try:
                if not answers:
                    record_answer(self._pair, self._ids(prompt), self._sampling)  # warms up
                answers.append(record_answer(self._pair, self._ids(prompt), self._sampling))
            except SpecgenError as error:
                raise type(error)(f"{prompt.label}: {error.message}", error.hint) from error
        tokens, seconds = sum(len(answer.token_ids) for answer in answers), sum(answer.seconds for answer in answers)
        return answers, f"plain decoding gives {tokens / seconds:.1f} tokens/s on {_counted(len(answers), 'prompt')}"

    def _ids(self, prompt: Prompt) -> list[int]:
        tokenizer = self._pair.tokenizer
        return tokenizer.chat(prompt.text, None) if self._wanted.chat else tokenizer.encode(prompt.text)

    # costs and behaviour

    def _behaviour(self, answers: Sequence[ReferenceOutput]) -> Behaviour:
        probes = self._timed(lambda: self._probed(answers))
        tapes = self._timed(lambda: self._taped(answers))
        slower = next((probe.slowdown for probe in probes.values() if isinstance(probe, ParallelProbe)), 1.0)
        costs = {kind: probe.costs for kind, probe in probes.items()}
        self.names = [name for name in self.names if methods.METHODS[name].cost_kind in costs]
        return Behaviour(answers, tapes, costs, slower)

    def _probed(self, answers: Sequence[ReferenceOutput]) -> tuple[dict[str, RoundProbe | ParallelProbe], str]:
        """Each kind of round timed in turn, more than once, so that a drifting machine is fair to all."""
        probes = self._probes(answers)
        seconds = COSTS * self._left / (len(probes) * _SLICES)
        for turn in range(_SLICES):
            for kind, probe in list(probes.items()):
                self._watch.doing(f"timing rounds ({_KINDS[kind]})", self._left)
                try:
                    probe.run(seconds)
                except SpecgenError as error:
                    if kind == "echo":
                        raise
                    del probes[kind]
                    self._leave_out(kind, error.message)
            if turn == 0 and self._left < 0:
                break
        judging = probes["echo"].costs.verification_cost
        length = min(judging.curves)
        passes = ", ".join(f"{1e3 * judging.at(width, length):.3g} for {width}" for width in (6, 16))
        return probes, f"a target pass takes {1e3 * judging.at(1, length):.3g} ms for 1 token, {passes}"

    def _probes(self, answers: Sequence[ReferenceOutput]) -> dict[str, RoundProbe | ParallelProbe]:
        behind = self._contexts(answers)
        a_pass = sum(answer.seconds for answer in answers) / sum(len(answer.token_ids) for answer in answers)
        kinds = self._kinds()
        room = COSTS * self._left / (2 * len(kinds) * _SLICES * len(behind))  # seconds of a ladder
        lengths = next((steps for steps in _LADDERS if a_pass * (4 * len(steps) + sum(steps)) < room), _LADDERS[-1])
        given = (self._pair, behind, self._sampling, lengths)
        makers: Mapping[str, Callable[[], RoundProbe | ParallelProbe]] = {
            "echo": lambda: _probe(*given, "ar", lengths=(0, *lengths), echo=True),
            MODEL.cost_kind: lambda: _probe(*given, "sd", looks=LOOKING),
            EXIT.cost_kind: lambda: _probe(
                *given, "eesd-fixed", looks=frozenset({"predicted_acceptance"} if self._has_predictor else ())
            ),
            "parallel": lambda: ParallelProbe(self._pair, behind, self._sampling),
        }
        return {kind: makers[kind]() for kind in kinds}

    def _contexts(self, answers: Sequence[ReferenceOutput]) -> list[list[int]]:
        """A short beginning, and as much as the longest prompt and its answer make."""
        prompts = sorted((answer.prompt_ids for answer in answers), key=len)
        limits = [model.context_limit for model in (self._pair.target, self._pair.draft) if model is not None]
        most = max(1, min(limits) // 2)
        wanted = len(prompts[-1]) + len(answers[0].token_ids)
        everything = [token for ids in prompts[::-1] for token in ids]
        short, long = prompts[0][: min(SHORT, most)], everything[: min(wanted, most)]
        return [short, long] if len(long) > 2 * len(short) else [short]

    def _taped(self, answers: Sequence[ReferenceOutput]) -> tuple[dict[str, list[RecordedDrafts]], str]:
        """What each drafter would have said along the answers."""
        tapes: dict[str, list[RecordedDrafts]] = {}
        target, draft = self._pair.runners
        drafters = {methods.METHODS[name].drafter for name in self.names}
        self._watch.doing("recording what the draft would say", self._left)
        recorders = {}
        if MODEL in drafters and draft is not None:
            recorders[MODEL.name] = Recorder(target, draft, self._sampling)
        if EXIT in drafters and self._pair.exit_layer is not None:
            early = self._pair.early_exit(methods.METHODS["eesd"])
            predictor = self._pair.exit_layer.predictor
            recorders[EXIT.name] = Recorder(early.target, early.draft, self._sampling, predictor=predictor)
        for drafter, recorder in recorders.items():
            try:
                tapes[drafter] = [recorder.tape(answer) for answer in answers]
            except SpecgenError as error:
                self._leave_out(drafter, error.message)
        said = [f"{rate:.0%} of {_DRAFTERS[kind]} tokens" for kind, rate in acceptances(tapes).items() if rate is not None]
        return tapes, f"the target accepts {' and '.join(said)}" if said else ""

    def _leave_out(self, kind: str, why: str) -> None:
        gone = [name for name in self.names if kind in (methods.METHODS[name].cost_kind, methods.METHODS[name].drafter.name)]
        self.left_out |= dict.fromkeys(gone, why)
        self.names = [name for name in self.names if name not in gone]

    # simulate

    def _replayed(self, behaviour: Behaviour) -> tuple[list[Candidate], str]:
        """The best settings of each method, by their expected speed. Where time is short, the last settings are left out."""
        deadline = time.perf_counter() + REPLAY * self._left
        found: dict[str, list[Candidate]] = {}
        tried = 0
        for position, (name, given) in enumerate(in_turn({name: grid(name) for name in self.names})):
            if position % 20 == 0:
                self._watch.doing(f"replaying, {tried} settings so far", self._left)
            if name in found and time.perf_counter() > deadline:
                self.left_out.setdefault("some settings", f"time was short: {tried} were replayed")
                break
            found.setdefault(name, []).append(self._expected(behaviour, name, given))
            tried += 1
        ranked = sorted(map(nearest_to_default, found.values()), key=lambda entry: -entry.predicted)
        return ranked, f"{_counted(tried, 'setting')} of {_counted(len(found), 'method')} replayed; best: {ranked[0].written}"

    def _expected(self, behaviour: Behaviour, name: str, given: Given) -> Candidate:
        summary = simulate(behaviour, name, given, has_predictor=self._has_predictor)
        speed = summary.tokens_per_second or 0.0
        return Candidate(name, given, methods.METHODS[name].lossless, speed, 1, summary.acceptance_rate)

    def _with_reruns(self, behaviour: Behaviour, found: list[Candidate]) -> tuple[list[Candidate], str]:
        """Draft trees, several drafts, beams: run again on a few of the answers, against plain decoding on the same ones."""
        with_trees = "sd" in self.names and any(entry.name == "sd" for entry in found)
        grids = {**({"sd": trees()} if with_trees else {}), **{name: grid(name) for name in self.rerun}}
        if not grids:
            return found, ""
        some = behaviour.answers[:RERUN_ANSWERS]
        plain = self._expected(replace(behaviour, answers=some), PLAIN, {}).predicted
        usual = next(entry for entry in found if entry.name == PLAIN).predicted
        share = ASKED_RERUNS if self.names == [PLAIN] else RERUNS
        searched = search(
            SimulatedRuns(self._pair, some, self._sampling, behaviour.costs["echo"]),
            grids,
            time.perf_counter() + share * self._left,
            lambda what: self._watch.doing(f"running {what} again", self._left),
        )
        self.left_out |= {f"{name} with width" if name == "sd" else name: why for name, why in searched.left_out.items()}
        scaled = {name: replace(entry, predicted=entry.predicted * usual / plain) for name, entry in searched.best.items()}
        made = [
            better(entry, scaled[entry.name], searched.tried[entry.name]) if entry.name in scaled else entry for entry in found
        ]
        made += [replace(scaled[name], tried=searched.tried[name]) for name in self.rerun if name in scaled]
        tried = searched.tried.total()
        if not tried:
            return found, ""
        shapes = f"{_counted(tried, 'shape')} of trees, drafts and beams run again"
        said = f"{shapes}; best: {max(scaled.values(), key=lambda entry: entry.predicted).written}" if scaled else shapes
        return sorted(made, key=lambda entry: -entry.predicted), said

    def _with_skips(self, answers: Sequence[ReferenceOutput], found: list[Candidate]) -> tuple[list[Candidate], str]:
        """Where layer skipping is asked for: the layers to skip, searched for by real runs, whose speed stands for it."""
        if self._wanted.names is None or "selfsd" not in self._wanted.names:
            return found, ""
        self._watch.doing("searching for layers to skip", self._left)
        try:
            made = tuned_skips(self._pair, answers, SKIPS * self._left)
        except SpecgenError as error:
            self.left_out["selfsd"] = error.message
            return found, ""
        ranked = sorted([*found, made], key=lambda entry: -entry.predicted)
        return ranked, f"{_counted(made.tried, 'set')} of layers to skip really run; best: {made.written}"

    # confirmation

    def _confirmed(self, found: list[Candidate]) -> tuple[list[Candidate], str]:
        """The best ones and plain decoding really run, in turn, for as long as there is time."""
        asked = self._wanted.names or ()
        rivals = [entry for entry in found if entry.name != PLAIN and (entry.lossless or entry.name in asked)]
        rivals, sampling = self._affordable(found, shortlist(rivals))
        if not rivals:
            return found, ""
        specs = [parse_spec(PLAIN), *(parse_spec(entry.written) for entry in rivals)]
        results = Results(specs, self._wanted.prompts, self._sampling.greedy)
        contest = BenchmarkConfig(specs, self._wanted.prompts, 50, sampling, self._wanted.chat)
        for step in Runner(self._pair, contest, results).steps():
            name = "" if step.spec is None else step.spec.written
            self._watch.doing(f"really running {name}", self._left)
            if self._left < sampling.max_new_tokens * self._a_token(found, rivals):
                break
        measured = {result.spec.written: result.overall for result in method_results(results)}
        turns = len(results.complete_repeats())
        if not turns:
            return found, ""
        made = []
        for entry in found:
            figures = measured.get(PLAIN if entry.name == PLAIN else entry.written)
            if figures is not None and figures.summary.new_tokens:
                told = (figures.summary.tokens_per_second, figures.speedup, figures.low, figures.high)
                entry = replace(entry, measured=told[0], speedup=told[1], low=told[2], high=told[3])
            made.append(entry)
        for written_as, error in results.failures.items():
            self.left_out[written_as] = error.message
        length = f"{_counted(turns, 'turn')} of up to {sampling.max_new_tokens} tokens"
        return made, f"{_counted(len(rivals), 'method')} and plain decoding really run, {length}"

    def _affordable(self, found: Sequence[Candidate], rivals: list[Candidate]) -> tuple[list[Candidate], SamplingParams]:
        """As many as can be run on a few prompts at least, warm-up included, in the time that is left. Answers shorter by up to a
        half are the price for runs behind all prompts: what is fast behind a few need not be behind the others."""
        tokens = self._sampling.max_new_tokens
        shortest = max(1, tokens // 2)

        def fitting(prompts: int) -> float:
            return self._left / ((1 + prompts) * (len(rivals) + 1) * self._a_token(found, rivals))

        while rivals and fitting(FEWEST_PROMPTS) < shortest:
            rivals = rivals[:-1]
        if not rivals:
            self.left_out["confirmation"] = "time was short: the figures are expected ones (a larger --budget helps)"
            return rivals, self._sampling
        tokens = min(tokens, max(shortest, int(fitting(len(self._wanted.prompts)))))
        return rivals, replace(self._sampling, max_new_tokens=tokens)

    def _a_token(self, found: Sequence[Candidate], rivals: Sequence[Candidate]) -> float:
        """Seconds of the slowest of them, with some to spare."""
        return 1.2 / min(entry.predicted for entry in found if entry in rivals or entry.name == PLAIN)

    # the answer

    def _outcome(self, behaviour: Behaviour, found: list[Candidate]) -> TuningOutcome:
        plain = next(entry for entry in found if entry.name == PLAIN)
        draft = behaviour.costs.get("model", behaviour.costs.get("exit"))
        speedup_model = None
        if draft is not None:
            length = min(draft.verification_cost.curves)
            echo = behaviour.costs["echo"].verification_cost
            widths = {width: echo.at(width, length) for width in range(1, 17)}
            speedup_model = SpeedupModel(widths, draft.draft_cost.at(4, length) / 4, length)
        rates = [rate for rate in acceptances(behaviour.tapes).values() if rate is not None]
        costs = {kind: cost.as_dict() for kind, cost in behaviour.costs.items()}
        acceptance, count = rates[0] if rates else None, len(behaviour.answers)
        outcome = TuningOutcome(
            found, plain, "does not pay", self._sampling, count, costs, speedup_model, acceptance, self.left_out
        )
        verdict = judged(outcome.best, plain)
        chosen = outcome.best if verdict == "pays" else plain
        return replace(outcome, chosen=chosen, verdict=verdict)


_KINDS = {"echo": "the target alone", "parallel": "pearl"} | {kind.cost_kind: f"with {kind.title}" for kind in (MODEL, EXIT)}
_DRAFTERS = {kind.name: f"{kind.title}'s" for kind in (MODEL, EXIT)}


def _probe(
    pair: Pair,
    behind: Sequence[list[int]],
    sampling: SamplingParams,
    usual: Sequence[int],
    method: str,
    *,
    lengths: Sequence[int] | None = None,
    looks: frozenset[str] = frozenset(),
    echo: bool = False,
) -> RoundProbe:
    return RoundProbe(pair, method, behind, sampling, lengths=lengths or usual, looks=looks, echo=echo)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
