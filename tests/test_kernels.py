"""Triton's kernels, run by its interpreter on the CPU, give what torch's operators and eager passes give."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from graph_checks import GREEDY, POLICIES, compare_drafters, graphs_on
from kernel_checks import exact_attention, interpreted, spec_of, static_inputs, tree_numbers, triton_kernels
from runner_checks import every
from specgen.engine.native.kernels import checked_kernels
from specgen.engine.native.kernels.torch_kernels import TORCH
from specgen.engine.native.static_forward import use_static_passes
from static_checks import random_calls, random_model, random_tokens

from specgen.base.types import Context
from specgen.engine.model_runner import ModelRunner

pytestmark = interpreted
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCES)
# width, group, kv heads, head size, capacity, base, cached nodes, window, score cap, dtype
ATTENTION = [
    (3, 4, 2, 24, 300, 130, 3, 60, 5.0, torch.bfloat16),
    *((1, 4, 2, 64, 300, 20, 0, None, None, dtype) for dtype in DTYPES),
    *((8, 4, 1, 80, 300, 250, 5, None, None, dtype) for dtype in DTYPES),
    *((16, 3, 2, 96, 400, 130, 0, 12, None, dtype) for dtype in DTYPES),
    *((4, 8, 1, 256, 150, 1, 40, None, 50.0, dtype) for dtype in DTYPES),
    *((16, 8, 1, 32, 2500, 2300, 47, 200, None, dtype) for dtype in DTYPES),
    (2, 1, 3, 128, 2304, 2290, 1, None, None, torch.float32),  # more splits than are added at once
    (1, 1, 1, 16, 64, 0, 0, None, None, torch.float32),  # the first token
]
_CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 12},
    "phi3": {"sliding_window": 600, "partial_rotary_factor": 0.75},
    "gemma2": {"sliding_window": 12, "query_pre_attn_scalar": 10},
    "gemma3_text": {"sliding_window": 12, "sliding_window_pattern": 2},
    "stablelm": {"qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 0.5},
}
FAMILIES = ["llama", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "starcoder2", "olmo2", "stablelm", "cohere", "smollm3"]


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return bool((found.double() - expected).abs().max() <= tolerance * expected.abs().max().clamp_min(1))


@pytest.mark.parametrize("case", every(99, ATTENTION))
def test_attention_over_valid_keys_only(case: tuple[Any, ...]) -> None:
    width, group, kv_heads, size, capacity, base, before, window, score_cap, dtype = case
    torch.manual_seed(0)
    numbers = tree_numbers(random.Random(0), base, before, width)
    cache = torch.randn(2, kv_heads, capacity, size).to(dtype)
    cache[:, :, base + before + width :] = torch.nan  # no key is read that no token sees
    query = torch.randn(width, (group + 2) * kv_heads, size).to(dtype)[:, : group * kv_heads] * size**-0.5
    inputs, spec = static_inputs(numbers, cache, window=window, group=group), spec_of(query, kv_heads, score_cap)
    assert close(triton_kernels().attend(query, spec, inputs), exact_attention(query, spec, inputs), TOLERANCES[dtype])


@pytest.mark.parametrize("case", every(99, [(d, r, n) for d in reversed(DTYPES) for r in (24, 16, 0) for n in (True, False)]))
def test_heads_are_normalised_rotated_and_written_to_the_cache(case: tuple[torch.dtype, int, bool]) -> None:
    dtype, rotated, is_normed = case
    torch.manual_seed(0)
    width, heads, kv_heads, size = 5, 3, 2, 24
    numbers = tree_numbers(random.Random(1), 30, 4, width)
    angles = torch.rand(64, rotated // 2) * 6
    rotations = torch.polar(torch.ones_like(angles), angles) if rotated else None
    every_head, cache = torch.randn(width, heads + 2 * kv_heads, size).to(dtype), torch.randn(2, kv_heads, 64, size).to(dtype)
    weight = torch.randn(heads + kv_heads, size).to(dtype) if is_normed else None
    spec, caches = spec_of(every_head[:, :heads], kv_heads, None, weight), (cache.clone(), cache.clone())
    normed = every_head.clone()
    if weight is not None:
        part = normed[:, : heads + kv_heads]
        part.copy_(torch.nn.functional.rms_norm(part, part.shape[-1:], None, spec.eps) * weight)
    expected = TORCH.store(normed, spec, static_inputs(numbers, caches[0], rotations))
    found = triton_kernels().store_heads(every_head.clone(), spec, static_inputs(numbers, caches[1], rotations))
    assert close(found, expected.double(), TOLERANCES[dtype])
    assert close(caches[1], caches[0].double(), TOLERANCES[dtype])
    slots = slice(34, 34 + width)
    assert torch.equal(caches[1][1, :, slots], every_head[:, heads + kv_heads :].transpose(0, 1))
    caches[1][:, :, slots] = cache[:, :, slots]
    assert torch.equal(caches[1], cache), "no other entry is written"


@pytest.mark.parametrize("case", every(99, [(d, a) for d in reversed(DTYPES) for a in ("silu", "gelu", "gelu_tanh", "relu")]))
def test_gated_activations(case: tuple[torch.dtype, Any]) -> None:
    dtype, activation = case
    inner = torch.cat((torch.linspace(-90, 90, 301), torch.linspace(-2, 2, 301)))[None].expand(3, -1).to(dtype)
    expected = TORCH.gate(inner.double(), activation)
    assert close(triton_kernels().gate(inner, activation), expected, TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("family", "prompt", "calls", "most"),
    [
        ("gemma3_text", 20, 2, 3),
        *(pytest.param(family, 120, 4, 7, marks=pytest.mark.slow) for family in FAMILIES),
        pytest.param("llama", 478, 12, 15, marks=pytest.mark.slow),
    ],
)
def test_static_passes_with_fused_kernels_give_the_eager_logits(family: str, prompt: int, calls: int, most: int) -> None:
    """Chains, trees that grow, rollbacks, and growth of the cache, in float32."""
    model = random_model(family, **_CHANGES.get(family, {}))
    eager, used = ModelRunner(model), set()
    model.inputs.kernels = triton_kernels().TRITON
    use_static_passes(model)
    static = ModelRunner(model)
    for context, tokens, parents, start in random_calls(random.Random(family), prompt, calls, most):
        expected = eager.logits(context, tokens, parents, start=start)
        found = static.logits(context, tokens, parents, start=start)
        assert close(found.logits, expected.logits.double(), 1e-5)
        assert close(found.hidden_states, expected.hidden_states.double(), 1e-5)  # type: ignore[arg-type, union-attr]
        used |= {(width, bucket) for width, bucket, _ in static._forward._passes}  # type: ignore[attr-defined]
        assert {bucket for _, bucket in used} <= {static.cache.data.shape[3], 512, 1024}  # type: ignore[attr-defined]
    assert used


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_tokens_logits_have_the_same_bits_alone_and_with_others(family: str, dtype: torch.dtype) -> None:
    model = random_model(family, dtype, **_CHANGES.get(family, {}))
    model.inputs.kernels = triton_kernels().TRITON
    use_static_passes(model, (8,))
    ids = random_tokens(random.Random(6), 270)
    plain, verifying = ModelRunner(model), ModelRunner(model)
    verifying.reserve(2000)  # another capacity
    for runner in (plain, verifying):
        runner.logits(Context(ids[:250]))  # the prompt runs eagerly
    one_by_one = [plain.logits(Context(ids[:length])).logits[0].clone() for length in range(250, 265)]
    for length in (250, 254, 257):
        found = verifying.logits(Context(ids[:length]), ids[length : length + 7]).logits
        assert torch.equal(found, torch.stack(one_by_one[length - 250 : length - 242]))


@pytest.mark.slow
def test_captured_passes_and_draft_steps_with_fused_kernels() -> None:
    counts: Counter[str] = Counter()
    model = random_model("qwen3")
    eager = ModelRunner(model)
    model.inputs.kernels = triton_kernels().TRITON
    use_static_passes(model, new_graphs=graphs_on("cpu", counts))
    captured = ModelRunner(model)
    compare_drafters(eager, captured, GREEDY, POLICIES["fixed"], rounds=4)
    for context, tokens, parents, start in random_calls(random.Random(3), 30, 6, 7):
        expected = eager.logits(context, tokens, parents, start=start).logits
        assert close(captured.logits(context, tokens, parents, start=start).logits, expected.double(), 1e-5)
    assert counts["replays"] > counts["captures"] > 0


def test_the_check_compiles_the_attention_of_every_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compile-time constants depend neither on the window's length nor on the room in the cache."""
    module, made = triton_kernels(), set()

    class Recorded:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *_, **constants: made.add(tuple(constants.items()))

    monkeypatch.setattr(module, "attention_parts", Recorded())
    monkeypatch.setattr(module, "attention_sum", Recorded())
    monkeypatch.setattr(checked_kernels._Samples, "_compare", lambda *_: None)
    monkeypatch.setattr(checked_kernels, "_BASES", (2,))
    model = random_model("gemma2", sliding_window=4096)
    checked_kernels.only_working(module.TRITON, model.architecture, model.dtype, model.device, (1,))
    checked = made.copy()
    assert len(checked) == 3  # with and without a window, and the sum
    model.inputs.kernels = module.TRITON
    use_static_passes(model, (1,))
    for capacity in (64, 8192):
        runner = ModelRunner(model)
        runner.reserve(capacity)
        made.clear()
        runner.logits(Context([3]))
        assert made == checked


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "stablelm"])
def test_the_check_on_a_device_accepts_the_kernels(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_kernels, "_BASES", (2, 130))
    monkeypatch.setattr(checked_kernels, "_CAPACITY", 300)
    monkeypatch.setattr(checked_kernels, "_BLOCK_WIDTHS", ())
    architecture, kernels = random_model(family, **_CHANGES.get(family, {})).architecture, triton_kernels().TRITON
    assert checked_kernels.only_working(kernels, architecture, dtype, torch.device("cpu"), (1, 4)) == kernels
    wrong: Callable[..., torch.Tensor] = lambda *inputs: kernels.attend(*inputs) * 1.2  # noqa: E731
    found = checked_kernels.only_working(replace(kernels, attend=wrong), architecture, dtype, torch.device("cpu"), (1,))
    assert found == replace(kernels, attend=TORCH.attend, finds_keys=False)
