"""Starts and ends the draft worker (the process that runs the draft model), and exchanges messages with it.

A request is a pickled triple: serial number, the name of a function of `server.DraftServer`, and its arguments. The answer is a
pair: serial number, and what the function returned, or a SpecgenError. Imports no torch, so that the worker can start while this
process still imports torch.
"""

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
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any

from specgen.base.errors import RunError, SpecgenError
from specgen.base.machine import WAIT_PASSIVELY
from specgen.base.measuring import prefill_reports
from specgen.workers.shared import SIZE, SharedWords

_POLL = 1e-3  # seconds between two looks at the shared memory
_LOOK = 1.0  # seconds between two looks at how far the worker is with a long prompt
_PATIENCE = 2.0  # seconds to wait for the exit code of a worker that closed its connection
WITHOUT = "Run it again, or use a method without a second process: -m svip"


def is_possible() -> bool:
    """Whether this system can start a worker process and share memory with it."""
    return os.name == "posix" and bool(sys.executable)


class DraftProcess:
    """A draft worker: a child process that runs `python -m specgen.workers`.

    Unlike with `multiprocessing`, the user's script is not run again in the child, which has no stdin or terminal and ignores
    Ctrl-C. The child ends with `close`, when this object is deleted, or when the parent process ends for any reason.
    `memory` is the descriptor of the file that parent and child share as memory, `words` are numbers in it.
    """

    def __init__(self) -> None:
        try:
            self.memory = _nameless_file()
            os.ftruncate(self.memory, SIZE)
            self.words = SharedWords(self.memory)
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
        self.is_wanted = True  # False once the pair of models is closed
        self._serial = 0
        self._answers: dict[int, Any] = {}  # received, but not yet asked for
        self._close = weakref.finalize(self, _end, self._process, self._connection, self._log, self.memory)

    @property
    def alive(self) -> bool:
        return self._close.alive and self._process.poll() is None

    def send(self, name: str, *arguments: object) -> int:
        """Asks for a call of `DraftServer`. Returns the request's serial number. Raises RunError if the worker has ended."""
        self._serial += 1
        with self._exchange():
            self._connection.send_bytes(pickle.dumps((self._serial, name, arguments)))  # `send` takes longer to pickle
            self.words.ask(self._serial)
        return self._serial

    def receive(self, serial: int) -> Any:
        """Waits for the answer to the request with this serial number and returns it. Raises the error that it may be."""
        with self._exchange():
            while serial not in self._answers:
                if not self.words.await_answer(serial):
                    while not self._connection.poll(_LOOK):
                        self._report_prefill()
                answered, answer = self._connection.recv()
                self._answers[answered] = answer
        answer = self._answers.pop(serial)
        if isinstance(answer, SpecgenError):
            self._log.truncate(0)  # reported here, so not again when the worker ends
            raise answer
        return answer

    def shown(self, serial: int, count: int) -> list[int]:
        """Waits until the draft of this request has `count` tokens, and returns them; fewer if it is complete."""
        with self._exchange():
            while not (self.words.await_tokens(serial, count) or self._connection.poll(_POLL)):
                self._report_prefill()
        return self.words.shown(serial, count)

    def cut(self, serial: int) -> None:
        """Ends the draft of this request after the token that is being drafted."""
        self.words.cut(serial)

    def _report_prefill(self) -> None:
        done, total = self.words.prefilled
        if done < total:
            prefill_reports.report(id(self), done, total)

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Wraps a use of the connection. If it is interrupted, ends the worker, because the connection is then unusable."""
        try:
            yield
        except (EOFError, OSError):
            raise self._died() from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kills the worker process. It holds no state that is needed later."""
        self._close()

    def _died(self) -> RunError:
        """Returns the error for a worker that ended: because its pair was closed, or unexpectedly.

        The error then has its exit code or signal and the last line of its log.
        """
        if not self.is_wanted:
            return RunError("the pair of models is closed", "Finish a run before its pair is closed")
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
    """Returns the error to raise if the system refuses to start a process or to provide shared memory."""
    return RunError(f"the draft worker cannot be started: {error.strerror or error}", WITHOUT)


def _environment() -> dict[str, str]:
    """Returns environment variables for the worker: those of this process, with PYTHONPATH set so that specgen is found.

    An installed specgen needs no such change: site-packages in PYTHONPATH would take precedence over the standard library.
    """
    variables = WAIT_PASSIVELY | os.environ
    package = str(Path(__file__).resolve().parents[2])
    if package not in {*site.getsitepackages(), site.getusersitepackages()}:
        paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        variables["PYTHONPATH"] = os.pathsep.join(paths)
    return variables


def _nameless_file() -> int:
    """Returns the descriptor of a file to be shared as memory. It has no name, so it disappears when no process uses it."""
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
    """Kills the worker process at once, and closes its connection, its log and the descriptor of its shared memory.

    Raises nothing: what was generated is worth more than a descriptor that cannot be closed.
    """
    for step in (process.kill, partial(process.wait, _PATIENCE), connection.close, log.close, partial(os.close, memory)):
        with suppress(OSError, subprocess.TimeoutExpired):
            step()
