"""Colours and text attributes of the terminal output.

A style is named after what it marks, such as token.accepted. A flavour is a colour scheme: it gives every style its look.

ansi   the terminal's own palette: two hues, two attributes (default, for an unknown background)
dark   SPECGEN_THEME=dark, or a dark background in COLORFGBG, and at least 256 colours
light  SPECGEN_THEME=light, or a light background in COLORFGBG, and at least 256 colours
mono   NO_COLOR or --no-color: attributes only
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from rich.theme import Theme

from specgen.base.sanitize import one_line, streamed

PIPED_WIDTH = 100  # columns of output that does not go to a terminal
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
    """Returns the Rich theme of a flavour (colour scheme). Styles that specgen does not define are Rich's defaults."""
    return Theme({name: Style.parse(styles[flavour]) for name, styles in _STYLES.items()})


def flavour(environment: Mapping[str, str], *, no_color: bool, many_colours: bool) -> str:
    """Returns the flavour (colour scheme) to use: mono without colours, the one in SPECGEN_THEME, or one for the background.

    The background's colour is read from COLORFGBG. `many_colours` says that the terminal has at least 256 colours; without them
    the flavour is ansi or mono.
    """
    if no_color or environment.get("NO_COLOR"):
        return "mono"
    requested = environment.get("SPECGEN_THEME", "").lower()
    if requested in ("ansi", "dark", "light", "mono"):
        return requested if requested in ("ansi", "mono") or many_colours else "ansi"
    background = environment.get("COLORFGBG", "").rpartition(";")[2]
    if not many_colours or not background.isdecimal():
        return "ansi"
    return "light" if background in ("7", "15") else "dark"


def is_mono(*, no_color: bool) -> bool:
    """Whether the output has no colours, because of --no-color (`no_color`) or an environment variable."""
    return flavour(os.environ, no_color=no_color, many_colours=True) == "mono"


class ThemedConsole(Console):
    """Rich's console, through which all text for a person passes. No control character in a text reaches the terminal: only the
    styles and the cursor movements that the program makes do.

    Writing to a pipe whose reader has closed it raises BrokenPipeError.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints objects as Rich does. Strings and Texts are one line each: a line feed in one becomes a symbol."""
        lines = (one_line_text(each) if isinstance(each, str | Text) else each for each in objects)
        super().print(*lines, **options)

    def stream(self, text: Text) -> None:
        """Prints text that continues a line and may hold line feeds."""
        super().print(text, end="")

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yields what Rich would write for an object, with visible symbols for the control characters in its texts."""
        for segment in super().render(renderable, options):
            yield segment if segment.control or segment.text == "\n" else Segment(streamed(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def one_line_text(text: str | Text) -> Text:
    """Returns the text without control characters (see `sanitize.one_line`), so that it has the width that it is shown with."""
    if isinstance(text, str):
        return Text(one_line(text))
    if not text.plain.isprintable():
        text = text.copy()
        text.plain = one_line(text.plain)  # as long as before, so that its styles keep their positions
    return text


def width(console: Console) -> int:
    """Returns the width of the output in cells: the terminal's width, or `PIPED_WIDTH` where the output is not a terminal."""
    return console.width if console.is_terminal else PIPED_WIDTH


def console(*, stderr: bool = False, no_color: bool = False, **options: Any) -> ThemedConsole:
    """Returns a console for specgen's output, in the flavour (colour scheme) that the environment variables choose.

    It prints colours on a terminal only. Rich's markup and emoji codes in a text are printed as they are.
    """
    many_colours = Console(stderr=stderr, **options).color_system in ("256", "truecolor")
    chosen = flavour(os.environ, no_color=no_color, many_colours=many_colours)
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
