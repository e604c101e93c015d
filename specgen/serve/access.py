"""Who may ask the server for what: checks of the address, of the origin and of the key, before a
request's body is read."""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from specgen.base.text import json_line
from specgen.serve.errors import ApiError

OPEN = ("/", "/health")  # need no key: the page asks for it, and has nothing of the model
LARGEST_BODY = 16 << 20  # bytes
_LOOPBACK_NAMES = ("localhost",)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def is_loopback(name: str) -> bool:
    """Whether a host's name or address means this machine alone."""
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name.lower().rstrip(".") in _LOOPBACK_NAMES


@dataclass(frozen=True, slots=True)
class Access:
    """What is allowed.

    `host` is where the server listens, `hosts` are further names by which clients may call it,
    `origins` those of pages in a browser (`https://example.org`) that may ask. `key` is what every
    request has to have, but those for `OPEN`; None: no key is needed.
    """

    host: str
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    key: str | None = None

    def check(self, scope: Scope, headers: dict[str, str]) -> None:
        """Raises ApiError if the request is not allowed. Adds to `headers` those that its answer
        has to have."""
        host = "".join(_values(scope, b"host"))
        if not self._is_own(_name_of(host)):
            problem = "the Host header names no address of this server"
            raise ApiError(403, f"{problem}: see --allow-host", code="host_not_allowed")

        headers |= self._of_origin(scope, host)
        is_preflight = scope["method"] == "OPTIONS" and bool(headers)
        if not is_preflight and scope["path"] not in OPEN:
            self._check_key(scope)
        if scope["method"] == "POST":
            _check_body(scope)

    def _is_own(self, name: str) -> bool:
        """Whether a name in a Host header is one of this server's. A page from elsewhere can have
        its own name resolved to this machine, but it cannot have it without a name."""
        own = self.host.lower()
        if name in (own, *self.hosts) or is_loopback(name):
            return bool(name)
        return not is_loopback(own) and _is_address(name)

    def _of_origin(self, scope: Scope, host: str) -> dict[str, str]:
        """Returns the headers for the page from which a request comes. Raises ApiError if it is not
        allowed."""
        origins = list(_values(scope, b"origin"))
        if not origins:
            return {}
        (origin, *more) = origins
        if not more and origin.lower() in (f"http://{host}".lower(), f"https://{host}".lower()):
            return {}
        if more or origin.lower() not in self.origins:
            problem = "pages from this origin are not allowed: see --allow-origin"
            raise ApiError(403, problem, code="origin_not_allowed")
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Headers": "Authorization, *",  # clients add their own
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Max-Age": "600",
            "Vary": "Origin",
        }

    def _check_key(self, scope: Scope) -> None:
        if self.key is None:
            return
        given = "".join(_values(scope, b"authorization"))
        scheme, _, key = given.partition(" ")
        # bytes, as the comparison takes no other characters than those of ASCII
        is_right = hmac.compare_digest(key.strip().encode("latin-1"), self.key.encode())
        if not is_right or scheme.lower() != "bearer":
            problem = "the key is missing or wrong: send Authorization: Bearer KEY"
            raise ApiError(401, problem, code="invalid_api_key")


def _check_body(scope: Scope) -> None:
    """Raises ApiError for a body that is no JSON by its type, or that is too large by its
    length."""
    kind = "".join(_values(scope, b"content-type")).partition(";")[0].strip().lower()
    if kind != "application/json":
        problem = "the body has to be of the type application/json"
        raise ApiError(415, problem, code="unsupported_media_type")
    if any(coding.strip().lower() != "identity" for coding in _values(scope, b"content-encoding")):
        raise ApiError(415, "the body must not be compressed", code="unsupported_media_type")
    length = "".join(_values(scope, b"content-length"))
    if length.isdecimal() and int(length) > LARGEST_BODY:
        raise too_large()


def too_large() -> ApiError:
    return ApiError(413, f"the body has more than {LARGEST_BODY >> 20} MiB", code="too_large")


class Guard:
    """An application that answers only what is allowed, and passes it on to `app`. Every failure
    becomes an answer in OpenAI's form."""

    def __init__(self, app: App, access: Access, log: Callable[[str], None]) -> None:
        self._app = app
        self._access = access
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        more: dict[str, str] = {}
        has_begun = False

        async def passed_on(message: MutableMapping[str, Any]) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                own = [(name.lower().encode(), value.encode()) for name, value in more.items()]
                own.append((b"x-content-type-options", b"nosniff"))
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        try:
            self._access.check(scope, more)
            if scope["method"] == "OPTIONS" and more:
                await _answer(passed_on, 204, b"", {})
                return
            await self._app(scope, receive, passed_on)
        except ApiError as error:
            self._log(f"{error.status} {error.code or error.kind}")
            await _answer(passed_on, error.status, json_line(error.body), error.headers)
        except Exception as error:  # noqa: BLE001  no traceback reaches a client or a terminal
            self._log(f"500 {type(error).__name__}")
            if not has_begun:
                failure = ApiError(500, "internal error", kind="server_error")
                await _answer(passed_on, 500, json_line(failure.body), {})


async def _answer(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    own = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    own += [(b"content-length", str(len(body)).encode())]
    if body:
        own.append((b"content-type", b"application/json"))
    await send({"type": "http.response.start", "status": status, "headers": own})
    await send({"type": "http.response.body", "body": body})


def _values(scope: Scope, name: bytes) -> Iterator[str]:
    for key, value in scope["headers"]:
        if key == name:
            yield value.decode("latin-1")


def _name_of(host: str) -> str:
    """Returns the name or the address in a Host header, without the port; "" if it has none."""
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s/@:\[\]]+)(:\d+)?", host)
    return found[1].strip("[]").lower() if found else ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
