"""Makes text from models and files safe to show: control characters, which could change the terminal, become visible symbols."""

from __future__ import annotations

import re

from specgen.json_lines import BIDIRECTIONAL

_PICTURES = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\N{SYMBOL FOR DELETE}"}
_C1 = dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}")
_SEPARATORS = {0x2028: "\n", 0x2029: "\n"}
_UNSAFE = _PICTURES | _C1 | dict.fromkeys(BIDIRECTIONAL, "") | _SEPARATORS
_INLINE = _UNSAFE | {0x09: "⇥", **dict.fromkeys((0x0A, *_SEPARATORS), "↵")}
_STREAMED = {code: mark for code, mark in _UNSAFE.items() if code not in (0x09, 0x0A)}


def streamed(text: str) -> str:
    """Returns the text with control characters replaced by visible symbols (␛ for escape). Line feeds and tabs are kept."""
    return text.translate(_STREAMED)


def inline(text: str) -> str:
    """Returns the text on one line, with visible symbols for control characters: ↵ for a line feed, ⇥ for a tab.

    Two or more spaces in a row become as many dots (·). Text that is a single space becomes ␣.
    """
    visible = text if text.isprintable() else text.translate(_INLINE)  # printable text has nothing to replace
    return "␣" if visible == " " else re.sub(r" {2,}", lambda spaces: "·" * len(spaces[0]), visible)
