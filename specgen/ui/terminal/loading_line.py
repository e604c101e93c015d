"""What is going on while models load: a spinner on stderr, gone when the answer begins."""

from __future__ import annotations

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.status import Status
from rich.text import Text

from specgen.ui.sanitize import inline


class LoadingLine:
    """A context manager; `announce` changes its words. Silent unless stderr is a terminal."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._status = None if quiet or not console.is_terminal else Status("starting", console=console, spinner="dots")

    def announce(self, what: str) -> None:
        """Downloads show bars of the hub's own, for which the spinner makes room."""
        if self._status is None:
            return
        if what.startswith("downloading"):
            self._status.stop()
        else:
            self._status.update(inline(what))
            self._status.start()

    def still(self, what: str) -> None:
        """Say what is going on without a thread that redraws: something is being timed."""
        if self._status is not None:
            self._status.stop()
            self._status.console.print(Text(inline(what), "quiet"), end="\r")

    def __enter__(self) -> LoadingLine:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
            self._status.console.control(Control((ControlType.ERASE_IN_LINE, 2)))
