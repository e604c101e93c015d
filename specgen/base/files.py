"""Reads and writes files: atomic replacement, checks that a file can be written before long work starts, locks, and YAML from
untrusted sources. Imports no torch."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
import tempfile
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import IO, Any

from specgen.base.errors import RunError, SpecgenError

_RACES = 1000  # an output may be replaced by another process between two looks at it
_DEEPEST = 20  # levels of nesting allowed in YAML; specgen's own files need six
_LONG_NUMBER = re.compile(r"[-+]?\d[\w:.]{100,}", re.ASCII)  # Python does not print integers of thousands of digits
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)  # of a folder: no file can be added, but one that exists may be writable
_STREAMS = {"/dev/stdout": 1, "/dev/fd/1": 1, "/proc/self/fd/1": 1, "/dev/stderr": 2, "/dev/fd/2": 2, "/proc/self/fd/2": 2}
_LOCKED = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES)
_LOCK_OFFSET = 1 << 62  # beyond the end of any file: on Windows, a locked byte cannot be read by others


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Yields a file to write to, which atomically replaces `path` at the end of the block.

    So `path` is always complete, the old file or the new one, even after a kill, with a full disk or with two writers at once.
    A symbolic link stays, and the file that it names is replaced; permissions stay too. What is not a regular file (a device, a
    FIFO), and a file in a folder where none can be created, is written to and not replaced. Raises OSError.
    """
    stream = own_stream(path)
    target = None if stream is not None else _replaceable(path)
    part = None if target is None else _new_part(target)
    if target is None or part is None:
        with path.open("wb") if stream is None else BufferedWriter(stream) as file:
            yield file
        return
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _copy_permissions(target, part)
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def own_stream(path: Path) -> FileIO | None:
    """Opens standard output or standard error if `path` is a name of one of them, such as /dev/stdout.

    Opened by its name, a file that it is redirected to would be written from the beginning. Returns None for any other path.
    """
    if str(path) not in _STREAMS:
        return None
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    return FileIO(os.dup(_STREAMS[str(path)]), "w")


def _replaceable(path: Path) -> Path | None:
    """Returns the file that `path` names, without symbolic links, if it is a regular file or does not exist yet. None for all
    else, and for a file that is open but has no name (such as /dev/fd/3 of a deleted file)."""
    target = Path(os.path.realpath(path))
    for _ in range(_RACES):
        try:
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):
                return None
            if os.path.samestat(found, target.stat()):
                return target
        except FileNotFoundError:
            return target if not path.exists() else None
    return None  # not another process's replacement each time: the name belongs to another file


def _new_part(target: Path) -> Path | None:
    """Creates an empty temporary file in `target`'s folder. None if the folder takes no files, but `target` may be writable."""
    try:
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".specgen-", suffix=".part")
    except OSError as error:
        if error.errno in _CLOSED and target.exists():
            return None
        raise
    os.close(descriptor)
    return Path(name)


def _copy_permissions(target: Path, part: Path) -> None:
    """Gives the temporary file `part`, which only its owner can read, the permissions of `target` or of a new file."""
    try:
        found = target.stat()
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        part.chmod(0o666 & ~mask)
        return
    if hasattr(os, "chown"):
        with suppress(OSError):  # only an administrator may keep another user's file theirs
            os.chown(part, found.st_uid, found.st_gid)
    part.chmod(stat.S_IMODE(found.st_mode))


def write_whole(path: Path, text: str, errors: str = "strict") -> None:
    """Writes `text` to `path` in UTF-8 and atomically (see `whole_file`). Creates the folder if it is missing. `errors` is the
    error handler of `str.encode`. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(text.encode("utf-8", errors))


def write_pieces(path: Path, pieces: Iterable[str]) -> None:
    """Writes a result to `path` in UTF-8, piece by piece and atomically (see `whole_file`). Halves of characters become question
    marks. Raises RunError if the file cannot be written."""
    try:
        with whole_file(path) as file:
            file.writelines(piece.encode("utf-8", "replace") for piece in pieces)
    except OSError as error:
        raise RunError(f"cannot write {path}: {_reason(error)}") from error


def check_writable(path: Path, what: str) -> None:
    """Raises SpecgenError if the file `path` cannot be written, so that this is known before long work starts. The file is not
    changed. `what` names the file in messages."""
    named, hint = f"cannot write the {what} {path}", "Name another file"
    try:
        if (stream := own_stream(path)) is not None:
            stream.close()
            return
        if path.is_socket():
            raise SpecgenError(f"{named}: it is a socket", hint)
        target = _replaceable(path)
        if path.is_dir():
            raise SpecgenError(f"{named}: it is a folder", "Name a file in it")
        if target is not None and not target.parent.is_dir():
            raise SpecgenError(f"{named}: there is no folder {path.parent}", "Create it first, or name another")
        part = None if target is None else _new_part(target)
    except OSError as error:
        kind = RunError if error.errno in (errno.ENOSPC, errno.EDQUOT) else SpecgenError
        raise kind(f"{named}: {_reason(error)}", hint) from error
    if part is not None:
        part.unlink(missing_ok=True)
    elif not os.access(path, os.W_OK):
        raise SpecgenError(f"{named}: {os.strerror(errno.EACCES)}", hint)


def make_writable_folder(folder: Path) -> None:
    """Creates a folder if it is missing. Raises SpecgenError if it cannot be created, or if no file can be written in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"cannot write to the folder {folder}: {_reason(error)}"
        raise SpecgenError(message, "Name another one with --out") from error


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def file_identity(path: Path) -> Hashable:
    """Returns a value that is equal for all names of the same file, even of one that does not exist yet. None for a device, which
    several may write to, and for standard output and error."""
    if str(path) in _STREAMS:
        return None
    try:
        found = path.stat()
    except (OSError, ValueError):
        target = Path(os.path.realpath(path))
        try:
            folder = target.parent.stat()
        except (OSError, ValueError):
            return str(target)
        return folder.st_dev, folder.st_ino, os.path.normcase(target.name)
    if stat.S_ISREG(found.st_mode) or stat.S_ISFIFO(found.st_mode) or stat.S_ISDIR(found.st_mode):
        return found.st_dev, found.st_ino
    return None


def take_lock(file: FileIO) -> bool:
    """Takes the advisory lock of a file that is open for writing. It ends when the file is closed or the process ends.

    Returns False if another process has it. Returns True without a lock if the platform or the file system has none, as some
    network file systems.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(_LOCK_OFFSET)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            file.seek(0)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return True
    except OSError as error:
        return error.errno not in _LOCKED
    return True


def load_yaml(text: str) -> Any:
    """Parses a YAML document from an untrusted source with a safe loader and returns its content.

    Aliases (which can expand without limit), deep nesting and very long numbers are refused. Raises yaml.YAMLError, with the
    position if it is known, and ValueError for a value that does not fit its tag or a date that does not exist.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C version is ten times as fast
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        position: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not allowed: write the value out", problem_mark=position)
        if isinstance(event, yaml.ScalarEvent) and (event.implicit[0] or event.tag) and _LONG_NUMBER.fullmatch(event.value):
            raise yaml.MarkedYAMLError(problem=f"a number of {len(event.value):,} digits", problem_mark=position)
        if depth > _DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"more than {_DEEPEST} levels of nesting", problem_mark=position)
    try:
        return yaml.load(text, Loader=loader)  # noqa: S506  a safe loader, chosen above
    except (KeyError, IndexError, AttributeError, TypeError) as error:  # for `!!bool maybe`, `!!int ''`
        raise ValueError("a value does not fit its tag") from error
