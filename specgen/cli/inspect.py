"""`specgen inspect`: shows recorded generations, a report on a pair of models before it is used, or the list of methods."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.text import print_json
from specgen.cli import options
from specgen.cli.error_reporting import reported
from specgen.cli.model_options import ModelOptions

_trace = partial(typer.Option, rich_help_panel="Recorded runs")
_pair = partial(typer.Option, rich_help_panel="A pair of models")
_ROUNDS = "Show at most N rounds of each run. Default: 40 of a single run, none of several."
_MEASURE = (
    "Load the pair and measure its forward passes, for the acceptance rate from which speculation is faster. "
    "Default: the bundled pair."
)
_LIST = "List every method with its paper, its settings and their defaults."


@reported
@options.grouped
def inspect(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(metavar="TRACE.jsonl ...", help="Traces to show, side by side if several.", show_default=False),
    ] = None,
    list_methods: Annotated[bool, typer.Option("--methods", help=_LIST)] = False,
    html: Annotated[Path | None, _trace(metavar="FILE", help="Write a self-contained page instead of text.")] = None,
    rounds: Annotated[int | None, _trace(metavar="N", help=_ROUNDS)] = None,
    run: Annotated[int, _trace(metavar="N", help="Show the rounds of each method's N-th run.")] = 1,
    pair: Annotated[bool, _pair(help="Inspect the bundled pair.")] = False,
    measure: Annotated[bool, _pair(help=_MEASURE)] = False,
    *,
    models: ModelOptions,
    display: options.OutputOptions,
) -> None:
    """Show a recorded run (TRACE.jsonl), a pair before it is used (--target, --draft), or the methods (--methods)."""
    given = {f"--{field.name.replace('_', '-')}": getattr(models, field.name) != field.default for field in fields(models)}
    pair_option = next((name for name, is_given in {**given, "--pair": pair, "--measure": measure}.items() if is_given), None)
    trace_option = "--html" if html is not None else "--rounds" if rounds is not None else None
    other = pair_option or ("a trace" if traces else None)
    ways = "Name a trace, or a pair (--target MODEL --draft MODEL; --pair is the bundled one), or list the methods: "
    either = "Inspect one or the other"
    for is_wrong, message, hint in (
        (not (other or list_methods), "nothing to inspect", f"{ways}specgen inspect --methods"),
        (list_methods and other, f"--methods lists the methods, and {other} is given too", either),
        (traces and pair_option, f"{pair_option} is for a pair of models, and a trace is given too", either),
        (not traces and trace_option, f"{trace_option} is given without a trace", "Name one: specgen inspect TRACE.jsonl"),
        (
            pair and models.target is not None,
            f"--pair is the bundled pair, and --target {models.target} is given too",
            "Leave one of them out",
        ),
        (rounds is not None and rounds < 0, f"--rounds is {rounds}", "It has to be a whole number, 0 for none"),
        (run < 1, f"--run is {run}", "Runs count from 1"),
    ):
        if is_wrong:
            raise SpecgenError(message, hint)
    if list_methods:
        _list_methods(display)
    elif traces:
        from specgen.cli.inspect_traces import inspect_traces

        inspect_traces(traces, display, html, rounds, run)
    else:
        from specgen.cli.inspect_pair import inspect_pair

        inspect_pair(models, display, measure=measure)


def _list_methods(display: options.OutputOptions) -> None:
    from specgen.view import theme
    from specgen.view.pair_report import method_card, method_line

    out = theme.console(no_color=display.no_color)
    for method in methods.METHODS.values():
        if display.json:
            print_json(method_line(method))
        else:
            method_card(out, method)
