"""Which GGUF model a user means, by the names of files in a folder or a repository.

A model is one file, or all parts of a split file. A user names a file, or a tag of its name such as
Q4_K_M, or neither if there is only one model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath

from specgen.base.errors import SpecgenError
from specgen.base.files import files_in
from specgen.base.text import one_line

SUFFIX = ".gguf"
PART = re.compile(
    r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf",
    re.DOTALL | re.IGNORECASE,
)
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # encoders of pictures; statistics
_MOST_LISTED = 8


def split_selector(name: str) -> tuple[str, str | None]:
    """Returns what comes before the first colon in a model's name, and what comes after it (None:
    there is no colon).

    Raises SpecgenError if what follows is empty, an absolute path, or leads out of the repository.
    """
    base, colon, selector = name.partition(":")
    if not colon:
        return name, None
    is_absolute = PurePosixPath(selector).is_absolute() or PureWindowsPath(selector).drive
    parts = re.split(r"[/\\]", selector)
    if not selector.strip() or is_absolute or ".." in parts or parts[0] == "":
        problem = f"{one_line(name)} names no file of {one_line(base)}"
        raise SpecgenError(problem, f"Name a GGUF file of it: {one_line(base)}:FILE{SUFFIX}")
    return base, selector


def gguf_in_folder(folder: Path, selector: str | None, name: str) -> Path | None:
    """Returns the (first) file of the GGUF model in a local folder; None if it holds none.

    Without a `selector`, a folder with a safetensors model counts as holding none. Raises
    SpecgenError as `choose_gguf` does.
    """
    names = [path.name for path in files_in(folder, "*")]
    if selector is None and has_safetensors(names):
        return None
    chosen = choose_gguf(names, selector, name, "/")
    return None if chosen is None else folder / chosen[0]


def has_safetensors(files: Iterable[str]) -> bool:
    """Whether `files` are those of a safetensors model: its config, and its weights or their
    index."""
    names = list(files)
    weights = (name.endswith((".safetensors", ".safetensors.index.json")) for name in names)
    return "config.json" in names and any(weights)


def choose_gguf(
    files: Iterable[str],
    selector: str | None,
    name: str,
    separator: str = ":",
) -> tuple[str, ...] | None:
    """Returns those of the `files` in one folder or repository, in order, that are the model that a
    user means.

    `selector` is a file's name, or a tag in it; None: the only model. Returns None if there is no
    selector and no GGUF model. Raises SpecgenError, which lists the models, if several are meant or
    none. Messages call the place `name`, and a file in it `name`, `separator` and the file's name.
    """
    models = gguf_models(files)
    if selector is None and not models:
        return None
    meant = [model for model in models if selector is None or _is_meant(model, selector)]
    if len(meant) == 1:
        return meant[0]

    place = one_line(name)
    wanted = one_line(selector or "")
    if not models:
        raise SpecgenError(f"{place} has no GGUF model", f"Leave out :{wanted}")
    if not meant:
        problem = f"{place} has no GGUF model {wanted}, but {_listed(models)}"
    elif selector is None:
        problem = f"{place} has {len(meant)} GGUF models: {_listed(meant)}"
    else:
        problem = f"{place} has {len(meant)} GGUF models that match {wanted}: {_listed(meant)}"
    first = one_line((meant or models)[0][0])
    raise SpecgenError(problem, f"Name one of them: {place}{separator}{first}")


def gguf_models(files: Iterable[str]) -> list[tuple[str, ...]]:
    """Returns the GGUF models among `files`, sorted by name, each as its files in order."""
    groups: dict[str, list[str]] = defaultdict(list)
    for file in sorted(files):
        base = PurePosixPath(file).name
        if not base.lower().endswith(SUFFIX) or base.startswith(".") or _NO_MODEL.search(base):
            continue
        part = PART.fullmatch(file)
        groups[file if part is None else f"{part['name']} of {part['count']}"].append(file)
    return [tuple(group) for group in groups.values()]


def gguf_beside(folder: Path) -> str:
    """Returns the GGUF models in a folder as the end of a hint; empty if there are none, or no
    folder."""
    if not folder.is_dir():
        return ""
    models = gguf_models(path.name for path in files_in(folder, "*"))
    return f"; beside it: {_listed(models)}" if models else ""


def _is_meant(model: Sequence[str], selector: str) -> bool:
    """Whether `selector` is the name of one of the model's files, or a tag in the first's name."""
    if selector.lower().endswith(SUFFIX):
        return any(selector in (file, PurePosixPath(file).name) for file in model)
    tag = rf"(?<![a-z0-9]){re.escape(selector)}(?=[-./])"
    return re.search(tag, model[0], re.IGNORECASE) is not None


def _listed(models: Sequence[Sequence[str]]) -> str:
    names = [one_line(model[0]) for model in models[:_MOST_LISTED]]
    more = len(models) - len(names)
    return ", ".join(names) + (f" and {more:,} more" if more else "")
