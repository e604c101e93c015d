"""`specgen inspect --target T --draft D`: the pre-flight of a pair."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from specgen.cli.model_options import ModelOptions, open_pair
from specgen.json_lines import print_json
from specgen.ui import theme
from specgen.ui.terminal import pair_report as view
from specgen.ui.terminal.loading_line import LoadingLine

if TYPE_CHECKING:
    from specgen.tuning.pair_report import PairReport


def inspect_pair(models: ModelOptions, *, measure: bool, json: bool, quiet: bool, no_color: bool) -> None:
    """Report on a pair; with `measure` load it and time its passes, where it can be used at all."""
    err = theme.console(stderr=True, no_color=no_color)
    report = _looked_at(models, err, quiet=quiet)
    if measure and (report.tokenizers is None or report.tokenizers.refusal is None):
        report = _measured(models, report, err, quiet=quiet)
    if json:
        print_json({"type": "pair", **report.as_dict()})
        return
    view.show(theme.console(no_color=no_color), report, _next_step(models, report))


def _looked_at(models: ModelOptions, err: Console, *, quiet: bool) -> PairReport:
    if quiet or not err.is_terminal:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the hub reads it when it is imported, below
    with LoadingLine(err, quiet=quiet) as loading:
        from specgen import demo
        from specgen.engine.devices import pick_device
        from specgen.engine.model_loading import ModelSource
        from specgen.tuning.pair_inspection import inspect_files

        on = pick_device(models.device)
        draft_on = pick_device(models.draft_device) if models.draft_device is not None else on
        draft: ModelSource | None
        if models.target is None:
            target, draft = (ModelSource(str(demo.folder(role)), f"demo/{role}") for role in ("target", "draft"))
        else:
            shared = (models.trust_remote_code, models.offline)
            target = ModelSource(models.target, None, models.revision, *shared)
            draft = None if models.draft is None else ModelSource(models.draft, None, models.draft_revision, *shared)
        return inspect_files(target, draft, (on, draft_on), models.dtype, loading.announce, exit_layer=models.exit_layer)


def _measured(models: ModelOptions, report: PairReport, err: Console, *, quiet: bool) -> PairReport:
    from specgen.tuning.pair_inspection import measure, measure_parallel, refusals
    from specgen.tuning.pair_report import planned

    with open_pair(models, err, quiet=quiet) as pair, LoadingLine(err, quiet=quiet) as line:
        return replace(
            report,
            speedup_model=measure(pair, line.still),
            parallel_costs=measure_parallel(pair, line.still),
            methods=planned(report.methods, refusals(pair)),
        )


def _next_step(models: ModelOptions, report: PairReport) -> str | None:
    """The command to go on with, where the pair can be used."""
    if report.tokenizers is not None and report.tokenizers.refusal is not None:
        return None
    named = [
        ("--target", models.target),
        ("--draft", models.draft),
        ("--dtype", models.dtype if models.dtype != "auto" else None),
    ]
    options = "".join(f" {option} {shlex.quote(value)}" for option, value in named if value is not None)
    if report.speedup_model is None:
        return f"specgen inspect{options} --measure"
    return f"specgen compare{options}"
