"""Reads traces line by line, as runs with their rounds. Imports no torch.

Traces may come from untrusted sources, so every line is checked; a mistake raises SpecgenError with file, line and value. Unknown
keys are ignored. Of a trace that was cut off (no summary, an incomplete last line), what is complete is read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn, cast, get_args

from specgen.errors import SpecgenError
from specgen.traces.summary import Summary
from specgen.types import PHASES, Draft, FinishReason, Mode, Round, Source, Verdict

LONGEST_LINE = 16 << 20  # bytes, enough for the ids of two million tokens; limits the memory that a malformed file can take
_SURROGATES = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class TracedRound:
    """A round with the texts of its drafted tokens and of its correction or bonus token.

    Where both distributions were recorded, `overlap` is the sum of min(p, q) for each drafted token and `kl` is KL(q||p) in nats,
    NaN for tokens that were not verified.
    """

    round: Round
    draft_texts: tuple[str, ...]
    token_text: str | None
    overlap: tuple[float, ...] = ()
    kl: tuple[float, ...] = ()


@dataclass(slots=True)
class TracedRun:
    """One run of a trace. `start` and `summary` are its lines (`summary` None where the run was cut off), `notes` say what is
    missing, and `end` is the offset in bytes after its last complete line, from which a resumed trace is continued."""

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
        """None where the run was cut off."""
        return None if self.summary is None else cast(FinishReason, self.summary["finish_reason"])

    def fold(self) -> Summary:
        """The summary, computed from the rounds, for a run that was cut off too."""
        summary = Summary(self.method)
        for traced in self.rounds:
            summary.add(traced.round)
        return summary

    def texts(self) -> dict[int, str]:
        """Texts of the tokens in the rounds, by token id."""
        texts: dict[int, str] = {}
        for traced in self.rounds:
            texts.update(zip(traced.round.draft.tokens, traced.draft_texts, strict=True))
            if traced.round.verdict.token is not None:
                texts[traced.round.verdict.token] = traced.token_text or ""
        return texts


def read_trace(path: Path) -> Iterator[TracedRun]:
    """The runs of a trace, one at a time in memory. Raises SpecgenError for a file that is not a trace."""
    try:
        with path.open("rb") as file:
            yield from _runs(_Lines(path, file))
    except OSError as error:
        raise SpecgenError(f"cannot read the trace {path}: {error.strerror}", "Check the path") from error


class _Lines:
    """A file's lines as JSON objects, with the current line number."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        self.number = 0
        self.end = 0  # offset in bytes after the last complete line
        self.is_cut = False  # the last line is incomplete

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while data := self._file.readline(LONGEST_LINE):
            self.number += 1
            if len(data) == LONGEST_LINE and not data.endswith(b"\n"):
                self.refuse(f"is longer than {LONGEST_LINE >> 20} MiB")
            if data.strip():
                is_last = not data.endswith(b"\n")
                line = self._parse(data.removeprefix(b"\xef\xbb\xbf") if self.number == 1 else data, is_last)
                if line is None:
                    return
                yield line
            self.end += len(data)

    def _parse(self, data: bytes, is_last: bool) -> dict[str, Any] | None:
        try:
            text = data.decode("utf-8", "surrogatepass")
            line = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            if not is_last or self.number == 1:
                self.refuse(_problem(error), error)
            self.is_cut = True  # an interruption while writing leaves an incomplete last line
            return None
        if not isinstance(line, dict):
            self.refuse(f"is {_shown(line)}, where an object is expected")
        if _ESCAPED_SURROGATE.search(text) or _SURROGATES.search(text):
            line = _without_surrogates(line)
        return cast(dict[str, Any], line)

    def refuse(self, what: str, cause: Exception | None = None) -> NoReturn:
        raise SpecgenError(f"{self._path}, line {self.number:,}, {what}", "Name an unchanged file from --trace") from cause

    def refuse_file(self) -> NoReturn:
        raise SpecgenError(f"{self._path} holds no run", "Name a file from --trace")


def _problem(error: ValueError | RecursionError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "is not UTF-8"
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"is not JSON ({error.msg} at column {error.colno:,})"
    return f"holds an invalid number ({str(error)[:60]})"  # NaN, or more digits than Python reads


def _runs(lines: _Lines) -> Iterator[TracedRun]:
    run: TracedRun | None = None
    for line in lines:
        entry = _Entry(line, lines.refuse)
        kind = entry.text("type")
        if kind == "start":
            if run is not None:
                yield _closed(run, lines, is_last=False)
            _check_start(entry)
            run = TracedRun(line, lines.number)
        elif kind not in ("round", "summary"):
            lines.refuse(f"has the unknown type {_shown(kind)}")
        elif run is None:
            lines.refuse(f"is a {kind} before any start line")
        elif run.summary is not None:
            lines.refuse(f"is a {kind} after the run's summary")
        elif kind == "round":
            run.rounds.append(_traced_round(entry, len(run.rounds)))
        else:
            _check_summary(entry)
            run.summary = line
    if run is None:
        lines.refuse_file()
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


def _check_start(entry: _Entry) -> None:
    for name in ("method", "target", "device", "dtype"):
        entry.text(name)
    entry.text("draft", optional=True)
    entry.ids("prompt_ids")
    for name in ("settings", "sampling", "versions"):
        entry.mapping(name)


def _check_summary(entry: _Entry) -> None:
    entry.text("text")
    entry.ids("token_ids")
    reason = entry.text("finish_reason")
    if reason not in get_args(FinishReason):
        entry.refuse(f"has the finish_reason {_shown(reason)}")


def _traced_round(entry: _Entry, expected: int) -> TracedRound:
    index = entry.get("index")
    if index != expected or isinstance(index, bool):
        entry.refuse(f"is round {_shown(index)}, where round {expected:,} is expected")
    mode = entry.text("mode")
    if mode not in get_args(Mode):
        entry.refuse(f"has the mode {_shown(mode)}")
    source = entry.text("source", optional=True)
    if source not in (*get_args(Source), None):
        entry.refuse(f"has the source {_shown(source)}")
    tokens = entry.ids("draft_ids")
    count = len(tokens)
    texts, parents = entry.texts("draft_texts", count), _parents(entry, count)
    figures = {name: entry.figures(name, count) for name in ("entropies", "top_probs", "overlap", "kl")}
    token, token_text = entry.target_token()
    draft = Draft(tokens, parents, None, figures["entropies"], figures["top_probs"], entry.text("stop_reason", optional=True))
    verdict = Verdict(_path(entry, tokens, parents), token, cast(Source | None, source))
    round_ = Round(expected, cast(Mode, mode), draft, verdict, _seconds(entry), _policy(entry))
    return TracedRound(round_, texts, token_text, figures["overlap"], figures["kl"])


def _parents(entry: _Entry, count: int) -> Sequence[int]:
    """Parent nodes; those of a chain as a range, to save memory."""
    parents = entry.list_of("parents", _is_integer, "a node")
    if len(parents) != count:
        entry.refuse(f"has {len(parents)} parents for {count} drafted tokens")
    chain = range(-1, count - 1)
    if parents == list(chain):
        return chain
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            entry.refuse(f"has the parent {_shown(parent)} for node {node}, which has to come before it")
    return tuple(parents)


def _path(entry: _Entry, tokens: Sequence[int], parents: Sequence[int]) -> tuple[int, ...]:
    """The accepted nodes, from the root. Follows all matching paths, as children of one node may have the same token."""
    accepted = entry.ids("accepted_ids")
    if isinstance(parents, range):
        if accepted != list(tokens[: len(accepted)]):
            entry.refuse("accepts tokens that were not drafted")
        return tuple(range(len(accepted)))
    paths: dict[int, tuple[int, ...]] = {-1: ()}  # matching paths by their last node
    for token in accepted:
        nodes = ((node, parent) for node, parent in enumerate(parents) if parent in paths and tokens[node] == token)
        paths = {node: (*paths[parent], node) for node, parent in nodes}
        if not paths:
            entry.refuse("accepts tokens that were not drafted")
    return next(iter(paths.values()))


def _seconds(entry: _Entry) -> dict[str, float]:
    """Seconds by phase. Unknown phases count as `other`, so that the sum is right."""
    seconds = dict.fromkeys(PHASES, 0.0)
    for phase, value in entry.mapping("seconds").items():
        if not _is_figure(value) or value < 0:
            entry.refuse(f"has {_shown(value)} seconds for {_shown(phase)}")
        seconds[phase if phase in seconds else "other"] += value
    return seconds


def _policy(entry: _Entry) -> dict[str, float] | None:
    state = entry.get("policy", None)
    if state is not None and not isinstance(state, dict):
        entry.refuse(f"has the policy {_shown(state)}, where an object is expected")
    return None if state is None else {name: float(value) for name, value in state.items() if _is_figure(value)}


class _Entry:
    """The values of one line, with their types checked."""

    def __init__(self, line: Mapping[str, Any], refuse: Callable[[str], NoReturn]) -> None:
        self._line, self.refuse = line, refuse

    def get(self, name: str, *default: Any) -> Any:
        if name not in self._line and not default:
            self.refuse(f"has no {name}")
        return self._line.get(name, *default)

    def text(self, name: str, *, optional: bool = False) -> str | None:
        value = self.get(name)
        if not isinstance(value, str) and not (optional and value is None):
            self.refuse(f"has {_shown(value)} for {name}, where a string is expected")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.get(name)
        if not isinstance(value, dict):
            self.refuse(f"has {_shown(value)} for {name}, where an object is expected")
        return cast(dict[str, Any], value)

    def list_of(self, name: str, fits: Callable[[object], bool], what: str) -> list[Any]:
        values = self.get(name)
        if not isinstance(values, list):
            self.refuse(f"has {_shown(values)} for {name}, where a list is expected")
        for value in values:
            if not fits(value):
                self.refuse(f"holds {_shown(value)} in {name}, where {what} is expected")
        return values

    def ids(self, name: str) -> list[int]:
        return self.list_of(name, _is_id, "a token id")

    def texts(self, name: str, count: int) -> tuple[str, ...]:
        values = self.list_of(name, lambda value: isinstance(value, str), "a string")
        if len(values) != count:
            self.refuse(f"has {len(values)} {name} for {count} drafted tokens")
        return tuple(values)

    def figures(self, name: str, count: int) -> tuple[float, ...]:
        """One number for each drafted token, NaN for null; empty where the line does not have the key."""
        if self._line.get(name) is None:
            return ()
        values = self.list_of(name, lambda value: value is None or _is_figure(value), "a number")
        if values and len(values) != count:
            self.refuse(f"has {len(values)} {name} for {count} drafted tokens")
        return tuple(math.nan if value is None else float(value) for value in values)

    def target_token(self) -> tuple[int | None, str | None]:
        token = self.get("token_id")
        if token is not None and not _is_id(token):
            self.refuse(f"has {_shown(token)} for token_id, where a token id is expected")
        return token, self.text("token_text", optional=True)


def _is_integer(value: object) -> bool:
    return type(value) is int


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _is_figure(value: object) -> bool:
    return type(value) in (int, float) and abs(cast(float, value)) < 1e300  # false for infinities


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _shown(value: object) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _without_surrogates(value: Any) -> Any:
    """The value with replacement characters for lone surrogates, which cannot be encoded."""
    if isinstance(value, str):
        return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, list):
        return [_without_surrogates(entry) for entry in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(entry) for key, entry in value.items()}
    return value
