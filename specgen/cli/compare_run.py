"""Runs a comparison of methods: continues an earlier trace if one is given, measures, and writes the results as table, JSON, CSV,
SVG and HTML."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from specgen.base.errors import RunError, SpecgenError
from specgen.base.files import write_pieces
from specgen.base.interrupts import interrupts
from specgen.base.machine import machine_in_words, versions
from specgen.base.text import print_json
from specgen.cli.error_reporting import INTERRUPTED, report
from specgen.compare.columns import as_json, csv_text
from specgen.compare.predictions import PassCosts, measure_costs, with_predictions
from specgen.compare.results import FEW_RESAMPLES, BenchmarkConfig, MethodResult, method_results
from specgen.compare.resume import RecordedComparison
from specgen.compare.runner import Runner
from specgen.pair import records as traces
from specgen.view import comparison as views
from specgen.view import theme
from specgen.view.progress import Progress

if TYPE_CHECKING:
    from specgen.cli.options import CompareOutput, OutputOptions
    from specgen.engine.model_loading import LoadedModel
    from specgen.pair.pair import Pair

OUTPUT_DIFFERS = 3  # exit code if a lossless method's output differs from plain decoding's


class Comparison:
    """One comparison on a loaded pair of models. `recorded` contains the finished runs of the trace that is resumed, None for a
    new comparison. Each finished run is written to `trace`.

    Raises SpecgenError if a prompt does not fit into the context or if the resumed trace was made with other settings.
    """

    def __init__(
        self,
        pair: Pair,
        config: BenchmarkConfig,
        recorded: RecordedComparison | None,
        trace: traces.TraceWriter | None,
        output: CompareOutput,
        display: OutputOptions,
    ) -> None:
        self._pair, self._config, self._output, self._display = pair, config, output, display
        self._runner = Runner(pair, config, trace)
        self.results = self._runner.results
        self._runner.check()
        if recorded is not None:
            recorded.add_to(self._runner)
            if trace is not None:
                trace.keep = recorded.end
        self._out = theme.console(no_color=display.no_color)
        self._err = theme.console(stderr=True, no_color=display.no_color)
        target = pair.target
        names = " with ".join(model.name for model in (target, pair.draft) if model)
        models = "demo pair" if target.name == "demo/target" else names
        self._where = f"{models}, {target.device} {target.dtype_name}"

    def run(self) -> int:
        """Measures all methods, then writes all outputs. Returns the exit code. If an error ends the measurements, the results so
        far are written before the error is raised."""
        interrupted, costs = False, None
        failure: SpecgenError | None = None
        with interrupts.caught():
            try:
                with Progress(self._err, quiet=self._display.quiet) as progress:
                    for step in self._runner.steps():
                        if not progress.is_silent:
                            with interrupts.held():
                                views.show_step(progress, self._report(method_results(self.results, FEW_RESAMPLES)), step)
                if self._output.predict:
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
            notes = [*([self._interruption()] if interrupted else []), *self._energy_notes()]
            shown = self._report(made, " ".join(notes))
            with interrupts.held():
                try:
                    self._print(shown, costs)
                finally:  # also if the reader has closed the pipe
                    unwritten = self._write_files(shown)
        for each in unwritten:
            report(each, no_color=self._display.no_color)
        code = INTERRUPTED if interrupted else self._exit_code(made)
        if failure is not None:
            raise failure
        return code or (RunError.exit_code if unwritten else 0)

    def _report(self, made: Sequence[MethodResult], notes: str = "") -> views.Report:
        return views.Report(self.results, made, self._where, self._output.by_category, self._output.phases, notes)

    def _interruption(self) -> str:
        path = self._output.trace_path
        resume = "with --trace FILE.jsonl the next one can be resumed"
        hint = resume if path is None else f"continue with --resume {shlex.quote(str(path))}"
        return f"Interrupted after {theme.counted(len(self.results.runs), 'run')}; {hint}."

    def _energy_notes(self) -> list[str]:
        """A sentence that says how joules were counted or why they are unavailable. Empty if energy was not requested."""
        energy = next((run.line["energy"] for run in self.results.runs.values() if run.line.get("energy")), None)
        if energy is None or not self._config.energy:
            return []
        if energy["joules"] is None:
            return [f"Energy is unavailable: {energy['reason']}."]
        power = f"{energy['idle_watts']:.3g} W"
        return [f"Joules are those beyond the {power} of the idle devices; 'with idle' adds these ({energy['source']})."]

    def _print(self, shown: views.Report, costs: PassCosts | None) -> None:
        if not self._display.json:
            for text in views.page(shown, theme.width(self._out)):
                self._out.print(text)
            return
        for result in shown.made:
            line = as_json(result) | {"tuned_on": self._config.tuned_on(result.spec)}
            print_json(line if costs is None else {**line, "predicted": result.predicted, "costs": costs.as_dict()})
        if not self._display.quiet:
            for note in self._energy_notes():
                self._err.print(Text(note, "quiet"))

    def _write_files(self, shown: views.Report) -> list[RunError]:
        """Writes the CSV file, the picture and the page, if requested. Returns the errors of those that could not be written."""
        output, errors = self._output, []
        files: tuple[tuple[Path | None, Callable[[], Iterable[str]]], ...] = (
            (output.csv, lambda: [csv_text(shown.made, by_category=output.by_category)]),
            (output.svg, lambda: [views.picture(shown)]),
            (output.html, lambda: self._page(shown)),
        )
        for path, content in files:
            if path is not None:
                try:
                    write_pieces(path, content())
                except RunError as error:
                    errors.append(error)
        return errors

    def _page(self, shown: views.Report) -> Iterator[str]:
        from specgen.view.pages import comparison_page

        installed = ", ".join(f"{name} {version}" for name, version in versions().items())
        return comparison_page(shown, _machine(self._pair), installed, f"specgen {shlex.join(sys.argv[1:])}")

    def _exit_code(self, made: Sequence[MethodResult]) -> int:
        """Returns the exit code. Prints an error for each method whose output differs from plain decoding's, or if there are none
        for each method that failed while running."""
        code = 0
        for result in made:
            if (difference := result.broken) is not None:
                hint = "This is an error in the method or in a forward pass: please report it with --trace"
                message = difference.explanation(result.spec.written, self.results.label(difference.prompt_index))
                report(SpecgenError(message.rstrip("."), hint), no_color=self._display.no_color)
                code = OUTPUT_DIFFERS
        for result in made if not code else ():
            if isinstance(failure := result.failure, RunError):
                report(RunError(f"{result.name}: {failure.message}", failure.hint), no_color=self._display.no_color)
                code = RunError.exit_code
        return code


def _machine(pair: Pair) -> list[tuple[str, str]]:
    """Returns (heading, text) pairs that describe the machine, its GPUs that are used, the devices and the CPU's threads, the
    target and the draft model (if there is one)."""
    import torch

    from specgen.pair.pair import devices

    target, draft = pair.target, pair.draft
    gpus = ", ".join(torch.cuda.get_device_name(each) for each in dict.fromkeys(devices(pair)) if each.type == "cuda")
    apart = "" if draft is None or draft.device == target.device else f" (draft: {draft.device})"
    device = f"{target.device}{apart}, {target.dtype_name}, {theme.counted(torch.get_num_threads(), 'CPU thread')}"
    models = [("Target", _model(target)), *([] if draft is None else [("Draft", _model(draft))])]
    return [("Machine", machine_in_words()), *([("GPU", gpus)] if gpus else []), ("Device", device), *models]


def _model(loaded: LoadedModel) -> str:
    parameters, shape = sum(loaded.prepared.parameters.values()), loaded.prepared.shape
    size = f"{parameters / 1e9:.2f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.1f} million"
    return f"{loaded.name} ({shape.model_type}, {size} parameters, {shape.num_layers} layers, {loaded.dtype_name})"
