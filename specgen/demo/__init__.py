"""The bundled demo models: a target, a draft, an exit layer and heads for the target, and the text
that they learn from.

`text.xz` holds documents of four kinds, written by programs for this project: code (short functions
and classes), math (word problems with worked answers), news (an article and its one-sentence
summary) and chat (questions and answers). Tokens that are easy to predict alternate with hard ones
(names, digits, facts). `tests/recipe` has the program that trains the pair.
"""

from __future__ import annotations

import lzma
from pathlib import Path

ROLES = ("target", "draft")
_PACKAGE = Path(__file__).resolve().parent


def folder(role: str) -> Path:
    """The folder with the weights, configuration and tokenizer of the bundled `target` or `draft`.

    Raises ValueError for any other role.
    """
    if role not in ROLES:
        raise ValueError(f"role is {role!r}; it has to be one of {', '.join(ROLES)}")
    return _PACKAGE / role


def exit_folder() -> Path:
    """The folder of the bundled target's exit layer. It may not exist."""
    return _PACKAGE / "exit"


def head_folder(kind: str) -> Path:
    """The folder of the bundled target's head of a kind: `medusa`, `eagle`, `glide` or `block`. It
    may not exist."""
    return _PACKAGE / "heads" / kind


def documents() -> list[str]:
    """Returns all documents of the bundled text (six million characters), the four kinds mixed.
    `--corpus demo` reads it."""
    return lzma.decompress((_PACKAGE / "text.xz").read_bytes()).decode().split("\f")
