"""What can go wrong, each with its exit code. A message is one line: what is wrong, with which value; `cure` says what to do."""

from __future__ import annotations

from collections.abc import Iterable


class SpecgenError(Exception):
    """A mistake that the user can mend: a model that is not there, a setting out of range, an empty prompt."""

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint

    def __str__(self) -> str:
        stop = "" if self.message.endswith(("?", "!", ".")) else "."
        return f"{self.message}{stop} {self.hint}" if self.hint else self.message


class RunError(SpecgenError):
    """It failed while running, and the command line was not to blame: NaN logits, a full disk."""

    exit_code = 1


def nan_logits(whose: str) -> RunError:
    return RunError(
        f"the {whose} model's logits hold NaN", "Its weights are damaged, or the dtype is too narrow: try --dtype float32"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine ran out of memory: torch says so in several ways."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(
        phrase in text for phrase in ("out of memory", "can't allocate memory", "not enough memory")
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean svip?"` where `name` looks like a slip for one of `known`, else nothing."""
    from difflib import get_close_matches  # only where something is wrong: --help has no need of it

    matches = get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""
