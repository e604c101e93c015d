"""`specgen inspect`: recorded runs, a pair before anything is run, the methods that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specgen import methods
from specgen.cli import options
from specgen.cli.error_reporting import reported
from specgen.errors import SpecgenError
from specgen.json_lines import print_json

_TRACES, _PAIR = "Recorded runs", "A pair of models"
Traces = Annotated[
    list[Path] | None,
    typer.Argument(metavar="TRACE.jsonl ...", help="Traces to show, side by side if several.", show_default=False),
]
Methods = Annotated[bool, typer.Option("--methods", help="List every method: its paper, its settings and defaults.")]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write one self-contained page instead of text.", rich_help_panel=_TRACES)
]
Rounds = Annotated[
    int | None,
    typer.Option(metavar="N", help="Rounds to show of each run; 40 of a single one, else none.", rich_help_panel=_TRACES),
]
Run = Annotated[int, typer.Option(metavar="N", help="Which of a method's runs to show in detail.", rich_help_panel=_TRACES)]
BundledPair = Annotated[bool, typer.Option("--pair", help="Look at the bundled pair.", rich_help_panel=_PAIR)]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="Load the pair (without --target the bundled one) and time its passes: what it costs, from where on it pays.",
        rich_help_panel=_PAIR,
    ),
]


@reported
def inspect(
    traces: Traces = None,
    list_methods: Methods = False,
    html: Html = None,
    rounds: Rounds = None,
    run: Run = 1,
    pair: BundledPair = False,
    measure: Measure = False,
    target: options.Target = None,
    draft: options.Draft = None,
    device: options.Device = "auto",
    draft_device: options.DraftDevice = None,
    dtype: options.Dtype = "auto",
    revision: options.Revision = None,
    draft_revision: options.DraftRevision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    offline: options.Offline = False,
    exit_layer: options.ExitLayer = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
) -> int | None:
    """Show a recorded run (TRACE.jsonl), a pair before it is run (--target, --draft), or the methods (--methods)."""
    asks_for_pair = next((name for name, given in _pair_options(target, draft, pair, measure) if given), None)
    _check(traces, asks_for_pair, html, rounds, run, list_methods=list_methods)
    if list_methods:
        _list_methods(as_json=json, no_color=no_color)
    elif traces:
        from specgen.cli.inspect_traces import TraceViewOptions, inspect_traces

        inspect_traces(traces, TraceViewOptions(html, json, rounds, run, quiet, no_color))
    else:
        from specgen.cli.inspect_pair import inspect_pair
        from specgen.cli.model_options import ModelOptions

        if pair and target is not None:
            raise SpecgenError(f"--pair is the bundled pair, and --target {target} is given too", "Leave one of them out")
        models = ModelOptions(
            target, draft, device, draft_device, dtype, revision, draft_revision, trust_remote_code, offline, exit_layer
        )
        inspect_pair(models, measure=measure, json=json, quiet=quiet, no_color=no_color)
    return None


def _list_methods(*, as_json: bool, no_color: bool) -> None:
    from specgen.ui import theme
    from specgen.ui.terminal.method_catalogue import method_card, method_line

    out = theme.console(no_color=no_color)
    for method in methods.METHODS.values():
        if as_json:
            print_json(method_line(method))
        else:
            method_card(out, method)


def _pair_options(target: str | None, draft: str | None, pair: bool, measure: bool) -> tuple[tuple[str, bool], ...]:
    return (("--target", target is not None), ("--draft", draft is not None), ("--pair", pair), ("--measure", measure))


def _check(
    traces: list[Path] | None, asks_for_pair: str | None, html: Path | None, rounds: int | None, run: int, *, list_methods: bool
) -> None:
    """Refuse what does not go together, and nothing at all."""
    if not (traces or asks_for_pair or list_methods):
        raise SpecgenError(
            "nothing to inspect",
            "Name a trace, or a pair (--target MODEL --draft MODEL; --pair is the bundled one), or list the methods: "
            "specgen inspect --methods",
        )
    if traces and asks_for_pair:
        raise SpecgenError(f"{asks_for_pair} is for a pair of models, and a trace is given too", "Inspect one or the other")
    if not traces and (html is not None or rounds is not None):
        raise SpecgenError(
            f"{'--html' if html is not None else '--rounds'} stands without a trace", "Name one: specgen inspect TRACE.jsonl"
        )
    if rounds is not None and rounds < 0:
        raise SpecgenError(f"--rounds is {rounds}", "It has to be a whole number, 0 for none")
    if run < 1:
        raise SpecgenError(f"--run is {run}", "Runs count from 1")
