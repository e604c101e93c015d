"""Errors that users can cause, with their exit codes. The message of an error says in one line what
is wrong, and its hint says what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SpecgenError(Exception):
    """A mistake that the user can correct, such as a missing model, a setting out of range or an
    empty prompt."""

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        stop = "" if self.message.endswith(("?", "!", ".")) else "."
        return f"{self.message}{stop} {self.hint}" if self.hint else self.message


class RunError(SpecgenError):
    """A failure while generating that the user's arguments did not cause, such as NaN logits or a
    full disk."""

    exit_code = 1


def nan_logits(whose: str) -> RunError:
    return RunError(
        f"the {whose} model's logits hold NaN",
        "Its weights are damaged, or the dtype is too narrow: try --dtype float32",
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that a device or the machine ran out of memory. Its message decides, as
    torch raises several types of errors."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(
        phrase in text for phrase in ("out of memory", "can't allocate memory", "not enough memory")
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns text such as `"; did you mean svip?"` if `name` looks like a misspelling of one of
    the `known` names, else an empty string."""
    matches = get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""
