"""`specgen inspect TRACE.jsonl ...`: recorded runs as text, as JSON, as a page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.errors import SpecgenError
from specgen.files import check_writable
from specgen.json_lines import print_json
from specgen.traces.statistics import TraceStatistics, posteriors
from specgen.traces.trace_reader import TracedRun, read_trace
from specgen.ui import theme
from specgen.ui.sanitize import inline

if TYPE_CHECKING:
    from specgen.ui.html.trace_page import Shown


_TOLD = (
    "spec",
    "settings",
    "lossless",
    "target",
    "draft",
    "device",
    "dtype",
    "prompt_index",
    "category",
    "repeat",
)  # of a start line


@dataclass(frozen=True, slots=True)
class TraceViewOptions:
    """What to show of the traces, and how. `run` counts each method's runs from 1; `rounds` None: as many as suit."""

    html: Path | None
    json: bool
    rounds: int | None
    run: int
    quiet: bool
    no_color: bool


@dataclass(slots=True)
class _Group:
    """A method's runs in one file, folded; `run` is the one to look at in detail. `name` is the method as it was written in a
    comparison, else its name; `settings` are all values that its runs had."""

    path: Path
    name: str
    anatomy: TraceStatistics
    settings: dict[str, list[Any]] = field(default_factory=dict)
    run: TracedRun | None = None

    def told(self) -> dict[str, Any]:
        """Each setting's value, or where runs had several the range of them: PEARL's window is measured anew for each prompt."""
        return {name: values[0] if len(values) == 1 else _range(values) for name, values in self.settings.items()}

    @property
    def varying(self) -> dict[str, str]:
        return {name: _range(values) for name, values in self.settings.items() if len(values) > 1}


def _range(values: Sequence[Any]) -> str:
    if all(type(value) in (int, float) for value in values):
        return f"{min(values):g}–{max(values):g}"
    return ", ".join(map(str, values))


def inspect_traces(paths: Sequence[Path], wanted: TraceViewOptions) -> None:
    """Show recorded runs. Raises SpecgenError for what is no trace, and for a page that cannot be written."""
    from specgen.ui.html import trace_page
    from specgen.ui.html.page import write_page
    from specgen.ui.terminal import trace_report

    if wanted.html is not None:
        check_writable(wanted.html, "page", replaces=True)
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
            trace_page.page(shown, f"specgen inspect {shlex.join(path.name for path in paths)} --html {wanted.html.name}"),
        )
        if not wanted.quiet:
            theme.console(stderr=True, no_color=wanted.no_color).print(f"page written to {inline(str(wanted.html))}")
    elif not wanted.json:
        trace_report.show(theme.console(no_color=wanted.no_color), shown, wanted.rounds)


def _add(groups: dict[tuple[Path, str, str], _Group], path: Path, run: TracedRun, wanted: int) -> None:
    """To the runs of its method: what a comparison took as one is one, whatever was measured for each prompt."""
    spec = run.start.get("spec")
    is_compared = isinstance(spec, str) and bool(spec)
    name = str(spec) if is_compared else run.method
    key = (path, name, "" if is_compared else json.dumps(run.start["settings"], sort_keys=True))
    group = groups.setdefault(key, _Group(path, name, TraceStatistics(run.method)))
    group.anatomy.add(run)
    for setting, value in run.start["settings"].items():
        values = group.settings.setdefault(setting, [])
        if value not in values:
            values.append(value)
    if group.anatomy.runs == wanted:
        group.run = run


def _labelled(groups: Sequence[_Group], wanted: int) -> Iterator[Shown]:
    """Each group by its method's name; by settings or the file too where the name alone does not tell them apart, and with a word
    where its output is not the target's."""
    from specgen.ui.html.trace_page import Shown

    for group in groups:
        if group.run is None:
            raise SpecgenError(
                f"{group.path} has no run {wanted} of {group.name}: it holds {group.anatomy.runs}", "Choose another with --run"
            )
        own = group.told()
        same = [other.told() for other in groups if other.name == group.name and other is not group]
        differing = {name for other in same for name in own if own[name] != other.get(name, ...)}
        label = group.name + "".join(f":{name}={value}" for name, value in own.items() if name in differing)
        if own in same:
            label += f" ({group.path.stem})"
        is_lossy = group.run.start.get("lossless") is False
        yield Shown(f"{label} (lossy)" if is_lossy else label, group.path.name, group.anatomy, group.run, group.varying)


def _write_line(path: Path, run: TracedRun) -> None:
    """One run's figures as a line of JSON; all of them are computed from its rounds."""
    anatomy = TraceStatistics(run.method)
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
            {"round": belief.index, "mean": belief.mean, "low": belief.low, "high": belief.high} for belief in posteriors(rounds)
        ],
    }
    print_json(line)
