"""However a run of PEARL ends, it does not hang, and leaves no process."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import Forked, is_running, wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
LONGEST = 60  # seconds after which a run counts as hanging
LIFE = 9.0  # seconds of a complete run here, with its start


def children(parent: int) -> list[int]:
    """The live processes whose parent is `parent`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, ppid = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(ppid) == parent and state != "Z":
            found.append(int(stat.parent.name))
    return found


class Running:
    """`specgen generate -m pearl` on the bundled pair, and the worker that it started."""

    def __init__(self, tokens: int, start: Callable[..., Any]) -> None:
        command = ["generate", "-m", "pearl", "--set", "window=6", "-n", str(tokens), "--ignore-eos", "--temperature", "1"]
        self.process = start(*command, "def f(")
        self.workers: list[int] = []

    def find_worker(self) -> int | None:
        self.workers = children(self.process.pid) or self.workers
        return self.workers[0] if self.workers else None

    def end(self) -> tuple[int, bytes, str]:
        """Exit code and output; checks that no process remains; the shared memory has no name and ends with them."""
        self.find_worker()
        out, err = self.process.communicate(timeout=LONGEST)
        assert wait_until(lambda: not any(map(is_running, self.workers))), "a worker is left"
        return self.process.returncode, out, err.decode()


def from_the_start(*command: str) -> subprocess.Popen[bytes]:
    whole = [sys.executable, "-m", "specgen", *command]
    return subprocess.Popen(whole, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture(params=[from_the_start])
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    started = Running(700, request.param)
    yield started
    started.process.send_signal(signal.SIGKILL)
    started.process.wait(LONGEST)


# These interrupt a run once it generates.
generating = pytest.mark.parametrize("running", [pytest.param(Forked, id="forked")], indirect=True)


def kill_the_worker(running: Running, moment: float) -> None:
    time.sleep(moment)
    worker = running.find_worker()
    if worker is not None and running.process.poll() is None:
        os.kill(worker, signal.SIGKILL)
    code, _, err = running.end()
    if code == 1:
        assert err.strip().count("\n") == 0, err
        assert "error: the draft worker is gone (SIGKILL" in err
        assert "-m svip" in err
    else:
        assert code == 0, err
        assert "tokens/s" in err


def press_ctrl_c(running: Running, moment: float) -> None:
    time.sleep(moment)
    if running.process.poll() is None:
        running.process.send_signal(signal.SIGINT)
    code, _, err = running.end()
    assert code in (130, 0, -signal.SIGINT), err  # the last one if the signal arrives before Python's handler is installed
    assert code == -signal.SIGINT or "Traceback" not in err


@generating
def test_a_worker_killed_while_generating_is_one_line(running: Running) -> None:
    running.process.stdout.read(1)
    worker = running.find_worker()
    assert worker is not None
    os.kill(worker, signal.SIGKILL)
    code, _, err = running.end()
    assert code == 1
    assert err.startswith("error: the draft worker is gone (SIGKILL")
    assert err.count("\n") == 1


@generating
def test_the_worker_leaves_with_a_parent_that_is_killed(running: Running) -> None:
    running.process.stdout.read(1)
    assert running.find_worker() is not None
    running.process.send_signal(signal.SIGKILL)
    assert running.end()[0] == -signal.SIGKILL


@pytest.mark.slow
def test_a_worker_killed_while_it_starts_is_one_line(running: Running) -> None:
    wait_until(running.find_worker, 20)
    kill_the_worker(running, 0.2)


@generating
def test_ctrl_c_ends_both_and_keeps_what_was_generated(running: Running) -> None:
    while not running.process.stdout.read(1).strip():  # its output begins with an empty line
        pass
    running.process.send_signal(signal.SIGINT)
    code, _, err = running.end()
    assert code == 130
    assert "interrupted" in err


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_a_worker_killed_at_any_moment(running: Running, seed: int) -> None:
    kill_the_worker(running, random.Random(seed).uniform(0, LIFE))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_ctrl_c_at_any_moment(running: Running, seed: int) -> None:
    press_ctrl_c(running, random.Random(seed).uniform(0.3, LIFE))
