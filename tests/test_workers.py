"""PEARL on real models, with the draft in a process of its own or in this one, and every way in
which a worker ends."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from families import make_model, save
from pair_helpers import knowledge, pass_costs
from processes import Forked, is_running, wait_until
from worker_helpers import PROMPT, posix, save_pair

import specgen
from specgen.base.errors import RunError, SpecgenError
from specgen.base.types import Round, SamplingParams
from specgen.pair.pair import Pair
from specgen.workers.process import DraftProcess

SAMPLED = SamplingParams(max_new_tokens=60, temperature=0.9, top_p=0.95, seed=5, ignore_eos=True)
GREEDY = SamplingParams(max_new_tokens=60, seed=5)
in_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="looks processes up in /proc"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair(tmp_path_factory.mktemp("pearl"))


@pytest.fixture(scope="module")
def apart(folders: tuple[str, str]) -> Iterator[Pair]:
    """A pair whose draft runs in a process of its own; its target has penalties."""
    with specgen.load(*folders, device="cpu", dtype="float32") as pair:
        yield pair


def worker_of(pair: Pair) -> DraftProcess:
    worker = pair.models.worker()
    assert worker is not None
    process = worker.ready()
    assert isinstance(process, DraftProcess)
    return process


def process_of(pair: Pair) -> int:
    return worker_of(pair)._process.pid


def comparable(round_: Round) -> object:
    """A round without its seconds and figures; tuples become lists in a pipe."""
    draft = round_.draft
    return (
        list(draft.tokens),
        draft.parents,
        draft.stop_reason,
        round_.verdict,
        round_.mode,
        round_.policy_state,
    )


def figures(rounds: list[Round]) -> list[float]:
    """The figures of all drafted tokens. Processes may differ in the last bits: each chooses its
    kernels by their speed."""
    return [
        number for round_ in rounds for number in (*round_.draft.entropies, *round_.draft.top_probs)
    ]


@posix
@pytest.mark.parametrize(
    ("sampling", "given", "record"),
    [
        (GREEDY, {}, True),
        (SAMPLED, {"pre_verify": False}, False),
        (SAMPLED, {"policy": "beta-ts"}, True),
        (GREEDY, {"policy": "adaptive", "verify_cost": 0.1}, False),
        (SAMPLED, {"post_verify": False}, False),
    ],
    ids=str,
)
def test_a_worker_in_another_process_gives_the_same_rounds_as_one_here(
    apart: Pair,
    sampling: SamplingParams,
    given: dict[str, object],
    record: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The output does not depend on where the draft runs or how long it takes; penalties apply to
    it too."""
    there = apart.generate(PROMPT, "pearl", sampling, window=4, record=record, **given)
    assert there.summary["acceptance_rate"] > 0.3
    monkeypatch.setattr(apart.models, "_worker", None)
    if given.get("policy") == "adaptive":
        knowledge(apart)._learned.clear()  # each worker starts with what is known at the beginning
    here = apart.generate(PROMPT, "pearl", sampling, window=4, record=record, **given)
    assert figures(there.rounds) == pytest.approx(figures(here.rounds), abs=1e-4)
    if record:
        overlaps = [
            [round_.verdict.agreement.overlap for round_ in each.rounds[1:]]
            for each in (there, here)
        ]  # type: ignore[union-attr]
        assert [len(each) for each in overlaps[0]] == [len(each) for each in overlaps[1]]
    elif given.get("policy") != "adaptive":
        assert [comparable(round_) for round_ in there.rounds] == [
            comparable(round_) for round_ in here.rounds
        ]
    assert there.token_ids == here.token_ids
    if sampling.greedy:
        assert there.token_ids == apart.generate(PROMPT, "ar", sampling).token_ids


@posix
def test_a_worker_keeps_what_adaptive_has_learned_for_the_next_run(apart: Pair) -> None:
    given: dict[str, object] = {"window": 4, "policy": "adaptive", "verify_cost": 0.3}
    first, second = (
        apart.generate(PROMPT, "pearl", GREEDY, **given).rounds[1].policy_state for _ in range(2)
    )
    assert first != second, "the states before each run's first draft"


@posix
def test_answers_that_nobody_waits_for_do_not_fill_the_connection(apart: Pair) -> None:
    """As of a comparison that empties the caches a thousand times and runs PEARL once."""

    def fail(*_: object) -> None:
        raise AssertionError("both processes wait for each other")

    worker = worker_of(apart)
    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(30)
    try:
        for _ in range(3000):
            worker.send("forget")
        assert worker.receive(worker.send("forget")) is None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@posix
def test_runs_may_take_turns_and_be_left_early(apart: Pair) -> None:
    """Each run has its own policy and its own part of the shared memory. The target gets its
    threads back."""
    other = [1, 30, 31, 8]
    threads = torch.get_num_threads()
    before = process_of(apart)
    torch.set_num_threads(2)
    try:
        alone = [
            apart.generate(ids, "pearl", SAMPLED, window=3, policy="beta-ts").token_ids
            for ids in (PROMPT, other)
        ]
        left = apart.rounds(PROMPT, "pearl", SAMPLED, window=4)
        next(left), next(left)
        left.close()  # type: ignore[attr-defined]
        runs = [
            apart.rounds(ids, "pearl", SAMPLED, window=3, policy="beta-ts")
            for ids in (PROMPT, other)
        ]
        tokens: list[list[int]] = [[], []]
        going = [0, 1]
        while going:
            for which in list(going):
                round_ = next(runs[which], None)
                if round_ is None:
                    going.remove(which)
                else:
                    tokens[which] += round_.token_ids
        assert tokens == alone
        assert torch.get_num_threads() == 2
        assert process_of(apart) == before
    finally:
        torch.set_num_threads(threads)


@posix
@pytest.mark.parametrize("moment", ["between", "after the last round"])
def test_a_worker_that_dies_ends_the_run_and_not_the_pair(apart: Pair, moment: str) -> None:
    run = apart.rounds(PROMPT, "pearl", SAMPLED, window=4)
    if moment == "between":
        next(run), next(run)
        os.kill(process_of(apart), signal.SIGKILL)
        with pytest.raises(RunError, match=r"draft worker is gone \(SIGKILL.*-m svip"):
            list(run)
    else:
        tokens: list[int] = []
        while len(tokens) < 60:
            tokens += next(run).token_ids
        # what a worker that dies between `alive` and `send` looks like
        worker_of(apart)._connection.close()
        assert list(run) == []
    assert len(apart.generate(PROMPT, "pearl", SAMPLED, window=4).token_ids) == 60, (
        "a new one is started"
    )


@posix
def test_what_fails_in_the_worker_is_told_here(tmp_path: Path) -> None:
    draft = make_model("llama")
    with torch.no_grad():
        draft.lm_head.weight[3] = float("nan")
    target = save(make_model("llama"), tmp_path / "target")
    with specgen.load(
        target, save(draft, tmp_path / "draft"), device="cpu", dtype="float32"
    ) as pair:
        with pytest.raises(RunError, match="draft model's logits hold NaN"):
            pair.generate(PROMPT, "pearl", window=4)
        process = worker_of(pair)
        with pytest.raises(
            RunError, match=r"the draft worker failed: AttributeError: .*no attribute 'nothing'"
        ):
            process.receive(process.send("nothing"))
        pid = process_of(pair)
    assert not is_running(pid), "closing the pair ends it"


@posix
def test_a_run_that_cannot_begin_says_why_and_spares_the_others(
    apart: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    going = apart.rounds(PROMPT, "pearl", SAMPLED, window=4)
    next(going), next(going)

    def full(*_: object) -> None:
        raise OSError(28, "No space left")

    with monkeypatch.context() as patch:
        patch.setattr("specgen.workers.worker.os.ftruncate", full)
        with pytest.raises(RunError, match="cannot be started: No space left"):
            list(apart.rounds(PROMPT, "pearl", SAMPLED, window=900))
    assert sum(len(round_.token_ids) for round_ in going) > 40


@posix
def test_an_interrupt_while_a_run_begins_leaves_the_threads_as_before(
    apart: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    process_of(apart)
    set_threads = torch.set_num_threads
    before = torch.get_num_threads()
    set_threads(2)

    def interrupted(threads: int) -> None:
        set_threads(threads)
        monkeypatch.undo()
        raise KeyboardInterrupt

    try:
        monkeypatch.setattr("specgen.workers.worker.torch.set_num_threads", interrupted)
        with pytest.raises(KeyboardInterrupt):
            apart.generate(PROMPT, "pearl", SAMPLED, window=4)
        assert torch.get_num_threads() == 2
    finally:
        set_threads(before)


@posix
def test_ctrl_c_does_not_reach_the_worker(apart: Pair) -> None:
    pid = process_of(apart)
    os.kill(pid, signal.SIGINT)
    assert os.getsid(pid) != os.getsid(0), "nor does the terminal send it one"
    apart.generate(PROMPT, "pearl", SAMPLED, window=4)
    assert process_of(apart) == pid


@posix
def test_a_long_prompt_and_a_short_context_of_the_draft(tmp_path: Path) -> None:
    """Where the draft has no room, the target continues alone."""
    target = save(make_model("llama"), tmp_path / "target")
    draft = save(make_model("llama", max_position_embeddings=24), tmp_path / "draft")
    sampling = SamplingParams(max_new_tokens=40, ignore_eos=True)
    with specgen.load(target, draft, device="cpu", dtype="float32") as pair:
        for ids in (PROMPT, [1, *range(3, 40)]):
            assert (
                pair.generate(ids, "pearl", sampling, window=4).token_ids
                == pair.generate(ids, "ar", sampling).token_ids
            )


@pytest.mark.parametrize("length", [1, 100, 126, 127])
def test_the_window_is_measured_wherever_a_prompt_ends(
    pair_of: Callable[..., Pair], length: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """GPT-2 has a table of 128 positions: a pass beyond it would be an index error."""
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path))
    pair = pair_of("gpt2", "near")
    ids = [3 + position % 50 for position in range(length)]
    sampling = SamplingParams(max_new_tokens=400, ignore_eos=True)
    result = pair.generate(ids, "pearl", sampling)
    assert result.token_ids == pair.generate(ids, "ar", sampling).token_ids
    assert len(result.token_ids) == 128 - length


@posix
@pytest.mark.parametrize("method", ["lookup", "pearl"])
def test_a_closed_pair_says_so_and_a_run_that_has_begun_can_be_finished(
    folders: tuple[str, str], method: str
) -> None:
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True)
    settings: dict[str, object] = {"window": 4} if method == "pearl" else {}
    pair = specgen.load(*folders, device="cpu", dtype="float32")
    request = pair.request(PROMPT, method, sampling, **settings)
    run = pair.rounds(PROMPT, method, sampling, **settings)
    next(run)
    pair.close()
    pair.close()
    if method == "pearl":
        with pytest.raises(
            RunError, match=r"the draft worker of this run was ended\. Finish a run before"
        ):
            next(run)
    else:
        assert sum(len(round_.token_ids) for round_ in run) > 20
    for use in (
        pair.prepare,
        pair.run,
        lambda _: pair.generate(PROMPT, method),
        lambda _: pass_costs(pair, 4),
    ):
        with pytest.raises(SpecgenError, match="the pair of models is closed"):
            use(request)


def test_a_worker_that_cannot_be_started_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment would have let idle threads leave their cores to others."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    variables: dict[str, str] = {}

    def refuse(*_: object, env: dict[str, str], **__: object) -> None:
        variables.update(env)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("specgen.workers.process.subprocess.Popen", refuse)
    with pytest.raises(
        RunError,
        match=r"the draft worker cannot be started: Resource temporarily unavailable.*-m svip",
    ):
        DraftProcess()
    assert (variables["OMP_WAIT_POLICY"], os.environ.get("OMP_WAIT_POLICY")) == ("PASSIVE", None)


# --------------------------------------- however a run ends, it does not hang and leaves no process

_PARENT = """
import os, subprocess, sys
connection, memory = map(int, sys.argv[1:])
arguments = [str(connection), str(os.getpid()), str(memory)]
command = [sys.executable, "-P", "-m", "specgen.workers", *arguments]
worker = subprocess.Popen(command, pass_fds=[connection, memory], start_new_session=True)
print(worker.pid, flush=True)
sys.stdin.read()
"""


@posix
@in_proc
def test_a_worker_leaves_with_its_parent_though_the_message_it_reads_never_ends(
    tmp_path: Path,
) -> None:
    """Another process, here the test, still holds the connection open, as any other child of the
    parent might."""
    ours, theirs = Pipe()
    with (tmp_path / "memory").open("w+b") as memory, ours, theirs:
        memory.truncate(1 << 16)
        descriptors = theirs.fileno(), memory.fileno()
        command = [sys.executable, "-c", _PARENT, *map(str, descriptors)]
        parent = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=descriptors
        )
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

    def __init__(self) -> None:
        command = [
            "generate",
            "-m",
            "pearl",
            "--set",
            "window=6",
            "-n",
            "700",
            "--ignore-eos",
            "--temperature",
            "1",
        ]
        self.process = Forked(*command, "def f(")
        self.workers: list[int] = []

    def find_worker(self) -> int | None:
        self.workers = children(self.process.pid) or self.workers
        return self.workers[0] if self.workers else None

    def generates(self) -> int:
        """Waits for the output, which begins with an empty line, and returns the worker."""
        while not self.process.stdout.read(1).strip():
            pass
        worker = self.find_worker()
        assert worker is not None
        return worker

    def end(self) -> tuple[int, str]:
        """Exit code and standard error; checks that no process remains; the shared memory has no
        name and ends with them."""
        self.find_worker()
        _, err = self.process.communicate(timeout=LONGEST)
        assert wait_until(lambda: not any(map(is_running, self.workers))), "a worker is left"
        return self.process.returncode, err.decode()


@pytest.fixture
def running() -> Iterator[Running]:
    started = Running()
    yield started
    started.process.send_signal(signal.SIGKILL)
    started.process.wait(LONGEST)


@in_proc
@pytest.mark.parametrize("ending", ["the worker is killed", "the parent is killed", "Ctrl-C"])
def test_a_command_that_generates_is_ended(running: Running, ending: str) -> None:
    worker = running.generates()
    if ending == "the worker is killed":
        os.kill(worker, signal.SIGKILL)
        code, err = running.end()
        about, problem = err.splitlines()
        assert code == 1
        assert about.endswith("pearl")
        assert problem.startswith("error: the draft worker is gone (SIGKILL")
    elif ending == "Ctrl-C":
        running.process.send_signal(signal.SIGINT)
        code, err = running.end()
        assert code == 130
        assert "interrupted" in err
    else:
        running.process.send_signal(signal.SIGKILL)
        assert running.end()[0] == -signal.SIGKILL


@in_proc
@pytest.mark.slow
@pytest.mark.parametrize("is_interrupted", [False, True])
@pytest.mark.parametrize("seed", range(50))
def test_a_worker_killed_or_ctrl_c_at_any_moment(
    running: Running, seed: int, is_interrupted: bool
) -> None:
    time.sleep(random.Random(seed).uniform(0.3, LIFE))
    worker = running.find_worker()
    if running.process.poll() is None and is_interrupted:
        running.process.send_signal(signal.SIGINT)
    elif running.process.poll() is None and worker is not None:
        os.kill(worker, signal.SIGKILL)
    code, err = running.end()
    if code == 1:
        assert re.fullmatch(
            "(.*pearl\n)?error: the draft worker is gone .SIGKILL.*-m svip.*\n", err
        ), err
    else:
        # the last one if the signal arrives before Python's handler is installed
        codes = (130, 0, -signal.SIGINT)
        assert code in (codes if is_interrupted else (0,)), err
        assert code == -signal.SIGINT or "Traceback" not in err


# ------------------------------------------------------------------ a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("draft", [None, "cpu"])
def test_on_a_gpu(folders: tuple[str, str], draft: str | None) -> None:
    """The draft has a stream of its own on the target's GPU; on another device, a process."""
    with specgen.load(*folders, device="cuda", draft_device=draft, dtype="float32") as pair:
        for window in ("auto", 1, 4):
            expected = pair.generate(PROMPT, "ar", GREEDY).token_ids
            assert pair.generate(PROMPT, "pearl", GREEDY, window=window).token_ids == expected
        first, second = (
            pair.generate(PROMPT, "pearl", SAMPLED, window=4).token_ids for _ in range(2)
        )
        assert first == second
        assert pair.models.drafts_apart == (draft is not None)
