"""`specgen generate --chat` on a terminal without a prompt: a conversation, whose turns the user
types."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.files import write_new
from specgen.base.interrupts import interrupts
from specgen.base.text import counted
from specgen.base.types import SamplingParams
from specgen.cli.conversation_lines import line_reader
from specgen.cli.prompt_input import check_text
from specgen.pair.prompts import Prompt, messages

if TYPE_CHECKING:
    from specgen.cli.options import GenerateOutput
    from specgen.cli.output_writers import OutputWriter

HELP = {
    "/help": "show this",
    "/reset": "forget the conversation",
    "/regen": "answer the last message anew: in another way when sampling",
    "/system [TEXT]": "set the system message, or show it",
    "/method [NAME]": "decode with another method, such as /method sd:k=8, or show the methods",
    "/rounds": "show each round's drafted tokens, or not",
    "/save FILE": "write the conversation to a new file, one message a line (JSON)",
    "/quit": "end, as Ctrl-D does",
}
COMMANDS = tuple(command.split()[0] for command in HELP)
KEYS = (
    "A pasted text is one message. Alt-Enter, or \\ at the end of a line, begins another line. "
    "A message that begins with / needs a space before it. Ctrl-C ends an answer only."
)


@dataclass(frozen=True)
class Decoding:
    """How answers are decoded: by the method `name` with `settings`."""

    name: str
    settings: Mapping[str, object]
    sampling: SamplingParams
    output: GenerateOutput

    @property
    def written(self) -> str:
        """The method with its settings as users write it."""
        return ":".join([self.name, *(f"{key}={value}" for key, value in self.settings.items())])


# Makes the writer of an answer to the messages.
Start = Callable[[Prompt, Decoding], "OutputWriter"]


class Conversation:
    """The turns so far, and what commands change. `start` begins an answer."""

    def __init__(self, start: Start, err: Console, system: str | None, decoding: Decoding) -> None:
        self._start = start
        self._err = err
        self._system = system
        self._decoding = decoding
        self._turns: list[tuple[str, str]] = []  # the user's texts, each with the model's answer
        self._regenerated = 0  # how often the last one was answered anew
        self._commands: Mapping[str, Callable[[str], None]] = {
            "/help": self._help,
            "/reset": self._reset,
            "/regen": self._regenerate,
            "/system": self._set_system,
            "/method": self._set_method,
            "/rounds": self._switch_rounds,
            "/save": self._save,
        }

    def run(self) -> None:
        """Reads turns and answers them until the user ends the conversation. An error is shown and
        ends only its turn."""
        read = line_reader()
        if not self._decoding.output.quiet:
            self._say(
                "Type a message; /help lists what else can be typed, Ctrl-D ends the conversation."
            )
        while True:
            try:
                text = self._read(read)
                if text is None or text.strip() == "/quit":
                    return
                if is_command(text):
                    self._obey(text)
                elif text.strip():
                    self._answer(check_text(text.strip(), "the message"))
            except SpecgenError as error:
                self._err.print(Text.assemble(("error: ", "bad"), str(error)), soft_wrap=True)

    def _read(self, read: Callable[[str], str]) -> str | None:
        """Returns what the user types, without the lines' final backslashes; None at the end of the
        input."""
        lines: list[str] = []
        with interrupts.caught():
            while not lines or lines[-1].endswith("\\"):
                try:
                    lines.append(read("… " if lines else "> "))
                except KeyboardInterrupt:
                    lines = []
                    self._err.print()
                except EOFError:
                    self._err.print()
                    return None
                except UnicodeDecodeError as error:
                    raise SpecgenError(
                        "the message is not UTF-8", "Set the terminal's encoding to UTF-8"
                    ) from error
        return "\n".join(line.removesuffix("\\") for line in lines)

    def _obey(self, text: str) -> None:
        word, _, argument = text.strip().partition(" ")
        command = self._commands.get(word)
        if command is None:
            hint = "/help lists what there is; a message that begins with / needs a space before it"
            raise SpecgenError(f"there is no command {word!r}", hint)
        command(argument.strip())

    # commands

    def _help(self, _: str) -> None:
        width = max(map(len, HELP)) + 2
        for command, meaning in HELP.items():
            self._say(f"{command:<{width}}{meaning}")
        self._say(KEYS)

    def _reset(self, _: str) -> None:
        self._turns.clear()
        self._regenerated = 0
        self._say("The conversation is forgotten.")

    def _regenerate(self, _: str) -> None:
        if not self._turns:
            raise SpecgenError("there is no answer yet", "Type a message first")
        last = self._turns.pop()
        count = len(self._turns)
        self._regenerated += 1
        try:
            self._answer(last[0], self._regenerated)
        finally:
            if len(self._turns) == count:  # no new answer
                self._turns.append(last)

    def _set_system(self, text: str) -> None:
        if text:
            self._system = check_text(text, "the system message")
            self._say(
                "The system message is set. It holds for what was said before too; "
                "/reset forgets that."
            )
        else:
            message = "There is no system message."
            if self._system is not None:
                message = f"The system message: {self._system}"
            self._say(message)

    def _set_method(self, text: str) -> None:
        if not text:
            self._say(
                f"Decoding with {self._decoding.written}. There are (specgen inspect "
                "--methods describes them):"
            )
            self._say(" ".join(methods.METHODS))
            return
        name, settings = methods.split(text)
        changed = replace(self._decoding, name=name, settings=settings)
        self._start([{"role": "user", "content": "x"}], changed)  # whether it can run here
        self._decoding = changed
        self._say(f"Decoding with {changed.written}.")

    def _switch_rounds(self, _: str) -> None:
        output = replace(self._decoding.output, rounds=not self._decoding.output.rounds)
        self._decoding = replace(self._decoding, output=output)
        self._say("Rounds are shown." if output.rounds else "Rounds are not shown.")

    def _save(self, name: str) -> None:
        if not name:
            raise SpecgenError("/save needs the name of a file", "For instance: /save talk.jsonl")
        if not self._turns:
            raise SpecgenError("there is nothing to save yet", "Type a message first")
        conversation = messages(self._turns[-1][0], self._system, self._turns[:-1])
        conversation.append({"role": "assistant", "content": self._turns[-1][1]})
        lines = "".join(json.dumps(message, ensure_ascii=False) + "\n" for message in conversation)
        path = Path(name).expanduser()
        write_new(path, lines, "conversation")
        self._say(f"{counted(len(conversation), 'message')} saved in {path}.")

    # answers

    def _answer(self, text: str, regenerated: int = 0) -> None:
        """Answers the user's text. An interrupted answer stays in the conversation as far as it was
        generated. If the text is `regenerated` for the n-th time, n is added to the seed."""
        turns = messages(text, self._system, self._turns)
        decoding = self._decoding
        sampling = decoding.sampling
        self._regenerated = regenerated
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + regenerated)
            decoding = replace(decoding, sampling=sampling)
        with interrupts.caught():
            try:
                writer = self._start(turns, decoding)
                try:
                    writer.write()
                finally:
                    if writer.has_begun:
                        self._turns.append((text, writer.text.strip()))
            except KeyboardInterrupt:
                self._err.print()

    def _say(self, text: str) -> None:
        for line in text.split("\n"):
            self._err.print(Text(line, "quiet"), soft_wrap=True)


def is_command(text: str) -> bool:
    """Whether the text is a command. A text of several lines is a message, unless it begins with
    one of `COMMANDS`."""
    return text.startswith("/") and ("\n" not in text.strip() or text.split()[0] in COMMANDS)
