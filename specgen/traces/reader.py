"""Reads trace files, which record runs (generations) as JSON lines: a start line, a line per round
(one target pass with its draft) and a summary line. Imports no torch.

Traces may come from untrusted sources, so every line is checked. A mistake raises SpecgenError with
file, line and key; unknown keys are ignored. If a trace was cut off (a missing summary, an
incomplete last line), its complete lines are read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import AfterValidator, BaseModel, Field

from specgen.base import schema
from specgen.base.errors import SpecgenError
from specgen.base.measuring import Energy
from specgen.base.types import (
    PHASES,
    DistributionOverlap,
    Draft,
    FinishReason,
    Mode,
    Round,
    Source,
    Verdict,
)
from specgen.pair.figures import Figures

# It limits the memory that a malformed file can take; the ids of two million tokens fit.
LONGEST_LINE = 16 << 20  # bytes
SHORTEST = 1e-30  # seconds; rates by a shorter time would overflow
_HINT = "Name an unchanged file from --trace"


@dataclass(frozen=True, slots=True)
class TracedRound:
    """A round as read from a trace, with the texts of its drafted tokens and of its correction or
    bonus token (None if it has none)."""

    round: Round
    draft_texts: tuple[str, ...]
    token_text: str | None


@dataclass(slots=True)
class TracedRun:
    """One run (generation) as read from a trace.

    `start` and `summary` are its start and summary line; `summary` is None if the run was cut off.
    `first_line` is the line number of `start`. `notes` are sentences about what is missing or
    inconsistent. `end` is the byte offset after the run's last complete line, where a resumed
    comparison continues to write.
    """

    start: Mapping[str, Any]
    first_line: int
    rounds: list[TracedRound] = field(default_factory=list)
    summary: Mapping[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    end: int = 0

    @property
    def method(self) -> str:
        return str(self.start["method"])

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the run ended. None if it was cut off."""
        return None if self.summary is None else self.summary["finish_reason"]

    def fold(self) -> Figures:
        """Returns the run's figures (see `add_to`). A run that was cut off has them too."""
        figures = Figures(self.method)
        self.add_to(figures)
        return figures

    def add_to(self, figures: Figures) -> None:
        """Adds the run's rounds to `figures`. For a run without rounds, which another program
        decoded, adds the counts and the seconds of its summary line."""
        for traced in self.rounds:
            figures.add(traced.round)
        if not self.rounds and self.summary is not None:
            keys = ("drafts", "drafted", "accepted", "target_passes", "seconds")
            line: dict[str, Any] = {name: self.summary.get(name, 0) for name in keys}
            line["rounds"] = line["target_passes"]
            line["token_ids"] = self.summary["token_ids"]
            line["phase_seconds"] = None
            figures.include(line)

    def texts(self) -> dict[int, str]:
        """The texts of all drafted, correction and bonus tokens in the run, by token id."""
        texts: dict[int, str] = {}
        for traced in self.rounds:
            texts.update(zip(traced.round.draft.tokens, traced.draft_texts, strict=True))
            if traced.round.verdict.token is not None:
                texts[traced.round.verdict.token] = traced.token_text or ""
        return texts


_TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
_Count = Annotated[int, Field(ge=0, lt=1 << 31)]
_Seconds = Annotated[float, Field(ge=0, lt=1e12)]
_Joules = Annotated[float, Field(ge=-1e9, le=1e9)]
# a value for each drafted token, None if it is unknown
_Figures = list[Annotated[float, Field(gt=-1e300, lt=1e300)] | None] | None
_FIGURES = ("entropies", "top_probs", "overlap", "kl")


def _measurable(seconds: float) -> float:
    if 0 < seconds < SHORTEST:
        raise ValueError(f"no time is shorter than {SHORTEST:g} seconds")
    return seconds


_MeasuredSeconds = Annotated[_Seconds, AfterValidator(_measurable)]


class _StartLine(BaseModel):
    type: Literal["start"]
    method: str
    target: str
    draft: str | None
    device: str
    dtype: str
    prompt_ids: list[_TokenId]
    settings: dict[str, Any]
    sampling: dict[str, Any]
    versions: dict[str, Any]
    spec: str | None = None  # this and the next two are `compare`'s
    prompt_index: _Count | None = None
    repeat: _Count | None = None


class _RoundLine(BaseModel):
    type: Literal["round"]
    index: int
    mode: Mode
    draft_ids: list[_TokenId]
    draft_texts: list[str]
    parents: list[int]
    accepted_ids: list[_TokenId]
    token_id: _TokenId | None
    token_text: str | None
    source: Source | None
    stop_reason: str | None
    copied: bool = False
    entropies: _Figures = None
    top_probs: _Figures = None
    predicted: list[Annotated[float, Field(ge=0, le=1)] | None] | None = None  # one a level
    overlap: _Figures = None
    kl: _Figures = None
    policy: dict[str, Any] | None = None
    target_passes: Annotated[_Count, Field(ge=1)] = 1
    unjudged: _Count = 0
    seconds: dict[str, _Seconds]


class _SummaryLine(BaseModel):
    type: Literal["summary"]
    text: str
    token_ids: list[_TokenId]
    finish_reason: FinishReason
    rounds: _Count = 0
    drafts: _Count = 0
    drafted: _Count = 0
    accepted: _Count = 0
    target_passes: _Count = 0
    rejections: _Count = 0
    ties: _Count = 0
    seconds: _MeasuredSeconds = 0.0
    phase_seconds: (
        dict[Literal["prefill", "draft", "policy", "verify", "sample", "other"], _MeasuredSeconds]
        | None
    ) = None
    perplexity: Annotated[float, Field(ge=1e-9, le=1e300)] | None = None
    energy: Energy | None = None
    joules_per_token: _Joules | None = None
    gross_joules_per_token: _Joules | None = None


_LINE: Any = Annotated[_StartLine | _RoundLine | _SummaryLine, Field(discriminator="type")]


def read_trace(path: Path) -> Iterator[TracedRun]:
    """Yields the runs of a trace, of which it keeps one at a time in memory.

    Raises SpecgenError if the file cannot be read, holds no run, or has a line that does not belong
    in a trace, also after it has yielded runs.
    """
    run: TracedRun | None = None
    for number, end, line in _lines(path):
        where = f"{path}, line {number:,}"
        if line is None:
            if run is not None:
                run.notes.append(
                    f"the trace is cut off in line {number:,}: only what comes before is shown"
                )
            break
        if run is None and _is_prompt(line):
            hint = (
                f"Answer them with specgen generate --prompts {path} --trace "
                "FILE.jsonl, and inspect that file"
            )
            raise SpecgenError(f"{path} holds prompts and is no trace", hint)
        checked = schema.check(json.dumps(line), _LINE, where, _HINT)
        if isinstance(checked, _StartLine):
            if run is not None:
                yield _closed(run)
            run = TracedRun(line, number)
        elif run is None:
            _refuse(where, f"a {line['type']} comes before any start line")
        elif run.summary is not None:
            _refuse(where, f"a {line['type']} comes after the run's summary")
        elif isinstance(checked, _RoundLine):
            run.rounds.append(_traced_round(checked, len(run.rounds), where))
        else:
            run.summary = line
        run.end = end
    if run is None:
        raise SpecgenError(f"{path} holds no run", "Name a file from --trace")
    yield _closed(run)


def _is_prompt(line: Any) -> bool:
    """Whether the line is one of a file of prompts in JSON lines."""
    if not isinstance(line, dict) or "type" in line:
        return False
    return not {"prompt", "turns"}.isdisjoint(line)


def _lines(path: Path) -> Iterator[tuple[int, int, Any]]:
    """Yields each line of a file that is not blank: its number, the byte offset after it, and its
    JSON value; None for an incomplete last line, as an interruption while writing leaves it."""
    end = 0
    try:
        with path.open("rb") as file:
            lines = iter(lambda: file.readline(LONGEST_LINE), b"")
            for number, data in enumerate(lines, start=1):
                end += len(data)
                where = f"{path}, line {number:,}"
                is_complete = data.endswith(b"\n")
                if len(data) == LONGEST_LINE and not is_complete:
                    _refuse(where, f"it is longer than {LONGEST_LINE >> 20} MiB")
                if number == 1:
                    schema.check_begin(data, f"the trace {path}", _HINT)
                if not data.strip():
                    continue
                try:
                    line = schema.parse_json(data.decode("utf-8-sig", "replace"), where, _HINT)
                except SpecgenError:
                    if is_complete or number == 1:
                        raise
                    line = None
                yield number, end, line
    except OSError as error:
        raise SpecgenError(
            f"cannot read the trace {path}: {error.strerror}", "Check the path"
        ) from error


def _refuse(where: str, problem: str) -> NoReturn:
    raise SpecgenError(f"{where}: {problem}", _HINT)


def _closed(run: TracedRun) -> TracedRun:
    """Returns a run whose last line has been read, with notes on what is missing."""
    if run.summary is None:
        run.notes = run.notes or ["the run has no summary: it was cut off"]
        return run
    token_ids = [token for traced in run.rounds for token in traced.round.token_ids]
    if not run.rounds and run.summary["token_ids"]:
        run.notes.append("the run has no rounds: another program decoded it")
    elif token_ids != run.summary["token_ids"]:
        run.notes.append(
            "the summary's tokens differ from those of the rounds: lines are missing or "
            "were changed"
        )
    return run


def _traced_round(line: _RoundLine, index: int, where: str) -> TracedRound:
    """Makes a round from a checked line. Raises SpecgenError unless it is round `index` and
    consistent."""
    if line.index != index:
        _refuse(where, f"this is round {line.index:,}, where round {index:,} is expected")
    for name in ("draft_texts", "parents", *_FIGURES):
        length = len(getattr(line, name) or ())
        if length != len(line.draft_ids) and (length or name not in _FIGURES):
            _refuse(where, f"{name} has {length} values for {len(line.draft_ids)} drafted tokens")
    entropies, top_probs, overlap, kl, predicted = (
        tuple(math.nan if value is None else value for value in getattr(line, name) or ())
        for name in (*_FIGURES, "predicted")
    )
    agreement = DistributionOverlap(overlap, kl) if overlap and kl else None
    verdict = Verdict(_path(line, where), line.token_id, line.source, agreement)
    draft = Draft(
        line.draft_ids,
        line.parents,
        None,
        entropies,
        top_probs,
        line.stop_reason,
        predicted=predicted,
        is_copied=line.copied,
    )
    if predicted and len(predicted) != draft.levels:
        _refuse(
            where,
            f"predicted has {len(predicted)} values for {draft.levels} levels of drafted tokens",
        )
    seconds = dict.fromkeys(PHASES, 0.0)
    for phase, value in line.seconds.items():
        # unknown phases count as another one, so that the seconds add up
        seconds[phase if phase in seconds else "other"] += value if value >= SHORTEST else 0.0
    policy = None
    if line.policy is not None:
        policy = {name: float(value) for name, value in line.policy.items() if _is_number(value)}
    round_ = Round(
        index, line.mode, draft, verdict, seconds, policy, line.target_passes, line.unjudged
    )
    return TracedRound(round_, tuple(line.draft_texts), line.token_text)


def _path(line: _RoundLine, where: str) -> tuple[int, ...]:
    """Returns the accepted nodes of the draft tree, from the root, by the accepted token ids. All
    matching paths are tried, because several children of a node may have the same token."""
    depths = {-1: 0}  # by node, for nodes on matching paths; -1 is the root
    for node, (token, parent) in enumerate(zip(line.draft_ids, line.parents, strict=True)):
        if not -1 <= parent < node:
            _refuse(
                where, f"parents has {parent} for node {node}, which has to come after its parent"
            )
        depth = depths.get(parent)
        if depth is not None and line.accepted_ids[depth : depth + 1] == [token]:
            depths[node] = depth + 1
    node = next((node for node, depth in depths.items() if depth == len(line.accepted_ids)), -2)
    if node == -2:
        _refuse(where, "accepted_ids has tokens that were not drafted")
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = line.parents[node]
    return tuple(reversed(path))


def _is_number(value: object) -> bool:
    """Whether the value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
