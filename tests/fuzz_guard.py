"""Forbids a process to write outside one folder, and to change anything in a model's folder there.

As a program it runs `specgen` so: python tests/fuzz_guard.py FOLDER MEMORY ARGUMENT ... (MEMORY in bytes). What was prevented is
appended to the file FOLDER/../escaped, a line each.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Escaped(BaseException):
    """The command was about to write outside its folder. It is prevented, not only reported."""


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = dict.fromkeys(("os.rename", "os.link", "os.symlink", "shutil.move"), 2)  # how many paths each of them changes
_CHANGES |= dict.fromkeys(
    ["os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "os.chown", "os.utime", "shutil.rmtree"], 1
)
_guarded: list[tuple[Path, list[str]]] = []
_installed: list[Any] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    """Python calls this before each of these operations, in whatever module it is."""
    if not _guarded:
        return
    if event == "open":
        written = args[:1] if isinstance(args[2], int) and args[2] & _WRITES else ()
    elif event == "socket.connect":
        written = ("/the network",) if isinstance(args[1], tuple) else ()
    else:
        written = args[: _CHANGES.get(event, 0)]
    root, found = _guarded[-1]
    for path in written:
        if isinstance(path, int):
            continue
        real = os.path.realpath(os.fsdecode(path))
        if not (real.startswith(f"{root}/") or real in ("/dev/null", str(root))) or "/in/model/" in real:
            found.append(f"{event} {real}")
            raise Escaped(found[-1])


@contextmanager
def guarded(folder: Path) -> Iterator[list[str]]:
    """Forbids to write elsewhere than in `folder` while the block runs. Yields a list of what was prevented."""
    if not _installed:
        sys.addaudithook(_audit)
        _installed.append(_audit)
    escaped: list[str] = []
    _guarded.append((folder.resolve(), escaped))
    try:
        yield escaped
    finally:
        _guarded.pop()


def main() -> None:
    import resource

    folder, memory = Path(sys.argv[1]), int(sys.argv[2])
    sys.argv[:3] = ["specgen"]
    sys.dont_write_bytecode = True
    sys.path.pop(0)  # the tests, whose modules a program of its own does not have
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    escaped: list[str] = []
    try:
        with guarded(folder) as escaped:
            from specgen.cli.app import program

            program()
    except Escaped:
        sys.exit(99)
    finally:
        if escaped:
            (folder.parent / "escaped").write_text("\n".join(escaped))


if __name__ == "__main__":
    main()
