"""Kernels and captured passes that fail or compute something else are not used, and a warning says so. Needs no triton."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_checks import assert_close, graphs_on, on_gpu
from kernel_counts import by_layer, count
from specgen.engine.native.kernels import checked_kernels
from specgen.engine.native.kernels.kernel_set import KernelSet
from specgen.engine.native.kernels.torch_kernels import TORCH
from specgen.engine.native.static_forward import use_cuda_graphs, use_static_passes
from static_checks import RecordedGraphs, random_calls, random_model, random_tokens

from specgen.base.types import Context
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native import static_forward

_LIKE_FUSED = replace(TORCH, finds_keys=True)


def _fails(*_: Any) -> Any:
    raise RuntimeError("out of resource: shared memory\nwith details")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"attend": _fails, "finds_keys": True}, "attend"),
        ({"attend": lambda *inputs: TORCH.attend(*inputs) * 1.2, "finds_keys": True}, "attend"),
        ({"attend": lambda *inputs: TORCH.attend(*inputs) * torch.nan, "finds_keys": True}, "attend"),
        ({"store": lambda heads, spec, inputs: TORCH.store(heads, spec, inputs) + 1}, "store"),
        ({"store": lambda heads, spec, inputs: heads[:, : spec.heads], "norms": frozenset({"head"})}, "store"),
        ({"gate": lambda inner, activation: inner.chunk(2, dim=-1)[0]}, "gate"),
    ],
)
def test_torchs_operators_replace_a_kernel_that_does_not_work(
    changes: dict[str, Any], field: str, caplog: pytest.LogCaptureFixture
) -> None:
    architecture, device = random_model("qwen3").architecture, torch.device("cpu")
    assert checked_kernels.only_working(TORCH, architecture, torch.float32, device, (1, 4)) == TORCH
    found = checked_kernels.only_working(replace(TORCH, **changes), architecture, torch.float32, device, (1, 4))
    assert found == TORCH
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"`{field}`" in caplog.text
    assert "details" not in caplog.text


def test_one_line_tells_of_all_kernels_that_fail_for_one_reason(caplog: pytest.LogCaptureFixture) -> None:
    kernels = replace(TORCH, store=_fails, attend=_fails, gate=_fails)
    architecture = random_model("llama").architecture
    assert checked_kernels.only_working(kernels, architecture, torch.float32, torch.device("cpu"), (1,)) == TORCH
    assert len(caplog.records) == 1
    assert "`store`, `attend`, `gate`: RuntimeError: out of resource" in caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_rounding_is_no_reason_to_replace_a_kernel(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    for family in ("llama", "gemma2", "gemma3_text"):
        model = random_model(family, dtype, **({} if family == "llama" else {"sliding_window": 12}))
        found = checked_kernels.only_working(_LIKE_FUSED, model.architecture, dtype, torch.device("cpu"), (1, 16))
        assert found == _LIKE_FUSED
    assert not caplog.records


def test_a_model_on_a_gpu_without_triton_runs_torchs_operators(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "specgen.engine.native.kernels.triton_kernels", None)
    caplog.set_level(logging.INFO)
    architecture = random_model("llama").architecture
    found = checked_kernels.checked_kernels(architecture, torch.float32, torch.device("cuda", 0), (1,))
    assert found is TORCH
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert "triton cannot be imported" in caplog.text


def test_a_model_on_a_gpu_uses_the_kernels_that_were_checked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def checked(*given: Any) -> KernelSet:
        asked.append(given)
        return _LIKE_FUSED

    monkeypatch.setattr(static_forward, "checked_kernels", checked)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    for is_exact, widths in ((False, static_forward.WIDTHS), (True, (16,))):
        model = random_model("llama")
        model.exact = is_exact
        use_cuda_graphs(model)
        assert model.inputs.kernels is _LIKE_FUSED
        assert asked.pop() == (model.architecture, model.dtype, model.device, widths)


def test_a_gpu_for_which_the_kernels_are_not_made_runs_torchs_operators(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = "specgen.engine.native.kernels.triton_kernels"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(TRITON=_LIKE_FUSED))  # type: ignore[misc]
    monkeypatch.setattr(checked_kernels, "only_working", lambda kernels, *_: kernels)
    caplog.set_level(logging.INFO)
    given = random_model("llama").architecture, torch.float32, torch.device("cuda", 0), (1,)
    for capability, expected in (((7, 5), TORCH), ((8, 0), _LIKE_FUSED), ((9, 0), _LIKE_FUSED)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        caplog.clear()
        assert checked_kernels.checked_kernels(*given) is expected
        assert ("8.0 and above" in caplog.text) == (expected is TORCH)
        assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_the_attention_is_checked_for_each_number_of_rows_that_a_draft_tree_needs() -> None:
    seen: set[int] = set()

    def attend(query: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.add(query.shape[0])
        return TORCH.attend(query, *others)

    architecture = random_model("llama").architecture
    kernels = replace(TORCH, attend=attend)
    assert checked_kernels.only_working(kernels, architecture, torch.float32, torch.device("cpu"), (16,)) == kernels
    for group in (1, 2, 3, 4, 5, 8):
        needed, checked = (
            {min(1 << (width * group - 1).bit_length(), 64) for width in widths} for widths in (range(1, 64), seen)
        )
        assert {max(16, rows) for rows in needed} == {max(16, rows) for rows in checked}


def test_a_kernel_that_finds_the_keys_itself_needs_one_pass_for_the_whole_cache() -> None:
    model = random_model("llama")
    eager = ModelRunner(model)
    model.inputs.kernels = _LIKE_FUSED
    use_static_passes(model)
    static = ModelRunner(model)
    static.reserve(1500)
    for context, tokens, parents, start in random_calls(random.Random(1), 478, 12):
        expected = eager.logits(context, tokens, parents, start=start).logits
        assert_close(static.logits(context, tokens, parents, start=start).logits, expected, 1e-5)
    buckets = {bucket for _, bucket, _ in static._forward._passes}  # type: ignore[attr-defined]
    assert buckets == {static.cache.data.shape[3]}  # type: ignore[attr-defined]


class _Wrong(RecordedGraphs):
    """Graphs whose replays compute something else from the second capture on."""

    change: Callable[[torch.Tensor], object]

    def capture(self, work: Callable[[], None], state: Sequence[torch.Tensor] = ()) -> Callable[[], None]:
        replay, written = super().capture(work, state), work.__self__._logits  # type: ignore[attr-defined]
        if self._counts["captures"] == 1:
            return replay

        def run() -> None:
            replay()
            with torch.inference_mode():
                type(self).change(written)

        return run


@pytest.mark.parametrize("change", [lambda logits: logits.mul_(1.2), lambda logits: logits[0, 3].fill_(torch.nan)])
def test_a_graph_that_gives_other_logits_is_not_used(change: Any, caplog: pytest.LogCaptureFixture) -> None:
    counts: Counter[str] = Counter()
    model = random_model("llama")
    eager = ModelRunner(model)
    _Wrong.change = staticmethod(change)
    use_static_passes(model, new_graphs=lambda: _Wrong(counts))
    captured = ModelRunner(model)
    for context, tokens, parents, start in random_calls(random.Random(5), 30, 6):
        expected = eager.logits(context, tokens, parents, start=start).logits
        assert_close(captured.logits(context, tokens, parents, start=start).logits, expected, 1e-5)
    assert counts["captures"] == 2
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "no CUDA graphs from here on" in caplog.text
    assert "do not give its own logits" in caplog.text


def test_the_kernels_of_a_layer_are_counted() -> None:
    """The fused ones take the place of 7 operators: 15 kernels in each layer become 10 (with triton), see `kernel_counts.py`."""
    layer, _ = by_layer(8)
    assert layer.total() == 15
    assert layer["aten.addmm_.default"] == 2, "the residual is added to in place"
    assert by_layer(1)[0].total() == 13


def test_fused_kernels_halve_the_kernels_of_a_pass() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from specgen.engine.native.kernels.triton_kernels import TRITON

    layer, rest = by_layer(8, TRITON)
    assert (layer.total(), rest.total()) == (10, 6)
    assert count(1, 8, TRITON)["specgen.attention.default"] == 2


@pytest.mark.slow
def test_fused_kernels_compile_for_gpus_that_are_not_here() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    script = Path(__file__).with_name("kernel_resources.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    found = [[int(number) for number in line.split()[-3:]] for line in done.stdout.splitlines() if line.startswith("sm_")]
    assert len(found) == 64
    assert max(shared for shared, _, _ in found) <= 86 << 10
    assert max(stack for _, _, stack in found) <= 24


_ON_GPU: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 12, "query_pre_attn_scalar": 10},
    "gemma3_text": {"sliding_window": 12, "sliding_window_pattern": 2},
    "starcoder2": {},
}


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", _ON_GPU)
def test_fused_kernels_work_on_this_gpu_and_give_the_eager_logits(
    family: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    from specgen.engine.native.kernels.triton_kernels import TRITON

    model = random_model(family, dtype, "cuda:0", **_ON_GPU[family])
    eager = ModelRunner(model)
    given = model.architecture, dtype, model.device, static_forward.WIDTHS
    model.inputs.kernels = checked_kernels.checked_kernels(*given)
    assert model.inputs.kernels == TRITON
    use_static_passes(model, new_graphs=graphs_on("cuda:0"))
    captured = ModelRunner(model)
    for context, tokens, parents, start in random_calls(random.Random(family), 478, 12):
        expected = eager.logits(context, tokens, parents, start=start).logits
        found = captured.logits(context, tokens, parents, start=start).logits
        assert_close(found, expected, 1e-4 if dtype == torch.float32 else 0.03)
    assert not [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_a_tokens_logits_have_the_same_bits_alone_and_with_others(dtype: torch.dtype) -> None:
    model = random_model("llama", dtype, "cuda:0")
    model.inputs.kernels = checked_kernels.checked_kernels(model.architecture, dtype, model.device, (16,))
    use_static_passes(model, (16,), graphs_on("cuda:0"))
    ids = random_tokens(random.Random(6), 320)
    plain, verifying = ModelRunner(model), ModelRunner(model)
    verifying.reserve(3000)
    for runner in (plain, verifying):
        runner.logits(Context(ids[:250]))
    one_by_one = [plain.logits(Context(ids[:length])).logits[0].clone() for length in range(250, 300)]
    for length in (250, 254, 270, 284):
        found = verifying.logits(Context(ids[:length]), ids[length : length + 15]).logits
        assert torch.equal(found, torch.stack(one_by_one[length - 250 : length - 234]))
