"""Renders a model's chat template: a jinja2 program from a stranger, run in jinja2's sandbox. Imports nothing of specgen, and is
also a program of its own (`main`).

The environment is the one that transformers gives to templates (version 5.23, `utils/chat_template_utils.py`).
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_KEPT = 8  # a process that has grown by more than this part of its limit ends, so that the next rendering has all of it


class TooMuchTextError(Exception):
    """The rendered text is longer than allowed."""


def render(
    template: str, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, Any], longest: int = sys.maxsize
) -> str:
    """Returns the text of the messages in the template, up to where the model's next answer starts.

    `special_tokens` are the template's variables for them, such as bos_token. Raises any exception, as the template does, and
    TooMuchTextError for more than `longest` characters.
    """
    pieces = _compiled(template).generate(
        messages=[dict(message) for message in messages],
        tools=None,
        documents=None,
        add_generation_prompt=True,
        **special_tokens,
    )
    kept, length = [], 0
    for piece in pieces:
        kept.append(piece)
        length += len(piece)
        if length > longest:
            raise TooMuchTextError(f"it makes more than {longest / (1 << 20):g} MiB of text")
    return "".join(kept)


class _Answer(NamedTuple):
    """A member of the JSON object that answers a request, and whether the rendering exceeded a limit."""

    field: bytes
    exceeds: bool

    @classmethod
    def of(cls, name: str, value: str, exceeds: bool = False) -> _Answer:
        return cls(f'"{name}": {json.dumps(value)}'.encode(), exceeds)


def main() -> None:
    """Renders in a process of its own, which can be killed.

    Its arguments are the limits of one rendering: seconds, bytes of memory, characters of text. Reads lines from standard input
    until its end, each with the arguments of `render` as a list in JSON. Writes a line for each on standard output: an object
    with `text` or `error`, and with `is_last`, which says that this process ends.
    """
    seconds, memory, longest = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    size = _address_space()
    _limit_address_space(size + memory)
    is_last = False
    while not is_last:
        answer = _next_answer(seconds, memory, longest)
        if answer is None:
            return
        is_last = answer.exceeds or _address_space() > size + memory // _KEPT
        sys.stdout.buffer.write(b'{"is_last": %s, %s}\n' % (json.dumps(is_last).encode(), answer.field))
        sys.stdout.buffer.flush()
        _set_timer(0)


def _next_answer(seconds: float, memory: int, longest: int) -> _Answer | None:
    """Reads a line and renders. Returns None at the end of the input."""
    try:
        request = sys.stdin.buffer.readline()
        if not request:
            return None
        _set_timer(2 * seconds)  # the parent process counts the seconds, but it may have ended
        template, messages, special_tokens = json.loads(request)
        return _Answer.of("text", render(template, messages, special_tokens, longest))
    except MemoryError:
        return _Answer.of("error", f"it needs more than {memory >> 20} MiB of memory", exceeds=True)
    except TooMuchTextError as error:
        return _Answer.of("error", str(error), exceeds=True)
    except Exception as error:  # noqa: BLE001  a template may raise anything
        return _Answer.of("error", str(error)[:longest] or type(error).__name__)


def _set_timer(seconds: float) -> None:
    """Ends this process after so many seconds, even in the middle of one long computation. 0: does not end it."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    except AttributeError:  # Windows has no timer
        pass


def _address_space() -> int:
    """The size of this process's address space in bytes; 0 where it is not known."""
    try:
        import resource

        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        return 0


def _limit_address_space(size: int) -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))
    except (ImportError, ValueError, OSError):  # Windows has no such limit, and there may be a lower one
        pass


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(template)


class _Generation(Extension):
    """The tag `{% generation %}` ... `{% endgeneration %}`, which marks answers for training. Here it gives its content."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> str:
        content: str = caller()
        return content


class _Dict:
    """`dict` for templates: makes dictionaries, without the attributes of Python's class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """`namespace` for templates, which refuses names that start with an underscore: they lead to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may pass a value called self
        self, *others = args
        values = dict(*others, **kwargs)
        for name in values:
            _refuse_underscore(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        Namespace.__setitem__(self, name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace of a chat template has no names that start with an underscore: {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Converts to JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


if __name__ == "__main__":
    main()
