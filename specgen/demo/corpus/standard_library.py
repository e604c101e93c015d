"""Short functions from the standard library (PSF licence) of the Python version in use."""

from __future__ import annotations

import ast
import os
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from specgen.base.errors import RunError
from specgen.demo.corpus.held_out import is_held_out

_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "ensurepip", "turtledemo"}
    | {"__pycache__", "encodings", "pydoc_data"}
)
_MAX_CHARACTERS = 700  # of a function: about 200 tokens
_MAX_BYTES = 200_000  # of a file


def library_function(rng: random.Random, *, held_out: bool = False) -> str:
    """Returns the source of a random short function or method of the standard library, dedented.

    With `held_out` it comes from a file that training never uses; otherwise from a file that training may use.

    Raises RunError if this Python was installed without the source of its standard library.
    """
    files, cumulative_sizes = _files(held_out)
    while True:
        functions = _functions(rng.choices(files, cum_weights=cumulative_sizes)[0])
        if functions:
            return rng.choice(functions)


@cache
def _files(held_out: bool) -> tuple[tuple[Path, ...], tuple[int, ...]]:
    """Returns the library files that are held out (if `held_out` is False: all others) and their cumulative sizes in bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files, cumulative_sizes, total = [], [], 0
    for path in sorted(_python_files(root)):
        size = path.stat().st_size
        if 0 < size < _MAX_BYTES and is_held_out(path.relative_to(root).as_posix()) == held_out:
            total += size
            files.append(path)
            cumulative_sizes.append(total)
    if not files:
        raise RunError(f"no Python source under {root}", "Use a Python that was installed with its standard library")
    return tuple(files), tuple(cumulative_sizes)


def _python_files(root: Path) -> Iterator[Path]:
    """Yields the Python files under `root` without looking into the skipped folders: site-packages may hold 100,000 files."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


@cache
def _functions(path: Path) -> tuple[str, ...]:
    source = path.read_text(encoding="utf-8", errors="ignore")
    tree = parse(source)
    if tree is None:
        return ()
    lines = source.splitlines()
    functions = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None and node.end_lineno - node.lineno >= 2:
            text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if len(text) <= _MAX_CHARACTERS and text.isascii() and text.startswith("def ") and parse(text) is not None:
                functions.append(text)
    return tuple(functions)


def parse(text: str) -> ast.Module | None:
    """Returns the syntax tree of Python source text, or None if the text does not parse."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None
