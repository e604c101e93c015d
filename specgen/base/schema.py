"""Reads the files that users and other programs write (profiles, traces, descriptions of trained
parts, prompts, generation configs) and checks them against a schema: a pydantic model, a dataclass
or any annotated type.

Every mistake raises a SpecgenError of one line that names the file, the key and the value. pydantic
and PyYAML are imported inside the functions, because `--help` imports this module.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from specgen.base.errors import SpecgenError

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

LARGEST = 4 << 20  # bytes of a file that `read` takes
_DEEPEST = 20  # levels of nesting of YAML; specgen's own files need six
# text that may be part of a number too large for a float64
_LONG_NUMBER = re.compile(r"\d{300}|[eE]\+?\d{3}")
# for pydantic's words
_PLAIN = {"missing": "it is missing", "unexpected_keyword_argument": "there is no such key"}
T = TypeVar("T")


def read(path: Path, kind: type[T], what: str, hint: str = "", largest: int = LARGEST) -> T:
    """Reads a file and returns its content as a `kind`: JSON if the file's suffix is .json,
    otherwise YAML.

    `what` is what messages call the file, such as "profile"; `hint` says what to do about a file
    that is missing or damaged. Raises SpecgenError if the file cannot be read, is larger than
    `largest` bytes, is not UTF-8, JSON or YAML, or does not fit `kind`. Types are strict: neither
    "5" nor 5.0 is an integer, and NaN and infinity are no numbers.
    """
    where = f"the {what} {path}"
    text = read_text(path, what, hint, largest)
    value = (
        parse_json(text, where, hint) if path.suffix == ".json" else parse_yaml(text, where, hint)
    )
    try:
        text = json.dumps(value, default=str, allow_nan=False)
    # a key that is a date, NaN, an integer of thousands of digits
    except (TypeError, ValueError) as error:
        raise SpecgenError(f"{where} holds what is not allowed: {error}", hint) from error
    return check(text, kind, where, hint)


def read_text(path: Path, what: str, hint: str = "", largest: int = LARGEST) -> str:
    """Returns the text of a UTF-8 file or pipe. `what` and `hint` are for messages, as in `read`.

    Raises SpecgenError if the file cannot be read, is larger than `largest` bytes, or as `decoded`.
    """
    try:
        with path.open("rb") as file:
            data = file.read(largest + 1)
    except (OSError, ValueError) as error:  # a ValueError for a name that contains NUL
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SpecgenError(f"cannot read the {what} {path}: {reason}", hint) from error
    if len(data) > largest:
        raise SpecgenError(f"the {what} {path} is larger than {largest >> 20} MB", hint)
    return decoded(data, f"the {what} {path}")


def decoded(data: bytes, where: str) -> str:
    """Returns the text of UTF-8 bytes, without a byte order mark. `where` names them in messages.

    Raises SpecgenError if they are a PDF or not UTF-8.
    """
    check_begin(data, where)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"{where} is not UTF-8 (at byte {error.start:,})"
        raise SpecgenError(problem, "Convert it first, for instance with iconv") from error


def check_begin(data: bytes, where: str, hint: str = "") -> None:
    """Raises SpecgenError if a file that begins with `data` is a PDF or UTF-16. `hint` replaces the
    usual way out."""
    if data.startswith(b"%PDF-"):
        raise SpecgenError(
            f"{where} is a PDF",
            hint or "Take the text out of it first: pdftotext FILE.pdf FILE.txt",
        )
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        way_out = (
            "Convert it with iconv -f UTF-16 -t UTF-8, or in PowerShell write it "
            "with Out-File -Encoding utf8"
        )
        raise SpecgenError(f"{where} is UTF-16, not UTF-8", hint or way_out)


def check(text: str | bytes, kind: type[T], where: str, hint: str = "") -> T:
    """Converts JSON text to a `kind` (a pydantic model, a dataclass or any annotated type), with
    strict types.

    Raises SpecgenError with the first problem. `where` names the text in the message, for instance
    `FILE, line 3`; `hint` says what to do.
    """
    from pydantic import ValidationError

    try:
        return cast(T, _adapter(cast(Hashable, kind)).validate_json(text, strict=True))
    except ValidationError as error:
        raise SpecgenError(f"{where}{_first_problem(error)}", hint) from error


def parse_json(text: str, where: str, hint: str = "", *, finite: bool = True) -> Any:
    """Returns the value of JSON text. `where` names the text in messages.

    Raises SpecgenError if the text is not JSON, is deeply nested or escapes half of a surrogate
    pair. Unless `finite` is False, also for NaN, infinity and numbers that a float64 cannot hold.
    """
    from pydantic_core import from_json

    try:
        value = from_json(text, allow_inf_nan=not finite)
        # only then, because calling a hook for each number is slow
        if finite and _LONG_NUMBER.search(text):
            json.loads(text, parse_int=_check_number, parse_float=_check_number)
    except ValueError as error:
        raise SpecgenError(f"{where} is not JSON ({error})", hint) from error
    return value


def _check_number(digits: str) -> None:
    if math.isinf(float(digits)):
        raise ValueError(f"{digits[:20]} is too large")


def parse_yaml(text: str, where: str, hint: str = "") -> Any:
    """Returns the value of a YAML document, read by a safe loader. `where` names the document in
    messages.

    Raises SpecgenError, with the line if it is known, for what is not YAML and for a value that
    does not fit its tag. Aliases and deep nesting are refused too, because they can take any amount
    of memory.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C version is ten times as fast
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                event, yaml.CollectionEndEvent
            )
            position: Any = event.start_mark
            if isinstance(event, yaml.AliasEvent):
                raise yaml.MarkedYAMLError(
                    problem="aliases (*name) are not allowed: write the value out",
                    problem_mark=position,
                )
            if depth > _DEEPEST:
                raise yaml.MarkedYAMLError(
                    problem=f"more than {_DEEPEST} levels of nesting", problem_mark=position
                )
        return yaml.load(text, Loader=loader)  # noqa: S506  a safe loader, chosen above
    except (yaml.YAMLError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        # none for `2020-99-99`, `!!bool maybe` or `!!int ''`
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "a value does not fit its type"
        raise SpecgenError(f"{where}{line} is not YAML: {problem}", hint) from error


@lru_cache(maxsize=32)
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(cast(Any, kind))


def _first_problem(error: ValidationError) -> str:
    """The first problem in a pydantic validation error as the end of a line: the key, the problem
    and the invalid value."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return f" is not JSON ({first['msg'].removeprefix('Invalid JSON: ')})"
    what = first["msg"].removeprefix("Value error, ").replace("Input should be", "it has to be")
    what = _PLAIN.get(first["type"], what)
    if first["type"] not in ("value_error", *_PLAIN):
        what += f" (it is {shown(first['input'])})"
    return "".join(f": {text}" for text in (".".join(map(str, first["loc"])), what) if text)


def shown(value: object) -> str:
    """A short text for any value, to be quoted in an error message."""
    if isinstance(value, dict | list):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value):,}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else text[:39] + "…"
