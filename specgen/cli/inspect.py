"""`specgen inspect`: shows recorded generations, a report on a pair of models before it is used, or
the list of methods."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.text import print_json
from specgen.cli.commands import given
from specgen.cli.inspect_traces import inspect_traces
from specgen.cli.opening import disable_hub_progress, open_pair
from specgen.cli.options import (
    InspectOptions,
    ModelOptions,
    OutputOptions,
    PairOptions,
    TraceOptions,
)
from specgen.view import pair_report as view
from specgen.view import theme
from specgen.view.progress import Progress

if TYPE_CHECKING:
    from specgen.pair.finding import Found
    from specgen.tune.pair_inspection import PairReport


def inspect(
    asked: InspectOptions,
    shown: TraceOptions,
    pair: PairOptions,
    models: ModelOptions,
    output: OutputOptions,
) -> None:
    """Shows traces, a pair of models or the methods. Raises SpecgenError for options that
    contradict each other."""
    wanted = ["a trace"] if asked.traces else []
    wanted += [*given(models), *given(pair)][:1]
    wanted += ["--methods"] if asked.list_methods else []
    if not wanted:
        ways = (
            "Name a trace, or a pair (--target MODEL --draft MODEL; --pair is the "
            "bundled one), or list the methods: "
        )
        raise SpecgenError("nothing to inspect", f"{ways}specgen inspect --methods")
    if len(wanted) > 1:
        raise SpecgenError(
            f"{' and '.join(wanted)} cannot be combined",
            "Inspect traces, a pair of models, or the methods",
        )
    if not asked.traces and given(shown):
        raise SpecgenError(
            f"{given(shown)[0]} is given without a trace", "Name one: specgen inspect TRACE.jsonl"
        )
    if pair.pair and models.target is not None:
        raise SpecgenError(
            f"--pair is the bundled pair, and --target {models.target} is given too",
            "Leave one of them out",
        )
    if asked.traces:
        inspect_traces(asked.traces, output, shown)
    elif not asked.list_methods:
        _inspect_pair(models, output, measure=pair.measure)
    else:
        for method in methods.METHODS.values():
            if output.json:
                print_json(view.method_line(method))
            else:
                view.method_card(theme.console(no_color=output.no_color), method)


def _inspect_pair(models: ModelOptions, output: OutputOptions, *, measure: bool) -> None:
    """Shows a report on a pair of models.

    With `measure` the models are loaded and their forward passes timed.
    """
    err = theme.console(stderr=True, no_color=output.no_color)
    report = _report(models, err, quiet=output.quiet)
    if measure:
        from specgen.tune.pair_inspection import with_measurements

        dtypes = {model.dtype for model in (report.target, report.draft) if model is not None}
        is_known = len(dtypes) == 1 and models.draft_dtype is None  # already measured
        pair, _ = open_pair(
            replace(models, dtype=dtypes.pop()) if is_known else models, err, quiet=output.quiet
        )
        with pair, Progress(err, quiet=output.quiet) as line:
            report = with_measurements(report, pair, line.announce)
    found, published = _found(models, err, quiet=output.quiet)
    if output.json:
        more = {"found": [each.as_dict() for each in found]} if models.finds else {}
        print_json({"type": "pair", **report.as_dict(), **more})
    else:
        view.show_found(theme.console(no_color=output.no_color), found, published)
        view.show(theme.console(no_color=output.no_color), report, _next_command(models, report))


def _found(models: ModelOptions, err: Console, *, quiet: bool) -> tuple[list[Found], str | None]:
    """Returns what can draft for the target, if no drafter is named, and a hint at published ones
    where nothing was found."""
    if not models.finds or models.target is None:
        return [], None
    with Progress(err, quiet=quiet) as loading:
        from specgen.engine.devices import pick_device, pick_draft_device
        from specgen.engine.model_files import ModelSource, find_model
        from specgen.pair.finding import hint, search

        source = ModelSource(
            models.target, models.revision, models.trust_remote_code, models.offline
        )
        device = pick_device(models.device)
        devices = device, pick_draft_device(models.draft_device, models.device, device)
        dtypes = models.dtype, models.draft_dtype
        found = search(find_model(source, loading.announce), devices, dtypes).found
        return found, None if found else hint(models.target)


def _report(models: ModelOptions, err: Console, *, quiet: bool) -> PairReport:
    """Returns the report that needs only the models' files, without loading their weights."""
    disable_hub_progress(err, quiet=quiet)
    with Progress(err, quiet=quiet) as loading:
        from specgen.engine.devices import pick_device, pick_draft_device
        from specgen.engine.hub import head_folder
        from specgen.pair.loading import assistant_folder, model_sources
        from specgen.tune.pair_inspection import inspect_files

        device = pick_device(models.device)
        draft_device = pick_draft_device(models.draft_device, models.device, device)
        draft = None if models.draft == "none" else models.draft
        named = (
            models.target,
            draft,
            models.revision,
            models.draft_revision,
            models.trust_remote_code,
            models.offline,
        )
        target, *drafts = model_sources(*named, models.backend)
        head = (
            None
            if models.head is None
            else head_folder(models.head, models.offline, loading.announce)
        )
        if (
            models.target is not None
            and drafts
            and (folder := assistant_folder(drafts[0], loading.announce)) is not None
        ):
            head = folder
            drafts = []
        return inspect_files(
            replace(target, context=models.context),
            drafts[0] if drafts else None,
            (device, draft_device),
            (models.dtype, models.draft_dtype),
            loading.announce,
            (models.exit_layer, head),
            (models.device, models.draft_device),
        )


def _next_command(models: ModelOptions, report: PairReport) -> str:
    """Returns the command that the user can run next. If tokens cannot be translated between the
    models, it names methods that work without that."""
    given = {
        name: getattr(models, name)
        for name in ("target", "draft", "head", "device", "dtype", "context", "draft_dtype")
    }
    arguments = "".join(
        f" --{name.replace('_', '-')} {shlex.quote(str(value))}"
        for name, value in given.items()
        if value not in (None, "auto")
    )
    if report.speedup_model is None:
        return f"specgen inspect{arguments} --measure"
    is_refused = report.tokenizers is not None and report.tokenizers.refusal is not None
    return f"specgen compare{arguments}" + (
        " --methods sd:translation=text,lookup,suffix" if is_refused else ""
    )
