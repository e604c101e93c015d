"""A target split over two processes (gloo) gives what one process gives, and no process outlives the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Forked, is_running, wait_until
from rank_processes import RankPair, commands

import specgen
from specgen.base.types import SamplingParams
from specgen.pair.pair import Pair

PROMPT = [1, 20, 5, 9, 14, 33, 7, 5, 9, 14]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(max_new_tokens=24, temperature=0.8, seed=5, ignore_eos=True)
FAMILIES = ("llama", "olmo2", "gemma2", "gemma", "phi3")
METHODS: list[tuple[str, dict[str, object]]] = [
    ("ar", {}),
    ("sd", {"k": 4, "width": 2}),
    ("svip", {}),
    ("lookup", {}),
    ("suffix", {}),
    ("pearl", {"window": 3}),
    ("selfsd", {"skip": "1"}),
    ("specinfer", {"k": 3, "drafts": 2}),
    ("mtad", {"k": 3, "beams": 2}),
    ("lookahead", {"window": 3, "ngram": 3}),
]


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPair]:
    pair = RankPair()
    yield pair
    assert pair.close() == [0, 0]


def folders(pair: Pair) -> tuple[str | None, str | None]:
    return str(pair.target.folder), None if pair.draft is None else str(pair.draft.folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_give_one_process_output(ranks: RankPair, pair_of: Callable[..., Pair], family: str) -> None:
    pair = pair_of(family, "near")
    for method, settings, sampling in (("sd", {"k": 3, "width": 2}, GREEDY), ("svip", {}, DRAWN)):
        expected = pair.generate(PROMPT, method, sampling, **settings).token_ids
        assert ranks.ask(folders(pair), "generate", PROMPT, method, sampling, settings) == expected


_SLOW = ("pearl", "selfsd", "mtad", "lookahead", "medusa", "eesd")


def marked(name: str, *values: object) -> Any:
    return pytest.param(name, *values, id=name, marks=[pytest.mark.slow] if name in _SLOW else [])


@pytest.mark.parametrize(("method", "settings"), [marked(*each) for each in METHODS])
def test_every_kind_of_drafting_works_on_two_processes(
    ranks: RankPair, pair_of: Callable[..., Pair], method: str, settings: dict[str, object]
) -> None:
    pair = pair_of("llama", "near")
    expected = pair.generate(PROMPT, method, GREEDY, **settings).token_ids
    assert ranks.ask(folders(pair), "generate", PROMPT, method, GREEDY, settings) == expected


@pytest.mark.parametrize("method", [marked(name) for name in ("eesd", "eesd-tree", "medusa", "eagle")])
def test_trained_parts_work_on_two_processes(ranks: RankPair, demo_pair: Pair, method: str) -> None:
    """Those of the bundled target: on rank 0 alone, from hidden states, embeddings and an LM head that are shared."""
    text = "def fibonacci(n):\n"
    expected = demo_pair.generate(text, method, GREEDY).token_ids
    assert ranks.ask((None, None), "generate", text, method, GREEDY, {}) == expected


def test_glide_is_refused_before_any_output(ranks: RankPair) -> None:
    with pytest.raises(specgen.SpecgenError, match="glide reads the target's keys"):
        ranks.ask((None, None), "plan", "def f():", "glide", GREEDY, {})
    assert ranks.ask((None, None), "generate", "def f():", "ar", GREEDY, {}), "the processes are still in step"


def test_each_process_holds_its_part(ranks: RankPair, pair_of: Callable[..., Pair]) -> None:
    pair = pair_of("llama", "near")
    whole = pair.target.model
    ranks.ask(folders(pair), "generate", PROMPT, "ar", GREEDY, {})
    facts = ranks.ask(folders(pair), "facts")
    assert facts == {"parameters": whole.num_parameters, "kv_heads": 1, "heads": 2, "embedding": [48, 32]}
    expected = pair.log_likelihood(PROMPT, [4, 5, 6])
    assert ranks.ask(folders(pair), "likelihood", PROMPT, [4, 5, 6]) == pytest.approx(expected, abs=1e-3)


def test_transformers_models_are_refused_in_one_line(ranks: RankPair, pair_of: Callable[..., Pair]) -> None:
    with pytest.raises(specgen.SpecgenError, match=r"cannot be split over torchrun's processes.*without torchrun"):
        ranks.ask(folders(pair_of("gpt2", "near")), "generate", PROMPT, "ar", GREEDY, {})


# ------------------------------------------------------------------ ends


LONG = ("generate", "-q", "-m", "ar", "--ignore-eos", "-n", "1500", "def f(x):")


def running() -> tuple[list[Forked], bytes]:
    """Two processes that generate, and the first output."""
    started = commands(*LONG)
    stdout: Any = started[0].stdout
    return started, os.read(stdout.fileno(), 1)


def ended(started: list[Forked]) -> tuple[int, bytes, bytes]:
    """The exit code and the streams of process 0, once no process runs; process 1 must have written nothing."""
    code = started[0].wait(15)
    out, err = started[0].communicate(1)
    assert wait_until(lambda: not is_running(started[1].pid)), "process 1 outlives process 0"
    assert started[1].communicate(5) == (b"", b"")
    return code, out, err


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_the_death_of_another_process_is_one_line(number: signal.Signals) -> None:
    started, _ = running()
    started[1].send_signal(number)
    code, _, err = ended(started)
    assert (code, err.count(b"\n")) == (1, 1), err
    assert err.startswith(b"error: the run on 2 processes has ended: another of torchrun's processes has ended")


def test_ctrl_c_ends_both_processes() -> None:
    started, first = running()
    for process in reversed(started):  # torchrun passes it on to both
        process.send_signal(signal.SIGINT)
    code, out, err = ended(started)
    assert (code, err) == (130, b"")
    assert (first + out).endswith(b"\n")


@pytest.mark.slow
def test_the_first_process_killed_leaves_none() -> None:
    started, _ = running()
    started[0].send_signal(signal.SIGKILL)
    assert ended(started)[0] == -signal.SIGKILL


def test_bad_input_is_one_line() -> None:
    started = commands("generate", "-t", "/nonexistent/model", "hello")
    code, out, err = started[0].wait(15), *started[0].communicate(1)
    assert (code, out, err.count(b"\n")) == (2, b"", 1)
    assert started[1].wait(5) == 0, "process 1 does not wait for a store that process 0 no longer serves"


def test_a_process_that_runs_out_of_memory_is_one_line(pair_of: Callable[..., Pair]) -> None:
    models = folders(pair_of("llama", "near"))
    pair = RankPair(TEST_PASSES="40")
    for _ in range(2):
        with pytest.raises(specgen.SpecgenError, match=r"on 2 processes has ended: process 1: out of memory"):
            pair.ask(models, "generate", PROMPT, "ar", GREEDY, {})
    assert pair.close() == [0, 0]


@pytest.mark.slow
def test_bad_input_is_passed_on_to_a_process_that_is_late() -> None:
    started = commands("generate", "-t", "/nonexistent/model", "hello")
    started[1].send_signal(signal.SIGSTOP)
    stderr: Any = started[0].stderr
    assert os.read(stderr.fileno(), 6) == b"error:"
    assert not wait_until(lambda: started[0].poll() is not None, 2), "process 0 waits for process 1"
    started[1].send_signal(signal.SIGCONT)
    assert [process.wait(15) for process in started] == [2, 0]


@pytest.mark.slow
def test_a_process_that_stands_still_ends_the_run() -> None:
    pair = RankPair(silence=3)
    try:
        assert pair.ask((None, None), "generate", PROMPT, "ar", GREEDY, {})
        pair.start((None, None), "generate", PROMPT, "ar", SamplingParams(max_new_tokens=900, ignore_eos=True), {})
        assert not pair.answered(0.2)
        assert pair.processes[1].pid is not None
        os.kill(pair.processes[1].pid, signal.SIGSTOP)
        assert wait_until(lambda: pair.processes[0].exitcode is not None, 30)
        assert pair.processes[0].exitcode == 1
    finally:
        for process in pair.processes:
            process.kill()


# ------------------------------------------------------------------ torchrun itself


def torchrun(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "specgen", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def own_lines(err: bytes) -> list[bytes]:
    return [line for line in err.splitlines() if line.startswith(b"error: ")]


@pytest.mark.slow
def test_torchrun_runs_a_command_once() -> None:
    out, err = torchrun("--help").communicate(timeout=60)
    assert (out.count(b"Usage:"), own_lines(err)) == (1, [])
    run = torchrun("generate", "-q", "-n", "8", "def f(x):")
    assert run.communicate(timeout=60)[0].count(b"\n") >= 1
    assert run.returncode == 0
    run = torchrun("generate", "-m", "nope", "hello")
    assert len(own_lines(run.communicate(timeout=60)[1])) == 1
    assert run.returncode == 1, "torchrun's own exit code"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_torchrun_leaves_no_process(number: signal.Signals) -> None:
    run = torchrun(*LONG)
    assert run.stdout is not None
    run.stdout.read(1)
    children = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
    assert len(children) == 2
    run.send_signal(number)
    _, err = run.communicate(timeout=60)
    assert wait_until(lambda: not any(map(is_running, children)))
    assert len(own_lines(err)) == (number != signal.SIGINT)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_one_gpus_output() -> None:
    command = ["generate", "-q", "--dtype", "float32", "--device", "cuda", "-n", "24", "def fibonacci(n):"]
    alone = subprocess.run([sys.executable, "-m", "specgen", *command], stdout=subprocess.PIPE, timeout=120, check=True)
    assert torchrun(*command).communicate(timeout=120)[0] == alone.stdout
