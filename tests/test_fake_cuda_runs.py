"""Models and whole runs on pretended GPUs: the tokens are the CPU's, and no access to memory is left without an order."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from fake_cuda import fake_cuda, gpus  # noqa: F401  a fixture
from fake_gpus import Gpus
from runner_checks import every
from scripted_models import ids_of, scripted_run
from specgen.engine.native.kernels.torch_kernels import TORCH
from specgen.engine.native.static_forward import use_cuda_graphs
from static_checks import random_model, random_tokens

import specgen
from specgen.base.errors import RunError
from specgen.base.types import Context, SamplingParams
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native import static_forward
from specgen.engine.native.native_model import NativeModel
from specgen.workers.draft_streams import streams_for
from specgen.workers.stream_worker import StreamWorker

GPU = "cuda:0"
SMALL = {"num_hidden_layers": 2}
SAMPLED = SamplingParams(max_new_tokens=16, temperature=0.8, top_k=20, top_p=0.9)
PROMPT = random_tokens(random.Random(3), 30)


@pytest.fixture(autouse=True)
def without_fused_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes use torch's operators: Triton's interpreter takes a minute for a run."""
    monkeypatch.setattr(static_forward, "checked_kernels", lambda *_: TORCH)


class OnGpus:
    """A random target and a near copy as its draft, which run as CUDA graphs; the target alone on the CPU gives the tokens."""

    def __init__(self, draft_device: str = GPU, dtype: torch.dtype = torch.float32) -> None:
        self.models = [random_model("llama", dtype, device, **SMALL) for device in (GPU, draft_device)]
        norm = self.models[1].parts.norm
        noise = torch.randn(norm.shape, generator=torch.Generator().manual_seed(1)) * 0.4
        norm.add_(noise.to(norm.device, norm.dtype))  # so that some drafts are accepted and some are not
        for model in self.models:
            if model.device.type == "cuda":
                use_cuda_graphs(model)
        self.target, self.draft = map(ModelRunner, self.models)
        self.worker = StreamWorker(self.draft, streams_for(self.draft.device, self.target.device))

    def run(self, method: str, sampling: SamplingParams, prompt: list[int] = PROMPT, **settings: Any) -> Any:
        worker: Any = self.worker if method == "pearl" else None
        return scripted_run(method, settings, self.target, self.draft, sampling, prompt=prompt, worker=worker)


def expected(count: int, prompt: list[int] = PROMPT) -> list[int]:
    """The greedy tokens on the CPU."""
    run = scripted_run(
        "ar", {}, ModelRunner(random_model("llama", **SMALL)), None, SamplingParams(max_new_tokens=count), prompt=prompt
    )
    return ids_of(run.rounds())


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count)


METHODS = [
    "svip",
    "pearl",
    "ar",
    "sd",
    "heuristic",
    "beta-ts",
    "adaptive",
    "lookup",
    "lookahead",
    "ouroboros",
    "spectr",
    "specinfer",
]
OFTEN = {("pearl", GPU)}


@pytest.mark.parametrize(
    ("method", "draft_device"),
    [
        pytest.param(method, device, marks=() if (method, device) in OFTEN else pytest.mark.slow)
        for method in METHODS
        for device in (GPU, "cuda:1", "cpu")
    ],
)
def test_greedy_tokens_are_those_of_the_cpu(method: str, draft_device: str, gpus: Gpus) -> None:  # noqa: F811
    settings = {"window": 3} if method == "pearl" else {}
    rounds = list(OnGpus(draft_device).run(method, greedy(16), **settings).rounds())
    assert ids_of(rounds) == expected(16)
    if method in ("sd", "svip", "pearl"):
        assert 1 < len(rounds) < 16, "no draft was accepted"
    assert gpus.counts["replays"]
    torch.cuda.synchronize()


@pytest.mark.slow
@pytest.mark.parametrize("draft_device", [GPU, "cuda:1", "cpu"])
@pytest.mark.parametrize("method", [*METHODS, "mtad", "bild"])
def test_sampled_runs_are_in_order(method: str, draft_device: str, gpus: Gpus) -> None:  # noqa: F811
    settings = {"window": 3} if method == "pearl" else {}
    pair = OnGpus(draft_device)
    for _ in range(2):
        assert len(ids_of(pair.run(method, SAMPLED, **settings).rounds())) == 16
    torch.cuda.synchronize()


@pytest.mark.slow
@pytest.mark.parametrize("draft_device", [GPU, "cuda:1"])
def test_caches_that_grow_in_a_run_on_two_streams(draft_device: str, gpus: Gpus) -> None:  # noqa: F811
    prompt = random_tokens(random.Random(3), 470)
    pair, sizes = OnGpus(draft_device), set()
    found = []
    for round_ in pair.run("pearl", greedy(60), prompt, window=3).rounds():
        found += round_.token_ids
        sizes.add(tuple(runner.cache.data.shape[3] for runner in (pair.target, pair.draft)))
    assert len(sizes) > 1
    assert found == expected(60, prompt)
    torch.cuda.synchronize()


@pytest.mark.parametrize("method", ["svip", "pearl"])
@pytest.mark.slow
@pytest.mark.parametrize("when", range(1, 900, 37))
def test_a_run_after_an_interrupted_one_gives_the_same_tokens(method: str, when: int, gpus: Gpus) -> None:  # noqa: F811
    settings = {"window": 3} if method == "pearl" else {}
    pair, left = OnGpus(), [10**9]
    launch = gpus.launch

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return launch(*args, **kwargs)

    gpus.launch = interrupted  # type: ignore[method-assign]
    first = pair.run(method, greedy(12), **settings).rounds()
    next(first)
    left[0] = when
    with suppress(KeyboardInterrupt):
        list(first)
        list(pair.run(method, greedy(40), random_tokens(random.Random(when), 20), **settings).rounds())
    left[0] = 10**9
    assert ids_of(pair.run(method, greedy(16), **settings).rounds()) == expected(16)
    torch.cuda.synchronize()


@pytest.mark.parametrize("error", every(3, ["a synchronisation", "memory", "its beginning"]))
def test_without_graphs_after_a_failed_capture(
    error: str,
    gpus: Gpus,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if gpus.capture is not None:
                if error == "memory":
                    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 bytes")
                torch.cuda.synchronize()
            return function(*args, **kwargs)

        return run

    pair = OnGpus()
    if error == "its beginning":

        def refuse(*_: Any) -> None:
            raise RuntimeError("CUDA error: operation not supported")

        monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", refuse)
    else:
        monkeypatch.setattr(NativeModel, "norm_and_head", fails(NativeModel.norm_and_head))
    assert ids_of(pair.run("svip", greedy(9)).rounds()) == expected(9)
    lines = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 2, "one for each model"
    assert all("no CUDA graphs from here on" in line for line in lines)
    torch.cuda.synchronize()


@pytest.mark.slow
def test_memory_that_runs_out_in_a_pass(gpus: Gpus) -> None:  # noqa: F811
    pair = OnGpus()
    rounds = pair.run("svip", greedy(16)).rounds()
    next(rounds)
    gpus.memory = gpus.used[0] + 100
    with pytest.raises(torch.cuda.OutOfMemoryError):
        pair.target.logits(Context(random_tokens(random.Random(1), 600)))
    gpus.memory = 1 << 40
    assert ids_of(pair.run("svip", greedy(9)).rounds()) == expected(9)


@pytest.mark.slow
def test_weights_that_do_not_fit(pair: tuple[str, ...]) -> None:
    with fake_cuda(1, memory=20_000), pytest.raises(RunError, match="does not fit into the memory of cuda:0"):
        specgen.load(pair[1], pair[3], device="cuda", dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("draft_device", [GPU, "cuda:1"])
def test_bfloat16_with_the_causal_kernel(draft_device: str, gpus: Gpus) -> None:  # noqa: F811
    pair = OnGpus(draft_device, torch.bfloat16)
    context = Context(random_tokens(random.Random(2), 100))
    found = pair.target.logits(context).logits.cpu().float()
    wanted = ModelRunner(random_model("llama", torch.bfloat16, **SMALL)).logits(context).logits.float()
    assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()
    for method, settings in (("svip", {}), ("pearl", {"window": 3})):
        assert len(ids_of(pair.run(method, greedy(12), **settings).rounds())) == 12
    torch.cuda.synchronize()


def test_hidden_states_of_another_stream_are_kept_until_they_are_copied(gpus: Gpus) -> None:  # noqa: F811
    runner, rng = ModelRunner(random_model("llama", device=GPU)), random.Random(1)
    runner.logits(Context(random_tokens(rng, 40)))
    side = torch.cuda.Stream(GPU)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        runner.logits(Context(random_tokens(rng, 40)))
    gpus.check()
    torch.cuda.synchronize()
