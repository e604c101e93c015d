"""`specgen inspect --target T --draft D`: reports whether two models can be used together, and which methods can run on them."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from specgen.cli.model_options import ModelOptions, disable_hub_progress, open_pair
from specgen.cli.options import OutputOptions
from specgen.json_lines import print_json
from specgen.ui import theme
from specgen.ui.terminal import pair_report as view
from specgen.ui.terminal.loading_line import LoadingLine

if TYPE_CHECKING:
    from specgen.tuning.pair_inspection import PairReport


def inspect_pair(models: ModelOptions, display: OutputOptions, *, measure: bool) -> None:
    """Shows a report on a pair of models.

    With `measure` the models are loaded and their forward passes timed, unless their tokenizers do not fit together.
    """
    err = theme.console(stderr=True, no_color=display.no_color)
    report = _report(models, err, quiet=display.quiet)
    if measure and not _is_refused(report):
        report = _measured(models, report, err, quiet=display.quiet)
    if display.json:
        print_json({"type": "pair", **report.as_dict()})
    else:
        view.show(theme.console(no_color=display.no_color), report, _next_command(models, report))


def _report(models: ModelOptions, err: Console, *, quiet: bool) -> PairReport:
    """Returns the report that needs only the models' files, without loading their weights."""
    disable_hub_progress(err, quiet=quiet)
    with LoadingLine(err, quiet=quiet) as loading:
        from specgen.engine.devices import pick_device
        from specgen.loading import model_sources
        from specgen.tuning.method_readiness import TrainedParts
        from specgen.tuning.pair_inspection import inspect_files

        device = pick_device(models.device)
        draft_device = pick_device(models.draft_device) if models.draft_device is not None else device
        sources = model_sources(
            models.target,
            models.draft,
            models.revision,
            models.draft_revision,
            models.trust_remote_code,
            models.offline,
            models.backend,
        )
        target, draft = replace(sources[0], context=models.context), sources[1] if len(sources) > 1 else None
        parts = TrainedParts(models.exit_layer, models.head)
        return inspect_files(target, draft, (device, draft_device), models.dtype, loading.announce, parts, models.draft_dtype)


def _measured(models: ModelOptions, report: PairReport, err: Console, *, quiet: bool) -> PairReport:
    from specgen.tuning.method_readiness import planned
    from specgen.tuning.pair_inspection import engine_choices, measure, measure_parallel

    dtypes = {model.dtype for model in (report.target, report.draft) if model is not None}
    if len(dtypes) == 1 and models.draft_dtype is None:  # already measured
        models = replace(models, dtype=dtypes.pop())
    with open_pair(models, err, quiet=quiet) as pair, LoadingLine(err, quiet=quiet) as line:
        return replace(
            report,
            speedup_model=measure(pair, line.still),
            choices=engine_choices(pair),
            parallel_costs=measure_parallel(pair, line.still),
            methods=planned(pair, report.methods),
        )


def _is_refused(report: PairReport) -> bool:
    return report.tokenizers is not None and report.tokenizers.refusal is not None


def _next_command(models: ModelOptions, report: PairReport) -> str | None:
    """Returns the command that the user can run next; None where the tokenizers do not fit together."""
    if _is_refused(report):
        return None
    dtype = models.dtype if models.dtype != "auto" else None
    head = None if models.head is None else str(models.head)
    context = None if models.context is None else str(models.context)
    named = {"--target": models.target, "--draft": models.draft, "--head": head, "--dtype": dtype, "--context": context}
    named["--draft-dtype"] = models.draft_dtype
    arguments = "".join(f" {option} {shlex.quote(value)}" for option, value in named.items() if value is not None)
    return f"specgen inspect{arguments} --measure" if report.speedup_model is None else f"specgen compare{arguments}"
