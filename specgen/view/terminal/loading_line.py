"""A line on stderr with a spinner that says what is being loaded. It is erased when loading ends."""

from __future__ import annotations

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.status import Status
from rich.text import Text

from specgen.view.theme import one_line_text


class LoadingLine:
    """A context manager that shows the line inside its `with` block. `announce` changes the text.

    It shows nothing if `console` is not a terminal or `quiet` is True.
    """

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._status = None if quiet or not console.is_terminal else Status("starting", console=console, spinner="dots")

    def announce(self, what: str) -> None:
        """Shows `what` beside the spinner. For downloads, which have their own progress bars, the spinner stops instead."""
        if self._status is None:
            return
        if what.startswith("downloading"):
            self._status.stop()
        else:
            self._status.update(one_line_text(what))
            self._status.start()

    def still(self, what: str) -> None:
        """Shows `what` without the spinner, because the spinner's thread would disturb the timing of model passes."""
        if self._status is not None:
            self._status.stop()
            self._status.console.print(Text(what, "quiet"), end="")
            self._status.console.control(Control(ControlType.CARRIAGE_RETURN))

    def __enter__(self) -> LoadingLine:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
            self._status.console.control(Control((ControlType.ERASE_IN_LINE, 2)))
