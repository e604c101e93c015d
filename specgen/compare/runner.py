"""Methods measured against one another on one pair: runs in turn, prompt by prompt, so that a drifting machine is fair to all.

Plain decoding comes first in every turn. Each method runs once before anything is counted; caches are forgotten before each run.
Nothing is written, shown or judged while a run is timed.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from specgen.compare.baselines import Baseline, baseline_settings
from specgen.compare.method_specs import BASELINE, MethodSpec
from specgen.compare.prompts import Prompt
from specgen.compare.results import Results, Run
from specgen.compare.verdict import judge
from specgen.energy import energy_meter_for
from specgen.environment import versions
from specgen.errors import RunError, SpecgenError, is_out_of_memory
from specgen.traces import trace_writer as traces
from specgen.traces.summary import Summary
from specgen.traces.trace_reader import TracedRound, TracedRun
from specgen.types import Round, SamplingParams

if TYPE_CHECKING:
    from specgen.pair import Pair


@dataclass(frozen=True, slots=True)
class BenchmarkConfig:
    """What is to be measured. `record` asks for figures of both distributions in the trace; perplexity is told where it is asked
    for or a method is lossy, and then of all methods."""

    specs: Sequence[MethodSpec]
    prompts: Sequence[Prompt]
    repeats: int
    sampling: SamplingParams
    chat: bool = False
    record: bool = False
    perplexity: bool = False
    energy: bool = False

    @property
    def tells_perplexity(self) -> bool:
        return self.perplexity or not all(spec.lossless for spec in self.specs)


@dataclass(frozen=True, slots=True)
class BenchmarkStep:
    """What is run next, None at the end, and how far we are. `seconds_left` is a guess from the runs so far."""

    spec: MethodSpec | None
    prompt: Prompt | None
    warming_up: bool
    done: int
    total: int
    seconds_left: float | None


@dataclass(frozen=True, slots=True)
class _Finished:
    """A run as a trace has it."""

    start: Mapping[str, Any]
    rounds: Sequence[Round]
    line: Mapping[str, Any]


class Runner:
    """Fills `results`. `write` gets each finished run's lines; `held` is where an interruption has to wait."""

    def __init__(
        self,
        pair: Pair,
        contest: BenchmarkConfig,
        results: Results,
        write: Callable[[Iterator[Mapping[str, Any]]], None] | None = None,
        held: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._pair, self._contest, self.results, self._write, self._held = pair, contest, results, write, held
        given = contest.sampling.seed
        self._seed = secrets.randbits(32) if given is None else given
        self._seconds: dict[str, list[float]] = defaultdict(list)  # of whole runs on the clock, warm-up included, for the guess
        self._ids: dict[int, list[int]] = {}
        self._meter = energy_meter_for(pair.all_devices) if contest.energy else None

    def check(self) -> None:
        """Refuse a prompt that plain decoding cannot go on from, before anything is run. Raises SpecgenError naming it."""
        for prompt in self._contest.prompts:
            if not prompt.earlier:
                try:
                    self._limit(self.prompt_ids(prompt))
                except SpecgenError as error:
                    raise type(error)(f"{prompt.label}: {error.message}", error.hint) from error

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Later turns stand behind plain decoding's answers to the earlier ones, for all methods alike."""
        if prompt.index not in self._ids:
            first = prompt.index - len(prompt.earlier)
            answers = [str(self.results.runs[BASELINE, first + turn, 0].line["text"]) for turn in range(len(prompt.earlier))]
            before = list(zip(prompt.earlier, answers, strict=True))
            if self._contest.chat:
                ids = self._pair.tokenizer.chat(prompt.text, None, before)
            else:
                said = "".join(f"{question}{answer.rstrip()}\n\n" for question, answer in before)
                ids = self._pair.tokenizer.encode(said + prompt.text)
            self._ids[prompt.index] = ids
        return self._ids[prompt.index]

    def steps(self) -> Iterator[BenchmarkStep]:
        """Yields before each run, and once at the end; the run happens when the next step is asked for."""
        todo = [
            (spec, prompt, repeat)
            for repeat in range(self._contest.repeats)
            for prompt in self._contest.prompts
            for spec in self._contest.specs
            if (spec.written, prompt.index, repeat) not in self.results.runs
        ]
        for spec in [spec for spec in self._contest.specs if any(spec is other for other, _, _ in todo)]:
            yield self._step(todo, 0, spec, self._contest.prompts[0], warming_up=True)
            self._attempt(spec, self._contest.prompts[0], 0)
        for position, (spec, prompt, repeat) in enumerate(todo):
            if spec.written in self.results.failures or prompt.index in self.results.skipped:
                continue
            yield self._step(todo, position, spec, prompt)
            finished = self._attempt(spec, prompt, repeat)
            if finished is not None:
                with self._held():
                    self._record(spec, prompt, repeat, finished)
        yield self._step(todo, len(todo), None, None)

    def _step(
        self,
        todo: Sequence[tuple[MethodSpec, Prompt, int]],
        position: int,
        spec: MethodSpec | None,
        prompt: Prompt | None,
        *,
        warming_up: bool = False,
    ) -> BenchmarkStep:
        results = self.results
        live = [
            (entry[0].written, at >= position)
            for at, entry in enumerate(todo)
            if entry[0].written not in results.failures and entry[1].index not in results.skipped
        ]
        known = {written: sum(seconds) / len(seconds) for written, seconds in self._seconds.items()}
        longest = max(known.values(), default=None)
        left = None if longest is None else sum(known.get(written, longest) for written, is_ahead in live if is_ahead)
        done = sum(not is_ahead for _, is_ahead in live)
        return BenchmarkStep(spec, prompt, warming_up, done, len(live), left)

    def _attempt(self, spec: MethodSpec, prompt: Prompt, repeat: int) -> _Finished | None:
        """One run; None, with the reason kept, where this method or this prompt cannot be had."""
        if prompt.index in self.results.skipped or spec.written in self.results.failures:
            return None
        sampling = replace(self._contest.sampling, seed=(self._seed + repeat) % 2**63)
        start = time.perf_counter()
        try:
            ids = self.prompt_ids(prompt)
            finished = self._rival(spec, ids, sampling) if spec.is_rival else self._own(spec, ids, sampling)
        except (SpecgenError, RuntimeError, MemoryError) as error:
            self._fail(spec, prompt, error)
            return None
        self._seconds[spec.written].append(time.perf_counter() - start)
        position = {"spec": spec.written, "prompt_index": prompt.index, "category": prompt.category, "repeat": repeat}
        return replace(finished, start={**finished.start, **position, "prompt_name": prompt.name})

    def _fail(self, spec: MethodSpec, prompt: Prompt, error: Exception) -> None:
        """Keep why a method cannot run, and go on; what is no mistake of the user's or machine's is raised again."""
        if is_out_of_memory(error):
            error = RunError("out of memory", "Leave this method out, or take a smaller -n")
        if not isinstance(error, SpecgenError):
            raise error
        if spec.written != BASELINE:
            self.results.failures[spec.written] = error
        elif prompt.earlier and not isinstance(error, RunError):
            self.results.skipped.add(prompt.index)
        else:
            raise error

    def _own(self, spec: MethodSpec, ids: list[int], sampling: SamplingParams) -> _Finished:
        self._pair.prepare(ids, spec.name, sampling, **spec.settings)
        plan = self._pair.plan(ids, spec.name, sampling, record=self._contest.record, **spec.settings)
        self._pair.forget()
        summary = Summary(spec.name)
        with self._metered(summary):
            rounds = list(plan.run.rounds())
        for round_ in rounds:
            summary.add(round_)
        self._add_likelihood(summary, ids)
        text = self._pair.text(plan, summary.token_ids)
        counts = {"drafts": summary.drafts, "rejections": summary.rejections}
        line = summary.as_dict(text, plan.run.finish_reason or "length") | counts
        return _Finished(traces.start_line(plan.info), rounds, line)

    def _rival(self, spec: MethodSpec, ids: list[int], sampling: SamplingParams) -> _Finished:
        settings = baseline_settings(spec.name, spec.settings)
        rival = Baseline(self._pair, spec.name, settings)
        plan = self._pair.plan(ids, BASELINE, sampling)
        counted = Summary(spec.name)
        with self._metered(counted):
            told = rival.run(ids, plan.run.limit, sampling, plan.seed)
        start = traces.start_line(plan.info) | {"method": spec.name, "settings": settings, "lossless": True}
        if spec.name == "transformers-assisted" and self._pair.draft is not None:
            start["draft"] = self._pair.draft.name
        counted.include(told)
        self._add_likelihood(counted, ids)
        line = counted.as_dict(self._pair.text(plan, told["token_ids"]), told["finish_reason"])
        return _Finished(start, (), line | {"phase_seconds": None, "drafts": told["drafts"]})

    @contextmanager
    def _metered(self, summary: Summary) -> Iterator[None]:
        """Count the energy of what happens inside, where that was asked for."""
        if self._meter is None:
            yield
            return
        self._meter.start()
        yield
        summary.add_energy(self._meter.stop())

    def _add_likelihood(self, summary: Summary, prompt_ids: list[int]) -> None:
        if self._contest.tells_perplexity:
            summary.add_log_likelihood(self._pair.log_likelihood(prompt_ids, summary.token_ids))

    def _limit(self, ids: list[int]) -> int:
        return self._pair.plan(ids, BASELINE, self._contest.sampling).run.limit

    def _record(self, spec: MethodSpec, prompt: Prompt, repeat: int, finished: _Finished) -> None:
        if self._write is not None:
            self._write(self._lines(finished))
        if repeat == 0 and prompt is self._contest.prompts[0]:
            self.results.examples[spec.written] = self._traced(finished)
        self.add(spec, prompt, repeat, Run.of(finished.line, finished.rounds))

    def _lines(self, finished: _Finished) -> Iterator[Mapping[str, Any]]:
        yield finished.start
        for round_ in finished.rounds:
            yield traces.round_line(round_, self._pair.tokenizer.text_of, record=self._contest.record)
        yield traces.summary_line(finished.line)

    def _traced(self, finished: _Finished) -> TracedRun:
        """The run as a reader of its trace would have it."""
        text_of = self._pair.tokenizer.text_of
        rounds = []
        for round_ in finished.rounds:
            texts = tuple(text_of([token]) for token in round_.draft.tokens)
            own = None if round_.verdict.token is None else text_of([round_.verdict.token])
            rounds.append(TracedRound(round_, texts, own))
        return TracedRun(finished.start, 0, rounds, finished.line)

    def add(self, spec: MethodSpec, prompt: Prompt, repeat: int, run: Run) -> None:
        """Count a finished run, and judge its output where that can be done."""
        results = self.results
        key = (spec.written, prompt.index, repeat)
        results.runs[key] = run
        reference = results.runs.get((BASELINE, prompt.index, repeat))
        if not results.greedy or not spec.lossless or spec.written == BASELINE or reference is None:
            return
        answers = reference.line["token_ids"], run.line["token_ids"]
        difference = judge(self._pair, prompt.index, repeat, self.prompt_ids(prompt), *answers)
        if difference is not None:
            results.differences[key] = difference


def settings_of(contest: BenchmarkConfig, pair: Pair) -> dict[str, Any]:
    """What has to be the same for runs to be comparable, under the names that a trace's start line has."""
    sampling = {name: value for name, value in asdict(contest.sampling).items() if name not in ("seed", "stop")}
    return {
        "target": pair.target.name,
        "device": str(pair.target.device),
        "dtype": pair.target.dtype_name,
        "versions": versions(),
        "sampling": sampling,
    }
