"""Files that are there whole or not at all, and what YAML is read for. Imports no torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_DEEPEST = 20  # levels of nesting; what is read here needs six


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to that takes the place of `path` in the end: two writers at once, a full disk and a kill leave a whole
    one, the old or the new. Raises OSError."""
    part = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".part", delete=False) as file:
            part = Path(file.name)
            yield file
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        part.chmod(0o666 & ~mask)  # a temporary file is its owner's alone
        os.replace(part, path)
    except BaseException:
        if part is not None:
            part.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str, errors: str = "strict") -> None:
    """`text` in UTF-8, in a folder that is made where it is missing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(text.encode("utf-8", errors))


def load_yaml(text: str) -> Any:
    """What a document says, by a safe loader, after a look at its bare events: aliases, of which bombs are made, and depth are
    refused. Raises yaml.YAMLError, with the place where it has one, and ValueError for a scalar that is not what its tag says or
    a date that does not exist."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same in C, ten times as fast
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        position: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not read: write out what they say", problem_mark=position)
        if depth > _DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"more than {_DEEPEST} levels", problem_mark=position)
    try:
        return yaml.load(text, Loader=loader)  # noqa: S506  a safe one, chosen above
    except (KeyError, IndexError, AttributeError, TypeError) as error:  # what its constructors say to `!!bool maybe`, `!!int ''`
        raise ValueError("a value is not what its tag says") from error
