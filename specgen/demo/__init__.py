"""The bundled demo pair, and the recipe that made it: `python -m specgen.demo.recipe --help`."""

from __future__ import annotations

from pathlib import Path

ROLES = ("target", "draft")


def exit_folder() -> Path:
    """Where the bundled target's exit layer lies, if there is one."""
    return Path(__file__).resolve().parent / "exit"


def folder(role: str) -> Path:
    """The folder of the bundled `target` or `draft`: weights, configuration, tokenizer. ValueError for another role."""
    if role not in ROLES:
        raise ValueError(f"role is {role!r}; it has to be one of {', '.join(ROLES)}")
    return Path(__file__).resolve().parent / role
