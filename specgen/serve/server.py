"""Opens the port, runs the HTTP server in a thread, and ends it on SIGINT and SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from specgen.base.errors import RunError, SpecgenError
from specgen.serve.access import App, is_loopback
from specgen.serve.queue import Worker

GRACE = 5.0  # seconds in which answers may be finished when the server ends
_BACKLOG = 128
_LARGEST_PORT = (1 << 16) - 1


def listen_at(host: str, port: int) -> socket.socket:
    """Returns a socket that has the address, and takes no connections yet. Raises SpecgenError if
    the address cannot be had."""
    if port > _LARGEST_PORT:
        raise SpecgenError(f"--port is {port}", f"It has to be at most {_LARGEST_PORT}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise SpecgenError(
            f"--host {host} is no address of this machine", "Take 127.0.0.1, or see --help"
        ) from error
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise SpecgenError(
            f"cannot listen at {host}, port {port}: {error.strerror}",
            "Take another port, such as --port 8081",
        ) from error
    return listening


def is_this_machine_alone(listening: socket.socket) -> bool:
    """Whether only programs on this machine can reach the socket's address."""
    return is_loopback(listening.getsockname()[0])


def address_of(listening: socket.socket) -> str:
    """Returns the address for clients on this machine, such as `http://127.0.0.1:8080`."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104  it is replaced, not bound
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server:
    """Serves `app` at the socket `listening`, whose answers `worker` generates.

    `run` returns when the process gets SIGTERM or SIGINT and the running answer is finished, at the
    latest `GRACE` seconds later; at once after a second signal. `on_open` is called when the port
    is open.
    """

    def __init__(
        self, app: App, worker: Worker, listening: socket.socket, on_open: Callable[[], None]
    ) -> None:
        self._worker = worker
        self._listening = listening
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            http="h11",
            loop="asyncio",
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=int(2 * GRACE),
        )
        self._uvicorn = _Uvicorn(config, on_open)
        self._error: BaseException | None = None
        self._timer: threading.Timer | None = None
        self.signal: int | None = None  # the one that ended it

    def run(self) -> None:
        """Serves, and generates the answers in this thread. Raises RunError if the server ends by
        itself."""
        for name in ("uvicorn", "uvicorn.error", "uvicorn.asgi", "asyncio"):
            logger = logging.getLogger(name)  # without a handler, Python prints its warnings
            logger.addHandler(logging.NullHandler())
            logger.propagate = False
        thread = threading.Thread(target=self._serve, name="specgen-serve", daemon=True)
        with self._watched():
            thread.start()
            try:
                self._worker.run()
            finally:
                self.end()
                thread.join()
                if self._timer is not None:
                    self._timer.cancel()
                self._listening.close()
        if self._error is not None:
            raise RunError(f"the server has failed: {type(self._error).__name__}")

    def end(self) -> None:
        """Ends the server: new requests are refused, and the running answer may be finished."""
        self._worker.close()
        self._uvicorn.should_exit = True

    def _serve(self) -> None:
        try:
            asyncio.run(self._uvicorn.serve([self._listening]))
        except BaseException as error:  # noqa: BLE001  reported by the thread that waits
            self._error = error
        finally:
            self._worker.end_running()
            self._worker.stop()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Ends the server at SIGTERM and SIGINT while the block runs."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            self._worker.end_running()
            self._uvicorn.force_exit = True
            return
        self.signal = number
        # in other threads: this one may hold the lock that ending needs
        threading.Thread(target=self.end, daemon=True).start()
        self._timer = threading.Timer(GRACE, self._worker.end_running)
        self._timer.daemon = True
        self._timer.start()


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the thread that generates, and says when the port is open."""

    def __init__(self, config: uvicorn.Config, on_open: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_open = on_open

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_open()
