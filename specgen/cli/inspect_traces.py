"""`specgen inspect TRACE.jsonl ...`: shows recorded generations (called runs here) as text, JSON
lines or an HTML page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specgen.base.errors import SpecgenError
from specgen.base.files import write_pieces
from specgen.base.text import one_line, print_json
from specgen.cli.commands import check_outputs
from specgen.cli.options import OutputOptions, TraceOptions
from specgen.traces.reader import TracedRun, read_trace
from specgen.traces.statistics import TraceStatistics, posteriors
from specgen.view import theme
from specgen.view.pages import trace_page
from specgen.view.trace_report import RecordedMethod, show

START_KEYS = (
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
)


@dataclass(slots=True)
class _Group:
    """The runs of one method in one trace file.

    `name` is the method with its settings as given to `specgen compare`, or the method's name in a
    trace of `generate`. `values` has each setting's values in these runs: PEARL's window is
    measured for each prompt. `run` is the run to show in detail, None until it is found.
    """

    path: Path
    name: str
    figures: TraceStatistics
    values: dict[str, list[Any]] = field(default_factory=dict)
    run: TracedRun | None = None

    def add(self, run: TracedRun, detailed: int) -> None:
        """Adds a run to the statistics. If it is the group's run number `detailed`, counted from 1,
        it becomes `self.run`."""
        self.figures.add(run)
        for setting, value in run.start["settings"].items():
            values = self.values.setdefault(setting, [])
            if value not in values:
                values.append(value)
        if self.figures.runs == detailed:
            self.run = run

    @property
    def settings(self) -> dict[str, str]:
        """Each setting's values as text, or their range if they are numbers."""
        texts = {}
        for name, values in self.values.items():
            texts[name] = ", ".join(map(str, values))
            if len(values) > 1 and all(type(value) in (int, float) for value in values):
                texts[name] = f"{min(values):g}–{max(values):g}"
        return texts


def _refuse_model(path: Path) -> None:
    """Raises SpecgenError if the path is a folder or a GGUF file, as those of models are."""
    is_folder = path.is_dir()
    begin = b""
    with suppress(OSError):  # reported where the trace is read
        if path.is_file():  # what is read from a pipe is lost for its reader
            with path.open("rb") as file:
                begin = file.read(4)
    if is_folder or begin == b"GGUF":
        kind = "a folder" if is_folder else "a GGUF file"
        hint = f"For a model: specgen inspect -t {shlex.quote(str(path))}"
        raise SpecgenError(f"{path} is {kind}, not a trace", hint)


def inspect_traces(paths: Sequence[Path], output: OutputOptions, options: TraceOptions) -> None:
    """Shows the traces as text, JSON lines or an HTML page.

    Raises SpecgenError for a file that is not a trace, for a page that cannot be written, and if a
    method has no run of the number `options.run`.
    """
    html = options.html
    check_outputs({"--html": html}, [("the trace", path) for path in paths])
    groups: dict[tuple[Path, str, str], _Group] = {}
    for path in paths:
        _refuse_model(path)
        for run in read_trace(path):
            # runs of `compare` with the same written method are one group, even if measured
            # settings differ
            spec = run.start.get("spec")
            name = run.method
            settings = json.dumps(run.start["settings"], sort_keys=True)
            if isinstance(spec, str) and spec:
                name = spec
                settings = ""
            group = groups.setdefault(
                (path, name, settings), _Group(path, name, TraceStatistics(run.method))
            )
            group.add(run, options.run)
            if output.json:
                print_json(_line(path, run))
    shown = list(_labelled(list(groups.values()), options.run))
    if html is not None:
        made_with = f"specgen inspect {shlex.join(path.name for path in paths)} --html {html.name}"
        write_pieces(html, trace_page(shown, made_with))
        if not output.quiet:
            theme.console(stderr=True, no_color=output.no_color).print(f"page written to {html}")
    elif not output.json:
        show(theme.console(no_color=output.no_color), shown, options.rounds)


def _labelled(groups: Sequence[_Group], number: int) -> Iterator[RecordedMethod]:
    """Yields each group as a RecordedMethod whose label tells it from the other groups.

    The label is the method's name. Where several groups have the same method, it also has the
    settings in which they differ, or the file's name. `(lossy)` follows the name of a lossy method.
    Raises SpecgenError for a group without run `number`.
    """
    for group in groups:
        if group.run is None:
            message = (
                f"{group.path} has no run {number} of {group.name}: it holds {group.figures.runs}"
            )
            raise SpecgenError(message, "Choose another with --run")
        own = group.settings
        others = [
            other.settings for other in groups if other.name == group.name and other is not group
        ]
        differing = {name for other in others for name in own if own[name] != other.get(name, ...)}
        label = group.name + "".join(
            f":{name}={value}" for name, value in own.items() if name in differing
        )
        if own in others:
            label += f" ({group.path.stem})"
        if group.run.start.get("lossless") is False:
            label += " (lossy)"
        varying = {name: own[name] for name, values in group.values.items() if len(values) > 1}
        yield RecordedMethod(one_line(label), group.path.name, group.figures, group.run, varying)


def _line(path: Path, run: TracedRun) -> dict[str, Any]:
    """Returns the line of `specgen inspect --json` for a run, with statistics computed from its
    rounds."""
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
        "posterior": posteriors(rounds),
    }
