"""Runs `specgen` in other processes without importing torch and transformers in each, which would
take most of the time.

`one_by_one` runs several commands in one process and captures their streams. `Forked` runs one
command in a process with its own signals, environment and exit code, which is forked from a server
that has imported the libraries. `ForkedWorker` does the same for a draft worker.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, NamedTuple

_ONE_BY_ONE = """
import json, os, sys, tempfile, traceback
from specgen.cli.app import main
results = os.fdopen(os.dup(1), "w")
for arguments, given in json.loads(sys.argv[1]):
    files = [tempfile.TemporaryFile() for _ in range(3)]
    files[0].write(given.encode("latin-1"))
    for descriptor, file in enumerate(files):
        file.seek(0)
        os.dup2(file.fileno(), descriptor)
    sys.stdin, sys.argv = open(0, closefd=False), ["specgen", *arguments]
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    except Exception:
        traceback.print_exc()
        code = -1
    sys.stdout.flush()
    sys.stderr.flush()
    for file in files[1:]:
        file.seek(0)
    written = [file.read().decode() for file in files[1:]]
    print(json.dumps([code, *written, "torch" in sys.modules]), file=results)
"""
_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(
    [
        "specgen.cli.generate",
        "specgen.cli.compare",
        "specgen.pair.loading",
        "specgen.engine.native.native_model",
        "specgen.workers.server",
    ]
)


class Ended(NamedTuple):
    """The exit code and output of a command, and whether torch had been imported at its end."""

    code: int
    out: str
    err: str
    has_torch: bool


def one_by_one(
    *commands: Sequence[str],
    stdin: Sequence[bytes] = (),
    environment: Mapping[str, str] | None = None,
) -> list[Ended]:
    """Run `specgen` with each of these argument lists and standard inputs, one after the other in
    one process."""
    given = json.dumps(
        [
            (list(command), data.decode("latin-1"))
            for command, data in zip_longest(commands, stdin, fillvalue=b"")
        ]
    )
    process = [sys.executable, "-c", _ONE_BY_ONE, given]
    done = subprocess.run(process, stdout=subprocess.PIPE, env=environment, timeout=120, check=True)
    return [Ended(*json.loads(line)) for line in done.stdout.splitlines()]


class _Process:
    """A function in a process forked from the server, with the methods of `subprocess.Popen` that
    tests and specgen need."""

    def __init__(
        self, target: Callable[..., None], connections: Sequence[Connection], *given: object
    ) -> None:
        self._process = _FORKSERVER.Process(
            target=target, args=(*connections, *given), daemon=target is _work
        )
        self._process.start()
        for each in connections:
            each.close()
        self.pid = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("specgen", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _main(
    out: Connection,
    err: Connection,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    closed: bool,
    missing: Sequence[str],
) -> None:
    from specgen.cli.app import main

    sys.modules |= dict.fromkeys(missing)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    out.close()
    err.close()
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  of the server: other files
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    if closed:  # as in Python started with a closed stdout
        os.close(1)
        sys.stdout = None  # type: ignore[assignment]
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["specgen", *arguments]
    try:
        main()
    finally:
        atexit._run_exitfuncs()


class Forked(_Process):
    """`specgen` with these arguments and this process's environment. Standard input is empty.
    Standard output is a pipe, unless `stdout` is the file for it, or `closed` says that it is
    closed. The packages in `missing` cannot be imported."""

    def __init__(
        self,
        *arguments: str,
        stdout: IO[bytes] | None = None,
        closed: bool = False,
        missing: Sequence[str] = (),
    ) -> None:
        self.stdout, out = (
            (None, Connection(os.dup(stdout.fileno()), readable=False))
            if stdout is not None
            else _pipe()
        )
        self.stderr, err = _pipe()
        super().__init__(_main, (out, err), arguments, dict(os.environ), closed, missing)

    def communicate(self, timeout: float) -> tuple[bytes, bytes]:
        """Wait for the end. Returns all of stdout and stderr, which may each fill a pipe only
        once."""
        self.wait(timeout)
        return b"" if self.stdout is None else self.stdout.read(), self.stderr.read()


def _work(
    connection: Connection,
    memory: Connection,
    log: Connection,
    environment: Mapping[str, str],
    new_session: bool,
) -> None:
    from specgen.workers.__main__ import main

    if new_session:
        os.setsid()
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["specgen.workers", *map(str, (connection.fileno(), os.getppid(), memory.fileno()))]
    main()


class ForkedWorker(_Process):
    """A draft worker in a process forked from the server, made with the arguments with which
    `specgen.workers.process` calls `subprocess.Popen`. It ends when the server does."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: IO[bytes],
        env: Mapping[str, str],
        start_new_session: bool,
        **_: object,
    ) -> None:
        assert command[1:4] == ["-P", "-m", "specgen.workers"]
        connection, _parent, memory = map(int, command[4:])
        passed = [
            Connection(os.dup(descriptor), readable=False)
            for descriptor in (connection, memory, stdout.fileno())
        ]
        super().__init__(_work, passed, dict(env), start_new_session)


def _pipe() -> tuple[IO[bytes], Connection]:
    reader, writer = multiprocessing.Pipe(duplex=False)
    return os.fdopen(os.dup(reader.fileno()), "rb"), writer


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], object], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False
