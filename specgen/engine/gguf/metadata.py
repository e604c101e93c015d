"""Reads single values of a GGUF file's metadata, and checks their types: the file is untrusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from specgen.base.errors import SpecgenError
from specgen.base.text import one_line

_HINT = "Download the file again, or take another one of this model"
_NAMES: Mapping[type, str] = {int: "a whole number", str: "a text", bool: "true or false"}
T = TypeVar("T", int, str, bool)


class Metadata:
    """The metadata of a GGUF file. `name` is what messages call the model.

    The methods take a key, in which `{arch}` stands for the name of the model's architecture, and a value for a key that is
    absent; without one, the key has to be there. They raise SpecgenError for a value of another type.
    """

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self._values = values
        self._name = name
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
        """Returns a number. Files have numbers in float32; the shortest decimal fraction that they stand for is returned, which
        is what the model's config.json said."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, "a number")
        return value if isinstance(value, int) else float(str(np.float32(value)))

    def list_of(self, key: str, kind: type[T]) -> list[T]:
        """Returns a list of values of one type."""
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
        shown = one_line(repr(self._values.get(self._key(key))))[:40]
        return self.refuse(f"has a {self._key(key)} of {shown}, which has to be {expected}")

    def _key(self, key: str) -> str:
        return key.replace("{arch}", self.architecture) if "{arch}" in key else key
