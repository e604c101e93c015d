"""Writes the answer while it is generated, once per round. The draft's tokens have another colour than the target's own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

from rich.text import Text

from specgen.base.sanitize import streamed
from specgen.base.types import Round
from specgen.view.theme import ThemedConsole


class Detokenizer(Protocol):
    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class Piece(NamedTuple):
    """A piece of the answer's text; `drafted` says whether the draft model proposed its tokens."""

    text: str
    drafted: bool


class AnswerText:
    """Turns the tokens of rounds into pieces of text that end before the first stop string.

    Text that may be the beginning of a stop string is held back until more text shows whether it is.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._held: list[Piece] = []
        self._ended = False
        self.text = ""

    def add(self, round_: Round) -> list[Piece]:
        """Adds a round's tokens and returns the text that can be shown now."""
        accepted = len(round_.verdict.path)
        for position, token in enumerate(round_.token_ids):
            self._held.append(Piece(self._detokenizer.push(token), drafted=position < accepted))
        return self._release(self._safe_length())

    def finish(self) -> list[Piece]:
        """Returns the text that was held back, at the end of generation."""
        self._held.append(Piece(self._detokenizer.flush(), drafted=False))
        self._safe_length()
        return self._release(sum(len(piece.text) for piece in self._held))

    def _safe_length(self) -> int:
        """Returns how many characters of the held text can be shown, because they cannot be part of a stop string.

        If the held text contains a stop string, the text from there on is dropped.
        """
        held = "".join(piece.text for piece in self._held)
        if self._ended:
            held = ""
        starts = [held.index(text) for text in self._stop if text in held]
        if starts:
            self._ended = True
            held = held[: min(starts)]
        self._held = _cut(self._held, len(held))[0]
        if self._ended:
            return len(held)
        return len(held) - max((_overlap(held, text) for text in self._stop), default=0)

    def _release(self, length: int) -> list[Piece]:
        released, self._held = _cut(self._held, length)
        self.text += "".join(piece.text for piece in released)
        return released


def _cut(pieces: list[Piece], length: int) -> tuple[list[Piece], list[Piece]]:
    """Splits a list of pieces in two: the first `length` characters, and the rest. Leaves out empty pieces."""
    pieces = [piece for piece in pieces if piece.text]
    for position, (text, drafted) in enumerate(pieces):
        if length < len(text):
            front = [Piece(text[:length], drafted)] if length else []
            return pieces[:position] + front, [Piece(text[length:], drafted), *pieces[position + 1 :]]
        length -= len(text)
    return pieces, []


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` with which `stop` begins, shorter than `stop` itself."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


class AnswerView:
    """Writes pieces of the answer to standard output.

    On a terminal they are coloured and their control characters replaced by symbols. Into a pipe or file they are unchanged.
    """

    def __init__(self, console: ThemedConsole) -> None:
        self._console = console
        self._at_line_start = True
        self._begun = False

    def show(self, pieces: Sequence[Piece]) -> None:
        text = "".join(piece.text for piece in pieces)
        if not text:
            return
        self._at_line_start = text.endswith("\n")
        if not (self._console.is_terminal or sys.stdout.isatty()):
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        styled = Text()
        for drafted, group in groupby(pieces, key=lambda piece: piece.drafted):
            shown = streamed("".join(piece.text for piece in group))
            if not self._begun and not styled:
                shown = shown.removeprefix(" ")  # it separates the first word from the prompt, which is not shown
            styled.append(shown, "token.accepted" if drafted else "token.target")
        self._begun = True
        self._console.stream(styled)

    def end(self) -> None:
        """Ends the last line of the answer with a line feed, if it has none."""
        if not self._at_line_start:
            self.show([Piece("\n", drafted=False)])
