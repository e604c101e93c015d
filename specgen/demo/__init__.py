"""The bundled demo models: a target, a draft, and an exit layer and heads for the target.

The code that trained them is in demo/recipe/.
"""

from __future__ import annotations

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
    """The folder of the bundled target's head of a kind: `medusa`, `eagle` or `glide`. It may not exist."""
    return _PACKAGE / "heads" / kind
