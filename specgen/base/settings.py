"""The settings (parameters) of decoding methods and of length policies: types, bounds and parsing.
Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specgen.base.errors import SpecgenError

Value = bool | int | float | str
_BOOLEANS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """The definition of one parameter. Its values have the type of `default`, from `low` to `high`
    (both allowed).

    If `words` are given, such as `auto`, values are integers (numbers, if `fractional`) or one of
    these words. `choices` are the allowed strings; empty allows any. `tuned` are the values that
    `specgen tune` tries; if empty, it keeps the default.
    """

    default: Value
    help: str
    low: float = -math.inf
    high: float = math.inf
    words: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    tuned: Sequence[Value] = ()
    fractional: bool = False

    def parse(self, name: str, value: object) -> Value:
        """Converts `value`, a string or a Python value, to this setting's type (bool, int, float or
        str, the type of `default`).

        If the setting has `words`, returns one of them or a number. `name` is the setting's name in
        error messages. Raises SpecgenError if the value has the wrong type, is out of bounds, is
        empty although the default is not, or is none of the `choices`.
        """
        if isinstance(self.default, bool):
            text = str(value).strip().lower()
            if text not in _BOOLEANS:
                raise SpecgenError(f"{name} is {value!r}", "It has to be true or false")
            return _BOOLEANS[text]
        if isinstance(value, str) and value in self.words:
            return value
        if not self.words and isinstance(self.default, str):
            if not str(value).strip() and self.default:
                raise SpecgenError(f"{name} is empty", f"Give a value, or leave {name} out")
            if self.choices and str(value) not in self.choices:
                raise SpecgenError(
                    f"{name} is {value!r}", f"It has to be one of {', '.join(self.choices)}"
                )
            return str(value)
        is_whole = isinstance(self.default, int) or (self.words and not self.fractional)
        number: int | float
        try:
            if isinstance(value, bool):
                raise ValueError
            number = int(str(value).strip()) if is_whole else float(str(value).strip())
        except ValueError:
            wanted = "a whole number" if is_whole else "a number"
            allowed = " or ".join([wanted, *self.words])
            raise SpecgenError(f"{name} is {value!r}", f"It has to be {allowed}") from None
        if not self.low <= number <= self.high:  # false for NaN too
            raise SpecgenError(
                f"{name} is {value}",
                f"It has to lie between {_bound(self.low)} and {_bound(self.high)}",
            )
        return number


def _bound(number: float) -> str:
    is_whole = isinstance(number, int) or number.is_integer()
    return f"{int(number):,}" if is_whole else f"{number:g}"


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked settings of a method: the name of its length policy and the value of each setting
    by name.

    `policy` is None if the method has no length policy (a rule that ends drafts).
    """

    policy: str | None
    values: Mapping[str, Value]

    @property
    def drafts_tree(self) -> bool:
        """Whether these values ask for a tree of likely continuations: a `width` above 1."""
        return int(self.values.get("width", 1)) > 1

    @property
    def drafts_text(self) -> bool:
        """Whether the draft model drafts text, which the target's tokenizer then encodes:
        `translation=text`."""
        return self.values.get("translation") == "text"

    def with_value(self, name: str, value: Value) -> Settings:
        return Settings(self.policy, {**self.values, name: value})

    def as_dict(self, *, with_policy: bool) -> dict[str, Value]:
        """All values by name, to be written to a trace. `with_policy` puts the policy's name first,
        if there is a policy."""
        return {**({"policy": self.policy} if with_policy and self.policy else {}), **self.values}


def parse_pairs(pairs: list[str]) -> dict[str, str]:
    """Converts `["k=8", "policy=svip"]` to a dictionary. Raises SpecgenError for a string without a
    name or without `=`."""
    settings: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise SpecgenError(
                f"cannot read the setting {pair!r}", "Write NAME=VALUE, for instance --set k=8"
            )
        settings[name.strip()] = value.strip()
    return settings


def written(name: str, settings: Mapping[str, Value]) -> str:
    """Writes the method `name` with its settings as `compare --methods` reads it:
    `svip:threshold=0.4:max_draft=12`."""
    return ":".join([name, *(f"{key}={written_value(value)}" for key, value in settings.items())])


def written_value(value: Value) -> str:
    """Writes a setting's value as users write it: `true`, `0.4`."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
