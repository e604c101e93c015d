"""Reads the trace of an interrupted comparison, so that finished runs (one generation for one prompt by one method) are not
repeated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

from specgen.base import schema
from specgen.base.errors import SpecgenError
from specgen.base.machine import versions
from specgen.base.measuring import Energy
from specgen.compare.method_specs import REFERENCE, MethodSpec, parse_spec
from specgen.compare.results import Run
from specgen.compare.runner import Runner
from specgen.traces.reader import SHORTEST, TracedRun, read_trace


def _measurable(seconds: float) -> float:
    if 0 < seconds < SHORTEST:
        raise ValueError(f"no time is shorter than {SHORTEST:g} seconds")
    return seconds


_Count = Annotated[int, Field(ge=0, lt=1 << 53)]
_Seconds = Annotated[float, Field(ge=0, lt=1e9), AfterValidator(_measurable)]
_Joules = Annotated[float, Field(ge=-1e9, le=1e9)]


class _Start(BaseModel):
    spec: str
    prompt_index: _Count
    repeat: _Count


class _Figures(BaseModel):
    """What the results read of a summary line, besides what every trace has."""

    rounds: _Count
    drafts: _Count
    drafted: _Count
    accepted: _Count
    target_passes: _Count = 0
    rejections: _Count = 0
    ties: _Count = 0
    seconds: _Seconds
    phase_seconds: dict[Literal["prefill", "draft", "policy", "verify", "sample", "other"], _Seconds] | None
    perplexity: Annotated[float, Field(ge=1e-9, le=1e300)] | None = None
    energy: Energy | None = None
    joules_per_token: _Joules | None = None
    gross_joules_per_token: _Joules | None = None


@dataclass(frozen=True, slots=True)
class RecordedComparison:
    """The finished runs in the trace `path`, as they were recorded and as results. The recorded ones keep their rounds if they
    are the first of the first prompt, to be displayed. `end` is the byte offset after the last complete line, where a resumed
    comparison continues to write."""

    path: Path
    runs: Sequence[tuple[TracedRun, Run]]
    end: int

    def specs(self) -> list[MethodSpec]:
        """Returns the methods in the trace, plain decoding first and then in the order of their first run."""
        return [parse_spec(name) for name in dict.fromkeys([REFERENCE, *(str(run.start["spec"]) for run, _ in self.runs)])]

    def has(self, figure: str) -> bool:
        """Whether any run's summary line has a value for the key `figure`, such as `perplexity`."""
        return any(run.line.get(figure) is not None for _, run in self.runs)

    def add_to(self, runner: Runner) -> None:
        """Adds the recorded runs to the runner's results, and their seeds, which the other methods on the same prompt take.

        Runs of methods, prompts or repeats that the runner's comparison does not include are skipped. Raises SpecgenError if a
        run was made with other settings or another prompt text.
        """
        config = runner.config
        specs = {spec.written: spec for spec in config.specs}
        prompts = {prompt.index: prompt for prompt in config.prompts}
        # plain decoding's runs are added first, because other methods' outputs are compared with its outputs
        for traced, run in sorted(self.runs, key=lambda pair: pair[0].start["spec"] != REFERENCE):
            start = traced.start
            self._check_settings({**start, **start["sampling"]}, runner)
            spec, prompt, repeat = specs.get(start["spec"]), prompts.get(start["prompt_index"]), start["repeat"]
            if spec is None or prompt is None or repeat >= config.repeats:
                continue
            if start["prompt_ids"] != runner.prompt_ids(prompt):
                raise SpecgenError(
                    f"{self.path}, line {traced.first_line:,}: {prompt.label} had other tokens",
                    "Give the same --prompts (and --chat, --turns) as for that trace",
                )
            runner.add(spec, prompt, repeat, run, traced)
            runner.seeds[prompt.index, repeat] = start["sampling"]["seed"]

    def _check_settings(self, before: Mapping[str, Any], runner: Runner) -> None:
        """Raises SpecgenError if a setting that makes runs comparable differs. `before` has those of a trace's start line."""
        target, sampling = runner.pair.target, asdict(runner.config.sampling)
        now = {"target": target.name, "device": str(target.device), "dtype": target.dtype_name, "versions": versions()} | sampling
        name = next((name for name, value in now.items() if name not in ("seed", "stop") and before.get(name) != value), None)
        if name == "versions":
            raise SpecgenError(
                f"{self.path} was made with other versions; now there are {', '.join(map(' '.join, versions().items()))}",
                "Times from other versions cannot be compared: start a new trace",
            )
        if name is not None:
            option = "-n" if name == "max_new_tokens" else f"--{name.replace('_', '-')}"
            message = f"{self.path} was made with {option} {before.get(name)}, and now it is {now[name]}"
            raise SpecgenError(message, f"Give the same {option}")


def read_comparison(path: Path) -> RecordedComparison:
    """Reads the finished runs from a trace that `specgen compare` wrote. Raises SpecgenError for any other file."""
    runs: list[tuple[TracedRun, Run]] = []
    end = 0
    for traced in read_trace(path):
        end = traced.end
        where, hint = (
            f"{path}, the run on line {traced.first_line:,}",
            "Name a trace that specgen compare --trace wrote, unchanged",
        )
        schema.check(json.dumps(traced.start), _Start, where, hint)
        if traced.summary is None or traced.finish_reason == "interrupted":
            continue
        schema.check(json.dumps(traced.summary), _Figures, where, hint)
        run = Run.of(traced)
        if traced.start["repeat"] or (runs and traced.start["prompt_index"] != runs[0][0].start["prompt_index"]):
            traced.rounds.clear()
        runs.append((traced, run))
    return RecordedComparison(path, runs, end)
