"""`specgen generate --chat` on a terminal without a prompt: a conversation, whose turns the user types."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.interrupts import interrupts
from specgen.pair.request import Prompt, messages

if TYPE_CHECKING:
    from specgen.cli.options import GenerateOutput
    from specgen.cli.output_writers import OutputWriter

COMMANDS = {
    "/reset": "forget the conversation",
    "/method NAME": "decode with another method, such as /method sd:k=8",
    "/rounds": "show each round's drafted tokens, or not",
    "/quit": "end (as Ctrl-D does); Ctrl-C ends an answer only, and a line that ends with \\ goes on",
}
# Makes the writer of an answer: to the messages, by the method with these settings.
Start = Callable[[Prompt, str, Mapping[str, object], "GenerateOutput"], "OutputWriter"]


class Conversation:
    """The turns so far, and what commands change. `start` begins an answer by the method `name` with `settings`."""

    def __init__(
        self, start: Start, err: Console, system: str | None, name: str, settings: Mapping[str, object], output: GenerateOutput
    ) -> None:
        self._start, self._err, self._system = start, err, system
        self._name, self._settings, self._output = name, settings, output
        self._turns: list[tuple[str, str]] = []  # the user's texts, each with the model's answer

    def run(self) -> None:
        """Reads turns and answers them until the user ends the conversation. An error is shown and ends only its turn."""
        if sys.platform != "win32":
            import readline  # noqa: F401  `input` takes its keys for editing a line and for earlier lines
        if not self._output.quiet:
            self._say("Type a message; /help lists what else can be typed, Ctrl-D ends the conversation.")
        while (text := self._read()) is not None and text != "/quit":
            try:
                if text.startswith("/"):
                    self._command(text)
                elif text:
                    self._answer(text)
            except SpecgenError as error:
                self._err.print(Text.assemble(("error: ", "bad"), str(error)), soft_wrap=True)

    def _read(self) -> str | None:
        """Returns what the user types, without the lines' final backslashes; None at the end of the input."""
        lines: list[str] = []
        with interrupts.caught():
            while not lines or lines[-1].endswith("\\"):
                try:
                    lines.append(input("… " if lines else "> "))
                except KeyboardInterrupt:
                    lines = []
                    self._err.print()
                except EOFError:
                    self._err.print()
                    return None
        return "\n".join(line.removesuffix("\\") for line in lines).strip()

    def _command(self, text: str) -> None:
        word, _, argument = text.partition(" ")
        if word == "/reset":
            self._turns.clear()
        elif word == "/rounds":
            self._output = replace(self._output, rounds=not self._output.rounds)
        elif word == "/method" and argument.strip():
            name, given = methods.split(argument)
            self._start([{"role": "user", "content": "x"}], name, given, self._output)  # whether it can run here
            self._name, self._settings = name, given
        elif word == "/help":
            for written, meaning in COMMANDS.items():
                self._say(f"{written:<14}{meaning}")
        else:
            raise SpecgenError(f"there is no command {text!r}", f"There are {', '.join(COMMANDS)}")

    def _answer(self, text: str) -> None:
        """Answers the user's text. An interrupted answer stays in the conversation as far as it was generated."""
        turns = messages(text, self._system, self._turns)
        with interrupts.caught():
            try:
                writer = self._start(turns, self._name, self._settings, self._output)
                try:
                    writer.write()
                finally:
                    self._turns.append((text, writer.text.strip()))
            except KeyboardInterrupt:
                self._err.print()

    def _say(self, text: str) -> None:
        self._err.print(Text(text, "quiet"), soft_wrap=True)
