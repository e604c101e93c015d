"""Self-contained HTML pages: no script, nothing fetched, light or dark as the reader's system is set.

The pages are jinja2 templates in `templates/`. A template escapes every value that it prints, after `_visible` has replaced the
control characters: no text from a model or a file becomes markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.errors import RunError
from specgen.files import whole_file
from specgen.ui.sanitize import inline, streamed

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def render(template: str, **values: Any) -> Iterator[str]:
    """Yield the page of a template in pieces. All strings in `values` are text, never HTML."""
    stream = _environment().get_template(template).stream(values)
    stream.enable_buffering(500)
    return stream


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("specgen.ui.html"),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": "{:.2%}".format, "px": "{:.1f}".format, "marked": _marked}
    return environment


def _visible(value: object) -> object:
    """A printed value as text on one line without control characters (↵ for a line feed). HTML of a macro stays as it is."""
    return value if hasattr(value, "__html__") else inline(str(value))


@lru_cache(1 << 16)  # a long text has few different tokens
def _marked(token: str, kind: str = "") -> Markup:
    """The filter for a token: an `<i>` of the class `kind` without the white space around it. Line feeds and tabs stay."""
    from markupsafe import Markup

    text = streamed(token)
    core = text.strip(" \n\t")
    before, _, after = text.partition(core) if core else (text, "", "")
    html = Markup('{}<i class="{}">{}</i>{}') if kind else Markup("{}<i{}>{}</i>{}")
    return html.format(before, kind, core, after)


def write_page(path: Path, pieces: Iterable[str]) -> None:
    """Write a page to a temporary file and move it to `path`, so that `path` is never half written. Raises RunError."""
    try:
        with whole_file(path) as file:
            file.writelines(piece.encode("utf-8", "replace") for piece in pieces)
    except OSError as error:
        raise RunError(f"cannot write the page {path}: {error.strerror}") from error
