"""Breaks text into lines of limited width, alone or to the right of a label."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from specgen.view.theme import one_line_text

_CONSOLE = Console(width=200)  # only for wrapping, which asks it for tab sizes
SHORTEST_WRAP = 12


def wrapped(text: Text, width: int) -> list[Text]:
    """Returns the text broken into lines of at most `width` cells, without spaces at their ends and control characters."""
    lines = one_line_text(text).wrap(_CONSOLE, width)
    for line in lines:
        line.rstrip()
    return list(lines)


def labelled(label: Text, text: Text, width: int, lead: int) -> list[Text]:
    """Returns lines of at most `width` cells: the label in a column of `lead` cells, and the text wrapped to the right of it.

    A label that does not fit into the column gets a line of its own.
    """
    lines, label = [], one_line_text(label)
    if label.cell_len >= lead:
        lines, label = [label], Text()
    for part in wrapped(text, max(width - lead, SHORTEST_WRAP)):
        line = Text().append_text(label).append(" " * (lead - label.cell_len)).append_text(part)
        line.rstrip()
        lines.append(line)
        label = Text()
    return lines
