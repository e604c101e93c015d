"""A comparison from its request to its end: a trace that is resumed, the runs, and all the forms that its result takes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from specgen.cli.error_reporting import INTERRUPTED, report
from specgen.cli.interrupts import Interrupts
from specgen.compare.machine_description import describe
from specgen.compare.predictions import PassCosts, Prediction, measure_costs, predict
from specgen.compare.results import FEW_RESAMPLES, Results, Row, rows
from specgen.compare.runner import BenchmarkConfig, Runner
from specgen.environment import versions
from specgen.errors import RunError, SpecgenError
from specgen.files import check_writable
from specgen.json_lines import print_json
from specgen.traces import trace_writer as traces
from specgen.ui import theme
from specgen.ui.html.page import write_page
from specgen.ui.terminal import comparison as views
from specgen.ui.terminal.live_table import LiveTable

if TYPE_CHECKING:
    from specgen.cli.compare import CompareRequest
    from specgen.pair import Pair

NOT_THE_TARGETS = 3
PIPED_WIDTH = 100  # columns where nobody has a window
_WAYS_ON = "with --trace FILE.jsonl the next one can be resumed"


@dataclass(frozen=True, slots=True)
class Look:
    """What is to be shown, and how."""

    by_category: bool
    phases: bool
    predict: bool
    json: bool
    quiet: bool
    no_color: bool


@dataclass(frozen=True, slots=True)
class Files:
    """Where things are written to. `resume` is a trace that is read first, then written on."""

    trace: Path | None
    resume: Path | None
    csv: Path | None
    svg: Path | None
    html: Path | None

    def __post_init__(self) -> None:
        """Refuse what cannot be written before anything is loaded. Raises SpecgenError."""
        if self.trace is not None and self.resume is not None and self.trace != self.resume:
            raise SpecgenError(f"--trace {self.trace} stands beside --resume {self.resume}", "--resume goes on in its own file")
        for what, path in (("trace", self.resume or self.trace), ("CSV file", self.csv), ("picture", self.svg)):
            if path is not None:
                check_writable(path, what)
        if self.html is not None:
            check_writable(self.html, "page", replaces=True)


class Comparison:
    """One comparison on a pair that is loaded."""

    def __init__(self, pair: Pair, request: CompareRequest) -> None:
        self._pair, self._request = pair, request
        files, look = request.files, request.look
        earlier = request.earlier
        self._contest = BenchmarkConfig(
            request.specs,
            request.prompts,
            request.repeats,
            request.sampling,
            request.chat,
            request.record,
            request.perplexity or (earlier is not None and earlier.tells_perplexity),
            request.energy or (earlier is not None and earlier.tells_energy),
        )
        self.results = Results(request.specs, request.prompts, request.sampling.greedy)
        self._interrupts = Interrupts()
        self._runner = Runner(pair, self._contest, self.results, self._write, self._interrupts.held)
        self._runner.check()
        if earlier is not None:
            earlier.fill(self._runner, self._contest, pair)
        self._trace: traces.TraceWriter | None = None
        if files.resume is not None or files.trace is not None:
            path = files.resume or files.trace
            assert path is not None
            self._trace = traces.TraceWriter(path, keep=earlier.end if earlier is not None else None)
        self._out = theme.console(no_color=look.no_color)
        self._err = theme.console(stderr=True, no_color=look.no_color)
        target = pair.target.name
        models = target if pair.draft is None else f"{target} with {pair.draft.name}"
        models = "demo pair" if target == "demo/target" else models
        machine = f"{pair.target.device} {pair.target.dtype_name}"
        self._setting = views.Setting(models, machine, request.repeats, request.sampling)

    def run(self) -> int:
        """All of it. Returns the exit code."""
        interrupted, costs = False, None
        failure: SpecgenError | None = None
        with self._interrupts as interrupts:
            try:
                with LiveTable(self._err, self._live_page, quiet=self._request.look.quiet) as live:
                    for step in self._runner.steps():
                        with interrupts.held():
                            live.show(step)
                if self._request.look.predict:
                    costs = measure_costs(self._pair, self.results)
            except KeyboardInterrupt:
                interrupted = True
            except SpecgenError as error:  # what was measured before is shown
                if not self.results.runs:
                    raise
                failure = error
            made = rows(self.results)
            predictions = predict(self.results, costs) if costs is not None else None
            with interrupts.held():
                self._save(made, predictions, interrupted=interrupted)  # first: whoever reads the answer may go away
                self._show(made, predictions, costs, interrupted=interrupted)
        if failure is not None:
            raise failure
        return INTERRUPTED if interrupted else self._verdict(made)

    def close(self) -> None:
        if self._trace is not None:
            self._trace.close()

    def _write(self, lines: Iterator[Mapping[str, Any]]) -> None:
        if self._trace is not None:
            for line in lines:
                self._trace.write(line)

    def _view(
        self, predictions: Mapping[str, Prediction] | None = None, *, interrupted: bool = False, is_live: bool = False
    ) -> views.View:
        path = self._request.files.resume or self._request.files.trace
        way_on = f"--resume {path} goes on." if path is not None else f"{_WAYS_ON}."
        said = [f"Interrupted after {len(self.results.runs)} runs; {way_on}"] if interrupted else []
        said += self._energy_in_words()
        return views.View(self._request.look.by_category, self._request.look.phases, predictions, " ".join(said), is_live)

    def _energy_in_words(self) -> list[str]:
        """What joules are counted from, or why there are none."""
        measured = [run.line["energy"] for run in self.results.runs.values() if run.line.get("energy")]
        if not self._contest.energy or not measured:
            return []
        told = measured[0]
        if told["joules"] is None:
            return [f"Energy is unavailable: {told['reason']}."]
        return [f"Joules are those above {told['idle_watts']:.3g} W idle ({told['source']})."]

    def _live_page(self, width: int) -> list[Text]:
        return views.page(self.results, rows(self.results, FEW_RESAMPLES), self._setting, self._view(is_live=True), width)

    def _show(
        self, made: list[Row], predictions: Mapping[str, Prediction] | None, costs: PassCosts | None, *, interrupted: bool
    ) -> None:
        """The answer, on standard output."""
        if self._request.look.json:
            for row in made:
                line: dict[str, Any] = {"type": "method", **row.as_dict()}
                if predictions is not None and costs is not None:
                    told = predictions.get(row.spec.written, Prediction(None, None))
                    line |= {"predicted": {"eq14": told.formula, "pass_costs": told.pass_costs}, "costs": costs.as_dict()}
                print_json(line)
            if not self._request.look.quiet:
                for said in self._energy_in_words():
                    self._err.print(Text(said, "quiet"))
            return
        width = self._out.width if self._out.is_terminal else PIPED_WIDTH
        for shown in views.page(self.results, made, self._setting, self._view(predictions, interrupted=interrupted), width):
            self._out.print(shown)

    def _save(self, made: list[Row], predictions: Mapping[str, Prediction] | None, *, interrupted: bool) -> None:
        files = self._request.files
        if files.csv is not None:
            text = views.csv_text(made, by_category=self._request.look.by_category, predictions=predictions)
            _write_file(files.csv, text)
        if files.svg is not None:
            from specgen.ui.svg_export import svg

            lines = views.page(self.results, made, self._setting, self._view(predictions, interrupted=interrupted), PIPED_WIDTH)
            _write_file(files.svg, svg(lines, PIPED_WIDTH))
        if files.html is not None:
            from specgen.ui.html import compare_page

            installed = ", ".join(f"{name} {version}" for name, version in versions().items())
            about = compare_page.About(describe(self._pair), installed, f"specgen {shlex.join(sys.argv[1:])}")
            view = self._view(predictions, interrupted=interrupted)
            write_page(files.html, compare_page.page(self.results, made, self._setting, self.results.examples, about, view))

    def _verdict(self, made: list[Row]) -> int:
        """The exit code, and a line on standard error where a method broke its promise or broke down."""
        broken = [row for row in made if row.is_broken]
        for row in broken:
            difference = next(difference for difference in row.differences if not difference.is_tie)
            hint = "This is a mistake in the method or in a pass: please report it with --trace"
            words = views.difference_in_words(self.results, row, difference)
            report(SpecgenError(words.rstrip("."), hint), no_color=self._request.look.no_color)
        if broken:
            return NOT_THE_TARGETS
        failed = [row for row in made if isinstance(row.failure, RunError)]
        for row in failed:
            assert row.failure is not None
            report(RunError(f"{row.spec.written}: {row.failure.message}", row.failure.hint), no_color=self._request.look.no_color)
        return RunError.exit_code if failed else 0


def _write_file(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error
