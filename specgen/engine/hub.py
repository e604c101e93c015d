"""Finds a model's files in a local folder, or in a Hugging Face repository, which is downloaded unless it is cached.

huggingface_hub takes 0.3 seconds to import, so it is imported only for models that are no local folder.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from specgen.base.errors import RunError, SpecgenError

GGUF_HINT = "llama.cpp runs GGUF files: specgen tune --export llama.cpp prints its options. Here, name the safetensors model"
ALLOWED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "head.yaml"]
IGNORED = ["original/*", "consolidated*", "onnx/*", "openvino/*", "*.fp16.safetensors"]


def model_folder(name: str, revision: str | None, offline: bool, remote_code: bool, announce: Callable[[str], None]) -> Path:
    """Returns the local folder with a model's files; downloads them if necessary. `name` is a folder or a Hugging Face id.

    `revision` is a branch, tag or commit on the hub (None: its main branch). `offline` uses only what was downloaded earlier.
    `remote_code` also downloads the repository's Python files. `announce` is called with a message before a download. Raises
    SpecgenError if there is no such model, and RunError if the download fails.
    """
    if not name.strip():
        raise SpecgenError("a model's name is empty", "Name a model id or a folder")
    try:
        local = Path(name).expanduser()
        is_folder, is_file = local.is_dir(), local.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, an unknown user's home, a null byte
        raise SpecgenError(f"{name[:60]!r} is no valid model name", "Check the spelling") from error
    if revision is None and not is_folder and "@" in name:
        name, _, revision = name.rpartition("@")
        is_folder = Path(name).expanduser().is_dir()
    if is_folder:
        if revision is not None:
            raise SpecgenError(f"{name} is a folder, which has no revision {revision!r}", "Leave the revision out")
        for path in local.iterdir():
            if path.exists() and not (path.is_file() or path.is_dir()):  # reading a FIFO would wait for another program
                raise SpecgenError(f"{path} is not a file", "Name the folder of a model")
        return local
    if is_file:
        raise SpecgenError(f"{name} is a file", GGUF_HINT if name.endswith(".gguf") else "Name the folder that contains it")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or (os.sep != "/" and os.sep in name):
        raise SpecgenError(f"there is no folder {name}", "Check the path, or name a model id such as Qwen/Qwen3-0.6B")
    return _download(name, revision, offline, remote_code, announce)


def head_folder(name: str | Path, offline: bool, announce: Callable[[str], None]) -> Path:
    """Returns the folder of a trained head: `name` itself if it exists, otherwise the folder that `model_folder` finds or
    downloads."""
    path = Path(name).expanduser()
    return path if path.exists() else model_folder(str(name), None, offline, False, announce)


def _download(name: str, revision: str | None, offline: bool, remote_code: bool, announce: Callable[[str], None]) -> Path:
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub import errors as hub_errors

    offline = offline or constants.HF_HUB_OFFLINE
    snapshot = partial(
        huggingface_hub.snapshot_download,
        name,
        revision=revision,
        allow_patterns=[*ALLOWED, *(["*.py"] if remote_code else [])],
        ignore_patterns=IGNORED,
    )
    try:
        if not offline:
            try:
                snapshot(local_files_only=True)
            except Exception:  # noqa: BLE001  not cached; the download reports other errors
                announce(f"downloading {name}")
        return Path(snapshot(local_files_only=offline))
    except hub_errors.GatedRepoError as error:
        raise SpecgenError(f"{name} is gated", "Accept its terms on the hub, then log in: hf auth login") from error
    except hub_errors.RevisionNotFoundError as error:
        raise SpecgenError(f"{name} has no revision {revision!r}", "See its page on the hub for branches and tags") from error
    except (hub_errors.RepositoryNotFoundError, hub_errors.HFValidationError) as error:
        raise SpecgenError(
            f"there is no model {name}: no local folder of that name, and no such repository on the hub",
            "Check the spelling; for a private one log in first: hf auth login",
        ) from error
    except (hub_errors.LocalEntryNotFoundError, hub_errors.OfflineModeIsEnabled, ConnectionError, TimeoutError) as error:
        raise SpecgenError(
            f"there is no local folder {name}, and the hub "
            + ("was not contacted (offline)" if offline else "cannot be reached"),
            "Check the spelling and the connection, or name the folder of a model that you have",
        ) from error
    except (OSError, hub_errors.HfHubHTTPError) as error:  # the disk or the hub fails during the download
        if error.errno in (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.EACCES, errno.EROFS):
            problem = f"cannot download {name} to {constants.HF_HUB_CACHE}: {error.strerror}"
            raise SpecgenError(problem, "Check the folders in HF_HOME, HF_HUB_CACHE and XDG_CACHE_HOME") from error
        raise RunError(f"cannot download {name}: {' '.join(str(error).split())[:200]}") from error
