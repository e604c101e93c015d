"""Starts and ends the draft worker (the process that runs the draft model), and exchanges messages
with it.

A request is a pickled triple: serial number, the name of a function of `server.DraftServer`, and
its arguments. The answer is a pair: serial number, and what the function returned, or a
SpecgenError.

A message through a socket wakes a sleeping process, which takes longer than a small model's pass.
So before they sleep, both processes first watch 64-bit numbers ("words") at the beginning of shared
memory for a moment. Each word is written by one process alone. The words are the serial numbers of
the last request, of the last answer and of a draft to be ended, and the tokens drafted so far, each
of these together with the serial number of its request. Imports no torch, so that the worker can
start while this process still imports torch.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from mmap import mmap
from multiprocessing.connection import Pipe
from typing import Any

from specgen.base.errors import RunError, SpecgenError
from specgen.base.machine import WAIT_PASSIVELY

SIZE = 4096  # bytes of shared memory that hold the words; the tensors of drafts follow
# the words' positions; the last one is that of a draft's first token
ASKED = 0
ANSWERED = 1
CUT = 2
DRAFTED = 3
MOST_SHOWN = SIZE // 8 - DRAFTED  # drafted tokens
TOKEN_BITS = 32
_WATCH = 5e-3  # seconds that a process watches words before it sleeps
_POLL = 1e-3  # seconds between two looks at the words after that
_PATIENCE = 2.0  # seconds to wait for the exit code of a worker that closed its connection
WITHOUT = "Run it again, or use a method without a second process: -m svip"


def is_possible() -> bool:
    """Whether this system can start a worker process and share memory with it."""
    return os.name == "posix" and bool(sys.executable)


def shared_words(memory: int) -> memoryview[int]:
    """Returns the first `SIZE` bytes of the memory with the file descriptor `memory` as a view of
    64-bit integers."""
    return memoryview(mmap(memory, SIZE)).cast("q")


def watch(happened: Callable[[], bool]) -> bool:
    """Calls `happened` repeatedly for a moment (`_WATCH` seconds) until it returns True. Returns
    whether it has.

    `happened` reads the words in shared memory.
    """
    deadline = time.perf_counter() + _WATCH
    while not happened():
        if time.perf_counter() > deadline:
            return False
        os.sched_yield()  # another process may need this core, the other side among them
    return True


class DraftProcess:
    """A draft worker: a child process that runs `python -m specgen.workers`.

    Unlike with `multiprocessing`, the user's script is not run again in the child, which has no
    stdin or terminal and ignores Ctrl-C. The child ends with `close`, when this object is deleted,
    or when the parent process ends for any reason. `memory` is a file without a name, which both
    processes map. Raises RunError if the system cannot start the child.
    """

    def __init__(self) -> None:
        try:
            if hasattr(os, "memfd_create"):
                self.memory = os.fdopen(os.memfd_create("specgen"), "r+b")
            else:
                self.memory = tempfile.TemporaryFile()  # noqa: SIM115  closed in `_end`, as the next one
            self.memory.truncate(SIZE)
            self._words = shared_words(self.memory.fileno())
            self._log = tempfile.TemporaryFile()  # noqa: SIM115
            self._connection, theirs = Pipe()
            with theirs:
                descriptors = theirs.fileno(), self.memory.fileno()
                arguments = descriptors[0], os.getpid(), descriptors[1]
                # the worker imports what this process would
                paths = os.pathsep.join(map(os.path.abspath, sys.path))
                self._process = subprocess.Popen(  # noqa: S603  this interpreter
                    [sys.executable, "-P", "-m", "specgen.workers", *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    pass_fds=descriptors,
                    env=WAIT_PASSIVELY | os.environ | {"PYTHONPATH": paths},
                    start_new_session=True,
                )
        except OSError as error:
            raise cannot_start(error) from error
        self._serial = 0
        self._answers: dict[int, Any] = {}  # received, but not yet asked for
        self._close = weakref.finalize(
            self, _end, self._process, self._connection, self._log, self.memory
        )

    @property
    def alive(self) -> bool:
        return self._close.alive and self._process.poll() is None

    def send(self, name: str, *arguments: object) -> int:
        """Sends a request to call the function `name` of `server.DraftServer`, and does not wait
        for the answer.

        Returns the request's serial number. Raises RunError if the worker has ended, and
        SpecgenError if an argument cannot be pickled: a length policy from outside of this package.
        """
        serial = self._serial + 1
        message = _pickled((serial, name, arguments))
        self._serial = serial  # of a message that is sent: the worker counts them too
        with self._exchange():
            # if unread answers filled the connection, both processes would wait for ever
            while self._connection.poll():
                self._read_answer()
            # `send` would pass tensors by files
            self._connection.send_bytes(message)
            self._words[ASKED] = self._serial
        return self._serial

    def receive(self, serial: int) -> Any:
        """Waits for the answer to the request with this serial number, and returns it. If the
        answer is a SpecgenError, raises it.

        Raises RunError if the worker has ended.
        """
        with self._exchange():
            while serial not in self._answers:
                watch(lambda: self._words[ANSWERED] >= serial)
                self._read_answer()
        answer = self._answers.pop(serial)
        if isinstance(answer, SpecgenError):
            self._log.truncate(0)  # reported here, so not again when the worker ends
            raise answer
        return answer

    def _read_answer(self) -> None:
        serial, answer = self._connection.recv()
        self._answers[serial] = answer

    def shown(self, serial: int, count: int) -> list[int]:
        """Waits until the draft that this request asked for has `count` tokens or is complete.
        Returns its first `count` tokens; fewer if it has fewer. Raises RunError if the worker has
        ended."""
        end = DRAFTED + count

        def is_there() -> bool:
            return self._words[end - 1] >> TOKEN_BITS == serial or self._words[ANSWERED] >= serial

        with self._exchange():
            while not (watch(is_there) or self._connection.poll(_POLL)):
                pass
        words = takewhile(lambda word: word >> TOKEN_BITS == serial, self._words[DRAFTED:end])
        return [word & ((1 << TOKEN_BITS) - 1) for word in words]

    def cut(self, serial: int) -> None:
        """Ends the draft that this request asked for as soon as the token that is being drafted is
        complete."""
        self._words[CUT] = serial

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Wraps a use of the connection. If it is interrupted, ends the worker, because the
        connection is then unusable."""
        try:
            yield
        except (EOFError, OSError):
            raise self._died() from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kills the worker process, which holds nothing that is needed later."""
        self._close()

    def _died(self) -> RunError:
        """Returns the error for a worker that ended: by `close`, or unexpectedly.

        The error then has its exit code or signal and the last line of its log.
        """
        if not self._close.alive:
            return RunError(
                "the draft worker of this run was ended", "Finish a run before its pair is closed"
            )
        try:
            code = self._process.wait(timeout=_PATIENCE)
            why = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        except subprocess.TimeoutExpired:
            why = "it closed its connection"
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").split("\n")
        last = next((f": {line.strip()[:160]}" for line in reversed(lines) if line.strip()), "")
        self.close()
        return RunError(f"the draft worker is gone ({why}{last})", WITHOUT)


def _pickled(request: tuple[int, str, Sequence[object]]) -> bytes:
    try:
        return pickle.dumps(request)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise not_sent(error) from error


def not_sent(error: Exception) -> SpecgenError:
    """Returns the error to raise if a length policy, or what it holds, cannot be sent to the draft
    worker, whose process imports the same modules, but not the user's script."""
    why = " ".join(str(error).split())[:200]
    return SpecgenError(
        f"the length policy cannot be sent to the draft worker: {why}",
        "Define its class in a module that can be imported, and keep no functions or models in it",
    )


def cannot_start(error: OSError) -> RunError:
    """Returns the error to raise if the system refuses to start a process or to provide shared
    memory."""
    return RunError(f"the draft worker cannot be started: {error.strerror or error}", WITHOUT)


def _end(process: subprocess.Popen[bytes], *files: Any) -> None:
    """Kills the worker process at once, and closes its connection, its log and its shared
    memory."""
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_PATIENCE)
    for file in files:
        file.close()
