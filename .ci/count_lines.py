"""Counts lines of code (no docstrings, comments, blank lines) and Python tokens a line; fails above the limits in pyproject.toml.

`[tool.specgen.size]` has a table a folder: `lines`, and where they are limited `files` and `tokens_per_line`. A folder that has a
table of its own does not count for the folder around it.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def count(source: str) -> tuple[int, int]:
    """Returns the lines of code and the tokens in them."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in LAYOUT]
    tokens = [token for token in tokens if token.start[0] not in docstrings]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)}), len(tokens)


def main() -> int:
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["specgen"]["size"]
    failed = False
    for folder, limit in limits.items():
        inner = [ROOT / other for other in limits if other.startswith(f"{folder}/")]
        files = [path for path in (ROOT / folder).rglob("*.py") if not any(path.is_relative_to(other) for other in inner)]
        lines, tokens = map(sum, zip(*(count(path.read_text(encoding="utf-8")) for path in files), strict=True))
        found = {"lines": lines, "files": len(files), "tokens_per_line": round(tokens / lines, 2)}
        over = [name for name, most in limit.items() if found[name] > most]
        failed |= bool(over)
        print(f"{folder}: " + ", ".join(f"{found[name]:,} {name} (at most {most:,})" for name, most in limit.items()))
    return failed


if __name__ == "__main__":
    sys.exit(main())
