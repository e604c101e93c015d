"""Measures the methods of a comparison on one pair of models (target and draft). Each prompt is run
by all methods in turn, so that changes of the machine's speed affect all methods alike.

Plain decoding comes first for every prompt. Each method has one warm-up run that is not counted,
and key-value caches are cleared before each run. Nothing is written, displayed or compared while a
run is timed. The finished runs in the trace of an interrupted comparison are not repeated.

Each prompt and repeat has a seed of its own, derived from --seed, so that a length policy that
draws random numbers (Thompson sampling) and sampled tokens draw afresh: the repeats are independent
measurements. All methods share this seed on a prompt and repeat. It does not depend on which
prompts and methods are measured, so a comparison with the same --seed makes the same runs, and so
does `specgen generate --seed` with the seed in a run's trace (`sampling.seed`). Without --seed, the
seeds derive from a random one; --resume takes those that are recorded.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from specgen.base.errors import RunError, SpecgenError, is_out_of_memory
from specgen.base.interrupts import interrupts
from specgen.base.machine import versions
from specgen.base.measuring import energy_meter_for
from specgen.base.seeds import derive_seed
from specgen.base.types import FILTERS, Round, SamplingParams
from specgen.compare.method_specs import REFERENCE, MethodSpec, parse_spec
from specgen.compare.prompts import ListedPrompt
from specgen.compare.results import BenchmarkConfig, Results, Run
from specgen.compare.verdict import judge
from specgen.methods import failure_outside
from specgen.methods.base import RESERVED
from specgen.pair import records
from specgen.pair.figures import Figures
from specgen.pair.prompts import messages, output_text, sampling_with
from specgen.traces.reader import TracedRound, TracedRun, read_trace

if TYPE_CHECKING:
    from specgen.pair.pair import Pair
    from specgen.traces.writer import TraceWriter

# keys that `compare` adds to the lines of a trace, and those that results need
_OF_START = ("spec", "prompt_index", "repeat")
_OF_SUMMARY = ("rounds", "drafts", "drafted", "accepted", "seconds")


@dataclass(frozen=True, slots=True)
class RecordedComparison:
    """The finished runs in the trace `path`, each as it was recorded (`TracedRun`) and as a result
    (`Run`). `end` is the byte offset after the last complete line, where a resumed comparison
    continues to write.

    Only the recorded runs of the first repeat on the trace's first prompt keep their rounds.
    """

    path: Path
    runs: Sequence[tuple[TracedRun, Run]]
    end: int

    def specs(self) -> list[MethodSpec]:
        """Returns the methods in the trace: plain decoding, then the others in the order of their
        first runs.

        Raises SpecgenError as `parse_spec`.
        """
        written = [REFERENCE, *(str(run.start["spec"]) for run, _ in self.runs)]
        return [parse_spec(method, is_named=False) for method in dict.fromkeys(written)]

    def has(self, figure: str) -> bool:
        """Whether any run's summary line has a value for the key `figure`, such as `perplexity`."""
        return any(run.line.get(figure) is not None for _, run in self.runs)


def read_comparison(path: Path) -> RecordedComparison:
    """Reads the finished runs from a trace that `specgen compare` wrote. Raises SpecgenError for
    any other file."""
    runs: list[tuple[TracedRun, Run]] = []
    end = 0
    for traced in read_trace(path):
        end = traced.end
        summary = traced.summary
        finished = summary is not None and traced.finish_reason != "interrupted"
        missing = [key for key in _OF_START if traced.start.get(key) is None]
        if finished and summary is not None:
            missing += [key for key in _OF_SUMMARY if key not in summary]
        if missing:
            where = f"{path}, the run on line {traced.first_line:,}"
            raise SpecgenError(
                f"{where} has no {missing[0]}",
                "Name a trace that specgen compare --trace wrote, unchanged",
            )
        if not finished:
            continue
        run = Run.of(traced)
        first_prompt = runs[0][0].start["prompt_index"] if runs else traced.start["prompt_index"]
        if traced.start["repeat"] or traced.start["prompt_index"] != first_prompt:
            traced.rounds.clear()
        runs.append((traced, run))
    return RecordedComparison(path, runs, end)


@dataclass(frozen=True, slots=True)
class BenchmarkStep:
    """The progress of a comparison before its next run. `spec` and `prompt` are the method and the
    prompt of this run, None at the end. If `warming_up`, this run is a warm-up, which is not
    counted. `done` and `total` count runs. `seconds_left` is an estimate from the runs so far, None
    if there are none."""

    spec: MethodSpec | None
    prompt: ListedPrompt | None
    warming_up: bool
    done: int
    total: int
    seconds_left: float | None


class Runner:
    """Runs a comparison and fills `results`. Each finished run is written to `trace`, if there is
    one; an interruption (Ctrl-C) is delayed until it is recorded completely."""

    def __init__(
        self, pair: Pair, config: BenchmarkConfig, trace: TraceWriter | None = None
    ) -> None:
        # an answer ends as `Pair.request` ends one
        turn_end = pair.tokenizer.turn_end if config.chat else ""
        config = replace(config, sampling=sampling_with(config.sampling, {}, pair.target, turn_end))
        self.pair = pair
        self.config = config
        self._trace = trace
        self.results = Results(config)
        self.deadline = math.inf  # of `time.perf_counter`; no prompt is begun after it
        self.is_cut = False  # whether the deadline ended the comparison
        self.warm_up_tokens = config.sampling.max_new_tokens  # the most of a warm-up run
        seed = config.sampling.seed
        self._seed = secrets.randbits(32) if seed is None else seed
        self._seeds: dict[tuple[int, int], int] = {}  # by prompt index and repeat
        self._seconds: list[float] = []  # of each run, to estimate the time left
        self._ids: dict[int, list[int]] = {}
        self._meter = energy_meter_for(pair.models.devices()) if config.energy else None

    def check(self) -> None:
        """Checks all prompts and loads all exit layers that methods name, before anything is run.

        Raises SpecgenError for an exit layer that cannot be used, and for the first prompt that
        plain decoding cannot continue, for instance because it is too long. Later turns of a
        question are not checked, because they contain answers.
        """
        for spec in self.config.specs:
            if "exit" in spec.choice.given:
                self.pair.parts.load("exit", str(spec.choice.given["exit"]))
        for prompt in self.config.prompts:
            if not prompt.previous_turns:
                try:
                    self.pair.request(self.prompt_ids(prompt), REFERENCE, self.config.sampling)
                except SpecgenError as error:
                    raise type(error)(f"{prompt.label}: {error.message}", error.hint) from error

    def resume(self, recorded: RecordedComparison) -> None:
        """Adds recorded runs to the results, and takes over their seeds for all methods on the same
        prompt and repeat.

        Runs of other methods, prompts or repeats than this comparison's are skipped. Raises
        SpecgenError if a run was made with another target (or another device or dtype of it), with
        other sampling parameters or versions, or with other tokens of its prompt.
        """
        specs = {spec.written: spec for spec in self.config.specs}
        prompts = {prompt.index: prompt for prompt in self.config.prompts}
        # plain decoding's runs first: other methods' outputs are compared with its outputs
        runs = sorted(recorded.runs, key=lambda run: run[0].start["spec"] != REFERENCE)
        for traced, run in runs:
            start = traced.start
            # traces of older versions lack the newer filters
            self._check_settings({**FILTERS, **start, **start["sampling"]}, recorded.path)
            spec = specs.get(start["spec"])
            prompt = prompts.get(start["prompt_index"])
            repeat = start["repeat"]
            if spec is None or prompt is None or repeat >= self.config.repeats:
                continue
            if start["prompt_ids"] != self.prompt_ids(prompt):
                message = (
                    f"{recorded.path}, line {traced.first_line:,}: {prompt.label} had other tokens"
                )
                raise SpecgenError(
                    message, "Give the same --prompts (and --chat, --turns) as for that trace"
                )
            self._add(spec, prompt, repeat, run, traced)
            self._seeds[prompt.index, repeat] = start["sampling"]["seed"]

    def _check_settings(self, before: Mapping[str, Any], path: Path) -> None:
        """Raises SpecgenError if a run in the trace `path` cannot be compared with runs made now.

        The target, its device and dtype, the versions and the sampling parameters must be equal.
        `before` has those of the run's start line.
        """
        target = self.pair.target
        sampling = asdict(self.config.sampling)
        models = {
            "target": target.name,
            "device": str(target.device),
            "dtype": target.dtype_name,
        }
        for name, value in (models | sampling).items():
            if name not in ("seed", "stop") and before.get(name) != value:
                if name == "grammar":
                    raise SpecgenError(
                        f"{path} was made with another --json-schema, --regex or --grammar",
                        "Give the same one, or start a new trace",
                    )
                option = "-n" if name == "max_new_tokens" else f"--{name.replace('_', '-')}"
                message = f"{path} was made with {option} {before.get(name)}, and now it is {value}"
                raise SpecgenError(message, f"Give the same {option}, or start a new trace")
        for name, version in versions().items():
            recorded = before["versions"].get(name, "unknown")
            if recorded != version:
                raise SpecgenError(
                    f"{path} was made with version {recorded} of {name}, and now it is {version}",
                    "Start a new trace: name another file",
                )

    def prompt_ids(self, prompt: ListedPrompt) -> list[int]:
        """Returns the prompt's token ids. For a later turn of a question these contain the earlier
        turns with plain decoding's answers, for every method. Raises SpecgenError if the chat
        template is missing or refuses the turns."""
        if prompt.index not in self._ids:
            previous = range(prompt.index - len(prompt.previous_turns), prompt.index)
            answers = [
                str(self.results.runs[REFERENCE, index, 0].line["text"]) for index in previous
            ]
            turns = list(zip(prompt.previous_turns, answers, strict=True))
            if self.config.chat:
                ids = self.pair.tokenizer.conversation(messages(prompt.text, None, turns))
            else:
                history = "".join(f"{question}{answer.rstrip()}\n\n" for question, answer in turns)
                ids = self.pair.tokenizer.encode(history + prompt.text)
            self._ids[prompt.index] = ids
        return self._ids[prompt.index]

    def steps(self) -> Iterator[BenchmarkStep]:
        """Runs the comparison, one step at a time. Yields the progress before each run and once at
        the end; a run is made when the caller asks for the next step. Runs already in `results` are
        not repeated. Raises SpecgenError if plain decoding fails, and after the warm-up runs if no
        other method can run; RunError if the trace cannot be written."""
        todo = self._missing(self.config.specs)
        total = len(todo)
        first_prompt = self.config.prompts[0]
        self._reserve()
        for spec in {spec.written: spec for spec, _, _ in todo}.values():
            left = self._seconds_of(total)
            yield BenchmarkStep(spec, first_prompt, True, done=0, total=total, seconds_left=left)
            self._attempt(spec, first_prompt, 0, self.warm_up_tokens)
        self._check_that_one_can_run()

        for done, (spec, prompt, repeat) in enumerate(todo):
            if (
                time.perf_counter() > self.deadline
                and spec is self.config.specs[0]
                and self.results.complete_repeats()
            ):
                self.is_cut = True
                break
            if self._is_ruled_out(spec, prompt):
                continue
            left = self._seconds_of(total - done)
            yield BenchmarkStep(spec, prompt, False, done=done, total=total, seconds_left=left)
            finished = self._attempt(spec, prompt, repeat)
            if finished is not None:
                with interrupts.held():
                    self._add(spec, prompt, repeat, Run.of(finished), finished)
                    # last: if it fails, the results have the run nevertheless
                    self._write(finished)
        yield BenchmarkStep(None, None, False, total, total, self._seconds_of(0))

    def _reserve(self) -> None:
        """Makes room in the caches for the longest run. Of a later turn, which follows answers that
        are not known yet, the length is estimated."""
        new_tokens = min(self.config.sampling.max_new_tokens, RESERVED)
        encode = self.pair.tokenizer.encode
        longest = 0
        for prompt in self.config.prompts:
            length = 0
            if prompt.previous_turns:
                for text in (*prompt.previous_turns, prompt.text):
                    length += len(encode(text)) + new_tokens
            else:
                length = len(self.prompt_ids(prompt)) + new_tokens
            longest = max(longest, length)
        self.pair.reserve(min(longest, self.pair.target.context_limit))

    def _seconds_of(self, count: int) -> float | None:
        """An estimate of the seconds that `count` runs take: the methods take turns. None before
        the first run."""
        return count * fmean(self._seconds) if self._seconds else None

    def is_interrupted(self, recorded: RecordedComparison) -> bool:
        """Whether the `recorded` runs, which were added, are those of this comparison, and some
        runs of their methods are missing."""
        written = {spec.written for spec in recorded.specs()}
        specs = [spec for spec in self.config.specs if spec.written in written]
        return len(self.results.runs) == len(recorded.runs) and bool(self._missing(specs))

    def is_complete(self, recorded: RecordedComparison) -> bool:
        """Whether the `recorded` runs, which were added, are all runs of this comparison."""
        if len(self.results.runs) != len(recorded.runs):
            return False
        return not self._missing(self.config.specs)

    def _missing(self, specs: Sequence[MethodSpec]) -> list[tuple[MethodSpec, ListedPrompt, int]]:
        return [
            (spec, prompt, repeat)
            for repeat in range(self.config.repeats)
            for prompt in self.config.prompts
            for spec in specs
            if (spec.written, prompt.index, repeat) not in self.results.runs
        ]

    def _check_that_one_can_run(self) -> None:
        """Raises SpecgenError if methods are named and each of them lacks something, such as a
        head."""
        failures = list(self.results.failures.values())
        named = sum(spec.written != REFERENCE for spec in self.config.specs)
        if (
            failures
            and len(failures) == named
            and not any(isinstance(failure, RunError) for failure in failures)
        ):
            reasons = "; ".join(dict.fromkeys(failure.message for failure in failures))
            raise SpecgenError(f"no method can run: {reasons}", failures[0].hint)

    def _is_ruled_out(self, spec: MethodSpec, prompt: ListedPrompt) -> bool:
        return spec.written in self.results.failures or prompt.index in self.results.skipped

    def _attempt(
        self, spec: MethodSpec, prompt: ListedPrompt, repeat: int, most_tokens: int | None = None
    ) -> TracedRun | None:
        """Makes one run of a method for a prompt, of at most `most_tokens` new tokens (None: no
        other limit than the config's).

        Returns None if the method fails (`results.failures` then has the error), or if the prompt
        is a later turn that plain decoding finds too long: it is skipped for all methods.
        """
        if self._is_ruled_out(spec, prompt):
            return None
        seed = self._seeds.setdefault(
            (prompt.index, repeat),
            derive_seed(self._seed, f"prompt {prompt.index} repeat {repeat}"),
        )
        sampling = replace(self.config.sampling, seed=seed)
        if most_tokens is not None:
            sampling = replace(sampling, max_new_tokens=min(most_tokens, sampling.max_new_tokens))
        start = time.perf_counter()
        try:
            finished = self._run(spec, self.prompt_ids(prompt), sampling)
        except Exception as error:
            if is_out_of_memory(error):
                error = RunError("out of memory", "Leave this method out, or take a smaller -n")
            if not isinstance(error, SpecgenError):
                own = failure_outside(error)
                if own is None:
                    raise
                error = own
            if spec.written == REFERENCE:
                if not prompt.previous_turns or isinstance(error, RunError):
                    raise error from None
                self.results.skipped.add(prompt.index)
            else:
                self.results.failures[spec.written] = error
            return None
        self._seconds.append(time.perf_counter() - start)
        keys = {
            "spec": spec.written,
            "prompt_index": prompt.index,
            "category": prompt.category,
            "repeat": repeat,
        }
        return replace(finished, start={**finished.start, **keys, "prompt_name": prompt.name})

    def _run(self, spec: MethodSpec, ids: list[int], sampling: SamplingParams) -> TracedRun:
        """Makes one run and returns what a trace records of it. Transformers' own methods have no
        rounds; their limits and seed are those of plain decoding."""
        pair = self.pair
        is_baseline = spec.is_baseline
        if is_baseline:
            from specgen.compare.transformers_generate import run_baseline

            spec.choice.method.check_request(spec.choice.settings, sampling)
        settings = spec.choice.settings.values
        name = REFERENCE if is_baseline else spec.name
        given = {} if is_baseline else spec.choice.given
        request = pair.request(ids, name, sampling, record=self.config.record, **given)
        run = pair.prepare(request)
        pair.forget()
        figures = Figures(spec.name)
        rounds = list[Round]()
        summary = dict[str, Any]()
        if self._meter is not None:
            self._meter.start()
        if is_baseline:
            summary = run_baseline(
                pair, spec.name, settings, ids, request.limit, sampling, run.seed
            )
        else:
            rounds = list(run.rounds())
            figures.prompt_tokens = len(ids)  # the caches are empty
        if self._meter is not None:
            figures.add_energy(self._meter.stop())

        for round_ in rounds:
            figures.add(round_)
        start = records.start_line(pair, request, run)
        counts: dict[str, Any] = {"drafts": figures.drafts, "rejections": figures.rejections}
        if is_baseline:
            figures.include(summary)
            counts = {"phase_seconds": None, "drafts": summary["drafts"]}
            draft = spec.choice.method.draft_of(pair.models)
            start["method"] = spec.name
            start["settings"] = dict(settings)
            start["draft"] = None if draft is None else draft.name
        if self.config.perplexity or not all(other.lossless for other in self.config.specs):
            figures.add_log_likelihood(pair.log_likelihood(ids, figures.token_ids))
        reason = summary.get("finish_reason") or run.finish_reason or "length"
        line = figures.as_dict(output_text(request, pair.tokenizer, figures.token_ids), reason)
        traced = [self._traced(round_) for round_ in rounds]
        return TracedRun(start, 0, traced, {"type": "summary", **line, **counts})

    def _traced(self, round_: Round) -> TracedRound:
        text_of = self.pair.tokenizer.text_of
        draft_texts = tuple(text_of([token]) for token in round_.draft.tokens)
        token = round_.verdict.token
        return TracedRound(round_, draft_texts, None if token is None else text_of([token]))

    def _write(self, finished: TracedRun) -> None:
        if self._trace is None:
            return
        text_of = self.pair.tokenizer.text_of
        self._trace.write(finished.start)
        for traced in finished.rounds:
            self._trace.write(records.round_line(traced.round, text_of, record=self.config.record))
        self._trace.write(finished.summary or {})

    def _add(
        self, spec: MethodSpec, prompt: ListedPrompt, repeat: int, run: Run, traced: TracedRun
    ) -> None:
        """Adds a finished run to the results. `traced` is the same run with its rounds: a method's
        first run of the first prompt is kept, to be displayed. In greedy decoding, the output of a
        lossless method is compared with plain decoding's."""
        results = self.results
        key = (spec.written, prompt.index, repeat)
        results.runs[key] = run
        if repeat == 0 and prompt is self.config.prompts[0]:
            results.examples[spec.written] = traced
        reference = results.runs.get((REFERENCE, prompt.index, repeat))
        if (
            not self.config.sampling.greedy
            or not spec.lossless
            or spec.written == REFERENCE
            or reference is None
        ):
            return
        difference = judge(
            self.pair,
            prompt.index,
            repeat,
            self.prompt_ids(prompt),
            reference.line["token_ids"],
            run.line["token_ids"],
            exact=not spec.is_baseline
            and self.pair.target.is_exact(in_trees=not spec.drafts_chains),
            dtype=spec.dtype or None,
        )
        if difference is not None:
            results.differences[key] = difference
