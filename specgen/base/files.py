"""Files and the user's folders: atomic replacement, checks that a file can be written before long
work starts, locks, and the names of what specgen keeps. Imports no torch."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
import tempfile
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import IO, TYPE_CHECKING

from specgen.base.errors import RunError, SpecgenError

if TYPE_CHECKING:
    from filelock import FileLock

EXIT_WEIGHTS = "exit.safetensors"
HEAD_DESCRIPTION = "head.yaml"
DRAFT_DESCRIPTION = "distilled.yaml"
_STREAMS = {
    "/dev/stdout": 1,
    "/dev/fd/1": 1,
    "/proc/self/fd/1": 1,
    "/dev/stderr": 2,
    "/dev/fd/2": 2,
    "/proc/self/fd/2": 2,
}


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Yields a file to write to, which atomically replaces `path` at the end of the block.

    So `path` is always complete, the old file or the new one, even after a kill, with a full disk
    or with two writers at once. A symbolic link stays, and the file that it names is replaced;
    permissions stay too. What is not a regular file (a device, a FIFO) is written to and not
    replaced. Raises OSError.
    """
    stream = own_stream(path)
    if stream is not None or not _is_replaceable(path):
        with path.open("wb") if stream is None else BufferedWriter(stream) as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    descriptor, part = tempfile.mkstemp(dir=target.parent, prefix=".specgen-", suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
        os.chmod(part, mode)
        os.replace(part, target)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def own_stream(path: Path) -> FileIO | None:
    """Opens standard output or standard error if `path` is a name of one of them, such as
    /dev/stdout; otherwise returns None.

    Opening such a path itself is wrong where the stream is redirected to a file: writing would
    start at the file's beginning.
    """
    if str(path) not in _STREAMS:
        return None
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    return FileIO(os.dup(_STREAMS[str(path)]), "w")


def _is_replaceable(path: Path) -> bool:
    """Whether `path` names a regular file, or no file yet. False for an open file whose name was
    deleted, such as one at /dev/fd/3."""
    target = Path(os.path.realpath(path))
    return not path.exists() or (path.is_file() and target.exists())


def write_whole(path: Path, text: str) -> None:
    """Writes `text` to `path` in UTF-8 and atomically (see `whole_file`). Creates the folder if it
    is missing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(text.encode())


def write_pieces(path: Path, pieces: Iterable[str]) -> None:
    """Writes text to `path` in UTF-8, piece by piece and atomically (see `whole_file`). Lone
    surrogates become question marks.

    Raises RunError if the file cannot be written.
    """
    try:
        with whole_file(path) as file:
            file.writelines(piece.encode("utf-8", "replace") for piece in pieces)
    except OSError as error:
        raise RunError(f"cannot write {path}: {_reason(error)}") from error


def write_new(path: Path, text: str, what: str) -> None:
    """Writes `text` in UTF-8 to a file that does not exist yet. `what` names the file in messages.

    Raises SpecgenError if it exists or cannot be created, RunError if the disk is full or writing
    fails.
    """
    check_writable(path, what)
    try:
        with path.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except FileExistsError as error:
        raise SpecgenError(
            f"{path} exists, and nothing is overwritten", "Name a new file"
        ) from error
    except OSError as error:
        raise RunError(f"cannot write {path}: {_reason(error)}") from error


def files_in(folder: Path, *patterns: str) -> list[Path]:
    """Returns the files in a folder whose names match one of the glob patterns, sorted by path,
    without macOS's side files (`._name`)."""
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path for path in paths if not path.name.startswith("._"))


def check_writable(path: Path, what: str) -> None:
    """Raises SpecgenError if the file `path` cannot be written, RunError if the disk is full. The
    file is not changed.

    To be called before long work starts. `what` names the file in messages.
    """
    named = f"cannot write the {what} {path}"
    if str(path) in _STREAMS:
        return
    try:
        folder = Path(os.path.realpath(path)).parent
        if path.is_dir():
            raise SpecgenError(f"{named}: it is a folder", "Name a file in it")
        if not folder.is_dir():
            raise SpecgenError(
                f"{named}: there is no folder {path.parent}", "Create it first, or name another"
            )
        if _is_replaceable(path):
            tempfile.TemporaryFile(dir=folder).close()
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        kind = RunError if error.errno in (errno.ENOSPC, errno.EDQUOT) else SpecgenError
        raise kind(f"{named}: {_reason(error)}", "Name another file") from error


def make_writable_folder(folder: Path) -> None:
    """Creates a folder if it is missing. Raises SpecgenError if it cannot be created, or if no file
    can be written in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        message = f"cannot write to the folder {folder}: {_reason(error)}"
        raise SpecgenError(message, "Name another one with --out") from error


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def file_identity(path: Path) -> Hashable:
    """Returns a value that is equal for all names of one file, whether the file exists already or
    not.

    Returns None for devices, standard output and standard error, to which several writers may
    write.
    """
    if str(path) in _STREAMS:
        return None
    try:
        status = path.stat()
    except (OSError, ValueError):
        return os.path.normcase(os.path.realpath(path))
    is_device = stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)
    return None if is_device else (status.st_dev, status.st_ino)


def take_lock(path: Path) -> FileLock | None:
    """Takes the lock for writing the file `path` and returns it; None if another process holds it.

    The lock ends when it is released or the process ends. It is a file in the folder of caches, so
    it is seen only by processes of this user on this machine. Where no lock file can be made, the
    lock that is returned excludes nobody.
    """
    from filelock import FileLock, Timeout

    name = sha256(os.path.realpath(path).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    folder = cache_folder() / "locks"
    lock = FileLock(folder / f"{name}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        return None
    # a folder that cannot be written, a file system without locks
    except (OSError, NotImplementedError):
        pass
    return lock


def examples_file() -> Path:
    """The path of `examples.yaml`, the prompts for the bundled pair of demo models: in the
    installed package, or at the top of a source checkout."""
    package = Path(__file__).parent.parent
    inside = package / "examples.yaml"
    return inside if inside.is_file() else package.parent / "examples.yaml"


def bundled_prompts() -> Path:
    """The path of the prompts for training that come with the package, in the form of
    `examples.yaml`."""
    return Path(__file__).parent.parent / "train" / "prompts.yaml"


def data_folder() -> Path:
    """The folder for tuning profiles and trained parts of models: the environment variable
    `SPECGEN_DATA`, or if it is not set a folder in the user's data folder."""
    return _user_folder(
        "SPECGEN_DATA",
        "Application Support/specgen",
        "specgen/Data",
        "XDG_DATA_HOME",
        ".local/share",
    )


def cache_folder() -> Path:
    """The folder for cached measurements, which can be deleted and measured again: the environment
    variable `SPECGEN_CACHE`, or if it is not set a folder in the user's cache folder."""
    return _user_folder(
        "SPECGEN_CACHE", "Caches/specgen", "specgen/Cache", "XDG_CACHE_HOME", ".cache"
    )


def _user_folder(
    override: str, on_macos: str, on_windows: str, xdg_variable: str, xdg_default: str
) -> Path:
    own = os.environ.get(override)
    if own:
        return Path(own)
    # unlike Path.home(), works for a user without a home folder
    home = Path(os.path.expanduser("~"))
    if sys.platform == "darwin":
        return home / "Library" / on_macos
    local = os.environ.get("LOCALAPPDATA")
    if sys.platform == "win32" and local:
        return Path(local) / on_windows
    return Path(os.environ.get(xdg_variable) or home / xdg_default) / "specgen"


def pair_folder(target: str, target_fingerprint: str, draft: str | None) -> Path:
    """The folder for what belongs to a pair of models, such as tuning profiles. Its name contains
    the models' names and the fingerprint of the target's weights. `draft` is None if there is no
    draft model."""
    names = "+".join(readable(name) for name in (target, draft) if name is not None)
    return data_folder() / "pairs" / f"{names}-{target_fingerprint}"


def part_folder(kind: str, target: str, target_fingerprint: str) -> Path:
    """The folder for a trained part of a target; the draft model does not matter.

    `kind` is `exit` (a layer that drafts after the target's first layers) or the kind of a head:
    `medusa`, `eagle`, ...
    """
    own = pair_folder(target, target_fingerprint, None)
    return own if kind == "exit" else own / "heads" / kind


def kept_part(kind: str, target: str, target_fingerprint: str) -> Path | None:
    """The folder of the part of this kind that was trained on this machine for a target with these
    weights; None if there is none.

    The fingerprint of the weights decides: a part is found even if the target had another name
    (such as another path) when the part was trained.
    """
    own = pair_folder(target, target_fingerprint, None)
    name = EXIT_WEIGHTS if kind == "exit" else f"heads/{kind}/{HEAD_DESCRIPTION}"
    others = sorted(own.parent.glob(f"*-{target_fingerprint}/{name}"))
    return next((path.parent for path in (own / name, *others) if path.is_file()), None)


def readable(name: str) -> str:
    """A model's name as part of a file name: the last two parts of its path, at most 60 characters
    of them. Characters other than letters, digits, dots and underscores become dashes."""
    return re.sub(r"[^\w.-]+", "-", "-".join(Path(name).parts[-2:])).strip("-.")[:60]
