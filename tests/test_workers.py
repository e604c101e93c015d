"""PEARL on real models, with the draft in a process or a thread of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_model, save
from processes import is_running, wait_until
from runner_checks import every
from worker_helpers import PROMPT, posix, save_pair

import specgen
from specgen import methods
from specgen.base.errors import RunError, SpecgenError
from specgen.base.types import Round, SamplingParams
from specgen.pair.pair import Pair, pass_costs
from specgen.workers.process import DraftProcess


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair(tmp_path_factory.mktemp("pearl"))


@pytest.fixture(scope="module")
def apart(folders: tuple[str, str]) -> Iterator[Pair]:
    """A pair whose draft runs in a process of its own; its target has penalties."""
    with specgen.load(*folders, device="cpu", dtype="float32") as pair:
        yield pair


def process_of(pair: Pair) -> int:
    worker = pair._worker
    assert worker is not None
    return worker.ready()._process.pid


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices here")
SAMPLED = SamplingParams(max_new_tokens=60, temperature=0.9, top_p=0.95, seed=5, ignore_eos=True)


@posix
@pytest.mark.parametrize("sampling", [SamplingParams(max_new_tokens=60, seed=5), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("given_", every(2, [{}, {"pre_verify": False}, {"policy": "beta-ts"}, {"post_verify": False}]), ids=str)
def test_a_process_and_a_thread_give_the_same_rounds(
    apart: Pair, sampling: SamplingParams, given_: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output does not depend on where the draft runs or how long it takes; penalties apply to it too."""
    there = apart.generate(PROMPT, "pearl", sampling, window=4, **given_)
    assert there.summary["acceptance_rate"] > 0.3
    monkeypatch.setattr(apart, "_worker", None)
    here = apart.generate(PROMPT, "pearl", sampling, window=4, **given_)
    assert [comparable(round_) for round_ in there.rounds] == [comparable(round_) for round_ in here.rounds]
    assert figures(there.rounds) == pytest.approx(figures(here.rounds), abs=1e-4)
    if sampling.greedy:
        assert there.token_ids == apart.generate(PROMPT, "ar", sampling).token_ids


def comparable(round_: Round) -> object:
    """A round without its seconds and figures; tuples become lists in a pipe."""
    draft = round_.draft
    return list(draft.tokens), draft.parents, draft.stop_reason, round_.verdict, round_.mode, round_.policy_state


def figures(rounds: Iterable[Round]) -> list[float]:
    """The figures of all drafted tokens. Processes may differ in the last bits: each chooses its kernels by their speed."""
    return [number for round_ in rounds for number in (*round_.draft.entropies, *round_.draft.top_probs)]


@posix
def test_runs_may_take_turns(apart: Pair) -> None:
    """Each run has its own policy and its own part of the shared memory."""
    other = [1, 30, 31, 8]
    alone = [apart.generate(ids, "pearl", SAMPLED, window=3, policy="beta-ts").token_ids for ids in (PROMPT, other)]
    runs = [apart.rounds(ids, "pearl", SAMPLED, window=3, policy="beta-ts") for ids in (PROMPT, other)]
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


@posix
def test_a_run_that_is_left_early_leaves_the_worker_usable(apart: Pair) -> None:
    threads = torch.get_num_threads()
    run = apart.rounds(PROMPT, "pearl", SAMPLED, window=4)
    next(run), next(run)
    run.close()  # type: ignore[attr-defined]
    assert torch.get_num_threads() == threads
    before = process_of(apart)
    assert len(apart.generate(PROMPT, "pearl", SAMPLED, window=4).token_ids) == 60
    assert process_of(apart) == before


@posix
@pytest.mark.parametrize("moment", [pytest.param("before", marks=pytest.mark.slow), "between"])
def test_a_worker_that_dies_ends_the_run_and_not_the_pair(apart: Pair, moment: str) -> None:
    if moment == "before":
        os.kill(process_of(apart), signal.SIGKILL)
        assert wait_until(lambda: not apart._worker._process.alive)  # type: ignore[union-attr]
    else:
        run = apart.rounds(PROMPT, "pearl", SAMPLED, window=4)
        next(run), next(run)
        os.kill(process_of(apart), signal.SIGKILL)
        with pytest.raises(RunError, match=r"draft worker is gone \(SIGKILL.*-m svip"):
            list(run)
    assert len(apart.generate(PROMPT, "pearl", SAMPLED, window=4).token_ids) == 60, "a new one is started"


@posix
def test_what_fails_in_the_worker_is_told_here(apart: Pair, tmp_path: Path) -> None:
    draft = make_model("llama")
    with torch.no_grad():
        draft.lm_head.weight[3] = float("nan")
    target = save(make_model("llama"), tmp_path / "target")
    with specgen.load(target, save(draft, tmp_path / "draft"), device="cpu", dtype="float32") as pair:
        with pytest.raises(RunError, match="draft model's logits hold NaN"):
            pair.generate(PROMPT, "pearl", window=4)
        pid = process_of(pair)
    assert not is_running(pid), "closing the pair ends it"


@posix
@pytest.mark.slow
def test_the_worker_leaves_with_its_parent_however_that_ends(folders: tuple[str, str]) -> None:
    """The caller's script is not run again by the worker: it prints once."""
    script = f"""
import specgen, sys, time
pair = specgen.load({folders[0]!r}, {folders[1]!r}, device="cpu", dtype="float32")
pair.generate([1, 7, 9], "pearl", window=3)
print(pair._worker.ready()._process.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    assert parent.stdout.read() == ""
    parent.wait()
    assert wait_until(lambda: not is_running(pid))


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
            assert pair.generate(ids, "pearl", sampling, window=4).token_ids == pair.generate(ids, "ar", sampling).token_ids


def test_there_is_no_pearl_without_a_draft_model(folders: tuple[str, str]) -> None:
    with specgen.load(folders[0], device="cpu") as pair, pytest.raises(SpecgenError, match="pearl needs a draft model"):
        pair.rounds(PROMPT, "pearl")


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"window": "0"}, "window is 0"),
        ({"window": "wide"}, "a whole number or auto"),
        ({"pre_verify": "perhaps"}, "true or false"),
        ({"policy": "svipp"}, "did you mean svip"),
        ({"gamma": 3}, "no setting 'gamma'"),
    ],
)
def test_settings_that_make_no_sense(given_: dict[str, object], message: str) -> None:
    with pytest.raises(SpecgenError, match=message):
        methods.resolve(methods.METHODS["pearl"], given_)


def test_the_last_possible_token_is_never_run(tmp_path: Path) -> None:
    """Where rotary frequencies change with the length, it may lie beyond the change: running it would change the logits."""
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0}
    rope = factors | {"partial_rotary_factor": 1.0, "original_max_position_embeddings": 32}
    model = make_model("phi3", sliding_window=None, original_max_position_embeddings=32, rope_parameters=rope)
    folder = save(model, tmp_path)
    with specgen.load(folder, folder, device="cpu", dtype="float32") as pair:
        pair._worker = None
        for window in (1, 3, 4, 7):
            for ids in ([5] * 8, [5, 9, 11, 7, 30, 8]):
                sampling = SamplingParams(max_new_tokens=60, ignore_eos=True)
                expected = pair.generate(ids, "ar", sampling).token_ids
                assert len(expected) == 33 - len(ids)
                assert pair.generate(ids, "pearl", sampling, window=window).token_ids == expected


@pytest.mark.parametrize("length", [1, 60, 100, 126, 127])
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


_PUPPET = """
import sys
from multiprocessing.connection import Connection
from specgen.base.errors import SpecgenError
from specgen.workers.messages import DraftAnswer, DraftRequest, LoadModel
connection = Connection(int(sys.argv[1]))
while True:
    serial, request = connection.recv()
    if isinstance(request, LoadModel):
        connection.send((serial, SpecgenError("no weights") if "broken" in request.folder else None))
    elif isinstance(request, DraftRequest):
        connection.send((serial, DraftAnswer([5], [0.0], [1.0], "length", 0.0)))
"""


@pytest.fixture
def puppet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker without torch or a model that always drafts the same token, for tests of the process alone."""
    start: Any = subprocess.Popen

    def start_puppet(command: list[str], **options: Any) -> Any:
        assert command[2:4] == ["-m", "specgen.workers"]
        return start([*command[:2], "-c", _PUPPET, *command[4:]], **options)

    monkeypatch.setattr("specgen.workers.process.subprocess.Popen", start_puppet)


@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("active", "active")])
def test_the_workers_idle_threads_leave_their_cores_to_others(
    monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    variables: dict[str, str] = {}

    def refuse(*_: object, env: dict[str, str], **__: object) -> None:
        variables.update(env)
        raise OSError("no more processes")

    monkeypatch.setattr("specgen.workers.process.subprocess.Popen", refuse)
    with pytest.raises(RunError, match="the draft worker cannot be started: no more processes"):
        DraftProcess()
    assert variables["OMP_WAIT_POLICY"] == expected
    assert os.environ.get("OMP_WAIT_POLICY") == given


@posix
@pytest.mark.usefixtures("puppet")
def test_the_worker_runs_the_forward_pass_that_the_pair_was_loaded_with(folders: tuple[str, str]) -> None:
    with specgen.load(*folders, device="cpu", dtype="float32", backend="transformers") as pair:
        worker = pair._worker
        assert worker is not None
        assert worker._load.backend == "transformers"


@posix
@pytest.mark.usefixtures("puppet")
def test_after_a_load_that_failed_a_second_try_fails_too(tmp_path: Path) -> None:
    target, draft = (save(make_model("llama", seed=seed), tmp_path / name) for seed, name in enumerate(("target", "broken")))
    with specgen.load(target, draft, device="cpu", dtype="float32") as pair:
        for _ in range(2):
            with pytest.raises(SpecgenError, match="no weights"):
                pair.prepare(pair.request(PROMPT, "pearl", window=4))


@posix
@pytest.mark.usefixtures("puppet")
def test_a_run_behind_a_closed_pair_touches_nobodys_files(folders: tuple[str, str], tmp_path: Path) -> None:
    pair = specgen.load(*folders, device="cpu", dtype="float32")
    run = pair.rounds(PROMPT, "pearl", SamplingParams(max_new_tokens=60, ignore_eos=True), window=4)
    next(run), next(run)
    pid = process_of(pair)
    pair.close()
    assert not is_running(pid)
    others = [(tmp_path / str(number)).open("w+b") for number in range(12)]  # they reuse the closed descriptors
    with pytest.raises(RunError, match="the pair of models is closed"):
        next(run)
    assert [file.read() for file in others] == [b""] * 12
    for file in others:
        file.close()


@posix
@pytest.mark.usefixtures("puppet")
@pytest.mark.parametrize("method", ["svip", "lookup", "pearl"])
def test_a_closed_pair_says_so_and_a_run_that_has_begun_can_be_finished(folders: tuple[str, str], method: str) -> None:
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True)
    settings: dict[str, object] = {"window": 4} if method == "pearl" else {}
    pair = specgen.load(*folders, device="cpu", dtype="float32")
    request = pair.request(PROMPT, method, sampling, **settings)
    run = pair.rounds(PROMPT, method, sampling, **settings)
    next(run)
    pair.close()
    pair.close()
    if method == "pearl":
        with pytest.raises(RunError, match=r"the pair of models is closed\. Finish a run before"):
            next(run)
    else:
        assert sum(len(round_.token_ids) for round_ in run) > 20
    for make in (pair.request, pair.generate, pair.rounds):
        with pytest.raises(SpecgenError, match="the pair of models is closed"):
            make(PROMPT, method, sampling, **settings)
    for use in (pair.prepare, pair.run):
        with pytest.raises(SpecgenError, match="the pair of models is closed"):
            use(request)
    with pytest.raises(SpecgenError, match="the pair of models is closed"):
        pass_costs(pair, 4)


@posix
def test_threads_are_as_before_when_runs_took_turns(apart: Pair) -> None:
    torch.set_num_threads(2)
    try:
        first, second = (apart.rounds(PROMPT, "pearl", SAMPLED, window=4) for _ in range(2))
        next(first), next(second)
        first.close()  # type: ignore[attr-defined]
        list(second)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@posix
def test_a_run_that_cannot_begin_says_why_and_spares_the_others(apart: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    going = apart.rounds(PROMPT, "pearl", SAMPLED, window=4)
    next(going), next(going)
    with monkeypatch.context() as patch:
        patch.setattr(
            "specgen.workers.process_worker.os.ftruncate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left"))
        )
        with pytest.raises(RunError, match="cannot be started: No space left"):
            list(apart.rounds(PROMPT, "pearl", SAMPLED, window=900))
    assert sum(len(round_.token_ids) for round_ in going) > 40


@posix
def test_a_run_whose_failed_beginning_another_run_has_skipped_says_so(apart: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    worker: Any = apart._worker
    make: Any = worker.drafter

    def without_settings(*given: Any) -> Any:
        made = make(*given)
        made._settings = None  # the worker cannot make a policy of it
        return made

    with monkeypatch.context() as patch:
        patch.setattr(worker, "drafter", without_settings)
        broken = apart.rounds(PROMPT, "pearl", SAMPLED, window=4)
    next(broken)
    assert len(apart.generate(PROMPT, "pearl", SAMPLED, window=4).token_ids) == 60
    with pytest.raises(RunError, match="could not begin this run"):
        list(broken)


@posix
def test_an_interrupt_while_a_run_begins_leaves_the_threads_as_before(apart: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    apart.generate(PROMPT, "pearl", SAMPLED, window=4)  # the process has been started
    set_threads = torch.set_num_threads
    set_threads(2)

    def interrupted(threads: int) -> None:
        set_threads(threads)
        monkeypatch.undo()
        raise KeyboardInterrupt

    try:
        monkeypatch.setattr("specgen.workers.process_worker.torch.set_num_threads", interrupted)
        with pytest.raises(KeyboardInterrupt):
            apart.generate(PROMPT, "pearl", SAMPLED, window=4)
        assert torch.get_num_threads() == 2
    finally:
        set_threads(1)


def test_a_worker_that_cannot_be_started_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("specgen.workers.process.subprocess.Popen", refuse)
    with pytest.raises(RunError, match=r"cannot be started: Resource temporarily unavailable.*-m svip"):
        DraftProcess()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("window", ["auto", 1, 4])
def test_on_a_gpu_the_draft_has_a_stream_of_its_own(folders: tuple[str, str], window: object) -> None:
    with specgen.load(*folders, device="cuda", dtype="float32") as pair:
        expected = pair.generate(PROMPT, "ar", SamplingParams(max_new_tokens=60)).token_ids
        assert pair.generate(PROMPT, "pearl", SamplingParams(max_new_tokens=60), window=window).token_ids == expected
        first, second = (pair.generate(PROMPT, "pearl", SAMPLED, window=4).token_ids for _ in range(2))
        assert first == second


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize(
    ("draft", "backend"),
    [
        ("cpu", "native"),
        ("cpu", "transformers"),
        pytest.param("cuda:1", "native", marks=TWO_GPUS),
        pytest.param("cuda:1", "transformers", marks=TWO_GPUS),
    ],
)
def test_a_draft_on_another_device_than_the_targets(folders: tuple[str, str], draft: str, backend: str) -> None:
    """This thread drafts while the target's graph runs. Without graphs the target's pass keeps it busy: a process drafts then."""
    with specgen.load(*folders, device="cuda:0", draft_device=draft, dtype="float32", backend=backend) as pair:
        expected = pair.generate(PROMPT, "ar", SamplingParams(max_new_tokens=60)).token_ids
        assert pair.generate(PROMPT, "pearl", SamplingParams(max_new_tokens=60)).token_ids == expected
        for sampling in (SAMPLED, replace(SAMPLED, top_k=3)):
            first, second = (pair.generate(PROMPT, "pearl", sampling, window=4).token_ids for _ in range(2))
            assert first == second
        assert (pair._worker is None) == (backend == "native")
