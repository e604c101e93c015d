"""Reads the trace of an interrupted comparison, so that finished runs (one generation for one prompt by one method) are not
repeated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from specgen.base.errors import SpecgenError
from specgen.base.machine import versions
from specgen.base.types import PHASES
from specgen.compare.method_specs import REFERENCE, MethodSpec, parse_spec
from specgen.compare.results import Run
from specgen.compare.runner import Runner
from specgen.traces.reader import TracedRun, read_trace

_UNCHANGED = "Name a trace as --trace writes it, unchanged"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One finished run (a generation for one prompt by one method) as read from a trace.

    `start` is its start line: method, prompt, settings and versions. `run` holds its results. `line` is the number of its start
    line in the file, for error messages. `traced` is the run with all of its rounds; it is kept for the first prompt and repeat
    only, as the example to display, and is None for every other run.
    """

    start: Mapping[str, Any]
    run: Run
    line: int
    traced: TracedRun | None


@dataclass(frozen=True, slots=True)
class RecordedComparison:
    """The finished runs in the trace `path`. `end` is the byte offset after the last complete line, where a resumed comparison
    continues to write."""

    path: Path
    runs: Sequence[RecordedRun]
    end: int

    def specs(self) -> list[MethodSpec]:
        """Returns the methods in the trace, plain decoding first and then in the order of their first run."""
        return [parse_spec(name) for name in dict.fromkeys([REFERENCE, *(str(run.start["spec"]) for run in self.runs)])]

    def has(self, figure: str) -> bool:
        """Whether any run's summary line has a value for the key `figure`, such as `perplexity`."""
        return any(recorded.run.line.get(figure) is not None for recorded in self.runs)

    def add_to(self, runner: Runner) -> None:
        """Adds the recorded runs to the runner's results, and their seeds, which the other methods on the same prompt take.

        Runs of methods, prompts or repeats that the runner's comparison does not include are skipped. Raises SpecgenError if a
        run was made with other settings or another prompt text.
        """
        config, now = runner.config, _settings(runner)
        specs = {spec.written: spec for spec in config.specs}
        prompts = {prompt.index: prompt for prompt in config.prompts}
        # plain decoding's runs are added first, because other methods' outputs are compared with its outputs
        for recorded in sorted(self.runs, key=lambda run: run.start["spec"] != REFERENCE):
            start = recorded.start
            self._check_settings({**start, **start["sampling"]}, now)
            spec, prompt = specs.get(start["spec"]), prompts.get(start["prompt_index"])
            if spec is None or prompt is None or start["repeat"] >= config.repeats:
                continue
            if start["prompt_ids"] != runner.prompt_ids(prompt):
                raise SpecgenError(
                    f"{self.path}, line {recorded.line:,}: {prompt.label} had other tokens",
                    "Give the same --prompts (and --chat, --turns) as for that trace",
                )
            runner.add(spec, prompt, start["repeat"], recorded.run)
            runner.seeds[prompt.index, start["repeat"]] = start["sampling"]["seed"]
            if recorded.traced is not None and prompt is config.prompts[0]:
                runner.results.examples[spec.written] = recorded.traced

    def _check_settings(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for name, value in now.items():
            if before.get(name) == value:
                continue
            if name == "versions":
                now_in_words = ", ".join(f"{library} {version}" for library, version in value.items())
                raise SpecgenError(
                    f"{self.path} was made with other versions; now there are {now_in_words}",
                    "Times from other versions cannot be compared: start a new trace",
                )
            option = "-n" if name == "max_new_tokens" else f"--{name.replace('_', '-')}"
            raise SpecgenError(
                f"{self.path} was made with {option} {before.get(name)}, and now it is {value}", f"Give the same {option}"
            )


def _settings(runner: Runner) -> dict[str, Any]:
    """The settings that must be equal for runs to be comparable, with their current values. The keys are those of a trace's start
    line and of `sampling` in it."""
    target = runner.pair.target
    sampling = {name: value for name, value in asdict(runner.config.sampling).items() if name not in ("seed", "stop")}
    return {
        "target": target.name,
        "device": str(target.device),
        "dtype": target.dtype_name,
        "versions": versions(),
        **sampling,
    }


def read_comparison(path: Path) -> RecordedComparison:
    """Reads the finished runs from a trace that `specgen compare` wrote. Raises SpecgenError for any other file."""
    runs: list[RecordedRun] = []
    end = 0
    for traced in read_trace(path):
        end = traced.end
        start = traced.start
        position = (start.get("spec"), start.get("prompt_index"), start.get("repeat"))
        if not isinstance(position[0], str) or not all(type(number) is int and number >= 0 for number in position[1:]):
            raise SpecgenError(
                f"{path}, line {traced.first_line:,} begins a run that is not part of a comparison",
                "Name a trace that specgen compare --trace wrote",
            )
        if traced.summary is None or traced.finish_reason == "interrupted":
            continue
        _check_summary(traced.summary, f"{path}, the run on line {traced.first_line:,}")
        run = Run.of(traced.summary, [entry.round for entry in traced.rounds])
        is_example = start["repeat"] == 0 and (not runs or start["prompt_index"] == runs[0].start["prompt_index"])
        runs.append(RecordedRun(start, run, traced.first_line, traced if is_example else None))
    return RecordedComparison(path, runs, end)


def _check_summary(line: Mapping[str, Any], where: str) -> None:
    """Raises SpecgenError for a summary line without the figures that `Summary.include` adds, or with impossible ones."""
    phases = line.get("phase_seconds", ...)
    checks: dict[str, Callable[[Any], bool]] = {
        **dict.fromkeys(("rounds", "drafts", "drafted", "accepted"), _is_count),
        **{name: _is_count for name in ("target_passes", "rejections", "ties") if name in line},
        "seconds": _is_seconds,
        "phase_seconds": lambda value: value is None or isinstance(value, dict),
        "perplexity": lambda value: value is None or _is_number(value, 1e-9, 1e300),
        "energy": lambda value: value is None or _is_energy(value),
        **dict.fromkeys(
            ("joules_per_token", "gross_joules_per_token"), lambda value: value is None or _is_number(value, -1e9, 1e9)
        ),
    }
    wrong = [(name, line.get(name)) for name, is_right in checks.items() if not is_right(line.get(name))]
    if phases is ...:
        wrong.append(("phase_seconds", None))
    elif isinstance(phases, dict):
        wrong += [(name, value) for name, value in phases.items() if name not in PHASES or not _is_seconds(value)]
    if wrong:
        name, value = wrong[0]
        raise SpecgenError(f"{where} has {shorten(repr(value), 40, placeholder='…')} for {name}", _UNCHANGED)


def _is_energy(value: object) -> bool:
    """Whether it is what is written of an `Energy`: figures, or the reason why there are none."""
    if not isinstance(value, dict) or value.get("joules") is None:
        return isinstance(value, dict) and isinstance(value.get("reason"), str)
    return isinstance(value.get("source"), str) and all(
        _is_number(value.get(name), -1e9, 1e9) for name in ("joules", "idle_watts")
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _is_seconds(value: object) -> bool:
    return value == 0 or _is_number(value, 1e-30, 1e9)  # rates by a shorter time would overflow


def _is_number(value: Any, low: float, high: float) -> bool:
    return type(value) in (int, float) and low <= value <= high
