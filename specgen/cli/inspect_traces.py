"""`specgen inspect TRACE.jsonl ...`: shows recorded runs as text, as JSON lines or as an HTML page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.cli.options import OutputOptions
from specgen.errors import SpecgenError
from specgen.files import check_writable
from specgen.json_lines import print_json
from specgen.traces.statistics import TraceStatistics, posteriors
from specgen.traces.trace_reader import TracedRun, read_trace
from specgen.ui import theme
from specgen.ui.sanitize import inline

if TYPE_CHECKING:
    from specgen.ui.recorded_methods import RecordedMethod

START_KEYS = ("spec", "settings", "lossless", "target", "draft", "device", "dtype", "prompt_index", "category", "repeat")


@dataclass(slots=True)
class _Group:
    """The runs of one method in one file.

    `name` is the method as the comparison wrote it, else its name. `settings` has every value that a setting had in these runs.
    `run` is the run to show in detail.
    """

    path: Path
    name: str
    statistics: TraceStatistics
    settings: dict[str, list[Any]] = field(default_factory=dict)
    run: TracedRun | None = None

    def add(self, run: TracedRun, detailed: int) -> None:
        """Add a run, and keep it if it is number `detailed`, counted from 1."""
        self.statistics.add(run)
        for setting, value in run.start["settings"].items():
            values = self.settings.setdefault(setting, [])
            if value not in values:
                values.append(value)
        if self.statistics.runs == detailed:
            self.run = run

    def values(self) -> dict[str, str]:
        """Each setting's value, or the range of its values: PEARL's measured window differs between prompts."""
        return {name: _range(values) for name, values in self.settings.items()}


def _range(values: Sequence[Any]) -> str:
    if len(values) > 1 and all(type(value) in (int, float) for value in values):
        return f"{min(values):g}–{max(values):g}"
    return ", ".join(map(str, values))


def inspect_traces(paths: Sequence[Path], display: OutputOptions, html: Path | None, rounds: int | None, number: int) -> None:
    """Show run `number` of each method, counted from 1, with at most `rounds` rounds; None lets the report choose how many.

    Raises SpecgenError for a file that is not a trace, and for a page that cannot be written.
    """
    from specgen.ui.html import trace_page
    from specgen.ui.html.page import write_page
    from specgen.ui.terminal import trace_report

    if rounds is not None and rounds < 0:
        raise SpecgenError(f"--rounds is {rounds}", "It has to be a whole number, 0 for none")
    if number < 1:
        raise SpecgenError(f"--run is {number}", "Runs count from 1")
    if html is not None:
        check_writable(html, "page", replaces=True)
    groups: dict[tuple[Path, str, str], _Group] = {}
    for path in paths:
        for run in read_trace(path):
            _group(groups, path, run).add(run, number)
            if display.json:
                print_json(_line(path, run))
    shown = list(_labelled(list(groups.values()), number))
    if html is not None:
        write_page(html, trace_page.page(shown, f"specgen inspect {shlex.join(path.name for path in paths)} --html {html.name}"))
        if not display.quiet:
            theme.console(stderr=True, no_color=display.no_color).print(f"page written to {inline(str(html))}")
    elif not display.json:
        trace_report.show(theme.console(no_color=display.no_color), shown, rounds)


def _group(groups: dict[tuple[Path, str, str], _Group], path: Path, run: TracedRun) -> _Group:
    """The group of a run. Runs that a comparison wrote as one method are one group, even if their measured settings differ."""
    spec = run.start.get("spec")
    name = spec if isinstance(spec, str) and spec else run.method
    key = (path, name, "" if name is spec else json.dumps(run.start["settings"], sort_keys=True))
    return groups.setdefault(key, _Group(path, name, TraceStatistics(run.method)))


def _labelled(groups: Sequence[_Group], number: int) -> Iterator[RecordedMethod]:
    """Each group with a unique label: the method, the settings or the file where several groups share it, and `(lossy)`."""
    from specgen.ui.recorded_methods import RecordedMethod

    for group in groups:
        run, statistics = group.run, group.statistics
        if run is None:
            message = f"{group.path} has no run {number} of {group.name}: it holds {statistics.runs}"
            raise SpecgenError(message, "Choose another with --run")
        own = group.values()
        others = [other.values() for other in groups if other.name == group.name and other is not group]
        differing = {name for other in others for name in own if own[name] != other.get(name, ...)}
        label = group.name + "".join(f":{name}={value}" for name, value in own.items() if name in differing)
        if own in others:
            label += f" ({group.path.stem})"
        if run.start.get("lossless") is False:
            label += " (lossy)"
        varying = {name: own[name] for name, values in group.settings.items() if len(values) > 1}
        yield RecordedMethod(label, group.path.name, statistics, run, varying)


def _line(path: Path, run: TracedRun) -> dict[str, Any]:
    """One run's figures, all computed from its rounds."""
    statistics = TraceStatistics(run.method)
    statistics.add(run)
    rounds = [traced.round for traced in run.rounds]
    return {
        "type": "inspect",
        "trace": str(path),
        "line": run.first_line,
        **{name: run.start.get(name) for name in START_KEYS},
        "finish_reason": run.finish_reason,
        "notes": run.notes,
        **statistics.as_dict(),
        "draft_lengths": [len(round_.draft.tokens) for round_ in rounds],
        "accepted_lengths": [len(round_.verdict.path) for round_ in rounds],
        "posterior": [
            {"round": posterior.index, "mean": posterior.mean, "low": posterior.low, "high": posterior.high}
            for posterior in posteriors(rounds)
        ],
    }
