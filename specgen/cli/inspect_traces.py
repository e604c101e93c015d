"""`specgen inspect TRACE.jsonl ...`: recorded runs as text, as JSON, as a page."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.bench.anatomy import Anatomy, beliefs
from specgen.bench.trace_reader import TracedRun, read_trace
from specgen.errors import SpecgenError
from specgen.ui import theme
from specgen.ui.visible import escaped_json, inline

if TYPE_CHECKING:
    from specgen.ui.inspect_page import Shown


_TOLD = ("settings", "target", "draft", "device", "dtype", "prompt_index", "category", "repeat")  # of a start line


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to show of the traces, and how. `run` counts each method's runs from 1; `rounds` None: as many as suit."""

    html: Path | None
    json: bool
    rounds: int | None
    run: int
    quiet: bool
    no_color: bool


@dataclass(slots=True)
class _Group:
    """A method's runs in one file, folded; `run` is the one to look at in detail."""

    path: Path
    method: str
    settings: Mapping[str, Any]
    anatomy: Anatomy
    run: TracedRun | None = None


def inspect_traces(paths: Sequence[Path], wanted: Wanted) -> None:
    """Show recorded runs. Raises SpecgenError for what is no trace, and for a page that cannot be written."""
    from specgen.ui import inspect_page, inspect_text
    from specgen.ui.page import check_page_writable, write_page

    if wanted.html is not None:
        check_page_writable(wanted.html)
    groups: dict[tuple[Path, str, str], _Group] = {}
    for path in paths:
        for run in read_trace(path):
            _add(groups, path, run, wanted.run)
            if wanted.json:
                _write_line(path, run)
    shown = list(_labelled(list(groups.values()), wanted.run))
    if wanted.html is not None:
        write_page(
            wanted.html,
            inspect_page.page(shown, f"specgen inspect {shlex.join(path.name for path in paths)} --html {wanted.html.name}"),
        )
        if not wanted.quiet:
            theme.console(stderr=True, no_color=wanted.no_color).print(f"page written to {inline(str(wanted.html))}")
    elif not wanted.json:
        inspect_text.show(theme.console(no_color=wanted.no_color), shown, wanted.rounds)


def _add(groups: dict[tuple[Path, str, str], _Group], path: Path, run: TracedRun, wanted: int) -> None:
    key = (path, run.method, json.dumps(run.start["settings"], sort_keys=True))
    group = groups.setdefault(key, _Group(path, run.method, run.start["settings"], Anatomy(run.method)))
    group.anatomy.add(run)
    if group.anatomy.runs == wanted:
        group.run = run


def _labelled(groups: Sequence[_Group], wanted: int) -> Iterator[Shown]:
    """Each group by its method's name; by settings or the file too where the name alone does not tell them apart."""
    from specgen.ui.inspect_page import Shown

    for group in groups:
        if group.run is None:
            raise SpecgenError(
                f"{group.path} has no run {wanted} of {group.method}: it holds {group.anatomy.runs}", "Choose another with --run"
            )
        same = [other for other in groups if other.method == group.method and other is not group]
        differing = {name for other in same for name in group.settings if group.settings[name] != other.settings.get(name, ...)}
        label = group.method + "".join(f":{name}={value}" for name, value in group.settings.items() if name in differing)
        if any(other.settings == group.settings for other in same):
            label += f" ({group.path.stem})"
        yield Shown(label, group.path.name, group.anatomy, group.run)


def _write_line(path: Path, run: TracedRun) -> None:
    """One run's figures as a line of JSON; all of them are computed from its rounds."""
    anatomy = Anatomy(run.method)
    anatomy.add(run)
    rounds = [traced.round for traced in run.rounds]
    line = {
        "type": "inspect",
        "trace": str(path),
        "line": run.first_line,
        **{name: run.start.get(name) for name in _TOLD},
        "finish_reason": run.finish_reason,
        "notes": run.notes,
        **anatomy.as_dict(),
        "draft_lengths": [len(round_.draft.tokens) for round_ in rounds],
        "accepted_lengths": [len(round_.verdict.path) for round_ in rounds],
        "posterior": [
            {"round": belief.index, "mean": belief.mean, "low": belief.low, "high": belief.high} for belief in beliefs(rounds)
        ],
    }
    text = escaped_json(json.dumps(line, ensure_ascii=False)) + "\n"
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()
