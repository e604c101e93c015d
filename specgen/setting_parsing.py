"""Settings of methods and length policies: their kinds and bounds, and how users' values are parsed. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specgen.errors import SpecgenError

Value = bool | int | float | str
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True, slots=True)
class Setting:
    """One parameter. The type of `default` is its type; `low` and `high` are its bounds, both included.

    `word` is accepted instead of an integer. `tuned` are the values that `specgen tune` tries, empty if it leaves the default.
    """

    default: Value
    help: str
    low: float = -math.inf
    high: float = math.inf
    word: str | None = None
    choices: tuple[str, ...] = ()
    tuned: Sequence[Value] = ()

    def parse(self, name: str, value: object) -> Value:
        """`value`, a string or a Python value, converted to the type of the default. Raises SpecgenError where it is invalid."""
        if isinstance(self.default, bool):
            if (found := _BOOLEANS.get(str(value).strip().lower())) is None:
                raise SpecgenError(f"{name} is {value!r}", "It has to be true or false")
            return found
        if self.word is not None and value == self.word:
            return self.word
        if self.word is None and isinstance(self.default, str):
            if self.choices and str(value) not in self.choices:
                raise SpecgenError(f"{name} is {value!r}", f"It has to be one of {', '.join(self.choices)}")
            return str(value)
        kind = int if self.word is not None or isinstance(self.default, int) else float
        try:
            if isinstance(value, bool):
                raise ValueError
            number: int | float = kind(str(value).strip())
        except ValueError:
            wanted = f"a whole number{f' or {self.word}' if self.word else ''}" if kind is int else "a number"
            raise SpecgenError(f"{name} is {value!r}", f"It has to be {wanted}") from None
        if not self.low <= number <= self.high:  # false for NaN too
            raise SpecgenError(f"{name} is {value}", f"It has to lie between {self.low:g} and {self.high:g}")
        return number


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked settings of a method: the name of its length policy, None without one, and every value by name."""

    policy: str | None
    values: Mapping[str, Value]

    @property
    def drafts_tree(self) -> bool:
        """Whether these values ask for a draft tree. A tree of width 1 is a tree too, if its depth is given."""
        return int(self.values.get("width", 1)) > 1 or isinstance(self.values.get("depth"), int)

    def with_value(self, name: str, value: Value) -> Settings:
        return Settings(self.policy, {**self.values, name: value})

    def as_dict(self, *, with_policy: bool) -> dict[str, Value]:
        """All values for a trace, the policy's name first if asked for and present."""
        return {**({"policy": self.policy} if with_policy and self.policy else {}), **self.values}


def parse_pairs(pairs: list[str]) -> dict[str, str]:
    """`["k=8", "policy=svip"]` as a dictionary. Raises SpecgenError for a string without `=`."""
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
