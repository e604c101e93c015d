"""Renders HTML pages that contain no script and load no other file.

Their colours follow the system's light or dark mode.

The pages are jinja2 templates in `templates/`. Every value that a template prints has its control characters replaced by
`_visible` and is then escaped, so text from a model or a file cannot become HTML.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from specgen.base.sanitize import inline, streamed

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def render(template: str, **values: Any) -> Iterator[str]:
    """Yields the HTML of a template, filled with `values`, in pieces. Strings in `values` are escaped."""
    stream = _environment().get_template(template).stream(values)
    stream.enable_buffering(500)
    return stream


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("specgen.view.html"),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": "{:.2%}".format, "px": "{:.1f}".format, "marked": _marked}
    return environment


def _visible(value: object) -> object:
    """Returns a value that a template prints as one line of text without control characters (↵ for a line feed).

    HTML that a macro has made is returned unchanged.
    """
    return value if hasattr(value, "__html__") else inline(str(value))


@lru_cache(1 << 16)  # a long text has few different tokens
def _marked(token: str, kind: str = "") -> Markup:
    """The template filter `marked`: puts a token's text into an `<i>` element with the CSS class `kind`.

    White space around the text stays outside the element. Line feeds and tabs are kept.
    """
    from markupsafe import Markup

    text = streamed(token)
    core = text.strip(" \n\t")
    before, _, after = text.partition(core) if core else (text, "", "")
    html = Markup('{}<i class="{}">{}</i>{}') if kind else Markup("{}<i{}>{}</i>{}")
    return html.format(before, kind, core, after)
