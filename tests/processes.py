"""Runs `specgen` in other processes without importing torch and transformers in each, which would take most of the time.

`one_by_one` runs several commands in one process and captures their streams. `Forked` runs one command in a process with its own
signals, environment and exit code, which is forked from a server that has imported the libraries.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import zip_longest
from typing import IO, NamedTuple

_ONE_BY_ONE = """
import json, os, sys, tempfile
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
    sys.stdout.flush()
    sys.stderr.flush()
    for file in files[1:]:
        file.seek(0)
    print(json.dumps([code, *(file.read().decode() for file in files[1:]), "torch" in sys.modules]), file=results)
"""
_SERVER = """
import gc, json, os, signal, socket, sys
import specgen.cli.generate, specgen.cli.compare, specgen.loading
from transformers import LlamaForCausalLM
gc.freeze()  # otherwise a child's last garbage collection copies all of this memory
server = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no monitor is waited for
while True:
    data, files, _, _ = socket.recv_fds(server, 1 << 20, 4)
    if not data:
        os._exit(0)
    if os.fork():
        for file in files:
            os.close(file)
        continue
    # a monitor: it reports the command's process id, waits for its end, and reports its exit code
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    server.close()
    if pid := os.fork():
        os.write(files[3], b"%d\\n" % pid)
        os.write(files[3], b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    break
for descriptor, file in enumerate(files):
    if descriptor < 3:
        os.dup2(file, descriptor)
    os.close(file)
arguments, environment, closed = json.loads(data)
if closed:  # as in Python started with a closed stdout
    os.close(1)
    sys.stdout = None
os.environ.clear()
os.environ.update(environment)
sys.argv = ["specgen", *arguments]
from specgen.cli.app import main
main()
"""


class Ended(NamedTuple):
    """The exit code and output of a command, and whether torch had been imported at its end."""

    code: int
    out: str
    err: str
    has_torch: bool


def one_by_one(
    *commands: Sequence[str], stdin: Sequence[bytes] = (), environment: Mapping[str, str] | None = None
) -> list[Ended]:
    """Run `specgen` with each of these argument lists and standard inputs, one after the other in one process."""
    given = json.dumps([(list(command), data.decode("latin-1")) for command, data in zip_longest(commands, stdin, fillvalue=b"")])
    process = [sys.executable, "-c", _ONE_BY_ONE, given]
    done = subprocess.run(process, stdout=subprocess.PIPE, env=environment, timeout=120, check=True)
    return [Ended(*json.loads(line)) for line in done.stdout.splitlines()]


@cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The socket for sending commands, whose closing at the end of this process ends the server; and the server process."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-c", _SERVER, str(theirs.fileno())]
        return ours, subprocess.Popen(command, pass_fds=[theirs.fileno()])


class Forked:
    """`specgen` with these arguments and this process's environment, with the methods of `subprocess.Popen` that tests need.

    Standard input is empty. Standard output is a pipe unless it is a given file or `closed`.
    """

    def __init__(self, *arguments: str, stdout: IO[bytes] | None = None, closed: bool = False) -> None:
        reports, report = os.pipe()
        self.stdout, out = (None, os.dup(stdout.fileno())) if stdout is not None else _pipe()
        self.stderr, err = _pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        files = [nothing, out, err, report]
        socket.send_fds(_server()[0], [json.dumps([arguments, dict(os.environ), closed]).encode()], files)
        for file in files:
            os.close(file)
        self._reports = os.fdopen(reports, "rb")
        self.pid = int(self._reports.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float) -> int:
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired("specgen", timeout)
        assert self.returncode is not None
        return self.returncode

    def _ended(self, timeout: float) -> int | None:
        if self.returncode is None and select.select([self._reports], [], [], timeout)[0]:
            self.returncode = int(self._reports.readline())
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[bytes, bytes]:
        """Wait for the end. Returns all of stdout and stderr."""
        found: dict[str, bytes] = {}
        streams = {"out": self.stdout, "err": self.stderr}
        readers = [
            threading.Thread(target=lambda name=name, stream=stream: found.update({name: stream.read()}), daemon=True)
            for name, stream in streams.items()
            if stream is not None
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return found.get("out", b""), found.get("err", b"")


def _pipe() -> tuple[IO[bytes], int]:
    read, write = os.pipe()
    return os.fdopen(read, "rb"), write
