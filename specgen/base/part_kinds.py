"""The kinds of trained parts that draft for a target. Imports no torch."""

from __future__ import annotations

import shlex
from typing import Final, Literal, get_args

HeadKind = Literal["medusa", "eagle", "glide", "block", "mtp"]
HEADS: tuple[HeadKind, ...] = get_args(HeadKind)
EXIT = "exit"  # EESD's exit layer
MTP: Final = "mtp"  # drafting layers in the target's own files
ONE_PASS = ("medusa", "block")  # the heads that draft all tokens in one pass
DEFAULT_PART = "auto"  # the part that the user named, or the one found for the target


def training_command(kind: str, target: str | None) -> str:
    """Returns the command that trains a part of this kind for `target`; None: the bundled
    target."""
    of = "" if target is None else f" -t {shlex.quote(target)} --corpus FILE"
    return f"specgen tune --train --methods {'eesd' if kind == EXIT else kind}{of}"
