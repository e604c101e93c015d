"""What the tests of PEARL's draft worker share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from families import make_model, near_copy, save

PROMPT = [1, 7, 9, 20, 11]
posix = pytest.mark.skipif(
    os.name != "posix", reason="a second process is used on POSIX systems only"
)


def save_pair(parent: Path) -> tuple[str, str]:
    """Writes a tiny target with a repetition penalty and a draft that is often right, and returns
    their folders."""
    target = make_model("llama")
    target.generation_config.repetition_penalty = 1.3
    return save(target, parent / "target"), save(near_copy(target), parent / "draft")
