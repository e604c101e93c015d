"""Reads single values of a GGUF file's metadata, and checks their types: the file is untrusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from specgen.base.errors import SpecgenError
from specgen.base.text import one_line

_HINT = "Download the file again, or take another one of this model"
_NAMES: Mapping[type, str] = {int: "a whole number", str: "a text", bool: "true or false"}
T = TypeVar("T", int, str, bool)


class Metadata:
    """The metadata of a GGUF file. `name` is what messages call the model.

    In the keys that the methods take, `{arch}` stands for the name of the model's architecture. A
    `default` is the value of an absent key. The methods raise SpecgenError for a value of another
    type, and for an absent key without a default; so does the constructor if the file names no
    architecture. Every key that was asked for counts as read.
    """

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self._values = values
        self._name = name
        self._read: set[str] = set()
        self.architecture = self.text("general.architecture")

    def __contains__(self, key: str) -> bool:
        return self._key(key) in self._values

    def integer(self, key: str, default: int | None = None) -> int:
        return self._typed(key, int, default)

    def text(self, key: str, default: str | None = None) -> str:
        return self._typed(key, str, default)

    def flag(self, key: str, default: bool | None = None) -> bool:
        return self._typed(key, bool, default)

    def number(self, key: str, default: float | None = None) -> float:
        """Returns an int as it is, and a float, which files have in float32, as the shortest
        decimal fraction that it stands for: what the model's config.json said."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, "a number")
        return value if isinstance(value, int) else float(str(np.float32(value)))

    def list_of(self, key: str, kind: type[T]) -> list[T]:
        """Returns a list of values of the type `kind`."""
        values = self._value(key, None)
        if not isinstance(values, list) or any(type(value) is not kind for value in values):
            raise self._wrong(key, f"a list, each of its values {_NAMES[kind]}")
        return values

    def list_of_numbers(self, key: str) -> list[float]:
        values = self._value(key, None)
        if not isinstance(values, list) or any(type(value) not in (int, float) for value in values):
            raise self._wrong(key, "a list of numbers")
        return values

    def is_list(self, key: str) -> bool:
        """Whether the key is there and its value is a list."""
        return isinstance(self._values.get(self._key(key)), list)

    def per_layer(self, key: str, default: int | None = None) -> int:
        """Returns a whole number that holds for all layers. The file may have a list of one for
        each layer; those above 0 are then the same, or SpecgenError is raised."""
        if not self.is_list(key):
            return self.integer(key, default)
        sizes = {number for number in self.list_of(key, int) if number > 0}
        if len(sizes) != 1:
            field = key.rpartition(".")[2]
            raise self.refuse(f"has layers of several sizes ({field}), which is not supported")
        return sizes.pop()

    def refuse_unread(self, is_harmless: Callable[[str, Any], bool]) -> None:
        """Raises SpecgenError for the first value of the architecture that was not read.

        Values are accepted if they are empty, or if `is_harmless`, which gets a key without the
        architecture and its value, says that they do not change the output.
        """
        prefix = f"{self.architecture}."
        for key, value in self._values.items():
            if not key.startswith(prefix) or key in self._read or value in ("", []):
                continue
            if not is_harmless(key.removeprefix(prefix), value):
                problem = f"has a {key} of {_shown(value)} in its metadata, which is not supported"
                raise self.refuse(
                    problem, "Take a safetensors model, or another GGUF file of this one"
                )

    def refuse(self, problem: str, hint: str = _HINT) -> SpecgenError:
        """Returns the error to raise for this file; `problem` follows the model's name."""
        return SpecgenError(f"{self._name} {problem}", hint)

    def _typed(self, key: str, kind: type[T], default: T | None) -> T:
        value = self._value(key, default)
        if type(value) is not kind:
            raise self._wrong(key, _NAMES[kind])
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self._values.get(self._key(key), default)
        if value is None:
            raise self.refuse(f"has no {self._key(key)} in its metadata")
        return value

    def _wrong(self, key: str, expected: str) -> SpecgenError:
        shown = _shown(self._values.get(self._key(key)))
        return self.refuse(f"has a {self._key(key)} of {shown}, which has to be {expected}")

    def _key(self, key: str) -> str:
        full = key.replace("{arch}", self.architecture) if "{arch}" in key else key
        self._read.add(full)
        return full


def _shown(value: Any) -> str:
    return one_line(repr(value))[:40]
