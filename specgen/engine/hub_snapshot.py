"""Models in Hugging Face repositories and in the cache of huggingface_hub, which takes 0.3 seconds
to import: so this module is imported only for models that are no local folder."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from glob import escape
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub import errors as hub_errors

from specgen.base.errors import RunError, SpecgenError
from specgen.engine.gguf.naming import choose_gguf, has_safetensors

_ALLOWED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "head.yaml"]
_PATIENCE = 10.0  # seconds to wait for the hub's answer about a repository
_IGNORED = ["original/*", "consolidated*", "onnx/*", "openvino/*", "*.fp16.safetensors"]


class UnreachableError(SpecgenError):
    """The hub was needed, and could not be reached."""


def copied_snapshot(name: str) -> Path | None:
    """Returns the folder of a cached repository's main branch where huggingface_hub does not find
    it: caches that were copied or written by hand may lack the file refs/main, or have a line feed
    at its end.

    Without refs/main it is the only snapshot. None if huggingface_hub finds the main branch itself,
    or if there is no such snapshot.
    """
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


def downloaded(
    name: str,
    selector: str | None,
    revision: str | None,
    offline: bool,
    remote_code: bool,
    announce: Callable[[str], None],
) -> Path:
    """Returns the folder of a safetensors model, or a GGUF file, after downloading what is not
    cached; the arguments are those of `hub.model_path`, and `selector` names the GGUF file.

    Raises SpecgenError, `UnreachableError` if the hub was needed and could not be reached, and
    RunError if the download fails.
    """
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


def _safetensors_model(
    snapshot: Callable[..., str],
    name: str,
    offline: bool,
    remote_code: bool,
    announce: Callable[[str], None],
) -> Path:
    patterns = [*_ALLOWED, *(["*.py"] if remote_code else [])]
    snapshot = partial(snapshot, allow_patterns=patterns, ignore_patterns=_IGNORED)
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
    try:  # list_repo_files would try again for half a minute, and say so
        files = huggingface_hub.model_info(name, revision=revision, timeout=_PATIENCE).siblings
        return [file.rfilename for file in files or ()]
    except Exception:  # noqa: BLE001  the download that follows reports what is wrong
        return None


@contextmanager
def _hub_errors(name: str, revision: str | None, offline: bool) -> Iterator[None]:
    """Turns the errors of huggingface_hub into a SpecgenError or RunError that says what to do."""
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
        raise UnreachableError(
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
