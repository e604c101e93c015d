"""Starts, talks to and ends the worker process. Imports no torch, so that the worker can start while torch is imported."""

from __future__ import annotations

import os
import pickle
import signal
import site
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any

from specgen.errors import RunError, SpecgenError

_PATIENCE = 2.0  # seconds to wait for the exit code of a worker that closed its connection
WITHOUT = "Run it again, or use a method without a second process: -m svip"


def is_possible() -> bool:
    """Whether this system can start a worker and share memory with it."""
    return os.name == "posix" and bool(sys.executable)


class DraftProcess:
    """A process `python -m specgen.workers`: the caller's script is not run again, its stdin and terminal are not used.

    The process ends with `close`, when this object is deleted, and when this process ends for any reason. It ignores Ctrl-C.
    """

    def __init__(self) -> None:
        try:
            self.memory = _nameless_file()
            self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in `_end`
            self._connection, theirs = Pipe()
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603  this interpreter
                    [sys.executable, "-P", "-m", "specgen.workers", *map(str, (theirs.fileno(), os.getpid(), self.memory))],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    pass_fds=[theirs.fileno(), self.memory],
                    env=_environment(),
                    start_new_session=True,
                )
        except OSError as error:
            raise cannot_start(error) from error
        self._serial = 0
        self._ready = False
        self._close = weakref.finalize(self, _end, self._process, self._connection, self._log, self.memory)

    @property
    def alive(self) -> bool:
        return self._close.alive and self._process.poll() is None

    def send(self, request: object) -> int:
        """Send a request from `workers.messages`. Returns its serial number. Raises RunError if the worker has ended."""
        self._serial += 1
        with self._exchange():
            self._connection.send_bytes(pickle.dumps((self._serial, request)))  # `send` would take longer to pickle it
        return self._serial

    def receive(self, serial: int, run: int = 0) -> Any:
        """The answer to the request `serial`. Raises errors reported for it or for its `run`; skips other answers."""
        with self._exchange():
            while True:
                answered, answer = self._connection.recv()
                if isinstance(answer, SpecgenError) and answered in (serial, run):
                    self._log.truncate(0)  # reported here, so not again when the worker ends
                    raise answer
                if answered == serial:
                    return answer

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Ends the worker where an exchange was interrupted, which leaves its connection unusable."""
        try:
            yield
        except SpecgenError:
            raise
        except (EOFError, OSError):
            raise self._died() from None
        except BaseException:
            self.close()
            raise

    def wait_ready(self, serial: int) -> None:
        """Wait until the model is loaded."""
        if not self._ready:
            try:
                self.receive(serial)
            except SpecgenError:
                self.close()  # it cannot draft without a model
                raise
            self._ready = True

    def close(self) -> None:
        """Kill the process; it holds no state that is needed later."""
        self._close()

    def _died(self) -> RunError:
        """The error for a worker that ended: its exit code or signal, and the last line of its log."""
        try:
            code = self._process.wait(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            code = None
        why = "it closed its connection" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            why = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        last = _last_line(self._log)
        self.close()
        return RunError(f"the draft worker is gone ({why}{f': {last}' if last else ''})", WITHOUT)


def cannot_start(error: OSError) -> RunError:
    """The error for a system that refused a process, a shared file or its size."""
    return RunError(f"the draft worker cannot be started: {error.strerror or error}", WITHOUT)


def _environment() -> dict[str, str]:
    """This process's environment, with the package's folder in PYTHONPATH unless the package is installed.

    A site-packages folder must not be added: its modules would take precedence over the standard library.
    """
    package = str(Path(__file__).resolve().parents[2])
    if package in {*site.getsitepackages(), site.getusersitepackages()}:
        return dict(os.environ)
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def _nameless_file() -> int:
    """A file descriptor for shared memory. The file has no name, so it disappears with its last user."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("specgen")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _last_line(log: IO[bytes]) -> str:
    if log.closed:
        return ""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - 4000))
    lines = log.read().decode("utf-8", "replace").split("\n")
    return next((line.strip()[:160] for line in reversed(lines) if line.strip()), "")


def _end(process: subprocess.Popen[bytes], connection: Connection, log: IO[bytes], memory: int) -> None:
    """Kill the worker, whatever it is doing, and close all its files."""
    connection.close()
    process.kill()
    process.wait()
    log.close()
    os.close(memory)
