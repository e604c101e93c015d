"""`specgen compare`: measures methods against plain decoding on a pair of models and a set of
prompts.

Continues an earlier trace if one is given, and writes the results as table, JSON, CSV, SVG and
HTML."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
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
from specgen.base.types import QUANTISED
from specgen.cli.commands import check_outputs, given
from specgen.cli.opening import find_profile, models_in_words, open_pair, show_overlap, tuned_specs
from specgen.cli.options import CompareOptions, CompareOutput, DecodingOptions, SamplingOptions
from specgen.compare.method_specs import MethodSpec, parse_specs
from specgen.compare.prompts import load_prompts
from specgen.compare.results import (
    BenchmarkConfig,
    MethodResult,
    measure_costs,
    method_results,
    with_predictions,
)
from specgen.compare.runner import RecordedComparison, Runner, read_comparison
from specgen.compare.verdict import Difference
from specgen.traces.writer import TraceWriter
from specgen.view import comparison as views
from specgen.view import theme
from specgen.view.comparison_columns import as_json, csv_text
from specgen.view.progress import Progress

if TYPE_CHECKING:
    from specgen.pair.pair import Pair
    from specgen.pair.profile import Profile


# of a comparison without options; in seconds
USUAL_PROMPTS = 8
USUAL_METHODS = 6
USUAL_BUDGET = 60.0
ENDED_BY_BUDGET = "The time was up (--budget SECONDS); -m all compares every method."


class OutputDiffersError(SpecgenError):
    """A lossless method's output differs from plain decoding's."""

    exit_code = 3


def compare(
    asked: CompareOptions, models: DecodingOptions, options: SamplingOptions, output: CompareOutput
) -> None:
    """Loads the models, compares the methods and writes the results. Raises SpecgenError for wrong
    options, and as `Comparison.run`."""
    begin = time.perf_counter()
    is_default = not given(asked) and output.trace_path is None
    prompts = asked.prompts or examples_file()
    sampling = options.params()
    limit = USUAL_PROMPTS if asked.limit is None and asked.prompts is None else asked.limit
    if asked.budget is not None and not asked.budget > 0:
        raise SpecgenError(f"--budget is {asked.budget:g}", "It has to be above 0 seconds")
    check_outputs(output.files, [("--prompts", prompts)], models)
    err = theme.console(stderr=True, no_color=output.no_color)
    with ExitStack() as opened:
        path = output.trace_path  # locked before it is read
        trace = (
            None
            if path is None
            else opened.enter_context(closing(TraceWriter(path, resumes=output.resume is not None)))
        )
        recorded = None if output.resume is None else read_comparison(output.resume)
        specs = (
            recorded.specs()
            if recorded is not None and not asked.methods
            else parse_specs(asked.methods or [])
        )
        config = BenchmarkConfig(
            specs,
            load_prompts(prompts, category=asked.category, limit=limit, all_turns=asked.turns),
            asked.repeats,
            sampling,
            asked.chat,
            output.record is not None,
            output.perplexity or (recorded is not None and recorded.has("perplexity")),
            output.energy or (recorded is not None and recorded.has("energy")),
        )
        parallel = any(spec.choice.method.is_parallel for spec in specs)
        in_turn = [
            spec.choice
            for spec in specs
            if spec.choice.method.needs_draft_model and not spec.choice.method.is_parallel
        ]
        sequential = any(not choice.settings.drafts_text for choice in in_turn)
        is_tuned = _takes_profile(asked, models, recorded)
        tuned_for = sampling if is_tuned else None
        pair, profile = open_pair(
            models,
            err,
            quiet=output.quiet,
            parallel=parallel,
            sequential=sequential,
            tuned_for=tuned_for,
            find="untried"
            if any(spec.is_baseline or spec.choice.method.uses_draft_model for spec in specs)
            else "heads",
        )
        opened.enter_context(pair)
        if asked.tuned and profile is None:
            raise SpecgenError(
                "--tuned is given, and there is no tuned profile for these models here",
                "Run specgen tune",
            )
        if recorded is None and not output.quiet and (parallel or sequential):
            show_overlap(pair, err)
        if not asked.methods and recorded is None:
            specs = fastest_specs(pair, profile, specs)
            config = replace(config, specs=specs)
        if not is_tuned and models.uses_profile:
            # which only tells whose settings these are
            profile = find_profile(pair, sampling, None, lambda _: None)
        if profile is not None:
            # a resumed one keeps its settings
            keep = not is_tuned or (recorded is not None and not asked.methods)
            specs, taken = tuned_specs(profile, specs, keep=keep)
            config = replace(config, specs=specs)
            if taken and not output.quiet:
                err.print(Text(f"tuned: {taken}"), soft_wrap=True)
        runner = Runner(pair, config, trace)
        runner.check()
        if recorded is not None and trace is not None:
            runner.resume(recorded)
            trace.keep = recorded.end
        elif trace is not None and path is not None and path.is_file():
            runner, said = _continued(runner, trace, path)
            if said and not output.quiet:
                err.print(Text(said), soft_wrap=True)
        runner.deadline = begin + (asked.budget or (USUAL_BUDGET if is_default else math.inf))
        Comparison(runner, output).run()


def _takes_profile(
    asked: CompareOptions, models: DecodingOptions, recorded: RecordedComparison | None
) -> bool:
    """Whether methods without settings run with those of the tuned profile, and its draft: methods
    that the user named only with --tuned or --profile. A resumed comparison loads the draft that it
    had.

    Raises SpecgenError for options that contradict each other.
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
    """Returns the runner, with the finished runs in the trace if it is that of the same comparison,
    interrupted. Any other file is written anew.

    Also returns a sentence for the user: which runs are continued, or why those of another
    comparison are not; it may be empty.
    """
    new = Runner(runner.pair, runner.config, trace)
    try:
        recorded = read_comparison(path)
    except SpecgenError:
        return new, ""
    try:
        runner.resume(recorded)
    except SpecgenError as error:
        return new, f"{error.message}: it is written anew"
    if not runner.is_interrupted(recorded):
        return new, ""
    trace.keep = recorded.end
    return runner, f"continuing {path}, which has {counted(len(runner.results.runs), 'run')}"


def fastest_specs(
    pair: Pair, profile: Profile | None, specs: Sequence[MethodSpec]
) -> list[MethodSpec]:
    """Returns those of the methods that can run with the pair, plain decoding and the
    `USUAL_METHODS` that are likely to be fast.

    With a profile, these are the ones that tuning expects to be, whether or not they are among
    `specs`.
    """
    from specgen.tune.pair_inspection import obstacle

    names = [spec.name for spec in specs[1:]]
    if profile is not None:
        known = {
            name: tuned.predicted
            for name, tuned in profile.methods.items()
            if methods.find(name).lossless
        }
        names = sorted(known, key=lambda name: -known[name])
    able = (name for name in names if name != specs[0].name and obstacle(pair, name) is None)
    return [specs[0], *parse_specs(list(islice(able, USUAL_METHODS)))[1:]]


class Comparison:
    """One comparison: measures what `runner` has not measured yet, and writes the results."""

    def __init__(self, runner: Runner, output: CompareOutput) -> None:
        self._runner = runner
        self._results = runner.results
        self._output = output
        self._err = theme.console(stderr=True, no_color=output.no_color)

    def run(self) -> None:
        """Measures all methods, then writes all outputs. If an error or an interruption ends the
        measurements, the results so far are written before it is raised. Raises SpecgenError if a
        lossless method's output differs from plain decoding's, if a method failed while running, or
        if a file could not be written."""
        costs, ended = self._measure()
        made = method_results(self._results)
        if costs is not None:
            made = with_predictions(made, self._results, costs)
        is_interrupted = isinstance(ended, KeyboardInterrupt)
        notes = (
            [self._interruption()]
            if is_interrupted
            else [ENDED_BY_BUDGET]
            if self._runner.is_cut
            else []
        )
        shown = self._report(made, " ".join(notes + self._energy_notes()))
        with interrupts.held():
            try:
                self._print(shown, costs)
            finally:  # also if the reader has closed the pipe
                unwritten = self._write_files(shown)
        if is_interrupted and not unwritten:
            raise ReportedInterrupt
        errors: list[SpecgenError] = [
            self._error(result.spec, result.broken) for result in made if result.broken is not None
        ]
        errors += [*([ended] if isinstance(ended, SpecgenError) else []), *unwritten]
        # a method that failed while running is an error; one that lacks something, such as a head,
        # is not
        if not errors:
            failed = [
                (result.name, result.failure)
                for result in made
                if isinstance(result.failure, RunError)
            ]
            errors = [
                RunError(f"{name}: {failure.message}", failure.hint) for name, failure in failed
            ]
        if errors:
            raise type(errors[0])("; ".join(each.message for each in errors), errors[0].hint)

    def _measure(self) -> tuple[dict[str, Any] | None, KeyboardInterrupt | SpecgenError | None]:
        """Measures all methods and, if requested, the costs of passes. Returns the costs (None if
        they were not measured), and the error or interruption that ended the measurements early
        (None if nothing did)."""
        with interrupts.caught():
            try:
                with Progress(self._err, quiet=self._output.quiet) as progress:
                    for step in self._runner.steps():
                        if not progress.is_silent:
                            with interrupts.held():
                                # the intervals still change
                                made = method_results(self._results, resamples=200)
                                views.show_step(progress, self._report(made), step)
                return measure_costs(
                    self._runner.pair, self._results
                ) if self._output.predict else None, None
            except KeyboardInterrupt as interruption:
                return None, interruption
            except SpecgenError as error:
                if not self._results.runs:
                    raise
                return None, error

    def _report(self, made: Sequence[MethodResult], notes: str = "") -> views.Report:
        where = models_in_words(self._runner.pair)
        return views.Report(
            self._results, made, where, self._output.by_category, self._output.phases, notes
        )

    def _interruption(self) -> str:
        path = self._output.trace_path
        hint = "with --trace FILE.jsonl a comparison can be resumed after its first run"
        if path is not None and path.exists():
            hint = "the same command continues it"
        return f"Interrupted after {counted(len(self._results.runs), 'run')}; {hint}."

    def _energy_notes(self) -> list[str]:
        """A sentence that says how joules were counted or why they are unavailable. Empty if energy
        was not requested."""
        energy = next(
            (run.line["energy"] for run in self._results.runs.values() if run.line.get("energy")),
            None,
        )
        if energy is None or not self._results.config.energy:
            return []
        if energy["joules"] is None:
            return [f"Energy is unavailable: {energy['reason']}."]
        power = f"{significant(energy['idle_watts'])} W"
        return [
            (
                f"Joules are those beyond the {power} of the idle devices; 'with idle' adds "
                f"these ({energy['source']})."
            )
        ]

    def _print(self, shown: views.Report, costs: dict[str, Any] | None) -> None:
        if not self._output.json:
            out = theme.console(no_color=self._output.no_color)
            for text in views.page(shown, theme.width(out)):
                out.print(text)
            return
        for result in shown.made:
            line = as_json(result) | {"tuned_on": self._results.config.tuned_on(result.spec)}
            print_json(
                line if costs is None else {**line, "predicted": result.predicted, "costs": costs}
            )

    def _write_files(self, shown: views.Report) -> list[SpecgenError]:
        """Writes the CSV file, the picture and the page, if requested. Returns the errors of those
        that could not be written."""
        output = self._output
        errors = list[SpecgenError]()
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
        return comparison_page(
            shown, _machine(self._runner.pair), installed, f"specgen {shlex.join(sys.argv[1:])}"
        )

    def _error(self, spec: MethodSpec, found: Difference) -> SpecgenError:
        """Returns the error of a method whose output differs from plain decoding's."""
        said = found.explanation(spec.written, self._results.label(found.prompt_index))
        hint = "This is an error in the method or in a forward pass: please report it with --trace"
        return OutputDiffersError(said.rstrip("."), hint)


def _machine(pair: Pair) -> list[tuple[str, str]]:
    """Returns (heading, text) pairs that describe the machine with its GPUs that are used, the
    target and the draft model."""
    import torch

    from specgen.pair.pair import devices

    gpus = [
        torch.cuda.get_device_name(each)
        for each in dict.fromkeys(devices(pair))
        if each.type == "cuda"
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
