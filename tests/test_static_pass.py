"""Static passes give the eager passes' results, and run only operators that a CUDA graph can capture and replay."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from runner_checks import every
from specgen.engine.native.kernels.kernel_set import SPAN
from specgen.engine.native.static_forward import WIDTHS, StaticForward, pick_bucket, pick_width, use_static_passes
from specgen.engine.native.static_pass import StaticPass
from static_checks import LENGTH, Copies, HostReads, OnlyDevice, Recording, Uploads, random_calls, random_model, random_tokens

from specgen.base.types import Context
from specgen.engine.forward_pass import NO_NODES, ForwardPass, LayerPart, TreeNodes, chain_parents
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.families import FAMILIES
from specgen.engine.native.native_model import NativeForward
from specgen.engine.parts.early_exit import EarlyExit

_CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 12},
    "qwen2": {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 2},
    "phi3": {"sliding_window": 600, "partial_rotary_factor": 0.75},
    "gemma2": {"sliding_window": 12, "query_pre_attn_scalar": 10},
    "gemma3_text": {"sliding_window": 12, "sliding_window_pattern": 2, "rope_local_base_freq": 5000.0},
    "smollm3": {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 12},
    "granite": {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "stablelm": {"qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 0.5},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.3},
}
# families that differ in the operators or inputs of a pass; the others repeat one of them
_DISTINCT = ("llama", "gemma2", "gemma3_text", "phi3", "starcoder2", "olmo2", "granite", "stablelm", "cohere", "smollm3")
_BY_DEFAULT = [pytest.param(family, marks=() if family in _DISTINCT else pytest.mark.slow) for family in FAMILIES]


def _assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert (found - expected).abs().max() <= tolerance * expected.abs().max().clamp_min(1)


@pytest.mark.parametrize("family", _BY_DEFAULT)
def test_calls_as_decoding_makes_them_give_the_eager_logits(family: str) -> None:
    model = random_model(family, **_CHANGES.get(family, {}))
    eager = ModelRunner(model)
    use_static_passes(model)
    static = ModelRunner(model)
    used = set()
    for context, tokens, parents, start in random_calls(random.Random(family), 480, 20):
        expected = eager.logits(context, tokens, parents, start=start)
        found = static.logits(context, tokens, parents, start=start)
        _assert_close(found.logits, expected.logits)
        assert found.hidden_states is not None
        assert expected.hidden_states is not None
        _assert_close(found.hidden_states, expected.hidden_states)
        used |= {(width, bucket) for width, bucket, _ in static._forward._passes}  # type: ignore[attr-defined]
    assert {width for width, _ in used} == set(WIDTHS)
    assert {bucket for _, bucket in used} == {512, 1024}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_half_precision_gives_the_eager_logits_but_for_rounding(dtype: torch.dtype, tolerance: float) -> None:
    for family in ("llama", "gemma2"):
        model = random_model(family, dtype, **_CHANGES.get(family, {}))
        eager, static = ModelRunner(model), ModelRunner(model, forward=StaticForward(model.layers_forward(_all(model))))
        for context, tokens, parents, start in random_calls(random.Random(1), 40, 8):
            expected = eager.logits(context, tokens, parents, start=start).logits
            _assert_close(static.logits(context, tokens, parents, start=start).logits, expected, tolerance)


def _all(model: Any) -> list[LayerPart]:
    return [LayerPart(index) for index in range(len(model.layers))]


def test_every_width_of_a_chain_is_the_reference_without_a_cache() -> None:
    model = random_model("llama")
    ids = random_tokens(random.Random(2), 60)
    expected = model.reference_logits(ids)
    use_static_passes(model)
    runner = ModelRunner(model)
    for count in range(17):
        context = Context(ids[:40])
        found = runner.logits(context, ids[40 : 40 + count]).logits
        _assert_close(found, expected[39 : 40 + count])


def test_early_exit_runs_ranges_of_layers_as_static_passes() -> None:
    model = random_model("llama")
    architecture = model.architecture
    tensors = {"norm.weight": torch.ones(architecture.hidden_size)}
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        rows = architecture.num_kv_heads if name in ("k_proj", "v_proj") else architecture.num_heads
        shape = (rows * architecture.head_size, architecture.hidden_size)
        tensors[f"layers.0.self_attn.{name}.weight"] = torch.randn(shape if name != "o_proj" else shape[::-1]) / 6
    for name in ("gate_proj", "up_proj", "down_proj"):
        shape = (architecture.intermediate_size, architecture.hidden_size)
        tensors[f"layers.0.mlp.{name}.weight"] = torch.randn(shape if name != "down_proj" else shape[::-1]) / 6
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"layers.0.{name}.weight"] = torch.ones(architecture.hidden_size)
    exit_layer = model.exit_layers(tensors, 1)
    eager = EarlyExit(model, exit_layer, 2)
    use_static_passes(model)
    static = EarlyExit(model, exit_layer, 2)
    for context, tokens, parents, start in random_calls(random.Random(3), 30, 16):
        for one, other in ((eager.draft, static.draft), (eager.target, static.target)):
            expected = one.logits(context, tokens, parents, start=start if one is eager.draft else 0)
            found = other.logits(context, tokens, parents, start=start if one is eager.draft else 0)
            _assert_close(found.logits, expected.logits)
            last, same = one.last_hidden_state(context), other.last_hidden_state(context)
            assert (last is None) == (same is None)
    assert static.target._forward._passes  # type: ignore[attr-defined]
    assert static._first_layers._forward._passes  # type: ignore[attr-defined]


def test_layers_can_be_skipped() -> None:
    model = random_model("llama")
    parts = [LayerPart(0), LayerPart(1, mlp=False), LayerPart(3, attention=False), LayerPart(4)]
    eager = ModelRunner(model, forward=model.layers_forward(parts))
    use_static_passes(model)
    static = ModelRunner(model, forward=model.layers_forward(parts))
    for context, tokens, parents, start in random_calls(random.Random(4), 20, 8):
        expected = eager.logits(context, tokens, parents, start=start).logits
        _assert_close(static.logits(context, tokens, parents, start=start).logits, expected)


def _loaded(family: str, width: int, draft: TreeNodes, device: str = "cpu") -> tuple[StaticPass, ForwardPass]:
    """A static pass over a draft after 20 random tokens, which the KV cache holds."""
    model = random_model(family, device=device, **_CHANGES.get(family, {}))
    forward, cache = model.forward(), model.new_cache()
    assert isinstance(forward, NativeForward)
    cache.enlarge(512)
    context = Context(random_tokens(random.Random(5), 20))
    forward(ForwardPass(context, NO_NODES, 0, 20, cache), 1)
    return StaticPass(forward, cache, width, 512), ForwardPass(context, draft, 20, 20 + len(draft.tokens), cache)


_TREE = TreeNodes([5, 6, 7, 8, 9], [-1, 0, 0, 2, -1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_never_waits_and_always_runs_the_same_operators(family: str) -> None:
    static, tree = _loaded(family, 8, _TREE)
    operators = []
    for forward_pass in (tree, tree._replace(draft=TreeNodes([3] * 8, chain_parents(8)), last=28)):
        static.load(forward_pass)
        with torch.inference_mode(), OnlyDevice() as mode:
            static.run()
        operators.append(mode.names)
    assert operators[0] == operators[1]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_loading_a_pass_makes_one_copy_and_waits_for_nothing(family: str) -> None:
    model = random_model(family, torch.bfloat16, "meta", **_CHANGES.get(family, {}))
    forward, cache, context = model.forward(), model.new_cache(), Context([3] * 20)
    assert isinstance(forward, NativeForward)
    cache.enlarge(512)
    static = StaticPass(forward, cache, 8, 512)
    chain = TreeNodes([3] * 5, chain_parents(5))
    with Copies() as copies, HostReads() as reads:
        for count, draft in enumerate((chain, _TREE), 1):
            static.load(ForwardPass(context, draft, 19, 25, cache))
            assert copies.count == count
        one = StaticPass(forward, cache, 1, 512)
        before = copies.count
        one.load_position(30)
    assert (copies.count - before, reads.count) == (1, 0)


def test_the_check_of_operators_refuses_what_makes_the_host_wait() -> None:
    numbers = torch.arange(5)
    with torch.inference_mode(), OnlyDevice():
        for wrong in (numbers.sum().item, numbers.nonzero, lambda: numbers[numbers > 2], lambda: torch.tensor([1])):
            with pytest.raises(AssertionError):
                wrong()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "starcoder2", "stablelm", "olmo2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_on_another_device_than_the_cpu_uses_no_tensor_of_the_cpu(family: str, dtype: torch.dtype) -> None:
    model = random_model(family, dtype, "meta", **_CHANGES.get(family, {}))
    forward, cache = model.forward(), model.new_cache()
    assert isinstance(forward, NativeForward)
    cache.enlarge(512)
    static = StaticPass(forward, cache, 8, 512)
    with torch.inference_mode(), OnlyDevice("meta") as mode:
        static.run()
    assert mode.names


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "smollm3"])
def test_an_eager_pass_uploads_ids_and_for_trees_positions_and_ancestors(family: str) -> None:
    model = random_model(family, torch.bfloat16, "meta", **_CHANGES.get(family, {}))
    forward, cache, context = model.forward(), model.new_cache(), Context([3] * 20)
    uploads = []
    for draft in (NO_NODES, TreeNodes([3] * 5, chain_parents(5)), _TREE, _TREE):
        with torch.inference_mode(), Uploads() as mode:
            forward(ForwardPass(context, draft, 19, 20 + len(draft.tokens), cache), 1)
        uploads.append(mode.count)
    assert uploads == [uploads[0], 1, uploads[2], 3]  # tables for rotations and masks are made once


@pytest.mark.parametrize("family", _BY_DEFAULT)
def test_replayed_operators_give_the_logits_of_other_inputs(family: str) -> None:
    static, tree = _loaded(family, 8, _TREE)
    cache, context = tree.cache, tree.context
    eager = static._forward
    static.load(tree)
    with torch.inference_mode(), Recording() as graph:
        static.run()
    nodes = TreeNodes([*_TREE.tokens, 11, 12, 13], [*_TREE.parents, 4, 5, 3])
    longer = Context([*context.ids, 5, 7, 8, 30])
    with torch.inference_mode():
        graph.replay()
        _assert_close(static.output(5).logits, eager(tree, 5).logits)
        grown = tree._replace(draft=nodes, first=25, last=28)  # the tree grows
        for forward_pass in (grown, tree._replace(context=longer, draft=TreeNodes([1, 2], chain_parents(2)), first=23, last=26)):
            if forward_pass is not grown:
                cache.gather([20, 22, 23], 20)  # a path was accepted, and a token after it
            count = forward_pass.last - forward_pass.first
            expected = eager(forward_pass, count)
            cache.data[:, :, :, forward_pass.first :] = 0
            if forward_pass is grown:
                eager(tree, 5)
            static.load(forward_pass)
            graph.replay()
            _assert_close(static.output(count).logits, expected.logits)


@pytest.mark.parametrize("dtype", every(2, [torch.float32, torch.bfloat16]))
def test_with_one_width_plain_and_verified_logits_are_bitwise_equal(dtype: torch.dtype) -> None:
    for family in ("llama", "mistral", "gemma3_text"):
        model = random_model(family, dtype, **_CHANGES.get(family, {}))
        use_static_passes(model, (16,))
        ids = random_tokens(random.Random(6), 540)
        plain, verifying = ModelRunner(model), ModelRunner(model)
        for runner in (plain, verifying):
            runner.logits(Context(ids[:480]))  # the prompt runs eagerly
        one_by_one = [plain.logits(Context(ids[:length])).logits[0].clone() for length in range(480, 541)]
        for length in (480, 485, 493, 508):
            found = verifying.logits(Context(ids[:length]), ids[length : length + 15]).logits
            assert torch.equal(found, torch.stack(one_by_one[length - 480 : length - 464]))


def test_growth_of_the_cache_makes_passes_invalid() -> None:
    static, tree = _loaded("llama", 8, _TREE)
    static.load(tree)
    assert static.is_valid
    tree.cache.enlarge(600)
    assert not static.is_valid
    with pytest.raises(ValueError, match="another KV cache buffer"):
        static.load(tree)


def test_a_reserved_cache_never_grows_and_one_that_grows_gives_the_same_logits() -> None:
    model = random_model("llama")
    use_static_passes(model)
    ids = random_tokens(random.Random(7), 700)
    reserved, growing = ModelRunner(model), ModelRunner(model)
    reserved.reserve(700)
    buffers: tuple[set[int], set[int]] = (set(), set())
    for length in (600, 640, 690):
        outputs = []
        for runner, found in zip((reserved, growing), buffers, strict=True):
            outputs.append(runner.logits(Context(ids[:length]), ids[length : length + 10]).logits.clone())
            found.add(runner.cache.data.data_ptr())  # type: ignore[attr-defined]
        _assert_close(*outputs)
    assert len(buffers[0]) == 1
    assert reserved.cache.data.shape[3] == 768  # type: ignore[attr-defined]  # 700 and a draft, rounded up
    assert len(buffers[1]) > 1


def test_passes_that_fit_no_static_one_run_eagerly() -> None:
    model = random_model("llama")
    eager = ModelRunner(model)
    use_static_passes(model)
    static = ModelRunner(model)
    context = Context(random_tokens(random.Random(8), 20))
    tokens, parents = random_tokens(random.Random(9), 80), [*range(-1, 39), *range(-1, 39)]
    for size in (17, 40, 60, 64, 80):  # the last ones are few nodes, far from the root of a large tree
        start = max(0, size - 4)
        expected = eager.logits(context, tokens[:size], parents[:size], start=start).logits
        _assert_close(static.logits(context, tokens[:size], parents[:size], start=start).logits, expected)


def test_what_does_not_fit_is_refused() -> None:
    static, tree = _loaded("llama", 2, _TREE)
    with pytest.raises(ValueError, match="do not fit"):
        static.load(tree)
    with pytest.raises(ValueError, match="a bucket of 1024"):
        StaticPass(static._forward, tree.cache, 2, 1024)
    far = tree._replace(draft=TreeNodes([3] * (SPAN + 1), [-1] * (SPAN + 1)), first=20 + SPAN, last=21 + SPAN)
    with pytest.raises(ValueError, match="do not fit"):
        static.load(far)


def test_widths_and_buckets() -> None:
    assert [pick_width(tokens) for tokens in (1, 2, 3, 8, 9, 16, 17)] == [1, 2, 4, 8, 16, 16, None]
    assert [pick_bucket(entries, 3000) for entries in (1, 512, 513, 2048, 2049, 3000)] == [512, 512, 1024, 2048, 3000, 3000]
    assert pick_bucket(3001, 3000) is None
    assert pick_bucket(10, 64) == 64
    assert LENGTH > 1024  # the positions that the tests reach
