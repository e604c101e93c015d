"""Makes lines of JSON for trace files and for standard output, in the same way for both. Imports no torch."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

# Characters that reorder text, so that it can look like other text.
BIDIRECTIONAL = (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
# JSON allows these characters unescaped, but they affect a terminal: control characters, line separators and those above.
_ESCAPED = re.compile(f"[{''.join(map(chr, (*range(0x7F, 0xA0), 0x2028, 0x2029, *BIDIRECTIONAL)))}]")


def json_line(content: Mapping[str, Any]) -> bytes:
    """Returns `content` as one line of JSON in UTF-8, with the line feed at its end.

    Text stays readable. Only characters that could disturb a terminal are escaped: control characters, line separators,
    characters that reorder text, and lone surrogates (halves of a character). Raises ValueError for NaN and infinity, which JSON
    does not have.
    """
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    text = _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)  # ten times faster than str.translate beyond ASCII
    return (text + "\n").encode("utf-8", "backslashreplace")


def print_json(content: Mapping[str, Any]) -> None:
    """Writes `content` as one line of JSON to standard output, in UTF-8 whatever the locale is."""
    sys.stdout.buffer.write(json_line(content))
    sys.stdout.buffer.flush()
