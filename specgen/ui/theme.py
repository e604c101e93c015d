"""One theme, four flavours. Names are what a thing means; a flavour says how it looks.

ansi   nothing is known of the background (the default): the terminal's own palette, two hues, two attributes
dark   SPECGEN_THEME=dark, or COLORFGBG says so, and at least 256 colours
light  SPECGEN_THEME=light, likewise
mono   NO_COLOR or --no-color: attributes alone
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.theme import Theme

_STYLES = {
    "token.accepted": {"ansi": "green", "dark": "#56d364", "light": "#116329", "mono": "none"},
    "token.rejected": {"ansi": "red strike", "dark": "#ff7b72 strike", "light": "#b3261e strike", "mono": "strike"},
    "token.discarded": {"ansi": "dim", "dark": "#8b949e", "light": "#656d76", "mono": "dim"},
    "token.target": {"ansi": "none", "dark": "none", "light": "none", "mono": "underline"},
    "mark": {"ansi": "bold", "dark": "bold", "light": "bold", "mono": "bold"},
    "mark.rejected": {"ansi": "bold red", "dark": "bold #ff7b72", "light": "bold #b3261e", "mono": "bold"},
    "quiet": {"ansi": "dim", "dark": "#8b949e", "light": "#656d76", "mono": "dim"},
    "strong": {"ansi": "bold", "dark": "bold", "light": "bold", "mono": "bold"},
    "good": {"ansi": "green", "dark": "#56d364", "light": "#116329", "mono": "none"},
    "command": {"ansi": "bold", "dark": "bold #79c0ff", "light": "bold #0550ae", "mono": "bold"},
    "bar": {"ansi": "none", "dark": "#79c0ff", "light": "#0969da", "mono": "none"},
    "bar.best": {"ansi": "green", "dark": "#56d364", "light": "#116329", "mono": "bold"},
    "bar.plain": {"ansi": "dim", "dark": "#8b949e", "light": "#656d76", "mono": "dim"},
    "bad": {"ansi": "bold red", "dark": "bold #ff7b72", "light": "bold #b3261e", "mono": "bold"},
}


def theme(flavour: str) -> Theme:
    # the standard styles come first, since Rich looks up names of its own (a table's header, a progress bar) in any theme
    return Theme({name: Style.parse(styles[flavour]) for name, styles in _STYLES.items()})


def flavour(environment: Mapping[str, str], *, no_color: bool, many_colours: bool) -> str:
    """Which flavour suits: what was asked for, else what the terminal says of its background."""
    if no_color or environment.get("NO_COLOR"):
        return "mono"
    asked = environment.get("SPECGEN_THEME", "").lower()
    if asked in ("ansi", "dark", "light", "mono"):
        return asked if asked in ("ansi", "mono") or many_colours else "ansi"
    background = environment.get("COLORFGBG", "").rpartition(";")[2]
    if not many_colours or not background.isdigit():
        return "ansi"
    return "light" if int(background) in (7, 15) else "dark"


def is_mono(*, no_color: bool) -> bool:
    return flavour(os.environ, no_color=no_color, many_colours=True) == "mono"


class ThemedConsole(Console):
    """Rich's console, except that a reader who closes the pipe is the caller's to deal with."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(*, stderr: bool = False, no_color: bool = False, **options: Any) -> ThemedConsole:
    """A console in the flavour that suits; it colours on a terminal only, and never reads markup or emoji codes in text."""
    bare = Console(stderr=stderr, **options)
    many = bare.color_system in ("256", "truecolor")
    chosen = flavour(os.environ, no_color=no_color, many_colours=many)
    return ThemedConsole(
        stderr=stderr,
        theme=theme(chosen),
        no_color=True if chosen == "mono" else None,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=True,
        **options,
    )
