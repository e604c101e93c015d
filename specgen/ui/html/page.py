"""A self-contained page: no script, nothing fetched, light and dark by the reader's system.

What `inspect` and `compare` put in it comes as pieces of HTML; all text in them goes through `text` here, so that none of it is
ever markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from importlib.resources import files
from pathlib import Path

from specgen.errors import RunError
from specgen.files import whole_file
from specgen.ui.sanitize import inline, streamed

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def text(content: str) -> str:
    """Text on one line, made visible (↵ for a line feed) and escaped."""
    return escape(inline(content))


def running_text(content: str) -> str:
    """Text with its line feeds and tabs as they are, everything else made visible, escaped."""
    return escape(streamed(content))


def code(content: str) -> str:
    return f"<code>{text(content)}</code>"


def document(title: str, headline: str, sub: str, body: Iterable[str], foot: str, *, wide: bool = False) -> Iterator[str]:
    """A page in pieces. `title`, `headline` and `sub` are text; `body` and `foot` are HTML. `wide` gives columns more room."""
    yield f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{text(title)}</title>
<style>{stylesheet()}</style></head>
<body><main{' class="wide"' if wide else ""}>
<h1>{text(headline)}</h1>
<p class="sub">{text(sub)}</p>
"""
    yield from body
    yield f"<footer><p>{foot}</p></footer>\n</main></body></html>\n"


def stylesheet() -> str:
    return files("specgen.ui.html").joinpath("page.css").read_text(encoding="utf-8")


def facts(entries: Iterable[tuple[str, str]]) -> str:
    """Figures with what they are: pairs of text."""
    items = "".join(f"<li><b>{text(figure)}</b><span>{text(meaning)}</span></li>" for figure, meaning in entries)
    return f'<ul class="facts">{items}</ul>\n'


def write_page(path: Path, pieces: Iterable[str]) -> None:
    """Write the page whole or not at all: beside its place first, then moved there. Raises RunError, for a full disk too."""
    try:
        with whole_file(path) as file:
            file.writelines(piece.encode("utf-8", "replace") for piece in pieces)
    except OSError as error:
        raise RunError(f"cannot write the page {path}: {error.strerror}") from error
