"""Checks the files that a command will write, before anything is loaded: that they can be written, and that none of them is
another output or an input."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.base.errors import SpecgenError
from specgen.base.files import check_writable, file_identity

if TYPE_CHECKING:
    from specgen.cli.model_options import ModelOptions

OWN_SUFFIXES = (".jsonl", ".csv", ".html", ".svg")  # of the files that specgen writes; models have none
_NAMES = {"--trace": "trace", "--resume": "trace", "--csv": "CSV file", "--svg": "picture", "--html": "page", "--out": "profile"}


def check_outputs(
    outputs: Mapping[str, Path | None], inputs: Iterable[tuple[str, Path | None]], models: ModelOptions | None = None
) -> None:
    """Raises SpecgenError if a file to write cannot be written, or is the same file as another output, an input or redirected
    standard input. All links are followed.

    `outputs` and `inputs` have the path of each option; None: not given. An input is a file or a folder. `models` are inputs too.
    """
    if not any(outputs.values()):
        return
    written: dict[Hashable, str] = {}
    read = [("standard input", Path("/dev/stdin")), *inputs, *(_of_models(models) if models is not None else ())]
    for option, path in outputs.items():
        if path is None:
            continue
        check_writable(path, _NAMES[option])
        identity, given = file_identity(path), f"{option} {path}"
        if identity is None:  # a device
            continue
        if identity in written:
            raise SpecgenError(f"{written[identity]} and {given} are the same file", "Name another file")
        written[identity] = given
        for name, other in read:
            if other is not None and _is_read(path, other):
                raise SpecgenError(f"{given} is a file that is read: {name} {other}", "Name another file")


def _is_read(path: Path, given: Path) -> bool:
    """Whether `path` is the file `given`, or belongs to the folder `given`: it lies in it and is not of a kind that specgen
    writes, or it is linked from it."""
    if not os.path.isdir(given):
        return file_identity(path) == file_identity(given)
    target = Path(os.path.realpath(path))
    if target.parent == Path(os.path.realpath(given)) and target.suffix not in OWN_SUFFIXES:
        return True
    return file_identity(path) in {file_identity(other) for other in given.iterdir() if other.suffix not in OWN_SUFFIXES}


def _of_models(models: ModelOptions) -> Iterator[tuple[str, Path]]:
    """Yields the files and folders that are named for models, and the folders of the bundled ones."""
    from specgen import demo

    if models.target is None:
        yield from (("the bundled model", folder) for folder in (*map(demo.folder, demo.ROLES), demo.exit_folder()))
    given = {"--target": models.target, "--draft": models.draft, "--head": models.head, "--exit-layer": models.exit_layer}
    yield from ((option, Path(os.path.expanduser(path))) for option, path in given.items() if path is not None)
