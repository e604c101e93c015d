"""Reads and writes files: atomic replacement, checks that a file can be written before long work starts, and YAML from untrusted
sources. Imports no torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from specgen.errors import SpecgenError

_DEEPEST = 20  # levels of nesting allowed in YAML; specgen's own files need six


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Yields a temporary file to write to, which atomically replaces `path` at the end of the block.

    So `path` is always complete, the old file or the new one, even after a kill, with a full disk or with two writers at once.
    Raises OSError.
    """
    part = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".part", delete=False) as file:
            part = Path(file.name)
            yield file
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        part.chmod(0o666 & ~mask)  # temporary files are readable by their owner only
        os.replace(part, path)
    except BaseException:
        if part is not None:
            part.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str, errors: str = "strict") -> None:
    """Writes `text` to `path` in UTF-8 and atomically (see `whole_file`). Creates the folder if it is missing. `errors` is the
    error handler of `str.encode`. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(text.encode("utf-8", errors))


def check_writable(path: Path, what: str, *, replaces: bool = False) -> None:
    """Raises SpecgenError if the file `path` cannot be written, so that this is known before long work starts. The file is not
    changed.

    `what` names the file in messages. `replaces` says that the file will be replaced by `whole_file`, which needs a writable
    folder instead of a writable file.
    """
    folder = path.parent
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise SpecgenError(f"cannot write the {what}: {error.strerror}", "Name another file") from error
    if is_folder:
        raise SpecgenError(f"cannot write the {what} {path}: it is a folder", "Name a file in it")
    if not folder.is_dir():
        raise SpecgenError(f"cannot write the {what} {path}: there is no folder {folder}", "Create it first, or name another")
    if not os.access(path if exists and not replaces else folder, os.W_OK):
        raise SpecgenError(f"cannot write the {what} {path}: permission denied", "Name another file")


def make_writable_folder(folder: Path) -> None:
    """Creates a folder if it is missing. Raises SpecgenError if it cannot be created or is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        usable = False
    if not usable:
        raise SpecgenError(f"cannot write to the folder {folder}", "Name another one with --out")


def load_yaml(text: str) -> Any:
    """Parses a YAML document from an untrusted source with a safe loader and returns its content.

    Aliases (which can expand without limit) and deep nesting are refused. Raises yaml.YAMLError, with the position if it is
    known, and ValueError for a value that does not fit its tag or a date that does not exist.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C version is ten times as fast
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        position: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not allowed: write the value out", problem_mark=position)
        if depth > _DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"more than {_DEEPEST} levels of nesting", problem_mark=position)
    try:
        return yaml.load(text, Loader=loader)  # noqa: S506  a safe loader, chosen above
    except (KeyError, IndexError, AttributeError, TypeError) as error:  # for `!!bool maybe`, `!!int ''`
        raise ValueError("a value does not fit its tag") from error
