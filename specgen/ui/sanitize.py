"""Model text made safe and legible: no control character reaches a terminal, white space shows where it matters."""

from __future__ import annotations

import re

_PICTURES = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\N{SYMBOL FOR DELETE}"}
_C1 = dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}")
# marks that reorder what a terminal shows, so that text could be made to look like other text
_REORDERING = dict.fromkeys([0x200E, 0x200F, 0x061C, *range(0x202A, 0x202F), *range(0x2066, 0x206A)], "")
_SEPARATORS = {0x2028: "\n", 0x2029: "\n"}
_INLINE = _PICTURES | _C1 | _REORDERING | {0x0A: "↵", 0x09: "⇥", 0x2028: "↵", 0x2029: "↵"}
_STREAMED = {code: mark for code, mark in (_PICTURES | _C1 | _REORDERING | _SEPARATORS).items() if code not in (0x09, 0x0A)}


def streamed(text: str) -> str:
    """The text with control characters as pictures (␛ for escape), line feeds and tabs kept."""
    return text.translate(_STREAMED)


def inline(text: str) -> str:
    """The text on one line: ↵ and ⇥ for line feed and tab, a dot for each space of an indentation."""
    dotted = re.sub(r" {2,}", lambda spaces: "·" * len(spaces[0]), text.translate(_INLINE))
    return "␣" if dotted == " " else dotted


def draft_length(mean: float | None, *, branches: bool) -> str:
    """Tokens of a draft, in trees and several drafts at once its nodes: no path is as long as that."""
    return "" if mean is None else f"{mean:.0f} nodes" if branches else f"{mean:.1f}"
