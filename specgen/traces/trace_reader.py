"""Reads trace files, which record runs (generations) as JSON lines: a start line, a line per round (one target pass with its
draft) and a summary line. Imports no torch.

Traces may come from untrusted sources, so every line is checked. A mistake raises SpecgenError with file, line and key; unknown
keys are ignored. If a trace was cut off (a missing summary, an incomplete last line), its complete lines are read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Annotated, Any, NoReturn, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specgen.base.errors import SpecgenError, first_problem
from specgen.base.input_files import open_input
from specgen.base.types import PHASES, Draft, FinishReason, Mode, Round, Source, Verdict
from specgen.pair.figures import Summary

LONGEST_LINE = 16 << 20  # bytes, enough for the ids of two million tokens; limits the memory that a malformed file can take
_DEEPEST = 100  # levels of nesting; specgen's own lines have four
_SHORTEST = 1e-30  # seconds; rates by a shorter time would overflow
_LONG_NUMBER = re.compile(r"\d{19}|[eE]\+?\d{3}")  # in a line that may hold a number without a float64 or int64
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class TracedRound:
    """A round as read from a trace, with the texts of its drafted tokens and of its correction or bonus token (None if it has
    none).

    `overlap` is sum(min(p, q)) for each drafted token and `kl` is KL(q||p) in nats; p is the target's distribution, q the
    draft's. They are NaN for tokens that were not verified, and empty if the distributions were not recorded.
    """

    round: Round
    draft_texts: tuple[str, ...]
    token_text: str | None
    overlap: tuple[float, ...] = ()
    kl: tuple[float, ...] = ()


@dataclass(slots=True)
class TracedRun:
    """One run (generation) as read from a trace.

    `start` and `summary` are its start and summary line; `summary` is None if the run was cut off. `first_line` is the line
    number of `start`. `notes` are sentences about what is missing or inconsistent. `end` is the byte offset after the run's last
    complete line, where a resumed comparison continues to write.
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
        return None if self.summary is None else cast(FinishReason, self.summary["finish_reason"])

    def fold(self) -> Summary:
        """Computes the summary from the rounds, so that it also exists for a run that was cut off."""
        return Summary(self.method, (traced.round for traced in self.rounds))

    def texts(self) -> dict[int, str]:
        """The texts of all drafted, correction and bonus tokens in the run, by token id."""
        texts: dict[int, str] = {}
        for traced in self.rounds:
            texts.update(zip(traced.round.draft.tokens, traced.draft_texts, strict=True))
            if traced.round.verdict.token is not None:
                texts[traced.round.verdict.token] = traced.token_text or ""
        return texts


_TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
_Figures = list[Annotated[float, Field(gt=-1e300, lt=1e300)] | None] | None  # one value per drafted token, None if unknown


_FIGURES = ("entropies", "top_probs", "overlap", "kl")


class _Line(BaseModel):
    """The keys that are read from a line of a trace, with their types."""

    model_config = ConfigDict(strict=True)


class _StartLine(_Line):
    method: str
    target: str
    draft: str | None
    device: str
    dtype: str
    prompt_ids: list[_TokenId]
    settings: dict[str, Any]
    sampling: dict[str, Any]
    versions: dict[str, Any]


class _RoundLine(_Line):
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
    entropies: _Figures = None
    top_probs: _Figures = None
    predicted: list[Annotated[float, Field(ge=0, le=1)] | None] | None = None  # one for each level of a tree
    overlap: _Figures = None
    kl: _Figures = None
    policy: dict[str, Any] | None = None
    target_passes: Annotated[int, Field(ge=1, lt=1 << 31)] = 1
    unjudged: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    seconds: dict[str, Annotated[float, Field(ge=0, lt=1e12)]]


class _SummaryLine(_Line):
    text: str
    token_ids: list[_TokenId]
    finish_reason: FinishReason


_LINES: dict[str, type[_Line]] = {"start": _StartLine, "round": _RoundLine, "summary": _SummaryLine}


def read_trace(path: Path) -> Iterator[TracedRun]:
    """Yields the runs of a trace; only one run at a time is in memory. Raises SpecgenError if the file is not a trace."""
    try:
        with open_input(path) as file:
            yield from _runs(_Lines(path, file))
    except OSError as error:
        raise SpecgenError(f"cannot read the trace {path}: {error.strerror}", "Check the path") from error


class _Lines:
    """Iterates over a file's lines as JSON objects and knows the current line number."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self._file = path, file
        self.number = 0
        self.end = 0  # offset in bytes after the last complete line
        self.is_cut = False  # the last line is incomplete, as an interruption while writing leaves it

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while data := self._file.readline(LONGEST_LINE):
            self.number += 1
            is_complete = data.endswith(b"\n")
            if len(data) == LONGEST_LINE and not is_complete:
                self.refuse(f"it is longer than {LONGEST_LINE >> 20} MiB")
            if data.strip():
                try:
                    line = _parse(data)
                except (ValueError, RecursionError) as error:
                    self.is_cut = self.number > 1 and not is_complete
                    if self.is_cut:
                        return
                    self.refuse(f"it is not JSON ({str(error)[:80]})", error)
                yield line
            self.end += len(data)

    def refuse(self, problem: str, cause: Exception | None = None) -> NoReturn:
        raise SpecgenError(f"{self.path}, line {self.number:,}: {problem}", "Name an unchanged file from --trace") from cause


def _parse(data: bytes) -> dict[str, Any]:
    """Parses a line as a JSON object. Lone surrogates (halves of a character, which cannot be encoded) become question marks.
    Raises ValueError if the line is not a JSON object."""
    text = data.decode("utf-8-sig").rstrip()
    hooks: dict[str, Any] = {"parse_int": _integer, "parse_float": _float} if _LONG_NUMBER.search(text) else {}  # these are slow
    line = json.loads(text, parse_constant=_refuse_constant, **hooks)
    if not isinstance(line, dict):
        raise ValueError("an object is expected")
    if text.count("[") + text.count("{") > _DEEPEST and is_deeper(line, _DEEPEST):
        raise ValueError(f"more than {_DEEPEST} levels of nesting")
    if _ESCAPED_SURROGATE.search(text):
        line = json.loads(json.dumps(line, ensure_ascii=False).encode("utf-8", "replace"))
    return cast(dict[str, Any], line)


def is_deeper(value: object, levels: int) -> bool:
    """Whether lists and objects in a JSON value are nested more than `levels` deep."""
    found: list[object] = [value]
    for _ in range(levels):
        found = [inner for outer in found if isinstance(outer, dict | list) for inner in _inner(outer)]
    return any(isinstance(inner, dict | list) for inner in found)


def _inner(outer: dict[str, object] | list[object]) -> Iterable[object]:
    return outer.values() if isinstance(outer, dict) else outer


def _integer(digits: str) -> int:
    if len(digits) > 20 or abs(int(digits)) >= 1 << 63:
        raise ValueError(f"{digits if len(digits) < 30 else f'{digits[:20]}…'} is too large")
    return int(digits)


def _float(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits[:20]} is too large")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _runs(lines: _Lines) -> Iterator[TracedRun]:
    run: TracedRun | None = None
    for line in lines:
        kind = line.get("type")
        if not isinstance(kind, str) or kind not in _LINES:
            lines.refuse("not a line of a trace, because it has no type" if kind is None else f"the type {kind!r} is unknown")
        if kind != "start" and run is None:
            lines.refuse(f"a {kind} comes before any start line")
        if kind != "start" and run is not None and run.summary is not None:
            lines.refuse(f"a {kind} comes after the run's summary")
        try:
            checked = _LINES[kind].model_validate(line)
            traced = _traced_round(checked) if isinstance(checked, _RoundLine) else None
        except ValidationError as error:
            lines.refuse(first_problem(error), error)
        except ValueError as error:
            lines.refuse(str(error), error)
        if run is None or kind == "start":
            if run is not None:
                yield _closed(run, lines, is_last=False)
            run = TracedRun(line, lines.number)
        elif traced is None:
            run.summary = line
        elif traced.round.index != len(run.rounds):
            lines.refuse(f"this is round {traced.round.index:,}, where round {len(run.rounds):,} is expected")
        else:
            run.rounds.append(traced)
    if run is None:
        raise SpecgenError(f"{lines.path} holds no run", "Name a file from --trace")
    yield _closed(run, lines, is_last=True)


def _closed(run: TracedRun, lines: _Lines, *, is_last: bool) -> TracedRun:
    run.end = lines.end
    if is_last and lines.is_cut:
        run.notes.append(f"the trace is cut off in line {lines.number:,}: only what comes before is shown")
    elif run.summary is None:
        run.notes.append("the run has no summary: it was cut off")
    if run.summary is not None and not run.rounds and run.summary["token_ids"]:
        run.notes.append("the run has no rounds: another program decoded it")
    elif run.summary is not None:
        joined = [token for traced in run.rounds for token in traced.round.token_ids]
        if joined != run.summary["token_ids"]:
            run.notes.append("the summary's tokens differ from those of the rounds: lines are missing or were changed")
    return run


def _traced_round(line: _RoundLine) -> TracedRound:
    """Makes a round from a checked line. Raises ValueError if the line's values contradict each other."""
    count = len(line.draft_ids)
    for name, is_optional in {"draft_texts": False, "parents": False, **dict.fromkeys(_FIGURES, True)}.items():
        length = len(getattr(line, name) or ())
        if length != count and (length or not is_optional):
            raise ValueError(f"{name} has {length} values for {count} drafted tokens")
    figures = {
        name: tuple(math.nan if value is None else value for value in getattr(line, name) or ())
        for name in (*_FIGURES, "predicted")
    }
    chain = range(-1, count - 1)
    parents = chain if line.parents == list(chain) else tuple(line.parents)  # a range saves memory
    verdict = Verdict(_path(line), line.token_id, line.source)
    draft = Draft(line.draft_ids, parents, None, figures["entropies"], figures["top_probs"], line.stop_reason)
    if predicted := figures["predicted"]:
        if len(predicted) != draft.levels:
            raise ValueError(f"predicted has {len(predicted)} values for {draft.levels} levels of drafted tokens")
        draft = replace(draft, predicted=predicted)
    seconds = dict.fromkeys(PHASES, 0.0)
    for phase, value in line.seconds.items():
        seconds[phase if phase in seconds else "other"] += value if value >= _SHORTEST else 0.0  # so that the seconds add up
    policy = None if line.policy is None else {name: float(value) for name, value in line.policy.items() if _is_number(value)}
    round_ = Round(line.index, line.mode, draft, verdict, seconds, policy, line.target_passes, line.unjudged)
    return TracedRound(round_, tuple(line.draft_texts), line.token_text, figures["overlap"], figures["kl"])


def _path(line: _RoundLine) -> tuple[int, ...]:
    """Finds the accepted nodes of the draft tree, from the root, by the accepted token ids. All matching paths are tried, because
    several children of a node may have the same token."""
    depths = {-1: 0}  # by node, for nodes on matching paths; -1 is the root
    for node, (token, parent) in enumerate(zip(line.draft_ids, line.parents, strict=True)):
        if not -1 <= parent < node:
            raise ValueError(f"parents has {parent} for node {node}, which has to come after its parent")
        depth = depths.get(parent)
        if depth is not None and line.accepted_ids[depth : depth + 1] == [token]:
            depths[node] = depth + 1
    if len(line.accepted_ids) not in depths.values():
        raise ValueError("accepted_ids has tokens that were not drafted")
    node = next(node for node, depth in depths.items() if depth == len(line.accepted_ids))
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = line.parents[node]
    return tuple(reversed(path))


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(cast(float, value)) < 1e300  # false for infinities
