"""`specgen serve`: a server with OpenAI's protocol, whose answers the pair of models generates."""

from __future__ import annotations

import os
import re
import signal
from contextlib import ExitStack, closing
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from rich.text import Text

from specgen.base.errors import SpecgenError
from specgen.base.interrupts import ReportedInterrupt
from specgen.base.types import Round, SamplingParams
from specgen.cli.opening import Opening, check_grammar, show_what_decodes
from specgen.cli.options import DecodingGroup, ServeOptions, ServeOutput, ServeSampling
from specgen.view import theme

if TYPE_CHECKING:
    import socket
    from collections.abc import Generator, Mapping

    from rich.console import Console

    from specgen.pair.pair import Pair
    from specgen.serve.access import Access

KEY_VARIABLE = "SPECGEN_API_KEY"
_WARM_UP_ROUNDS = 8
_PACKAGES = ("fastapi", "uvicorn")
_TRIAL_PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."


def serve(
    asked: ServeOptions, models: DecodingGroup, sampling: ServeSampling, output: ServeOutput
) -> None:
    """Loads the models, then answers requests until SIGINT or SIGTERM. Raises SpecgenError for
    wrong options and RunError for failures while running."""
    default = sampling.params()
    _check_packages()
    check_grammar(default)
    opening = Opening.of(asked.method, asked.settings, models, default)
    access = _access(asked)
    err = theme.console(stderr=True, no_color=output.no_color)
    from specgen.serve.server import Server, listen_at

    with ExitStack() as opened:
        # before the models are loaded, which takes long
        listening = opened.enter_context(closing(listen_at(asked.host, asked.port)))
        _check_reach(listening, access)

        pair, profile = opening.open(err, quiet=output.quiet)
        opened.enter_context(pair)
        name, settings, tuned = opening.decoding(
            pair, profile, _TRIAL_PROMPT, err, quiet=output.quiet
        )
        _warm_up(pair, name, settings, default)

        from specgen.serve.app import make_app
        from specgen.serve.queue import Worker

        def log(line: str) -> None:
            if not output.quiet:
                err.print(Text(line, "quiet"), soft_wrap=True)

        def say_that_it_is_open() -> None:
            if output.quiet:
                return
            show_what_decodes(pair, name, settings, err)
            if tuned:
                err.print(Text(tuned, "quiet"), soft_wrap=True)
            _say_where(listening, err, has_key=access.key is not None)

        worker = Worker(pair, name, settings, asked.queue, log)
        server = Server(
            make_app(worker, default, access, log), worker, listening, say_that_it_is_open
        )
        server.run()
    if server.signal == signal.SIGINT:
        raise ReportedInterrupt


def _check_packages() -> None:
    """Raises SpecgenError if a package that the server needs is not installed."""
    for package in _PACKAGES:
        if not _is_installed(package):
            raise SpecgenError(
                f"specgen serve needs {package}, which is not installed",
                'Install it with pip install -e ".[serve]"',
            )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # its import is forbidden
        return False


def _access(asked: ServeOptions) -> Access:
    """Returns who may ask. Raises SpecgenError for a key, a host or an origin that is none."""
    from specgen.serve.access import Access

    key = os.environ.get(KEY_VARIABLE) or None
    if asked.api_key is not None:
        key = asked.api_key
    if key is not None and (not key.isascii() or not key.isprintable() or not key.strip()):
        raise SpecgenError(
            "the key is empty or has characters that no header can have",
            f"Take a key of ASCII letters and digits, best in {KEY_VARIABLE}",
        )
    hosts = asked.allow_host or []
    for host in hosts:
        if re.fullmatch(r"[\w.:-]+", host) is None:
            raise SpecgenError(f"--allow-host is {host!r}", "Name a host, such as my-machine.local")
    origins = asked.allow_origin or []
    for origin in origins:
        if re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s*]+", origin, re.IGNORECASE) is None:
            raise SpecgenError(
                f"--allow-origin is {origin!r}", "Name one origin, such as https://example.org"
            )
    return Access(
        asked.host,
        frozenset(host.lower() for host in hosts),
        frozenset(origin.lower() for origin in origins),
        None if key is None else key.strip(),
    )


def _check_reach(listening: socket.socket, access: Access) -> None:
    """Raises SpecgenError if others than this machine could ask, without a key."""
    from specgen.serve.server import is_this_machine_alone

    if access.key is None and not is_this_machine_alone(listening):
        raise SpecgenError(
            f"--host {access.host} lets other machines in, and there is no key",
            f"Set a key in {KEY_VARIABLE}, or leave --host out",
        )


def _warm_up(pair: Pair, name: str, settings: Mapping[str, Any], default: SamplingParams) -> None:
    """Prepares a run as requests will start it, so that the first one need not wait for what has to
    be measured or loaded. Raises SpecgenError if the method cannot run."""
    request = pair.request("Hello", name, default, **settings)
    rounds = cast("Generator[Round]", pair.prepare(request).rounds())
    with closing(rounds):
        for _ in islice(rounds, _WARM_UP_ROUNDS):
            pass
    pair.models.forget()


def _say_where(listening: socket.socket, err: Console, *, has_key: bool) -> None:
    """Prints where the server is, and how to ask it."""
    from specgen.serve.server import address_of

    address = address_of(listening)
    where = f"serving at {address}/v1, with a page at {address} (Ctrl-C ends it)"
    err.print(Text(where), soft_wrap=True)
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if has_key else ""
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    err.print(
        Text(
            f"curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key} "
            f"-d '{body}'",
            "quiet",
        ),
        soft_wrap=True,
    )
