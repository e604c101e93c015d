"""`specgen inspect`: shows recorded generations, a report on a pair of models before it is used, or
the list of methods."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.text import print_json
from specgen.cli.commands import option_of, options_given
from specgen.cli.inspect_traces import inspect_traces
from specgen.cli.opening import disable_hub_progress, open_pair
from specgen.cli.options import (
    InspectOptions,
    ModelGroup,
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
    models: ModelGroup,
    output: OutputOptions,
) -> None:
    """Shows traces, a pair of models or the methods. Raises SpecgenError for options that
    contradict each other, and for traces and models that cannot be read."""
    _check(asked, shown, pair, models)
    if asked.traces:
        inspect_traces(asked.traces, output, shown)
    elif not asked.list_methods:
        _inspect_pair(models, output, measure=pair.measure)
    else:
        _list_methods(output)


def _list_methods(output: OutputOptions) -> None:
    """Describes our methods and those of installed packages. A line on standard error says which of
    those cannot be used."""
    err = theme.console(stderr=True, no_color=output.no_color)

    def note(text: str) -> None:
        if not output.quiet:
            err.print(Text(f"note: {text}", "quiet"), soft_wrap=True)

    for method in methods.listed(note):
        if output.json:
            print_json(view.method_line(method))
        else:
            view.method_card(theme.console(no_color=output.no_color), method)


def _check(
    asked: InspectOptions, shown: TraceOptions, pair: PairOptions, models: ModelGroup
) -> None:
    """Raises SpecgenError unless the options name one thing to inspect."""
    wanted = []
    if asked.traces:
        wanted.append("a trace")
    wanted += [*options_given(models), *options_given(pair)][:1]
    if asked.list_methods:
        wanted.append("--methods")
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
    if not asked.traces and options_given(shown):
        raise SpecgenError(
            f"{options_given(shown)[0]} is given without a trace",
            "Name one: specgen inspect TRACE.jsonl",
        )
    if pair.pair and models.target is not None:
        raise SpecgenError(
            f"--pair is the bundled pair, and --target {models.target} is given too",
            "Leave one of them out",
        )


def _inspect_pair(models: ModelGroup, output: OutputOptions, *, measure: bool) -> None:
    """Shows a report on a pair of models. With `measure` the models are loaded and timed."""
    err = theme.console(stderr=True, no_color=output.no_color)
    report = _report(models, err, quiet=output.quiet)
    if measure:
        from specgen.tune.pair_inspection import with_measurements

        dtypes = {model.dtype for model in (report.target, report.draft) if model is not None}
        chosen = models
        if len(dtypes) == 1 and models.draft_dtype is None:  # "auto" would be measured again
            chosen = replace(models, dtype=dtypes.pop())
        pair, _ = open_pair(chosen, err, quiet=output.quiet)
        with pair, Progress(err, quiet=output.quiet) as line:
            report = with_measurements(report, pair, line.announce)

    drafters, published = _drafters(models, err, quiet=output.quiet)
    if output.json:
        line_of_pair = {"type": "pair", **report.as_dict()}
        if models.finds:
            line_of_pair["found"] = [drafter.as_dict() for drafter in drafters]
        print_json(line_of_pair)
    else:
        out = theme.console(no_color=output.no_color)
        view.show_found(out, drafters, published)
        view.show_not_chosen(out, drafters)
        view.show(out, report, _next_command(models, report))


def _drafters(models: ModelGroup, err: Console, *, quiet: bool) -> tuple[list[Found], str | None]:
    """Returns what was found to draft for the target, if no drafter is named, last what is not
    chosen, and a hint at published drafters if nothing else was found."""
    if not models.finds or models.target is None:
        return [], None
    with Progress(err, quiet=quiet) as loading:
        from specgen.engine.devices import pick_device, pick_draft_device
        from specgen.engine.model_files import find_model
        from specgen.pair.finding import hint, search
        from specgen.pair.loading import model_sources

        device = pick_device(models.device)
        devices = device, pick_draft_device(models.draft_device, models.device, device)
        target, *_ = model_sources(models.loaded())
        made = search(find_model(target, loading.announce), devices, models)
        published = None if made.found else hint(models.target)
        return [*made.found, *made.not_chosen], published


def _report(models: ModelGroup, err: Console, *, quiet: bool) -> PairReport:
    """Returns a report on the models' files, without loading their weights."""
    disable_hub_progress(err, quiet=quiet)
    with Progress(err, quiet=quiet) as loading:
        from specgen.engine.devices import pick_device, pick_draft_device
        from specgen.tune.pair_inspection import inspect_files

        device = pick_device(models.device)
        draft_device = pick_draft_device(models.draft_device, models.device, device)
        return inspect_files(models.loaded(), (device, draft_device), loading.announce)


def _next_command(models: ModelGroup, report: PairReport) -> str:
    """Returns the command that the user can run next. If tokens cannot be translated between the
    models, it names methods that work without that."""
    arguments = ""
    for name in ("target", "draft", "head", "device", "dtype", "context", "draft_dtype"):
        value = getattr(models, name)
        if value not in (None, "auto"):
            arguments += f" {option_of(name)} {shlex.quote(str(value))}"
    if report.speedup_model is None:
        return f"specgen inspect{arguments} --measure"
    if report.tokenizers is not None and report.tokenizers.refusal is not None:
        arguments += " --methods sd:translation=text,lookup,suffix"
    return f"specgen compare{arguments}"
