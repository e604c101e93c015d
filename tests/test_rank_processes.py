"""A target split over two processes (gloo) gives what one process gives, and no process outlives
the run."""

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
from kernel_folder import shared_folder
from processes import Forked, is_running, wait_until
from rank_processes import RankPair, commands

import specgen
from specgen.base.types import SamplingParams
from specgen.engine.kernels import library
from specgen.pair.pair import Pair

PROMPT = [1, 20, 5, 9, 14, 33, 7, 5, 9, 14]
TEXT = "def fibonacci(n):\n"
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(max_new_tokens=24, temperature=0.8, seed=5, ignore_eos=True)
RUNS: list[tuple[str, str, dict[str, object], SamplingParams]] = [
    *((family, "sd", {"k": 3, "width": 2}, GREEDY) for family in ("llama", "olmo2")),
    ("llama", "svip", {}, DRAWN),
]
SLOW: list[tuple[str, str, dict[str, object], SamplingParams]] = [
    ("llama", "pearl", {"window": 3}, GREEDY),
    ("llama", "selfsd", {"skip": "1"}, GREEDY),
    ("gemma2", "specinfer", {"k": 3, "drafts": 2}, GREEDY),
]
RUNS_AND_SLOW = [*RUNS, *(pytest.param(*run, marks=pytest.mark.slow) for run in SLOW)]


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPair]:
    pair = RankPair()
    yield pair
    assert pair.close() == [0, 0]


def folders(pair: Pair) -> tuple[str | None, str | None]:
    return str(pair.target.folder), None if pair.draft is None else str(pair.draft.folder)


@pytest.mark.parametrize(("family", "method", "settings", "sampling"), RUNS_AND_SLOW)
def test_two_processes_give_one_process_output(
    ranks: RankPair,
    pair_of: Callable[..., Pair],
    family: str,
    method: str,
    settings: Any,
    sampling: SamplingParams,
) -> None:
    pair = pair_of(family, "near")
    expected = pair.generate(PROMPT, method, sampling, **settings).token_ids
    assert ranks.ask(folders(pair), "generate", PROMPT, method, sampling, settings) == expected
    assert ranks.ask(folders(pair), "likelihood", PROMPT, [4, 5, 6]) == pytest.approx(
        pair.log_likelihood(PROMPT, [4, 5, 6]), abs=1e-3
    )


@pytest.mark.parametrize(
    "method",
    [
        "eesd-tree",
        "eagle",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("eesd", "medusa")),
    ],
)
def test_trained_parts_work_on_two_processes(ranks: RankPair, demo_pair: Pair, method: str) -> None:
    """Those of the bundled target: on rank 0 alone, from hidden states, embeddings and an LM head
    that are shared."""
    expected = demo_pair.generate(TEXT, method, GREEDY).token_ids
    assert ranks.ask((None, None), "generate", TEXT, method, GREEDY, {}) == expected


def test_what_cannot_run_is_refused_and_the_processes_stay_in_step(
    ranks: RankPair, pair_of: Callable[..., Pair]
) -> None:
    with pytest.raises(specgen.SpecgenError, match="glide reads the target's keys"):
        ranks.ask((None, None), "generate", TEXT, "glide", GREEDY, {})
    with pytest.raises(
        specgen.SpecgenError, match=r"cannot be split over torchrun's processes.*without torchrun"
    ):
        ranks.ask(folders(pair_of("gpt2", "near")), "generate", PROMPT, "ar", GREEDY, {})
    assert ranks.ask((None, None), "generate", TEXT, "ar", GREEDY, {})


def test_each_process_holds_its_part(ranks: RankPair, pair_of: Callable[..., Pair]) -> None:
    pair = pair_of("llama", "near")
    ranks.ask(folders(pair), "generate", PROMPT, "ar", GREEDY, {})
    assert ranks.ask(folders(pair), "facts") == {"kv_heads": 1, "heads": 2, "embedding": [48, 32]}


# ------------------------------------------------------------------ ends


LONG = ("generate", "-q", "-m", "ar", "--ignore-eos", "-n", "1500", "def f(x):")


def running() -> tuple[list[Forked], bytes]:
    """Two processes that generate, and the first output."""
    started = commands(*LONG)
    stdout: Any = started[0].stdout
    return started, os.read(stdout.fileno(), 1)


def ended(started: list[Forked]) -> tuple[int, bytes, bytes]:
    """The exit code and the streams of process 0, once no process runs; process 1 must have written
    nothing."""
    code = started[0].wait(15)
    out, err = started[0].communicate(1)
    assert wait_until(lambda: not is_running(started[1].pid)), "process 1 outlives process 0"
    assert started[1].communicate(5) == (b"", b"")
    return code, out, err


@pytest.mark.skipif(library.kernels() is None, reason="there are no kernels here")
def test_each_process_loads_the_compiled_kernels(
    ranks: RankPair, pair_of: Callable[..., Pair]
) -> None:
    """None compiles them again: the file is the one that the tests have compiled."""
    pair = pair_of("llama", "near")
    ranks.ask(folders(pair), "generate", PROMPT, "ar", GREEDY, {})
    (file,) = Path(os.environ["SPECGEN_CACHE"], "kernels").glob(f"{library.kind()}-*.so")
    compiled = shared_folder() / "kernels" / file.name
    assert file.stat().st_mtime == compiled.stat().st_mtime
    for process in ranks.processes:
        assert str(file) in Path(f"/proc/{process.pid}/maps").read_text()


def test_the_death_of_another_process_is_one_line() -> None:
    started, _ = running()
    started[1].send_signal(signal.SIGKILL)
    code, _, err = ended(started)
    assert (code, err.count(b"\n")) == (1, 1), err
    assert err.startswith(
        b"error: the run on 2 processes has ended: another of torchrun's processes has ended"
    )


def test_ctrl_c_ends_both_processes() -> None:
    started, first = running()
    for process in reversed(started):  # torchrun passes it on to both
        process.send_signal(signal.SIGINT)
    code, out, err = ended(started)
    assert (code, err) == (130, b"")
    assert (first + out).endswith(b"\n")


def test_bad_input_is_one_line() -> None:
    started = commands("generate", "-t", "/nonexistent/model", "hello")
    code, out, err = ended(started)
    assert (code, out, err.count(b"\n")) == (2, b"", 1)
    assert started[1].wait(5) == 0


# ------------------------------------------------------------------ torchrun itself


def torchrun(*arguments: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "specgen",
        *arguments,
    ]
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


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_one_gpus_output() -> None:
    command = [
        "generate",
        "-q",
        "--dtype",
        "float32",
        "--device",
        "cuda",
        "-n",
        "24",
        "def fibonacci(n):",
    ]
    alone = subprocess.run(
        [sys.executable, "-m", "specgen", *command], stdout=subprocess.PIPE, timeout=120, check=True
    )
    assert torchrun(*command).communicate(timeout=120)[0] == alone.stdout
