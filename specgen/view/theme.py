"""What is common to all that a terminal shows: the console that all text passes, colours, line
breaks, tables, pictures.

A style is named after what it marks, such as token.accepted. A flavour is a colour scheme: it gives
every style its look.

- ansi: the terminal's own palette: two hues, two attributes (default, for an unknown background)
- dark: SPECGEN_THEME=dark
- light: SPECGEN_THEME=light
- mono: NO_COLOR or --no-color: attributes only
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text
from rich.theme import Theme

from specgen.base.text import one_line, streamed

PIPED_WIDTH = 100  # columns of output that does not go to a terminal
SHORTEST_WRAP = 12  # cells
GAP = 2  # cells between the columns of a table
_GREY = [(0x59, 0x60, 0x69)] * 16
# a format string for Rich's `export_svg`
_PICTURE = Path(__file__).with_name("templates") / "picture.svg"
BACKGROUNDS = {
    "light": TerminalTheme((0xFF, 0xFF, 0xFF), (0x1F, 0x23, 0x28), _GREY),
    "dark": TerminalTheme((0x0D, 0x11, 0x17), (0xE6, 0xED, 0xF3), _GREY),
}
_LOOKS = {  # of each style in each of the flavours
    "token.accepted": ("green", "#56d364", "#116329", "none"),
    "token.rejected": ("red strike", "#ff7b72 strike", "#b3261e strike", "strike"),
    "token.discarded": ("dim", "#8b949e", "#656d76", "dim"),
    "token.target": ("none", "none", "none", "underline"),
    "mark": ("bold",) * 4,
    "mark.rejected": ("bold red", "bold #ff7b72", "bold #b3261e", "bold"),
    "quiet": ("dim", "#8b949e", "#656d76", "dim"),
    "strong": ("bold",) * 4,
    "good": ("green", "#56d364", "#116329", "none"),
    "command": ("bold", "bold #79c0ff", "bold #0550ae", "bold"),
    "bar": ("none", "#79c0ff", "#0969da", "none"),
    "bar.best": ("green", "#56d364", "#116329", "bold"),
    "bar.plain": ("dim", "#8b949e", "#656d76", "dim"),
    "bad": ("bold red", "bold #ff7b72", "bold #b3261e", "bold"),
}
FLAVOURS = ("ansi", "dark", "light", "mono")


class ThemedConsole(Console):
    """Rich's console, through which all text for a person passes. No control character in a text
    reaches the terminal: only the styles and the cursor movements that the program makes do.

    `flavour` is its colour scheme. Rich's markup and emoji codes are printed as they are. Writing
    to a pipe whose reader has closed it raises BrokenPipeError.
    """

    def __init__(self, flavour: str, **options: Any) -> None:
        looks = {
            name: Style.parse(looks[FLAVOURS.index(flavour)]) for name, looks in _LOOKS.items()
        }
        super().__init__(theme=Theme(looks), highlight=False, markup=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints objects as Rich does. Strings and Texts are one line each: a line feed in one
        becomes a symbol."""
        shown = []
        for printed in objects:
            is_text = isinstance(printed, str | Text)
            shown.append(one_line_text(printed) if is_text else printed)
        super().print(*shown, **options)

    def stream(self, text: Text) -> None:
        """Prints text, which may hold line feeds, at the cursor, without a line feed after it."""
        super().print(text, end="")

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yields what Rich would write for an object, with visible symbols for the control
        characters in its texts."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text == "\n":
                yield segment
            else:
                yield Segment(streamed(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(*, stderr: bool = False, no_color: bool = False, **options: Any) -> ThemedConsole:
    """Returns a console for specgen's output, in the flavour that the environment variables choose.
    It prints colours on a terminal only."""
    flavour = os.environ.get("SPECGEN_THEME", "").lower()
    if no_color or os.environ.get("NO_COLOR"):
        flavour = "mono"
    elif flavour not in FLAVOURS:
        flavour = "ansi"
    return ThemedConsole(
        flavour,
        stderr=stderr,
        no_color=True if flavour == "mono" else None,
        soft_wrap=True,
        **options,
    )


def width(console: Console) -> int:
    """Returns the width of the output in cells: the terminal's; elsewhere the variable COLUMNS, or
    `PIPED_WIDTH` without it."""
    return console.width if console.is_terminal or "COLUMNS" in os.environ else PIPED_WIDTH


def one_line_text(text: str | Text) -> Text:
    """Returns the text with a symbol for each control character (see `base.text.one_line`), so that
    its width in cells is the one that it is shown with."""
    if isinstance(text, str):
        return Text(one_line(text))
    if not text.plain.isprintable():
        text = text.copy()
        # as long as before, so that its styles keep their positions
        text.plain = one_line(text.plain)
    return text


_CONSOLE = Console(width=200)  # only for wrapping, which asks it for tab sizes


def wrapped(text: Text, width: int, *, folds: bool = True) -> list[Text]:
    """Returns the text broken into lines of at most `width` cells, without control characters and
    spaces at the ends. Without `folds` a longer word, such as a path, stays in one piece."""
    text = one_line_text(text)
    lines = text.wrap(_CONSOLE, width) if folds else text.divide(_word_breaks(text.plain, width))
    for line in lines:
        line.rstrip()
    return list(lines)


def _word_breaks(text: str, width: int) -> list[int]:
    """Returns where lines begin if the text is broken between words only."""
    begins = []
    column = 0
    for word in re.finditer(r"\S+\s*", text):
        if column and column + cell_len(word[0].rstrip()) > width:
            begins.append(word.start())
            column = 0
        column += cell_len(word[0])
    return begins


def labelled(label: Text, text: Text, width: int, lead: int) -> list[Text]:
    """Returns lines of at most `width` cells: the label in a column of `lead` cells, and the text
    wrapped to the right of it.

    Only a longer word makes a longer line, to be printed with `soft_wrap`. A label that does not
    fit into the column gets a line of its own.
    """
    label = one_line_text(label)
    parts = wrapped(text, max(width - lead, SHORTEST_WRAP), folds=False)
    lines = [Text(" " * lead).append_text(part) for part in parts]
    if label.cell_len >= lead:
        return [label, *lines]
    lines[0] = Text.assemble(label, " " * (lead - label.cell_len), lines[0][lead:])
    return lines


def table(
    rows: Sequence[Sequence[str | Text]], left: Iterable[int] = (0,), gap: int = GAP
) -> list[Text]:
    """Returns the rows of a table as lines; the first one has the headings. The columns whose
    numbers are in `left` are aligned to the left, others to the right, `gap` cells apart."""
    cells = [[one_line_text(cell).copy() for cell in row] for row in rows]
    sizes = [max(cell.cell_len for cell in column) for column in zip(*cells, strict=True)]
    lines: list[Text] = []
    for row in cells:
        for number, (cell, size) in enumerate(zip(row, sizes, strict=True)):
            if not lines:
                cell.stylize("quiet")
            cell.align("left" if number in left else "right", size)
        line = Text(" " * gap).join(row)
        line.rstrip()
        lines.append(line)
    return lines


def recorder(width: int, flavour: str) -> ThemedConsole:
    """Returns a console that records what is printed, so that its `export_svg` can draw it.

    `width` is in cells. `flavour` is the name of a colour scheme, one of `FLAVOURS`.
    """
    return ThemedConsole(
        flavour,
        record=True,
        legacy_windows=False,
        width=width,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        _environ={},
    )


def svg(lines: Sequence[Text], width: int) -> str:
    """Returns styled lines as an SVG picture, `width` terminal cells wide. It loads no fonts, and
    inverts its colours where the system is in dark mode."""
    console = recorder(width, "light")
    for line in lines:
        console.print(line, soft_wrap=True)
    template = _PICTURE.read_text(encoding="utf-8")
    return console.export_svg(
        title="", theme=BACKGROUNDS["light"], code_format=template, unique_id="specgen"
    )
