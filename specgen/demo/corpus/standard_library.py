"""The running Python's own standard library (PSF licence): its short functions, as far as a small model can learn them."""

from __future__ import annotations

import ast
import random
import sysconfig
import textwrap
from functools import cache
from pathlib import Path

from specgen.demo.corpus.held_out import is_apart
from specgen.errors import RunError

_NOT_CODE = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "ensurepip", "turtledemo"}
    | {"__pycache__", "encodings", "pydoc_data"}
)
_LONGEST = 700  # characters of a function: about 200 tokens
_LARGEST = 200_000  # bytes of a file


def library_function(rng: random.Random, *, held_out: bool = False) -> str:
    """A short function or method, at the left margin; of a file that is kept apart, or of all others.

    Raises RunError where this Python comes without its library's source.
    """
    files, sizes = _files(held_out)
    while True:
        found = _functions(rng.choices(files, cum_weights=sizes)[0])
        if found:
            return rng.choice(found)


@cache
def _files(held_out: bool) -> tuple[tuple[Path, ...], tuple[int, ...]]:
    """Files in a fixed order, and their sizes added up."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found, sizes, total = [], [], 0
    for path in sorted(root.rglob("*.py")):
        name, size = path.relative_to(root), path.stat().st_size
        if _NOT_CODE.isdisjoint(name.parts) and 0 < size < _LARGEST and is_apart(name.as_posix()) == held_out:
            total += size
            found.append(path)
            sizes.append(total)
    if not found:
        raise RunError(f"no Python source under {root}", "Use a Python that was installed with its standard library")
    return tuple(found), tuple(sizes)


@cache
def _functions(path: Path) -> tuple[str, ...]:
    source = path.read_text(encoding="utf-8", errors="ignore")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    lines = source.splitlines()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None and node.end_lineno - node.lineno >= 2:
            text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if len(text) <= _LONGEST and text.isascii() and text.startswith("def ") and parses(text):
                found.append(text)
    return tuple(found)


def parses(text: str) -> bool:
    """Whether it is Python, as far as its syntax goes."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True
