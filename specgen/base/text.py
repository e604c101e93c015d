"""Makes text from models, traces and files safe to show: characters that could change the terminal,
reorder other text or hide in it become visible symbols, or are left out. Also lines of JSON, the
same for trace files and standard output."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

# Characters that reorder text, so that it looks like other text, and characters without width,
# which hide in it.
_JOINERS = (0x200C, 0x200D)  # emoji and several scripts, such as Persian, are written with these
_INVISIBLE = (
    *(
        0xAD,
        0x61C,
        0x180E,
        0x200B,
        0x200E,
        0x200F,
        *range(0x202A, 0x202F),
        *range(0x2060, 0x2070),
        0xFEFF,
    ),
    *(*range(0xFFF9, 0xFFFC), *range(0x1D173, 0x1D17B), *range(0xE0000, 0xE0080)),
)
# halves of a character: bytes in a name or an argument that are not UTF-8
_SURROGATES = range(0xD800, 0xE000)
# DELETE, and control characters that many terminals obey like those below the space
_C1 = range(0x7F, 0xA0)
_SEPARATORS = (0x2028, 0x2029)
_REPLACED = "\N{REPLACEMENT CHARACTER}"
# JSON allows these characters unescaped, but they affect a terminal or hide in text. Half of a
# character is no character at all.
_ESCAPED = re.compile(f"[{''.join(map(chr, (*_C1, *_SEPARATORS, *_INVISIBLE, *_SURROGATES)))}]")

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)

_CONTROLS = {
    **{code: chr(0x2400 + code) for code in range(0x20)},
    **dict.fromkeys((*_C1, *_SURROGATES), _REPLACED),
    0x7F: "\N{SYMBOL FOR DELETE}",
}
_STREAMED: dict[int, str] = {
    **{code: mark for code, mark in _CONTROLS.items() if code not in (0x09, 0x0A)},
    **dict.fromkeys(_INVISIBLE, ""),
    **dict.fromkeys(_SEPARATORS, "\n"),
}
_ONE_LINE: dict[int, str] = {
    **_CONTROLS,
    **dict.fromkeys((*_INVISIBLE, *_JOINERS), _REPLACED),
    **dict.fromkeys((0x0A, *_SEPARATORS), "↵"),
    0x09: "⇥",
}


def streamed(text: str) -> str:
    """Returns the text with control characters replaced by visible symbols (␛ for escape). Line
    feeds and tabs are kept.

    Characters that reorder text or hide in it are left out, and line separators become line feeds.
    """
    # printable text has nothing to replace
    return text if text.isprintable() else text.translate(_STREAMED)


def one_line(text: str) -> str:
    """Returns the text on one line, as long as before, with visible symbols for control characters:
    ↵ for a line feed."""
    return text if text.isprintable() else text.translate(_ONE_LINE)


def shown(text: object, longest: int = 80) -> str:
    """Returns the text for a message: on one line, without control characters, and cut to `longest`
    characters."""
    line = one_line(str(text))
    return line if len(line) <= longest else line[: longest - 1] + "…"


def inline(text: str) -> str:
    """Returns a token's text on one line (see `one_line`) with visible spaces.

    Two or more spaces in a row become as many dots (·). Text that is a single space becomes ␣.
    """
    visible = one_line(text)
    return "␣" if visible == " " else re.sub(r" {2,}", lambda spaces: "·" * len(spaces[0]), visible)


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, such as `1 round` or `2,000 rounds`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def print_result(text: str) -> None:
    """Prints text on standard output: unchanged for a program that reads it, without control
    characters on a terminal."""
    print(streamed(text) if sys.stdout.isatty() else text)


def json_line(content: Mapping[str, Any]) -> bytes:
    """Returns `content` as one line of JSON in UTF-8, with the line feed at its end.

    Text stays readable. Only characters that could disturb a terminal are escaped: control
    characters, line separators, and characters that reorder text or have no width. A lone surrogate
    (half of a character), which many parsers refuse, becomes the replacement character. Raises
    ValueError for NaN and infinity, which JSON does not have.
    """
    text = _ENCODER.encode(content)
    if not text.isprintable():  # printable text has nothing to escape, and this is far faster
        text = _ESCAPED.sub(_escape, text)  # ten times faster than str.translate beyond ASCII
    return (text + "\n").encode("utf-8")


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    return _REPLACED if ord(character) in _SURROGATES else json.dumps(character)[1:-1]


def argument_text(text: str) -> str:
    """Returns the text of an argument of the command line, which is UTF-8 also where the locale's
    encoding is ASCII.

    There, Python represents other bytes as surrogates. They stay where the bytes are no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        with suppress(UnicodeError):
            return os.fsencode(text).decode("utf-8")
    return text


def print_json(content: Mapping[str, Any]) -> None:
    """Writes `content` as one line of JSON to standard output, in UTF-8 whatever the locale is."""
    sys.stdout.buffer.write(json_line(content))
    sys.stdout.buffer.flush()


def significant(number: float, digits: int = 3) -> str:
    """Returns the number with so many significant digits, as a person writes it: `1,180`, `0.0042`,
    never with an exponent."""
    if not number or not math.isfinite(number):
        return f"{number:g}"
    decimals = digits - 1 - math.floor(math.log10(abs(number)))
    text = f"{round(number, decimals):,.{max(0, decimals)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
