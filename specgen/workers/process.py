"""The worker's process, as its parent sees it: started, talked to, ended. Imports no torch, so that it can be started before."""

from __future__ import annotations

import json
import os
import signal
import site
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import IO, Any

from specgen.errors import RunError, SpecgenError
from specgen.workers.channel import Channel, ChannelClosedError, Kind

_PATIENCE = 2.0  # seconds in which a worker that closed its pipe has to be gone
WITHOUT = "Run it again, or do without a second process: -m svip"


def is_possible() -> bool:
    """Whether this system can start a worker and share memory with it."""
    return os.name == "posix" and bool(sys.executable)


class DraftProcess:
    """`python -m specgen.workers`: nobody's script is run twice, and nobody's stdin or terminal is touched.

    It ends when told to, when this object or this process goes away in whatever manner, and it never sees a Ctrl-C.
    """

    def __init__(self) -> None:
        try:
            self.memory = _nameless_file()
            self._log = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the process
            self._process = subprocess.Popen(  # noqa: S603  this very interpreter
                [sys.executable, "-P", "-m", "specgen.workers", str(os.getpid()), str(self.memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                pass_fds=[self.memory],
                env=_environment(),
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise cannot_start(error) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._channel = Channel(self._process.stdout.fileno(), self._process.stdin.fileno())
        self._serial = 0
        self._ready = False
        self._close = weakref.finalize(self, _end, self._process, self._log, self.memory)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._close.alive and self._process.poll() is None

    def send(self, kind: Kind, payload: bytes | int | dict[str, Any] = b"") -> int:
        """Returns the message's serial number. Raises RunError where the worker is gone."""
        if not self._close.alive:  # its descriptors may be somebody else's by now
            raise self._died()
        self._serial += 1
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        try:
            self._channel.send(kind, self._serial, data)
        except ChannelClosedError:
            raise self._died() from None
        except BaseException:
            self.close()
            raise
        return self._serial

    def receive(self, serial: int, run: int) -> bytes:
        """The answer to the message `serial`. Raises what the worker reports of that one or of `run`, with which it belongs; what
        else was not waited for is passed over."""
        if not self._close.alive:
            raise self._died()
        try:
            while True:
                kind, answered, payload = self._channel.receive()
                self._ready |= kind == Kind.READY
                if kind == Kind.FAILED and answered in (serial, run):
                    self._log.truncate(0)  # told, and not to be told again
                    raise _reported(json.loads(payload))
                if answered == serial:
                    return payload
        except ChannelClosedError:
            raise self._died() from None
        except SpecgenError:
            raise
        except BaseException:
            self.close()
            raise

    def wait_ready(self, serial: int) -> None:
        """Until the model is loaded."""
        if self._ready:
            return
        try:
            self.receive(serial, serial)
        except SpecgenError:
            self.close()  # without a model it is of no use
            raise

    def close(self) -> None:
        """End it at once: it has nothing to lose."""
        self._close()

    def _died(self) -> RunError:
        """What became of it, as far as can be known."""
        try:
            code = self._process.wait(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            code = None
        why = "it closed its pipe" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            why = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        last = _last_line(self._log)
        self.close()
        return RunError(f"the draft worker is gone ({why}{f': {last}' if last else ''})", WITHOUT)


def cannot_start(error: OSError) -> RunError:
    """What the system refused: another process, a file to share memory through, room in it."""
    return RunError(f"the draft worker cannot be started: {error.strerror or error}", WITHOUT)


def _environment() -> dict[str, str]:
    """This process's, with this package's folder where the worker would not find it by itself. One that is installed it finds,
    and what is installed beside it must not stand before the standard library."""
    package = str(Path(__file__).resolve().parents[2])
    if package in {*site.getsitepackages(), site.getusersitepackages()}:
        return dict(os.environ)
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def _reported(failure: dict[str, Any]) -> SpecgenError:
    kind = RunError if failure["while_running"] else SpecgenError
    return kind(failure["message"], failure["hint"])


def _nameless_file() -> int:
    """A file descriptor to share memory through. The file has no name, so nothing of it is left however its users end."""
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


def _end(process: subprocess.Popen[bytes], log: IO[bytes], memory: int) -> None:
    """Whatever the worker is about."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    process.kill()
    process.wait()
    log.close()
    os.close(memory)
