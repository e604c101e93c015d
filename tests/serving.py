"""Serves a pair of models inside the tests' process, at a free port of this machine."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

from specgen.base.types import SamplingParams
from specgen.pair.pair import Pair
from specgen.serve import queue
from specgen.serve.access import Access
from specgen.serve.app import make_app
from specgen.serve.queue import Worker
from specgen.serve.server import Server, address_of, listen_at

JSON = {"Content-Type": "application/json"}


@dataclass
class Served:
    """A server that runs. `log` has the lines that it would print."""

    address: str
    worker: Worker
    server: Server
    log: list[str] = field(default_factory=list)

    def ask(
        self,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        method: str | None = None,
    ) -> tuple[int, dict[str, str], Any]:
        """The status, the headers (names in lower case) and the JSON of an answer. `body` is sent
        as JSON, bytes as they are."""
        connection = http.client.HTTPConnection(urlsplit(self.address).netloc, timeout=60)
        try:
            sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            method = method or ("GET" if body is None else "POST")
            given = {**({} if body is None else JSON), **(headers or {})}
            connection.request(method, path, sent, given)
            answer = connection.getresponse()
            text = answer.read()
            found = {name.lower(): value for name, value in answer.getheaders()}
        finally:
            connection.close()
        if found.get("content-type") == "application/json":
            return answer.status, found, json.loads(text)
        return answer.status, found, text.decode()


class Gate:
    """Lets the worker make rounds only as it is told, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounds = 0
        self._permits = threading.Semaphore(0)
        original = queue._until

        def gated(rounds: Any, is_over: Any) -> Iterator[Any]:
            def waiting() -> bool:
                self._permits.acquire()
                over: bool = is_over()
                self.rounds += not over
                return over

            return original(rounds, waiting)

        monkeypatch.setattr(queue, "_until", gated)

    def open(self, rounds: int) -> None:
        self._permits.release(rounds)


@contextmanager
def serving(
    pair: Pair,
    method: str = "svip",
    settings: Mapping[str, Any] | None = None,
    *,
    default: SamplingParams | None = None,
    queue: int = 16,
    access: Access | None = None,
) -> Iterator[Served]:
    """Serves the pair while the block runs. The models run in a thread of their own."""
    log: list[str] = []
    is_open = threading.Event()
    worker = Worker(pair, method, settings or {}, queue, log.append)
    listening = listen_at("127.0.0.1", 0)
    app = make_app(worker, default or SamplingParams(), access or Access("127.0.0.1"), log.append)
    server = Server(app, worker, listening, is_open.set)
    thread = threading.Thread(target=server.run, daemon=True)
    address = address_of(listening)
    thread.start()
    try:
        assert is_open.wait(30)
        yield Served(address, worker, server, log)
    finally:
        server.end()
        worker.end_running()
        thread.join(30)
        assert not thread.is_alive()
