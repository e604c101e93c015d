"""`specgen inspect --target T --draft D`: reports whether two models can be used together, and which methods can run on them."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from specgen.base.text import print_json
from specgen.cli.model_options import ModelOptions, disable_hub_progress, open_pair
from specgen.cli.options import OutputOptions
from specgen.view import pair_report as view
from specgen.view import theme
from specgen.view.progress import Progress

if TYPE_CHECKING:
    from specgen.tune.pair_inspection import PairReport


def inspect_pair(models: ModelOptions, display: OutputOptions, *, measure: bool) -> None:
    """Shows a report on a pair of models.

    With `measure` the models are loaded and their forward passes timed.
    """
    err = theme.console(stderr=True, no_color=display.no_color)
    report = _report(models, err, quiet=display.quiet)
    if measure:
        report = _measured(models, report, err, quiet=display.quiet)
    if display.json:
        print_json({"type": "pair", **report.as_dict()})
    else:
        view.show(theme.console(no_color=display.no_color), report, _next_command(models, report))


def _report(models: ModelOptions, err: Console, *, quiet: bool) -> PairReport:
    """Returns the report that needs only the models' files, without loading their weights."""
    disable_hub_progress(err, quiet=quiet)
    with Progress(err, quiet=quiet) as loading:
        from specgen.engine.devices import pick_device, pick_draft_device
        from specgen.engine.hub import head_folder
        from specgen.pair.loading import model_sources
        from specgen.tune.pair_inspection import inspect_files

        device = pick_device(models.device)
        draft_device = pick_draft_device(models.draft_device, models.device, device)
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
        head = None if models.head is None else head_folder(models.head, models.offline, loading.announce)
        parts = models.exit_layer, head
        named = models.device, models.draft_device
        dtypes = models.dtype, models.draft_dtype
        return inspect_files(target, draft, (device, draft_device), dtypes, loading.announce, parts, named)


def _measured(models: ModelOptions, report: PairReport, err: Console, *, quiet: bool) -> PairReport:
    from specgen.tune.pair_inspection import with_measurements

    dtypes = {model.dtype for model in (report.target, report.draft) if model is not None}
    if len(dtypes) == 1 and models.draft_dtype is None:  # already measured
        models = replace(models, dtype=dtypes.pop())
    with open_pair(models, err, quiet=quiet) as pair, Progress(err, quiet=quiet) as line:
        return with_measurements(report, pair, line.announce)


def _is_refused(report: PairReport) -> bool:
    """Whether the draft model's tokens cannot be translated, so that drafts go by way of their text."""
    return report.tokenizers is not None and report.tokenizers.refusal is not None


def _next_command(models: ModelOptions, report: PairReport) -> str:
    """Returns the command that the user can run next."""
    dtype = models.dtype if models.dtype != "auto" else None
    head = None if models.head is None else str(models.head)
    context = None if models.context is None else str(models.context)
    named = {"--target": models.target, "--draft": models.draft, "--head": head}
    named |= {"--device": None if models.device == "auto" else models.device, "--dtype": dtype, "--context": context}
    named["--draft-dtype"] = models.draft_dtype
    arguments = "".join(f" {option} {shlex.quote(value)}" for option, value in named.items() if value is not None)
    if report.speedup_model is None:
        return f"specgen inspect{arguments} --measure"
    return f"specgen compare{arguments}" + (" --methods sd:translation=text,lookup,suffix" if _is_refused(report) else "")
