"""Finds a model's files on this machine, or in a Hugging Face repository, from which what is not
cached is downloaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from specgen.base.errors import SpecgenError
from specgen.engine.gguf.file import is_gguf
from specgen.engine.gguf.naming import (
    SUFFIX,
    gguf_beside,
    gguf_in_folder,
    split_selector,
)

GGUF_HINT = "Name the GGUF file itself: -t FOLDER/FILE.gguf"


def model_folder(
    name: str,
    revision: str | None,
    offline: bool,
    remote_code: bool,
    announce: Callable[[str], None],
) -> Path:
    """Returns the folder of a head, found or downloaded as `model_path` does it. Raises
    SpecgenError as it does, and for a GGUF file."""
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

    `name` is a folder, a GGUF file, or a Hugging Face id, which `@` and a revision may follow. A
    colon and a file's name, or a tag in it such as Q4_K_M, name one of several GGUF models in a
    folder or a repository; an existing path wins. `revision` is a branch, tag or commit on the hub
    (None: its main branch). `offline` uses only what was downloaded earlier. `remote_code` also
    downloads the repository's Python files. `announce` is called with a message before a download.
    Raises SpecgenError if there is no such model, or if several are meant, and RunError if the
    download fails.
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
    """Returns `name` if there is such a path, otherwise the folder of the head that `model_folder`
    finds or downloads. Raises SpecgenError as it does."""
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

    from specgen.engine import hub_snapshot

    offline = offline or constants.HF_HUB_OFFLINE
    copied = hub_snapshot.copied_snapshot(name) if revision is None else None
    if offline and copied is not None:
        return _local_model(str(copied), selector, None)
    try:
        return hub_snapshot.downloaded(name, selector, revision, offline, remote_code, announce)
    except hub_snapshot.UnreachableError:
        if copied is None:
            raise
        announce(
            f"note: the hub cannot be reached, so {name} is the snapshot {copied.name} in the cache"
        )
        return _local_model(str(copied), selector, None)
