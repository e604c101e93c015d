"""Draft workers that stall, that lose their parent, or that end while a run is open: no hang, no orphan, no lost result."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from processes import is_running, wait_until
from scripted_models import TableRunner, scripted_run
from worker_helpers import PROMPT, posix, save_pair

import specgen
from specgen.base import heartbeat
from specgen.base.errors import RunError
from specgen.base.heartbeat import LONGEST_SILENCE, SilenceWatch
from specgen.base.types import SamplingParams
from specgen.pair.pair import Pair
from specgen.workers.process import DraftProcess
from specgen.workers.worker import DraftWorker

GREEDY = SamplingParams(max_new_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A pair whose draft runs in a process of its own."""
    with specgen.load(*save_pair(tmp_path_factory.mktemp("pearl")), device="cpu", dtype="float32") as pair:
        yield pair


def process_of(pair: Pair) -> int:
    assert pair._worker is not None
    return pair._worker.ready()._process.pid


# ------------------------------------------------------------------ stalls


class Clock:
    """A worker's count of beats and the parent's clock, in the test's hands."""

    def __init__(self) -> None:
        self.now, self.beats = 50.0, 3
        self.watch = SilenceWatch(lambda: self.beats, lambda: self.now)

    def look(self, seconds: float, beats: int = 0) -> bool:
        self.now += seconds
        self.beats += beats
        return self.watch.is_over()


def test_silence_ends_the_wait_and_any_beat_prolongs_it() -> None:
    clock = Clock()
    looks = int(LONGEST_SILENCE)
    assert not any(clock.look(1) for _ in range(looks - 1))
    assert not clock.look(1, beats=1), "a sign of life after nearly the whole time"
    assert [clock.look(1) for _ in range(looks)] == [False] * (looks - 1) + [True]


def test_a_worker_that_lives_may_take_days_for_an_answer() -> None:
    clock = Clock()
    assert not any(clock.look(1, beats=step % 60 == 0) for step in range(3 * 86_400))


def test_time_in_which_the_parent_slept_too_does_not_count() -> None:
    """A laptop that sleeps, or Ctrl-Z: the clock jumps by hours between two looks, once or often."""
    clock = Clock()
    assert not any(clock.look(8 * 3600) for _ in range(int(LONGEST_SILENCE) // 4))


@posix
def test_a_worker_that_stops_is_one_line(apart: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    run = apart.rounds(PROMPT, "pearl", GREEDY, window=4)
    next(run), next(run)
    pid = process_of(apart)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(heartbeat, "LONGEST_SILENCE", 0.05)
    with pytest.raises(RunError, match=r"no sign of life for 0.05 seconds.*-m svip"):
        list(run)
    monkeypatch.undo()
    assert not is_running(pid)
    assert len(apart.generate(PROMPT, "pearl", GREEDY, window=4).token_ids) == 60, "a new one is started"


_DEAF = "import time; time.sleep(600)"


@posix
@pytest.mark.parametrize("use", ["receive", "drafted", "send"])
def test_a_process_that_never_beats_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    """Neither for its answers, nor for room for a message that is longer than the connection's buffer."""
    start: Any = subprocess.Popen
    monkeypatch.setattr(
        "specgen.workers.process.subprocess.Popen", lambda command, **options: start([*command[:2], "-c", _DEAF], **options)
    )
    monkeypatch.setattr(heartbeat, "LONGEST_SILENCE", 0.05)
    monkeypatch.setattr(heartbeat, "LOOK", 0.01)
    process = DraftProcess()
    wait: dict[str, Any] = {
        "receive": lambda: process.receive(1),
        "drafted": lambda: process.drafted(1, 3),
        "send": lambda: process.send(bytes(4 << 20)),
    }
    with pytest.raises(RunError, match="no sign of life"):
        wait[use]()
    assert not process.alive


@posix
def test_the_worker_shows_signs_of_life(apart: Pair) -> None:
    assert apart._worker is not None
    flags = apart._worker.ready().flags
    before = flags.beats
    assert wait_until(lambda: flags.beats > before, 60)


# ------------------------------------------------------------------ orphans

_PARENT = """
import os, subprocess, sys
connection, memory = map(int, sys.argv[1:])
command = [sys.executable, "-P", "-m", "specgen.workers", str(connection), str(os.getpid()), str(memory)]
worker = subprocess.Popen(command, pass_fds=[connection, memory], start_new_session=True)
print(worker.pid, flush=True)
sys.stdin.read()
"""


@posix
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
def test_a_worker_leaves_with_its_parent_though_the_message_it_reads_never_ends(tmp_path: Path) -> None:
    """Another process, here the test, still holds the connection open, as any other child of the parent might."""
    ours, theirs = Pipe()
    with (tmp_path / "memory").open("w+b") as memory, ours, theirs:
        memory.truncate(1 << 16)
        descriptors = theirs.fileno(), memory.fileno()
        command = [sys.executable, "-c", _PARENT, *map(str, descriptors)]
        parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=descriptors)
        os.write(ours.fileno(), (1000).to_bytes(4, "big") + b"the beginning")
        assert parent.stdin is not None
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.stdin.close()
        parent.wait()
        try:
            assert wait_until(lambda: not is_running(pid), 60)
        finally:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


# ------------------------------------------------------------------ closing


def thread_run() -> tuple[DraftWorker, Iterator[Any]]:
    runner = TableRunner(0)
    worker = DraftWorker.in_this_process(runner)  # type: ignore[arg-type]
    run = scripted_run("pearl", {"window": 3}, runner, runner, SamplingParams(max_new_tokens=40), worker=worker)
    rounds = run.rounds()
    next(rounds), next(rounds)
    return worker, rounds


def test_a_run_in_a_thread_that_has_ended_is_one_line() -> None:
    worker, rounds = thread_run()
    worker.close()
    with pytest.raises(RunError, match="thread of the draft model has ended"):
        next(rounds)


def test_an_open_run_may_be_closed_after_its_thread_has_ended() -> None:
    worker, rounds = thread_run()
    worker.close()
    rounds.close()  # type: ignore[attr-defined]


_LEFT_OPEN = """
import sys
sys.path.insert(0, sys.argv[1])
thread_run = __import__("test_worker_faults").thread_run
worker, rounds = thread_run()
"""


@pytest.mark.slow
def test_a_run_that_is_open_when_python_exits_prints_nothing() -> None:
    command = [sys.executable, "-c", _LEFT_OPEN, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@posix
def test_a_worker_that_dies_after_the_last_round_costs_no_result(apart: Pair) -> None:
    run = apart.rounds(PROMPT, "pearl", GREEDY, window=4)
    tokens: list[int] = []
    while len(tokens) < 60:
        tokens += next(run).token_ids
    pid = process_of(apart)
    assert apart._worker is not None
    process = apart._worker.ready()
    process._connection.close()  # what a worker that dies between `alive` and `send` looks like
    assert list(run) == []
    assert not is_running(pid)


@posix
def test_a_descriptor_that_cannot_be_closed_keeps_nothing_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    start: Any = subprocess.Popen
    monkeypatch.setattr(
        "specgen.workers.process.subprocess.Popen", lambda command, **options: start([*command[:2], "-c", _DEAF], **options)
    )
    process = DraftProcess()

    def refuse() -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(process._connection, "close", refuse)
    process.close()
    assert not is_running(process._process.pid)
