"""Trained parts of models (exit layers, heads): the files that describe them, and the search for the one to use by default."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import yaml
from pydantic import TypeAdapter, ValidationError

from specgen.base.errors import RunError, SpecgenError, first_problem, is_out_of_memory
from specgen.base.files import load_yaml
from specgen.base.text import one_line

DescriptionT = TypeVar("DescriptionT")
PartT = TypeVar("PartT")


def digest_of(description: Any) -> str:
    """Returns 16 hexadecimal digits that identify a description (a dataclass), and so the training that made it."""
    return sha256(repr(asdict(description)).encode()).hexdigest()[:16]


def description_text(comment: str, description: Any) -> str:
    """Returns a description (a dataclass) as YAML after a comment. Tuples become lists, floats get four significant digits."""
    plain = json.loads(json.dumps(asdict(description)), parse_float=lambda text: float(f"{float(text):.4g}"))
    return comment + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def read_described(path: Path, adapter: TypeAdapter[DescriptionT], part: str, *, train: str, restore: str) -> DescriptionT:
    """Reads the description of a trained part, which messages call `part`. `train` and `restore` are hints: what to do if there
    is no such part, and if its file is damaged.

    Raises SpecgenError if the file is missing, unreadable or in a wrong format.
    """
    if path.exists() and not path.is_file():
        raise SpecgenError(f"{path} is not a file", restore)
    try:
        return adapter.validate_python(load_yaml(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise SpecgenError(f"there is no {part} in {path.parent} (no {path.name})", train) from error
    except ValidationError as error:
        raise SpecgenError(f"{path}: {one_line(first_problem(error))[:200]}", restore) from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # an impossible date is a ValueError
        raise SpecgenError(f"cannot read {path}", restore) from error


class FoundPart(Generic[DescriptionT, PartT]):
    """A trained part that is used if the user names none. Its description is read at once, its weights by `load`.

    `description` is None if there is no usable part. `refusal` says why a part that was found cannot be used. It is None if there
    is no such problem. `what` is what messages call the part. `find` returns its folder or None, `describe` reads the description
    in a folder, and `read` loads the part.
    """

    def __init__(
        self,
        what: str,
        device: torch.device,
        find: Callable[[], Path | None],
        describe: Callable[[Path], DescriptionT],
        read: Callable[[Path], PartT],
    ) -> None:
        self.refusal: SpecgenError | None = None
        self.description: DescriptionT | None = None
        self._what, self._device, self._read = what, device, read
        self._folder: Path | None = None
        try:
            self._folder = find()
            if self._folder is not None:
                self.description = describe(self._folder)
        except SpecgenError as error:
            self.refusal = error

    def load(self) -> PartT | None:
        """Returns the part, or None if there is none or it cannot be used; then `refusal` says why."""
        if self.description is None or self._folder is None:
            return None
        try:
            return self._read(self._folder)
        except SpecgenError as error:
            self.refusal = error
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.refusal = RunError(f"{self._what} {self._folder} does not fit into the memory of {self._device}")
        self.description = None
        return None
