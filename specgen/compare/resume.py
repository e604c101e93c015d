"""A comparison that was broken off, read back from its trace so that it can go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.compare.method_specs import BASELINE, MethodSpec, parse_spec
from specgen.compare.results import Run
from specgen.compare.runner import BenchmarkConfig, Runner, settings_of
from specgen.errors import SpecgenError
from specgen.traces.trace_reader import TracedRun, read_trace

if TYPE_CHECKING:
    from specgen.pair import Pair

_OPTIONS = {
    "target": "--target",
    "device": "--device",
    "dtype": "--dtype",
    "max_new_tokens": "-n",
    "temperature": "--temperature",
    "top_p": "--top-p",
    "top_k": "--top-k",
    "ignore_eos": "--ignore-eos",
}


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """A run of the trace that ended, and the line it begins on."""

    start: Mapping[str, Any]
    run: Run
    line: int
    traced: TracedRun | None  # kept whole for the first prompt's first run alone


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a trace holds. `end` is the byte behind its last whole line."""

    path: Path
    runs: Sequence[EarlierRun]
    end: int

    def specs(self) -> list[MethodSpec]:
        """The methods of the trace, as they were written."""
        written = dict.fromkeys([BASELINE, *(str(run.start["spec"]) for run in self.runs)])
        return [parse_spec(name) for name in written]

    @property
    def tells_perplexity(self) -> bool:
        return any(run.run.line.get("perplexity") is not None for run in self.runs)

    @property
    def tells_energy(self) -> bool:
        return any(run.run.line.get("energy") is not None for run in self.runs)

    def fill(self, runner: Runner, contest: BenchmarkConfig, pair: Pair) -> None:
        """Count its runs as far as this comparison asks for them. Raises SpecgenError where they were made otherwise."""
        specs = {spec.written: spec for spec in contest.specs}
        prompts = {prompt.index: prompt for prompt in contest.prompts}
        for earlier in sorted(self.runs, key=lambda run: run.start["spec"] != BASELINE):  # others are judged by plain decoding's
            self._check_settings(earlier.start, settings_of(contest, pair))
            start = earlier.start
            spec, prompt = specs.get(start["spec"]), prompts.get(start["prompt_index"])
            if spec is None or prompt is None or start["repeat"] >= contest.repeats:
                continue
            if start["prompt_ids"] != runner.prompt_ids(prompt):
                raise SpecgenError(
                    f"{self.path}, line {earlier.line:,}: {prompt.label} was another one",
                    "Give the same --prompts (and --chat, --turns) as then",
                )
            runner.add(spec, prompt, start["repeat"], earlier.run)
            if earlier.traced is not None and prompt is contest.prompts[0]:
                runner.results.examples[spec.written] = earlier.traced

    def _check_settings(self, start: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        before = {name: start.get(name) for name in now if name != "sampling"} | dict(start["sampling"])
        present = {name: value for name, value in now.items() if name != "sampling"} | dict(now["sampling"])
        for name, value in present.items():
            if before.get(name) != value:
                option = _OPTIONS.get(name)
                raise SpecgenError(
                    f"{self.path} was made with {option or name} {_shown(before.get(name))}, and now it is {_shown(value)}",
                    f"Give the same {option}" if option else "Times are comparable on one installation only: start a new trace",
                )


def _shown(value: object) -> str:
    return ", ".join(f"{name} {item}" for name, item in value.items()) if isinstance(value, dict) else str(value)


def read_earlier(path: Path) -> Earlier:
    """The whole runs of a comparison's trace. Raises SpecgenError for what is none."""
    runs: list[EarlierRun] = []
    end = 0
    for traced in read_trace(path):
        end = traced.end
        start = traced.start
        position = (start.get("spec"), start.get("prompt_index"), start.get("repeat"))
        if not isinstance(position[0], str) or not all(type(number) is int and number >= 0 for number in position[1:]):
            raise SpecgenError(
                f"{path}, line {traced.first_line:,} begins a run of no comparison",
                "Name a trace that specgen compare --trace wrote",
            )
        if traced.summary is None or traced.finish_reason == "interrupted":
            continue
        _check_summary(traced.summary, f"{path}, the run on line {traced.first_line:,}")
        run = Run.of(traced.summary, [entry.round for entry in traced.rounds])
        is_example = start["repeat"] == 0 and start["prompt_index"] == runs[0].start["prompt_index"] if runs else True
        runs.append(EarlierRun(start, run, traced.first_line, traced if is_example else None))
    return Earlier(path, runs, end)


def _check_summary(line: Mapping[str, Any], where: str) -> None:
    for name in ("rounds", "drafts", "drafted", "accepted"):
        if type(line.get(name)) is not int or line[name] < 0:
            raise SpecgenError(f"{where} has {line.get(name)!r} for {name}", "Name a trace as --trace writes it, unchanged")
    phases = line.get("phase_seconds")
    seconds = [line.get("seconds"), *(phases.values() if isinstance(phases, dict) else [])]
    if not all(isinstance(value, int | float) and 0 <= value < 1e9 for value in seconds):
        raise SpecgenError(f"{where} has seconds that are none", "Name a trace as --trace writes it, unchanged")
