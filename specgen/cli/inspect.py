"""`specgen inspect`: for now the methods that are there."""

from __future__ import annotations

from typing import Annotated

import typer

from specgen import methods
from specgen.cli.reporting import reported
from specgen.errors import SpecgenError


@reported
def inspect(
    list_methods: Annotated[
        bool, typer.Option("--methods", help="List every method: its paper, its settings and defaults.")
    ] = False,
) -> None:
    """Show the methods that there are."""
    if not list_methods:
        raise SpecgenError("nothing to inspect", "List the methods: specgen inspect --methods")
    from specgen.ui import theme
    from specgen.ui.catalogue import method_card

    out = theme.console()
    for method in methods.METHODS.values():
        method_card(out, method)
