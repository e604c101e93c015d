"""No wasted work on a GPU. A CPU's tensors are taken for a GPU's, or operators are recorded, as no GPU is needed."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import TINY, native_model
from native_configs import sparse
from safetensors.torch import save_file
from static_checks import random_model, random_tokens
from torch.utils._python_dispatch import TorchDispatchMode

import specgen
from specgen.base.errors import RunError
from specgen.base.types import Context, Draft, Round, SamplingParams, Verdict
from specgen.decoding import logits_ops
from specgen.decoding.draft_chain import DeviceNumbers, DraftChain
from specgen.decoding.run import Clock
from specgen.decoding.verifiers import GreedyVerifier
from specgen.engine import devices
from specgen.engine.forward_pass import ModelOutput
from specgen.engine.generation_config import GenerationConfig
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native import weight_files
from specgen.engine.native.masks import ChainMasks
from specgen.engine.native.weight_files import WeightFiles
from specgen.pair.figures import Summary
from specgen.view.generation import footer

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@contextmanager
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Code takes the CPU's tensors for an accelerator's."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cpu", False)
        yield


class Calls(TorchDispatchMode):
    """Records the operators and their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))


def count_transfers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each copy of numbers to the host."""
    found: list[int] = []
    for name in ("tolist", "item"):
        original = getattr(torch.Tensor, name)

        def counted(tensor: torch.Tensor, original: Callable[..., Any] = original) -> Any:
            found.append(tensor.numel())
            return original(tensor)

        monkeypatch.setattr(torch.Tensor, name, counted)
    return found


# ------------------------------------------------------------------ sampling


@pytest.mark.parametrize("rows", [1, 6])
def test_after_top_k_only_its_tokens_are_sorted(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(rows, 5000, generator=torch.Generator().manual_seed(rows)) * 3
    with as_on_a_gpu(monkeypatch), Calls() as mode:
        found = logits_ops.warp(logits, SamplingParams(temperature=0.8, top_k=20, top_p=0.7))
    sorted_rows = [args[0].shape[1] for name, args in mode.calls if name in ("sort", "argsort", "msort")]
    assert max(sorted_rows, default=0) <= 20 + logits_ops.TIES  # by their ids, after the top k are found
    assert max(args[1] for name, args in mode.calls if name == "topk") <= 20 + logits_ops.TIES
    kept = (logits / 0.8).topk(20)
    probs = kept.values.softmax(-1)
    nucleus = probs.cumsum(-1) - probs < 0.7
    expected = torch.zeros_like(logits).scatter_(1, kept.indices, probs * nucleus / (probs * nucleus).sum(-1, keepdim=True))
    assert torch.allclose(found, expected, atol=1e-6)


def test_tokens_as_likely_as_the_last_of_the_top_k_are_kept() -> None:
    logits = torch.tensor([[5.0, 4.0, *[3.0] * 7, *[0.0] * 300]])
    probs = logits_ops.warp(logits, SamplingParams(temperature=1.0, top_k=3, top_p=0.999))
    assert (probs > 0).sum() == 9


# ------------------------------------------------------------------ drafting and verifying


def test_a_drafts_entropies_are_copied_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    expected, _ = logits_ops.entropy_and_top_prob(rows)
    transfers = count_transfers(monkeypatch)
    with as_on_a_gpu(monkeypatch):
        chain = DraftChain(SamplingParams(), 50, torch.Generator(), frozenset())
        for row in rows:
            chain.append(row)
        draft = chain.draft("length")
        assert len(transfers) == len(rows), "one for each token"
        assert isinstance(draft.entropies, DeviceNumbers)
        assert list(draft.entropies) == pytest.approx(expected.tolist())
        assert len(draft.part(1).entropies) == 3
    with pytest.raises(RunError, match="NaN"), as_on_a_gpu(monkeypatch):
        chain.append(torch.tensor([0.0, math.nan, 1.0]))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_ties_of_the_targets_choice_are_counted_in_half_precision(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.tensor([[1.0, 3.0, 3.0], [2.0, 1.0, 0.0], [7.0, 0.0, 7.0], [5.0, 5.0, 5.0]])
    draft = Draft.chain([1, 0, 1], stop_reason="length")  # its third token is rejected, so the last row decides nothing
    transfers = count_transfers(monkeypatch)
    for dtype, ties in ((torch.bfloat16, 2), (torch.float32, 0)):
        if on_gpu:
            with as_on_a_gpu(monkeypatch):
                transfers.clear()
                verdict = GreedyVerifier().verify(draft, ModelOutput(rows.to(dtype)))
                assert len(transfers) == 1
        else:
            verdict = GreedyVerifier().verify(draft, ModelOutput(rows.to(dtype)))
        assert (verdict.path, verdict.token, verdict.ties) == ((0, 1), 0, ties)


def test_ties_are_in_the_summary_and_its_line() -> None:
    rounds = [
        Round(0, "prefill", Draft(), Verdict((), 3, None, ties=1)),
        Round(1, "sequential", Draft(), Verdict((), 3, None, ties=1)),
    ]
    summary = Summary("ar", rounds)
    assert summary.as_dict("", "eos")["ties"] == 2
    assert "2 ties in the target's logits" in footer(summary, [], 200).plain
    summary.include(summary.as_dict("", "eos") | {"drafts": 0})
    assert summary.ties == 4
    assert "ties" not in footer(Summary("ar", [Round(0, "prefill", Draft(), Verdict((), 3))]), [], 200).plain


def test_lists_are_uploaded_without_waiting_for_the_device() -> None:
    """`torch.tensor(list, device=...)` copies from memory that is not pinned, and waits for all the work before it."""
    for path in (Path(specgen.__file__).parent / "decoding").glob("*.py"):
        assert not re.search(r"torch\.tensor\([^\n]*device=", path.read_text()), path


def test_penalties_need_as_many_uploads_for_one_row_as_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the drafted tokens and the forbidden ones of all rows, one for several new tokens of the context."""
    uploads: list[int] = []
    original = PenaltyProcessor._indices
    monkeypatch.setattr(PenaltyProcessor, "_indices", lambda self, places: uploads.append(1) or original(self, places))
    options: dict[str, Any] = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2}
    for biases, most in ((None, 1), ({(3, 4): 1.0, (5,): 2.0}, 2)):
        config = GenerationConfig(**options, sequence_bias=biases)
        for drafted in (0, 1, 7):
            processor, context = PenaltyProcessor(config, {1}, 40, torch.device("cpu")), Context([3, 4, 5, 3])
            for new in ([9, 8], [7], [3, 4]):
                context.extend(new)
                uploads.clear()
                processor(torch.zeros(drafted + 1, 40), context, [3] * drafted, range(-1, drafted - 1), 0)
                assert len(uploads) <= most + (len(new) > 1)


# ------------------------------------------------------------------ attention


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("mistral", {"sliding_window": 12}), ("gemma3_text", {"sliding_window": 12, "sliding_window_pattern": 2})],
)
def test_a_device_with_a_causal_kernel_gets_no_masks_for_chains(
    family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(family, **changes)
    ids = random_tokens(random.Random(1), 30)
    calls = (
        (Context(ids[:8]), ids[8:11]),
        (Context(ids[:12]), ids[12:16]),
        (Context(ids[:20]), ids[20:27]),
        (Context(ids[:21]), []),
    )
    expected = [ModelRunner(model).logits(*call).logits for call in calls]
    model.inputs.has_causal_kernel = True
    windows: list[int | None] = []
    original = ChainMasks.__call__
    monkeypatch.setattr(ChainMasks, "__call__", lambda self, *args: windows.append(self._window) or original(self, *args))
    runner = ModelRunner(model)
    for call, rows in zip(calls, expected, strict=True):
        assert torch.allclose(runner.logits(*call).logits, rows, atol=1e-5)
    assert None not in windows, "only windows that exclude something need a mask"
    assert bool(windows) == (family != "llama")


# ------------------------------------------------------------------ timing


class ManualTimer:
    """A device whose work ends when the test says so; it counts how often the host waits."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.waits = 0

    def start(self) -> None:
        pass

    def mark(self) -> Callable[[], float]:
        end = self.ends.pop(0)

        def ended() -> float:
            self.waits += 1
            return end

        return ended


def test_the_clock_reads_the_devices_times_after_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((10.0, 11.0, 12.5, 15.0, 16.0))  # start, draft, draft beside the pass, sample, other
    monkeypatch.setattr("specgen.decoding.run.time.perf_counter", lambda: next(now))
    timer = ManualTimer()
    timer.ends = [14.0]
    clock = Clock(timer)
    clock.lap("draft")
    clock.lap("verify", on_device=True)
    clock.lap("draft")  # ends while the device still computes
    clock.lap("sample")
    clock.move(0.25, "draft", "policy")
    assert timer.waits == 0
    found = clock.seconds()
    assert timer.waits == 1
    assert found | {"other": 0.0} == dict.fromkeys(found, 0.0) | {
        "draft": 0.75,
        "policy": 0.25,
        "verify": 3.0,
        "sample": 1.0,
    }
    assert found["other"] == 1.0


# ------------------------------------------------------------------ loading, devices


def test_weights_are_read_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    opened: list[str] = []

    def safe_open(path: Path, framework: str, device: str = "cpu") -> Any:
        opened.append(device)
        return original(path, framework)

    original = weight_files.safe_open
    monkeypatch.setattr(weight_files, "safe_open", safe_open)
    files = WeightFiles(tmp_path, "a model", torch.device("cuda", 1))
    assert "norm.weight" in files
    files._file(next(iter(files._paths.values())))
    assert opened[-1] == "cuda:1"


@pytest.mark.parametrize(
    ("count", "name", "target", "given", "expected"),
    [
        (2, "auto", "cuda:0", None, "cuda:1"),
        (1, "auto", "cuda:0", None, "cuda:0"),
        (2, "cuda", "cuda:0", None, "cuda:0"),
        (2, "auto", "cpu", None, "cpu"),
        (2, "auto", "cuda:0", "cpu", "cpu"),
    ],
)
def test_auto_puts_the_draft_on_a_second_gpu(
    count: int, name: str, target: str, given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert devices.pick_draft_device(given, name, torch.device(target)) == torch.device(expected)


# ------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_causal_kernels_give_the_logits_of_masks(family: str) -> None:
    ids = random_tokens(random.Random(1), 100)
    outputs = []
    for has_kernel in (False, True):
        model = model_on_gpu(family)
        assert model.inputs.has_causal_kernel
        model.inputs.has_causal_kernel = has_kernel
        runner = ModelRunner(model)
        outputs.append(torch.cat([runner.logits(Context(ids[:n]), ids[n : n + 7]).logits.clone() for n in (5, 70, 90)]).float())
    assert (outputs[0] - outputs[1]).abs().max() < 0.05 * outputs[0].abs().max()


def model_on_gpu(family: str) -> Any:
    return native_model(sparse(family, max_position_embeddings=2048), torch.device("cuda", 0), torch.bfloat16)


@pytest.mark.gpu
@ON_GPU
def test_events_say_when_the_device_has_finished() -> None:
    device = torch.device("cuda", 0)
    timer = devices.CudaTimer(device)
    numbers = torch.randn(4000, 4000, device=device)
    torch.cuda.synchronize()
    timer.start()
    start = time.perf_counter()
    for _ in range(20):
        numbers = (numbers @ numbers).clamp_(-1, 1)
    ended = timer.mark()
    queued = time.perf_counter()
    torch.cuda.synchronize()
    finished = time.perf_counter()
    assert queued < ended() <= finished + 1e-3
    assert ended() > start


@pytest.mark.gpu
@ON_GPU
def test_a_cache_that_grows_on_one_stream_keeps_what_another_reads() -> None:
    model = native_model(TINY, torch.device("cuda", 0), torch.bfloat16)
    cache, side = model.new_cache(), torch.cuda.Stream()
    cache.enlarge(4096)
    cache.data.fill_(3.0)
    cache.length = 4096
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        cache.enlarge(8192)
    for _ in range(20):  # would take the old buffer's memory, which the copy still reads
        torch.full_like(cache.data[:, :, :, :4096], 7.0)
    torch.cuda.synchronize()
    assert bool((cache.data[:, :, :, :4096] == 3.0).all())
