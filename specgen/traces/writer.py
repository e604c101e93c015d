"""Writes traces: JSON lines, which `reader` reads back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.base.errors import RunError, SpecgenError
from specgen.base.files import own_stream, take_lock
from specgen.base.text import json_line

if TYPE_CHECKING:
    from filelock import FileLock

_BEGINNING = b'{"type": '  # of a line


class TraceWriter:
    """Writes JSON lines to a trace file. Each line is one unbuffered write, so that an interruption
    leaves only complete lines.

    The constructor locks the file, and the first line opens it. An existing file is replaced,
    unless `keep` is set before the first line: then its first `keep` bytes stay, and lines are
    added after them. With `resumes` there has to be a file, and `keep` is 0. Raises SpecgenError if
    this file is missing, if another process of this user writes to the file, or if it holds
    anything but a trace.
    """

    def __init__(self, path: Path, *, resumes: bool = False) -> None:
        self.keep = 0 if resumes else None
        self._path = path
        self._file: FileIO | None = None
        self._lock: FileLock | None = None
        is_file = path.is_file()
        if resumes and not is_file:
            problem = "it is not a file" if path.exists() else "there is none"
            raise SpecgenError(
                f"cannot continue the trace {path}: {problem}", "Name one that --trace wrote"
            )
        if is_file and os.access(path, os.R_OK):
            with path.open("rb") as file:
                if file.read(len(_BEGINNING)) not in (b"", _BEGINNING):
                    raise SpecgenError(
                        f"the file {path} is not a trace and would be lost",
                        "Delete it, or name another file",
                    )
        if is_file or not path.exists():  # several processes may write to a device
            self._lock = take_lock(path)
            if self._lock is None:
                raise SpecgenError(
                    f"another process writes the trace {path}",
                    "Wait for its end, or name another file",
                )

    def write(self, line: Mapping[str, Any]) -> None:
        """Writes one line. Raises RunError if it cannot be written, ValueError if it holds NaN or
        infinity."""
        data = json_line(line)
        try:
            if self._file is None:
                self._file = self._opened()
            written = self._file.write(data)
        except OSError as error:
            raise RunError(f"cannot write the trace {self._path}: {error.strerror}") from error
        if written != len(data):
            raise RunError(f"cannot write the trace {self._path}: the disk is full")

    def _opened(self) -> FileIO:
        if self.keep is None:
            return own_stream(self._path) or FileIO(self._path, "w")
        file = FileIO(self._path, "r+")
        file.truncate(self.keep)
        if self.keep:
            file.seek(self.keep - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
        return file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._lock is not None:
            self._lock.release()
