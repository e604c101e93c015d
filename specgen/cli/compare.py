"""`specgen compare`: measures methods against plain decoding on a pair of models and a set of
prompts, and writes the results as a table, JSON, CSV, SVG and HTML.

An interrupted comparison is continued from its trace.
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from specgen import methods
from specgen.base.errors import RunError, SpecgenError
from specgen.base.files import examples_file, write_pieces
from specgen.base.interrupts import ReportedInterrupt, interrupts
from specgen.base.machine import machine_in_words, versions
from specgen.base.text import counted, print_json, significant
from specgen.base.types import QUANTISED, SamplingParams
from specgen.cli.commands import check_outputs, holds_single_run, options_given
from specgen.cli.opening import (
    check_grammar,
    find_profile,
    models_in_words,
    open_pair,
    show_overlap,
    tuned_specs,
)
from specgen.cli.options import CompareOptions, CompareOutput, DecodingGroup, SamplingOptions
from specgen.compare.method_specs import MethodSpec, parse_specs, with_dtypes
from specgen.compare.prompts import load_prompts, picked
from specgen.compare.results import (
    BenchmarkConfig,
    MethodResult,
    measure_costs,
    method_results,
    with_predictions,
)
from specgen.compare.runner import BenchmarkStep, RecordedComparison, Runner, read_comparison
from specgen.traces.writer import TraceWriter
from specgen.view import comparison as views
from specgen.view import theme
from specgen.view.comparison_columns import as_json, csv_text
from specgen.view.pages import comparison_page
from specgen.view.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console

    from specgen.pair.pair import Pair
    from specgen.pair.profile import Profile


# of a comparison without options
USUAL_PROMPTS = 20
USUAL_METHODS = 6
USUAL_BUDGET = 60.0  # seconds
ENDED_BY_BUDGET = "The time was up (--budget SECONDS); -m all compares every method."


class OutputDiffersError(SpecgenError):
    """A lossless method's output differs from plain decoding's."""

    exit_code = 3


def compare(
    asked: CompareOptions, models: DecodingGroup, options: SamplingOptions, output: CompareOutput
) -> None:
    """Loads the models, compares the methods and writes the results. Raises SpecgenError for wrong
    options, and as `specgen.load` and `Comparison.run`."""
    begin = time.perf_counter()
    is_default = not options_given(asked) and output.trace_path is None
    sampling = options.params()
    check_grammar(sampling)
    if asked.budget is not None and not asked.budget > 0:
        raise SpecgenError(f"--budget is {asked.budget:g}", "It has to be above 0 seconds")
    check_outputs(output.files, [("--prompts", asked.prompts or examples_file())], models)
    err = theme.console(stderr=True, no_color=output.no_color)
    with ExitStack() as opened:
        trace = None
        if output.trace_path is not None:  # locked before it is read
            writer = TraceWriter(output.trace_path, resumes=output.resume is not None)
            trace = opened.enter_context(closing(writer))
        recorded = None if output.resume is None else read_comparison(output.resume)
        config = _config(asked, sampling, output, recorded)
        is_tuned = _takes_profile(asked, models, recorded)
        pair, profile = _open_pair(
            models, config.specs, err, output, tuned_for=sampling if is_tuned else None
        )
        opened.enter_context(pair)
        if asked.tuned and profile is None:
            raise SpecgenError(
                "--tuned is given, and there is no tuned profile for these models here",
                "Run specgen tune",
            )
        drafts_tokens = any(
            spec.choice.method.draft_of(pair.models) and not spec.choice.settings.drafts_text
            for spec in config.specs
        )
        if recorded is None and not output.quiet and drafts_tokens:
            show_overlap(pair, err)

        if not asked.methods and recorded is None:
            config = replace(config, specs=fastest_specs(pair, profile, config.specs))
        if not is_tuned and models.uses_profile:
            # only to tell which settings are the profile's
            profile = find_profile(pair, sampling, None, lambda _: None)
        if profile is not None:
            # a resumed comparison keeps its settings
            keep = not is_tuned or (recorded is not None and not asked.methods)
            specs, taken = tuned_specs(profile, config.specs, keep=keep)
            config = replace(config, specs=specs)
            _say(f"tuned: {taken}" if taken else "", err, output)

        adds_rows = recorded is None or bool(asked.methods)
        specs = with_dtypes(config.specs, pair.target, adds_rows=adds_rows)
        config = replace(config, specs=specs)
        runner, note = _runner(pair, config, trace, recorded, output.trace_path)
        _say(note, err, output)
        runner.deadline = begin + (asked.budget or (USUAL_BUDGET if is_default else math.inf))
        Comparison(runner, output).run()


def _say(note: str, err: Console, output: CompareOutput) -> None:
    """Prints a note, if it is not empty; nothing with --quiet."""
    if note and not output.quiet:
        err.print(Text(note), soft_wrap=True)


def _config(
    asked: CompareOptions,
    sampling: SamplingParams,
    output: CompareOutput,
    recorded: RecordedComparison | None,
) -> BenchmarkConfig:
    """Returns what the options ask to measure: the methods of --methods, else those of the recorded
    comparison, else the usual ones. Raises SpecgenError for log-probabilities that go nowhere."""
    if sampling.logprobs is not None and output.trace_path is None:
        raise SpecgenError("--logprobs is given without --trace", "Add --trace FILE.jsonl")
    if recorded is not None and not asked.methods:
        specs = recorded.specs()
    else:
        specs = parse_specs(asked.methods or [])
    limit = asked.limit
    if limit is None and asked.prompts is None:
        limit = USUAL_PROMPTS
    available = load_prompts(asked.prompts, category=asked.category, all_turns=asked.turns)
    prompts = available if limit is None else picked(available, limit)
    return BenchmarkConfig(
        specs,
        prompts,
        asked.repeats,
        sampling,
        asked.chat,
        output.record is not None,
        output.perplexity or (recorded is not None and recorded.has("perplexity")),
        output.energy or (recorded is not None and recorded.has("energy")),
        len(available),
    )


def _open_pair(
    models: DecodingGroup,
    specs: Sequence[MethodSpec],
    err: Console,
    output: CompareOutput,
    *,
    tuned_for: SamplingParams | None,
) -> tuple[Pair, Profile | None]:
    """Loads the models that the methods need: `opening.open_pair`."""
    drafts = {spec.choice.method.loading.draft for spec in specs} - {""}
    has_baseline = any(spec.is_baseline for spec in specs)
    return open_pair(
        models,
        err,
        quiet=output.quiet,
        drafts=drafts,
        tuned_for=tuned_for,
        find="untried" if drafts or has_baseline else "heads",
    )


def _runner(
    pair: Pair,
    config: BenchmarkConfig,
    trace: TraceWriter | None,
    recorded: RecordedComparison | None,
    path: Path | None,
) -> tuple[Runner, str]:
    """Returns what runs the comparison, with the finished runs of `recorded`, or of an interrupted
    comparison in the trace `path`. Also returns a sentence about them for the user; it may be
    empty."""
    runner = Runner(pair, config, trace)
    runner.check()
    if trace is None:
        return runner, ""
    if recorded is not None:
        runner.resume(recorded)
        trace.keep = recorded.end
        return runner, ""
    if path is not None and path.is_file():
        return _continued(runner, trace, path)
    return runner, ""


def _takes_profile(
    asked: CompareOptions, models: DecodingGroup, recorded: RecordedComparison | None
) -> bool:
    """Whether methods without settings run with the settings and the draft of the tuned profile.

    Methods that the user named do so only with --tuned or --profile. A resumed comparison loads the
    draft that it had. Raises SpecgenError for options that contradict each other.
    """
    if asked.tuned and not models.uses_profile:
        raise SpecgenError("--tuned and --profile none are given", "Leave one of them out")
    if not models.uses_profile:
        return False
    if asked.tuned or models.profile is not None:
        return True
    if recorded is None:
        return not asked.methods
    return any(run.start.get("draft_dtype") in QUANTISED for run, _ in recorded.runs)


def _continued(runner: Runner, trace: TraceWriter, path: Path) -> tuple[Runner, str]:
    """Returns the runner with the finished runs in the trace, if it is the same comparison's and
    that was interrupted. If it is the same one's and complete, or the trace holds a single run of
    `generate`, returns a new runner, which writes the file anew.

    Also returns a sentence for the user about this; it may be empty. Raises SpecgenError if runs of
    another comparison, or several of `generate`, would be lost.
    """
    empty = Runner(runner.pair, runner.config, trace)
    try:
        recorded = read_comparison(path)
    except SpecgenError:
        if not _has_finished_run(path) or not holds_single_run(path):
            return empty, ""
        return empty, f"{path} is written anew: the run that it holds is replaced"
    runs = counted(len(recorded.runs), "finished run")
    try:
        runner.resume(recorded)
    except SpecgenError as error:
        problem = f"{error.message}: the {runs} in it would be lost"
        raise SpecgenError(problem, "Name another file, or delete this one") from error
    if not runner.is_interrupted(recorded):
        if not runner.is_complete(recorded):
            raise SpecgenError(
                f"the trace {path} holds {runs} of another comparison, which would be lost",
                f"Name another file, add to it (--resume {shlex.quote(str(path))}), or delete it",
            )
        return empty, f"{path} is written anew: the {runs} in it are replaced"
    trace.keep = recorded.end
    return runner, f"continuing {path}, which has {counted(len(runner.results.runs), 'run')}"


def _has_finished_run(path: Path) -> bool:
    from specgen.traces.reader import read_trace  # imports pydantic

    finished = False
    with suppress(SpecgenError):  # a damaged line ends what can be read
        for run in read_trace(path):
            finished |= run.finish_reason not in (None, "interrupted")
    return finished


def fastest_specs(
    pair: Pair, profile: Profile | None, specs: Sequence[MethodSpec]
) -> list[MethodSpec]:
    """Returns plain decoding, the first of `specs`, and `USUAL_METHODS` methods that can run with
    the pair and are likely to be fast: the first ones of `specs`, or with a profile the lossless
    methods that tuning expects to be the fastest."""
    from specgen.tune.pair_inspection import obstacle

    reference = specs[0]
    names = [spec.name for spec in specs[1:]]
    if profile is not None:
        speedups = {
            name: tuned.predicted
            for name, tuned in profile.methods.items()
            if methods.is_known(name) and methods.find(name).lossless
        }
        names = sorted(speedups, key=lambda name: -speedups[name])
    runnable = (name for name in names if name != reference.name and obstacle(pair, name) is None)
    return [reference, *parse_specs(list(islice(runnable, USUAL_METHODS)))[1:]]


class Comparison:
    """One comparison: measures what `runner` has not measured yet, and writes the results."""

    def __init__(self, runner: Runner, output: CompareOutput) -> None:
        self._runner = runner
        self._results = runner.results
        self._output = output
        self._err = theme.console(stderr=True, no_color=output.no_color)

    def run(self) -> None:
        """Measures all methods, then writes all outputs.

        If an error or an interruption ends the measurements, it is raised after the results so far
        are written. Raises SpecgenError if a lossless method's output differs from plain
        decoding's, if a method failed while running, or if a file could not be written.
        """
        costs, ended = self._measure()
        results = method_results(self._results)
        if costs is not None:
            results = with_predictions(results, self._results, costs)
        is_interrupted = isinstance(ended, KeyboardInterrupt)
        notes = self._energy_notes()
        if is_interrupted:
            notes.insert(0, self._interruption())
        elif self._runner.is_cut:
            notes.insert(0, ENDED_BY_BUDGET)
        report = self._report(results, " ".join(notes))
        with interrupts.held():
            try:
                self._print(report, costs)
            finally:  # also if the reader has closed the pipe
                unwritten = self._write_files(report)
        if is_interrupted and not unwritten:
            raise ReportedInterrupt
        errors = [self._error(result) for result in results if result.broken is not None]
        if isinstance(ended, SpecgenError):
            errors.append(ended)
        errors += unwritten
        if not errors:
            errors = _failures(results)
        if errors:
            message = "; ".join(error.message for error in errors)
            raise type(errors[0])(message, errors[0].hint)

    def _measure(self) -> tuple[dict[str, Any] | None, KeyboardInterrupt | SpecgenError | None]:
        """Measures all methods, and with --predict the costs of passes. Returns the costs (None if
        they were not measured), and the error or interruption that ended the measurements early
        (None if nothing did)."""
        with interrupts.caught():
            try:
                with Progress(self._err, quiet=self._output.quiet) as progress:
                    for step in self._runner.steps():
                        if not progress.is_silent:
                            self._show_step(progress, step)
                if not self._output.predict:
                    return None, None
                return measure_costs(self._runner.pair, self._results), None
            except KeyboardInterrupt as interruption:
                return None, interruption
            except SpecgenError as error:
                if not self._results.runs:
                    raise
                return None, error

    def _show_step(self, progress: Progress, step: BenchmarkStep) -> None:
        with interrupts.held():
            # fewer resamples: the intervals still change
            results = method_results(self._results, resamples=200)
            views.show_step(progress, self._report(results), step)

    def _report(self, results: Sequence[MethodResult], notes: str = "") -> views.Report:
        where = models_in_words(self._runner.pair)
        return views.Report(
            self._results, results, where, self._output.by_category, self._output.phases, notes
        )

    def _interruption(self) -> str:
        path = self._output.trace_path
        hint = "with --trace FILE.jsonl a comparison can be resumed after its first run"
        if path is not None and path.exists():
            hint = "the same command continues it"
        return f"Interrupted after {counted(len(self._results.runs), 'run')}; {hint}."

    def _energy_notes(self) -> list[str]:
        """Returns a sentence that says how joules were counted or why they are unavailable; an
        empty list without --energy."""
        energies = [run.line.get("energy") for run in self._results.runs.values()]
        energy = next(filter(None, energies), None)
        if energy is None or not self._results.config.energy:
            return []
        if energy["joules"] is None:
            return [f"Energy is unavailable: {energy['reason']}."]
        power = f"{significant(energy['idle_watts'])} W"
        return [
            f"Joules are those beyond the {power} of the idle devices; 'with idle' adds "
            f"these ({energy['source']})."
        ]

    def _print(self, report: views.Report, costs: dict[str, Any] | None) -> None:
        if not self._output.json:
            out = theme.console(no_color=self._output.no_color)
            for text in views.page(report, theme.width(out)):
                out.print(text)
            return
        for result in report.methods:
            line = as_json(result)
            line["tuned_on"] = self._results.config.tuned_on(result.spec)
            if costs is not None:
                line |= {"predicted": result.predicted, "costs": costs}
            print_json(line)

    def _write_files(self, report: views.Report) -> list[SpecgenError]:
        """Writes the CSV file, the picture and the page, if requested. Returns the errors of those
        that could not be written."""
        output = self._output
        errors = list[SpecgenError]()
        files: tuple[tuple[Path | None, Callable[[], Iterable[str]]], ...] = (
            (output.csv, lambda: [csv_text(report.methods, by_category=output.by_category)]),
            (output.svg, lambda: [views.picture(report)]),
            (output.html, lambda: self._page(report)),
        )
        for path, content in files:
            if path is not None:
                try:
                    write_pieces(path, content())
                except RunError as error:
                    errors.append(error)
        return errors

    def _page(self, report: views.Report) -> Iterator[str]:
        installed = ", ".join(f"{name} {version}" for name, version in versions().items())
        command = f"specgen {shlex.join(sys.argv[1:])}"
        return comparison_page(report, _machine(self._runner.pair), installed, command)

    def _error(self, result: MethodResult) -> SpecgenError:
        """Returns the error of a method whose output differs from plain decoding's."""
        difference = result.broken
        assert difference is not None
        prompt = self._results.label(difference.prompt_index)
        message = difference.explanation(result.spec.written, prompt)
        hint = "This is an error in the method or in a forward pass: please report it with --trace"
        return OutputDiffersError(message.rstrip("."), hint)


def _failures(results: Sequence[MethodResult]) -> list[SpecgenError]:
    """Returns the errors of the methods that failed while running. That a method lacks something,
    such as a head, is no error."""
    errors = list[SpecgenError]()
    for result in results:
        failure = result.failure
        if isinstance(failure, RunError):
            errors.append(RunError(f"{result.name}: {failure.message}", failure.hint))
    return errors


def _machine(pair: Pair) -> list[tuple[str, str]]:
    """Returns (heading, text) pairs about the machine with the GPUs that are used, the target and
    the draft model."""
    import torch

    gpus = [
        torch.cuda.get_device_name(device)
        for device in dict.fromkeys(pair.models.devices())
        if device.type == "cuda"
    ]
    threads = counted(torch.get_num_threads(), "CPU thread")
    rows = [("Machine", ", ".join([machine_in_words(), *gpus, threads]))]
    for role, model in (("Target", pair.target), ("Draft", pair.draft)):
        if model is not None:
            shape = model.files.shape
            millions = sum(model.files.parameters.values()) / 1e6
            size = (
                f"{shape.model_type}, {millions:,.1f} million parameters, {shape.num_layers} layers"
            )
            rows.append((role, f"{model.name} ({size}, {model.device} {model.dtype_name})"))
    return rows
