"""Renders a model's chat template in jinja2's sandbox, because a template is a program from an
untrusted source.

The environment is the one that transformers gives to templates (version 5.23,
`utils/chat_template_utils.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def render(
    template: str, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, Any]
) -> str:
    """Returns the text of the messages in the template, up to where the model's next answer starts.

    A message has `role` and `content`. `special_tokens` are variables of the template, such as
    bos_token. A template may raise any exception, which is passed on.
    """
    given = {"messages": [dict(message) for message in messages], "tools": None, "documents": None}
    return _compiled(template).render(**given, add_generation_prompt=True, **special_tokens)


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
    }
    return environment.from_string(template)


class _Generation(Extension):
    """The tag `{% generation %}` ... `{% endgeneration %}`, which marks answers for training. Here
    it gives its content."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> str:
        content: str = caller()
        return content


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Converts to JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
