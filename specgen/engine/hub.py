"""Finds a model's files on this machine, or in a Hugging Face repository, from which what is not
cached is downloaded.

huggingface_hub takes 0.3 seconds to import, so it is imported only for models that are no local
folder.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from glob import escape
from pathlib import Path

from specgen.base.errors import RunError, SpecgenError
from specgen.engine.gguf.file import is_gguf
from specgen.engine.gguf.naming import (
    SUFFIX,
    choose_gguf,
    gguf_beside,
    gguf_in_folder,
    has_safetensors,
    split_selector,
)

GGUF_HINT = "Name the GGUF file itself: -t FOLDER/FILE.gguf"
ALLOWED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "head.yaml"]
_PATIENCE = 10.0  # seconds to wait for the hub's answer about a repository
IGNORED = ["original/*", "consolidated*", "onnx/*", "openvino/*", "*.fp16.safetensors"]


class _UnreachableError(SpecgenError):
    """The hub was needed, and could not be reached."""


def model_folder(
    name: str,
    revision: str | None,
    offline: bool,
    remote_code: bool,
    announce: Callable[[str], None],
) -> Path:
    """Returns what `model_path` does, for what is no model but a head. Raises SpecgenError for a
    GGUF file too."""
    path = model_path(name, revision, offline, remote_code, announce)
    if path.is_file():
        raise SpecgenError(
            f"{name} is a GGUF file, and heads are read from safetensors",
            "Name the folder of a head",
        )
    return path


def model_path(
    name: str,
    revision: str | None,
    offline: bool,
    remote_code: bool,
    announce: Callable[[str], None],
) -> Path:
    """Returns the local folder with a model's files, or the (first) file of a GGUF model; downloads
    what is not there.

    `name` is a folder, a GGUF file, or a Hugging Face id. A colon and a file's name, or a tag in it
    such as Q4_K_M, name one of several GGUF models in a folder or a repository; an existing path
    wins. `revision` is a branch, tag or commit on the hub (None: its main branch). `offline` uses
    only what was downloaded earlier. `remote_code` also downloads the repository's Python files.
    `announce` is called with a message before a download. Raises SpecgenError if there is no such
    model, or if several are meant, and RunError if the download fails.
    """
    if not name.strip():
        raise SpecgenError("a model's name is empty", "Name a model id or a folder")
    if _kind(name) == "folder":
        return _local_model(name, None, revision)
    if _kind(name) == "file":
        return _local_file(name, revision)

    name, revision = _split_revision(name, revision)
    base, selector = split_selector(name)
    if _kind(base) == "folder":
        return _local_model(base, selector, revision)
    if selector is None and _kind(base) == "file":
        return _local_file(base, revision)
    if selector is not None and _kind(base) == "file":
        raise SpecgenError(
            f"{base} is a file, in which :{selector} names nothing", f"Leave out :{selector}"
        )
    is_path = (
        base.startswith((".", "/", "~"))
        or base.count("/") > 1
        or (os.sep != "/" and os.sep in base)
    )
    folder = Path(base).expanduser().parent
    if base.lower().endswith(SUFFIX) and (is_path or folder.is_dir()):
        raise SpecgenError(f"there is no file {base}", f"Check the path{gguf_beside(folder)}")
    if is_path:
        raise SpecgenError(
            f"there is no folder {name}",
            "Check the path, or name a model id such as Qwen/Qwen3-0.6B",
        )
    return _hub_model(base, selector, revision, offline, remote_code, announce)


def _kind(name: str) -> str | None:
    """Returns "folder" or "file" for what exists on this machine, None for what does not. Raises
    SpecgenError if no path can be so."""
    try:
        local = Path(name).expanduser()
        if local.is_dir():
            return "folder"
        return "file" if local.is_file() else None
    # a name too long, an unknown user's home, a null byte
    except (OSError, RuntimeError, ValueError) as error:
        raise SpecgenError(f"{name[:60]!r} is no valid model name", "Check the spelling") from error


def _split_revision(name: str, revision: str | None) -> tuple[str, str | None]:
    """Returns the name without its revision, and that: `owner/name@v2`, `owner/name@v2:FILE` and
    `owner/name:FILE@v2`."""
    if revision is not None or "@" not in name or _is_below_at(name):
        return name, revision
    name, _, revision = name.rpartition("@")
    revision, colon, selector = revision.partition(":")
    return f"{name}{colon}{selector}", revision


def _is_below_at(name: str) -> bool:
    """Whether `name` is a path in a folder that exists and has an @ in its name."""
    return any("@" in folder.name and folder.is_dir() for folder in Path(name).expanduser().parents)


def _local_model(name: str, selector: str | None, revision: str | None) -> Path:
    """Returns a folder, or the GGUF file in it that is its model."""
    if revision is not None:
        raise SpecgenError(
            f"{name} is a folder, which has no revision {revision!r}", "Leave the revision out"
        )
    folder = Path(name).expanduser()
    for path in folder.iterdir():
        # reading a FIFO would wait for another program
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise SpecgenError(f"{path} is not a file", "Name the folder of a model")
    return gguf_in_folder(folder, selector, name) or folder


def _local_file(name: str, revision: str | None) -> Path:
    """Returns a GGUF file."""
    path = Path(name).expanduser()
    if not is_gguf(path):
        hint = "Name the folder that contains it, or a GGUF file"
        raise SpecgenError(f"{name} is a file, and no GGUF model", hint)
    if revision is not None:
        raise SpecgenError(
            f"{name} is a file, which has no revision {revision!r}", "Leave the revision out"
        )
    return path


def head_folder(name: str | Path, offline: bool, announce: Callable[[str], None]) -> Path:
    """Returns the folder of a trained head: `name` itself if it exists, otherwise the folder that
    `model_folder` finds or downloads."""
    path = Path(name).expanduser()
    return path if path.exists() else model_folder(str(name), None, offline, False, announce)


def _hub_model(
    name: str,
    selector: str | None,
    revision: str | None,
    offline: bool,
    remote_code: bool,
    announce: Callable[[str], None],
) -> Path:
    """Returns the folder of a safetensors model on the hub, or a GGUF file there, after downloading
    what is not cached.

    If the hub cannot be reached, a snapshot will do of which the cache does not say that it is the
    main branch's.
    """
    from huggingface_hub import constants

    offline = offline or constants.HF_HUB_OFFLINE
    copied = _copied_snapshot(name) if revision is None else None
    if offline and copied is not None:
        return _local_model(str(copied), selector, None)
    try:
        return _downloaded(name, selector, revision, offline, remote_code, announce)
    except _UnreachableError:
        if copied is None:
            raise
        announce(
            f"note: the hub cannot be reached, so {name} is the snapshot {copied.name} in the cache"
        )
        return _local_model(str(copied), selector, None)


def _downloaded(
    name: str,
    selector: str | None,
    revision: str | None,
    offline: bool,
    remote_code: bool,
    announce: Callable[[str], None],
) -> Path:
    import huggingface_hub

    snapshot = partial(huggingface_hub.snapshot_download, name, revision=revision)
    with _hub_errors(name, revision, offline):
        cached = _cached_files(snapshot)
        listed = None
        if not offline and (selector is not None or not has_safetensors(cached)):
            listed = _files_on_hub(name, revision)
        if selector is not None and listed is None and not cached:
            # raises the error that says why there are no files
            snapshot(allow_patterns=[], local_files_only=offline)

        known = cached if listed is None else listed
        is_gguf_model = selector is not None or not has_safetensors(known)
        files = choose_gguf(known, selector, name) if is_gguf_model else None
        if files is None:
            return _safetensors_model(snapshot, name, offline, remote_code, announce)
        if not set(files) <= cached.keys():
            announce(f"downloading {files[0]} of {name}")
        if listed is None:
            return cached[files[0]]
        return Path(snapshot(allow_patterns=[escape(file) for file in files])) / files[0]


def _copied_snapshot(name: str) -> Path | None:
    """Returns the snapshot of a cached repository's main branch where the cache does not say which
    it is: the only one there is, or the one that refs/main names with a line feed at its end. None
    if huggingface_hub finds it.

    Caches that were copied or written by hand lack that file, or have it so.
    """
    from huggingface_hub import constants

    repository = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    try:
        snapshots = {
            path.name: path for path in (repository / "snapshots").iterdir() if path.is_dir()
        }
        reference = repository / "refs" / "main"
        main = reference.read_text("utf-8") if reference.is_file() else ""
    except (OSError, UnicodeError):
        return None
    if main in snapshots:
        return None
    alone = next(iter(snapshots.values())) if len(snapshots) == 1 else None
    return snapshots.get(main.strip(), alone)


def _safetensors_model(
    snapshot: Callable[..., str],
    name: str,
    offline: bool,
    remote_code: bool,
    announce: Callable[[str], None],
) -> Path:
    patterns = [*ALLOWED, *(["*.py"] if remote_code else [])]
    snapshot = partial(snapshot, allow_patterns=patterns, ignore_patterns=IGNORED)
    if not offline:
        try:
            snapshot(local_files_only=True)
        except Exception:  # noqa: BLE001  not cached; the download reports other errors
            announce(f"downloading {name}")
    return Path(snapshot(local_files_only=offline))


def _cached_files(snapshot: Callable[..., str]) -> dict[str, Path]:
    """Returns the path of each file that was downloaded earlier, by its name in the repository;
    empty if there are none."""
    try:
        folder = Path(snapshot(local_files_only=True, allow_patterns=[]))
        return {
            path.relative_to(folder).as_posix(): path
            for path in folder.rglob("*")
            if path.is_file()
        }
    except Exception:  # noqa: BLE001  nothing is cached, or no cache can be there: the download reports errors
        return {}


def _files_on_hub(name: str, revision: str | None) -> list[str] | None:
    """Returns the names of the files in a repository; None if the hub does not answer, or has no
    such repository."""
    import huggingface_hub

    try:  # list_repo_files would try again for half a minute, and say so
        files = huggingface_hub.model_info(name, revision=revision, timeout=_PATIENCE).siblings
        return [file.rfilename for file in files or ()]
    except Exception:  # noqa: BLE001  the download that follows reports what is wrong
        return None


@contextmanager
def _hub_errors(name: str, revision: str | None, offline: bool) -> Iterator[None]:
    """Turns the errors of huggingface_hub into a SpecgenError or RunError that says what to do."""
    from huggingface_hub import constants
    from huggingface_hub import errors as hub_errors

    try:
        yield
    except hub_errors.GatedRepoError as error:
        raise SpecgenError(
            f"{name} is gated", "Accept its terms on the hub, then log in: hf auth login"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise SpecgenError(
            f"{name} has no revision {revision!r}", "See its page on the hub for branches and tags"
        ) from error
    except (hub_errors.RepositoryNotFoundError, hub_errors.HFValidationError) as error:
        raise SpecgenError(
            (
                f"there is no model {name}: no local folder of that name, and no such "
                "repository on the hub"
            ),
            "Check the spelling; for a private one log in first: hf auth login",
        ) from error
    except (
        hub_errors.LocalEntryNotFoundError,
        hub_errors.OfflineModeIsEnabled,
        ConnectionError,
        TimeoutError,
    ) as error:
        raise _UnreachableError(
            f"there is no local folder {name}, and the hub "
            + ("was not contacted (offline)" if offline else "cannot be reached"),
            "Check the spelling and the connection, or name the folder of a model that you have",
        ) from error
    # the disk or the hub fails during the download
    except (OSError, hub_errors.HfHubHTTPError) as error:
        if error.errno in (
            errno.ENAMETOOLONG,
            errno.ENOTDIR,
            errno.EEXIST,
            errno.ELOOP,
            errno.EACCES,
            errno.EROFS,
        ):
            problem = f"cannot download {name} to {constants.HF_HUB_CACHE}: {error.strerror}"
            raise SpecgenError(
                problem, "Check the folders in HF_HOME, HF_HUB_CACHE and XDG_CACHE_HOME"
            ) from error
        raise RunError(f"cannot download {name}: {' '.join(str(error).split())[:200]}") from error
