"""What can be set of a method: kinds, bounds, and values read from what users write. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from specgen.errors import SpecgenError

Value = bool | int | float | str
_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True, slots=True)
class Setting:
    """A method's parameter: its default says its kind, the bounds what is sensible (both included).

    `word` may stand in place of a whole number.
    """

    default: Value
    help: str
    low: float = -math.inf
    high: float = math.inf
    word: str | None = None
    choices: tuple[str, ...] = ()

    def parse(self, name: str, value: object) -> Value:
        """The value as a number or text of the default's kind, from a string or a Python value."""
        if isinstance(self.default, bool):
            return _truth(name, value)
        if self.word is not None and value == self.word:
            return self.word
        if self.word is None and isinstance(self.default, str):
            if self.choices and str(value) not in self.choices:
                raise SpecgenError(f"{name} is {value!r}", f"It has to be one of {', '.join(self.choices)}")
            return str(value)
        kind = int if self.word is not None or isinstance(self.default, int) else float
        number: int | float
        try:
            if isinstance(value, bool):
                raise ValueError
            number = kind(str(value).strip())
        except ValueError:
            wanted = f"a whole number{f' or {self.word}' if self.word else ''}" if kind is int else "a number"
            raise SpecgenError(f"{name} is {value!r}", f"It has to be {wanted}") from None
        if not self.low <= number <= self.high:  # false for NaN too
            raise SpecgenError(f"{name} is {value}", f"It has to lie between {self.low:g} and {self.high:g}")
        return number


def _truth(name: str, value: object) -> bool:
    found = _TRUTH.get(str(value).strip().lower())
    if found is None:
        raise SpecgenError(f"{name} is {value!r}", "It has to be true or false")
    return found


def parse_pairs(pairs: list[str]) -> dict[str, str]:
    """`["k=8", "policy=svip"]` as a dictionary. Raises SpecgenError for what has no `=`."""
    settings: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise SpecgenError(f"cannot read the setting {pair!r}", "Write NAME=VALUE, for instance --set k=8")
        settings[name.strip()] = value.strip()
    return settings


def written(name: str, settings: Mapping[str, Value]) -> str:
    """A method with its settings as `compare --methods` reads it: `svip:threshold=0.4:max_draft=12`."""
    return ":".join([name, *(f"{key}={_text(value)}" for key, value in settings.items())])


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
