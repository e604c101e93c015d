"""Runs a comparison: resumes a trace, measures, and writes the results as table, JSON, CSV, SVG and HTML."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from specgen.cli.error_reporting import INTERRUPTED, report
from specgen.cli.interrupts import Interrupts
from specgen.compare.columns import as_json, csv_text
from specgen.compare.machine_description import describe
from specgen.compare.method_specs import MethodSpec
from specgen.compare.predictions import PassCosts, measure_costs, with_predictions
from specgen.compare.prompts import Prompt
from specgen.compare.results import FEW_RESAMPLES, MethodResult, Prediction, Results, method_results
from specgen.compare.resume import RecordedComparison
from specgen.compare.runner import BenchmarkConfig, Runner
from specgen.environment import versions
from specgen.errors import RunError, SpecgenError
from specgen.files import check_writable
from specgen.json_lines import print_json
from specgen.traces import trace_writer as traces
from specgen.types import SamplingParams
from specgen.ui import theme
from specgen.ui.html.page import write_page
from specgen.ui.terminal import comparison as views
from specgen.ui.terminal.live_table import LiveTable

if TYPE_CHECKING:
    from specgen.pair import Pair

OUTPUT_DIFFERS = 3  # the exit code where a lossless method did not give the target's own output
PIPED_WIDTH = 100  # columns where stdout is not a terminal


@dataclass(frozen=True, slots=True)
class DisplayOptions:
    """What is shown, and how."""

    by_category: bool
    phases: bool
    predict: bool
    json: bool
    quiet: bool
    no_color: bool


@dataclass(frozen=True, slots=True)
class OutputFiles:
    """The files to write. `resume` is a trace that is read first and then appended to. Raises SpecgenError for a path that cannot
    be written, before anything is loaded."""

    trace: Path | None
    resume: Path | None
    csv: Path | None
    svg: Path | None
    html: Path | None

    def __post_init__(self) -> None:
        if self.trace is not None and self.resume is not None and self.trace != self.resume:
            raise SpecgenError(f"--trace {self.trace} differs from --resume {self.resume}", "--resume appends to its own file")
        for what, path in (("trace", self.trace_path), ("CSV file", self.csv), ("picture", self.svg)):
            if path is not None:
                check_writable(path, what)
        if self.html is not None:
            check_writable(self.html, "page", replaces=True)

    @property
    def trace_path(self) -> Path | None:
        return self.resume or self.trace


@dataclass(frozen=True, slots=True)
class CompareRequest:
    """A comparison as the command line asks for it. `recorded` holds the runs of a trace that is resumed.

    Raises SpecgenError for fewer than one repeat.
    """

    specs: list[MethodSpec]
    prompts: list[Prompt]
    repeats: int
    sampling: SamplingParams
    chat: bool
    record: bool
    perplexity: bool
    energy: bool
    display: DisplayOptions
    files: OutputFiles
    recorded: RecordedComparison | None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise SpecgenError(f"--repeats is {self.repeats}", "It has to be a whole number of at least 1")

    def wants(self, figure: str, requested: bool) -> bool:
        """Whether to measure a figure: where an option asks for it, or the resumed trace has it."""
        return requested or (self.recorded is not None and self.recorded.has(figure))

    def config(self) -> BenchmarkConfig:
        perplexity, energy = self.wants("perplexity", self.perplexity), self.wants("energy", self.energy)
        return BenchmarkConfig(self.specs, self.prompts, self.repeats, self.sampling, self.chat, self.record, perplexity, energy)


class Comparison:
    """One comparison on a loaded pair. Raises SpecgenError for prompts that do not fit and for a trace with other settings."""

    def __init__(self, pair: Pair, request: CompareRequest) -> None:
        self._pair, self._request = pair, request
        config, recorded = request.config(), request.recorded
        self.results = Results(request.specs, request.prompts, request.sampling.greedy)
        self._interrupts = Interrupts()
        self._runner = Runner(pair, config, self.results, self._write_trace, self._interrupts.held)
        self._runner.check()
        if recorded is not None:
            recorded.add_to(self._runner, config, pair)
        self._trace: traces.TraceWriter | None = None
        if request.files.trace_path is not None:
            self._trace = traces.TraceWriter(request.files.trace_path, keep=recorded.end if recorded is not None else None)
        self._out = theme.console(no_color=request.display.no_color)
        self._err = theme.console(stderr=True, no_color=request.display.no_color)
        target = pair.target.name
        models = target if pair.draft is None else f"{target} with {pair.draft.name}"
        models = "demo pair" if target == "demo/target" else models
        machine = f"{pair.target.device} {pair.target.dtype_name}"
        self._conditions = views.Conditions(models, machine, request.repeats, request.sampling)

    def run(self) -> int:
        """Measure, then write all outputs. Returns the exit code; an error that ended the runs is raised after the output."""
        interrupted, costs = False, None
        failure: SpecgenError | None = None
        with self._interrupts as interrupts:
            try:
                with LiveTable(self._err, self._live_page, quiet=self._request.display.quiet) as live:
                    for step in self._runner.steps():
                        with interrupts.held():
                            live.show(step)
                if self._request.display.predict:
                    costs = measure_costs(self._pair, self.results)
            except KeyboardInterrupt:
                interrupted = True
            except SpecgenError as error:
                if not self.results.runs:
                    raise
                failure = error
            made = method_results(self.results)
            if costs is not None:
                made = with_predictions(made, self.results, costs)
            view = self._view(interrupted=interrupted)
            with interrupts.held():
                self._write_files(made, view)  # before stdout, whose reader may close the pipe
                self._print(made, view, costs)
        if failure is not None:
            raise failure
        return INTERRUPTED if interrupted else self._exit_code(made)

    def close(self) -> None:
        if self._trace is not None:
            self._trace.close()

    def _write_trace(self, lines: Iterator[Mapping[str, Any]]) -> None:
        if self._trace is not None:
            for line in lines:
                self._trace.write(line)

    def _view(self, *, interrupted: bool = False, is_live: bool = False) -> views.View:
        display, notes = self._request.display, self._energy_notes()
        if interrupted:
            path = self._request.files.trace_path
            hint = "with --trace FILE.jsonl the next one can be resumed" if path is None else f"continue with --resume {path}"
            notes.insert(0, f"Interrupted after {len(self.results.runs)} runs; {hint}.")
        return views.View(display.by_category, display.phases, " ".join(notes), is_live)

    def _energy_notes(self) -> list[str]:
        """How joules were counted, or why they are unavailable."""
        measured = [run.line["energy"] for run in self.results.runs.values() if run.line.get("energy")]
        if not measured or not self._request.wants("energy", self._request.energy):
            return []
        energy = measured[0]
        if energy["joules"] is None:
            return [f"Energy is unavailable: {energy['reason']}."]
        return [f"Joules are those above {energy['idle_watts']:.3g} W idle ({energy['source']})."]

    def _live_page(self, width: int) -> list[Text]:
        made = method_results(self.results, FEW_RESAMPLES)
        return views.page(self.results, made, self._conditions, self._view(is_live=True), width)

    def _print(self, made: Sequence[MethodResult], view: views.View, costs: PassCosts | None) -> None:
        if not self._request.display.json:
            width = self._out.width if self._out.is_terminal else PIPED_WIDTH
            for text in views.page(self.results, made, self._conditions, view, width):
                self._out.print(text)
            return
        for result in made:
            line = as_json(result)
            if costs is not None:
                prediction = result.prediction or Prediction()
                predicted = {"eq14": prediction.formula, "pass_costs": prediction.pass_costs}
                line |= {"predicted": predicted, "costs": costs.as_dict()}
            print_json(line)
        if not self._request.display.quiet:
            for note in self._energy_notes():
                self._err.print(Text(note, "quiet"))

    def _write_files(self, made: Sequence[MethodResult], view: views.View) -> None:
        files = self._request.files
        if files.csv is not None:
            _write(files.csv, csv_text(made, by_category=view.by_category))
        if files.svg is not None:
            from specgen.ui.svg_export import svg

            lines = views.page(self.results, made, self._conditions, view, PIPED_WIDTH)
            _write(files.svg, svg(lines, PIPED_WIDTH))
        if files.html is not None:
            from specgen.ui.html import compare_page

            installed = ", ".join(f"{name} {version}" for name, version in versions().items())
            about = compare_page.About(describe(self._pair), installed, f"specgen {shlex.join(sys.argv[1:])}")
            write_page(files.html, compare_page.page(self.results, made, self._conditions, self.results.examples, about, view))

    def _exit_code(self, made: Sequence[MethodResult]) -> int:
        """The exit code, with an error line for each method whose output differs or that failed while running."""
        no_color = self._request.display.no_color
        broken = [(result, result.broken) for result in made if result.broken]
        for result, difference in broken:
            hint = "This is an error in the method or in a forward pass: please report it with --trace"
            message = difference.explanation(result.spec.written, self.results.label(difference.prompt_index))
            report(SpecgenError(message.rstrip("."), hint), no_color=no_color)
        if broken:
            return OUTPUT_DIFFERS
        failed = [(result.spec.written, result.failure) for result in made if isinstance(result.failure, RunError)]
        for written, failure in failed:
            report(RunError(f"{written}: {failure.message}", failure.hint), no_color=no_color)
        return RunError.exit_code if failed else 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error
