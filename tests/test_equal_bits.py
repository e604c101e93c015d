"""`--exact` on a GPU: all passes have one width, so a token's logits depend on the tokens before it alone.

Here the passes are recorded operators on the CPU, whose products and attention also round differently for other shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from captured_pairs import captured_pair
from families import make_model, near_copy, save
from graph_checks import graphs_on, nothing_falls_back, on_gpu  # noqa: F401
from runner_checks import every
from static_checks import random_calls, random_model, random_tokens

import specgen
from specgen.base.errors import SpecgenError
from specgen.base.types import Context, SamplingParams
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.cuda_graphs import with_attention_of_graphs
from specgen.engine.native.equal_bits import bucket_of
from specgen.engine.native.families import FAMILIES
from specgen.engine.native.native_model import NativeForward, NativeModel
from specgen.engine.native.static_forward import use_static_passes
from specgen.engine.parts.early_exit import EarlyExit
from specgen.pair.pair import Pair

MOST = 40  # drafted tokens
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("sd", {"k": 1}),
    ("sd", {"k": 5}),
    ("sd", {"k": MOST}),
    ("svip", {}),
    ("pearl", {"window": 3}),
    ("eesd-beta", {}),
    ("eesd-fixed", {"k": 20}),
    ("lookup", {}),
    ("selfsd", {"skip": "1", "k": 4}),
    ("adaptive", {"draft_cost": 0.1, "verify_cost": 0.1}),
]


def one_width_model(
    family: str, dtype: torch.dtype, device: str = "cpu", counts: Counter[str] | None = None, *, exact: bool = True
) -> NativeModel:
    model = random_model(family, dtype, device)
    model.exact = exact
    use_static_passes(model, new_graphs=graphs_on(device, counts))
    return model


class PlainLogits:
    """The logits after each prefix of `ids`, computed as plain decoding does: one token at a time. Each is computed once."""

    def __init__(self, model: NativeModel, ids: Sequence[int], lengths: Sequence[int]) -> None:
        runner = ModelRunner(model)
        self._rows = {length: runner.logits(Context(ids[:length])).logits[0].clone() for length in lengths}

    def differences(self, length: int, found: torch.Tensor) -> int:
        """How many rows of the logits after `length`, `length` + 1, ... tokens have other bits."""
        return sum(not torch.equal(row, self._rows[length + index]) for index, row in enumerate(found))


def count_differences(family: str, dtype: torch.dtype, device: str = "cpu", *, exact: bool, step: int = 1) -> tuple[int, int]:
    """How many of the logits of calls as decoding makes them have other bits than plain decoding's, and how many there are.

    With drafts of 1 to 40 tokens after prompts of 1 to 70, rollbacks, cached prefixes of other contexts, and caches of several
    sizes. `step` leaves out calls.
    """
    model, rng = one_width_model(family, dtype, device, exact=exact), Random(5)
    ids = random_tokens(rng, 600)
    near_the_bucket = range(495, 513 + MOST + 1)
    plain = PlainLogits(model, ids, [*range(1, 71 + MOST), *near_the_bucket])
    runners = [ModelRunner(model), ModelRunner(model)]
    runners[1].reserve(1900)
    found = total = 0
    calls = [(length, drafted) for length in (*range(1, 71, 4), 498, 511, 512, 513) for drafted in range(1, MOST + 1, 3)]
    rng.shuffle(calls)
    for length, drafted in calls[::step]:
        runner = rng.choice(runners)
        if not rng.randrange(4):
            runner.clear_cache()
        elif not rng.randrange(3):  # a draft that is rejected, of another context
            other = Context([*ids[: rng.randrange(1, length + 1)], 5])
            runner.logits(other, random_tokens(rng, rng.randrange(MOST)))
        rows = runner.logits(Context(ids[:length]), ids[length : length + drafted]).logits
        found, total = found + plain.differences(length, rows), total + len(rows)
    return found, total


@pytest.mark.parametrize("dtype", every(2, [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("family", ["qwen3", *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES)])
def test_a_tokens_logits_have_the_bits_of_plain_decoding(family: str, dtype: torch.dtype) -> None:
    found, total = count_differences(family, dtype, exact=True, step=12 if family == "qwen3" else 2)
    assert total > 400
    assert found == 0


@pytest.mark.parametrize("dtype", every(2, [torch.float32, torch.bfloat16]))
def test_without_exact_the_same_calls_give_other_bits(dtype: torch.dtype) -> None:
    """So the check above means something: on a CPU, too, other shapes round differently."""
    found, total = count_differences("qwen3", dtype, exact=False, step=12)
    assert found > total / 4


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_tokens_logits_have_the_bits_of_plain_decoding_on_a_gpu(family: str, dtype: torch.dtype) -> None:
    assert count_differences(family, dtype, "cuda:0", exact=True)[0] == 0


def _attend_in_parts(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *_: object, **__: object
) -> torch.Tensor:
    """Attention that adds up five parts of the keys, masked ones included: which depends on their number, as on a GPU."""
    tokens, heads, size = query.shape
    rows = query.view(tokens, len(keys), -1, size).transpose(0, 1).reshape(len(keys), -1, size)
    weights = (rows @ keys.transpose(1, 2) + mask).softmax(-1)
    part = -(-keys.shape[1] // 5)
    parts = zip(weights.split(part, -1), values.split(part, 1), strict=True)
    mixed = torch.stack([weight @ value for weight, value in parts]).sum(0)
    return mixed.view(len(keys), tokens, -1, size).transpose(0, 1).reshape(tokens, heads * size)


def test_the_bits_depend_on_no_buckets_end_and_on_no_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgen.engine.native.kernels.torch_kernels.attend", _attend_in_parts)
    model, ids = one_width_model("llama", torch.float32), random_tokens(Random(1), 560)
    plain = PlainLogits(model, ids, range(505, 530))
    for capacity in (0, 1900):
        runner = ModelRunner(model)
        runner.reserve(capacity)
        for length in (505, 511, 512, 513):
            assert plain.differences(length, runner.logits(Context(ids[:length]), ids[length : length + 12]).logits) == 0


def test_a_cache_holds_the_same_bits_whatever_filled_it() -> None:
    model, ids = one_width_model("llama", torch.bfloat16), random_tokens(Random(2), 90)
    caches = []
    for drafted in (0, 7, MOST):
        runner = ModelRunner(model)
        for length in (33, 34, 60) if drafted else range(1, 91):
            runner.logits(Context(ids[:length]), [*ids[length : length + drafted // 2], *[4] * (drafted - drafted // 2)])
        if drafted:
            runner.logits(Context(ids))
        caches.append(runner.cache.data[:, :, :, :90])  # type: ignore[attr-defined]
    assert torch.equal(caches[0], caches[1])
    assert torch.equal(caches[0], caches[2])


def test_no_pass_is_eager_and_all_have_one_width(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    model = one_width_model("llama", torch.float32, counts=counts)
    monkeypatch.setattr(NativeForward, "__call__", lambda *_: pytest.fail("an eager pass"))
    runner: Any = ModelRunner(model)
    for context, tokens, parents, start in random_calls(Random(3), 70, 8, most=35):
        runner.logits(context, tokens, parents, start=start)
    runner.clear_cache()
    runner.logits(context, [3, 4, 5, 6], [-1, -1, 0, 1])  # a tree after a long prompt
    assert {(width, bucket) for width, bucket, _ in runner._forward._passes} == {(16, 512)}
    assert counts["captures"] == 1


def test_early_exit_gives_the_bits_of_the_whole_model() -> None:
    """Its lower and upper layers run in passes of their own, with hidden states between them."""
    model, rng = one_width_model("qwen3", torch.bfloat16), Random(4)
    tensors = _exit_tensors(model)
    early, ids = EarlyExit(model, model.exit_layers(tensors, 1), 2), random_tokens(rng, 120)
    plain = PlainLogits(model, ids, range(1, 58))
    for length in (1, 17):
        for drafted in (1, 15, 16, MOST):
            context = Context(ids[:length])
            early.draft.logits(context, ids[length : length + rng.randrange(drafted + 1)])
            found = early.target.logits(context, ids[length : length + drafted]).logits
            assert plain.differences(length, found) == 0, (length, drafted)


def _exit_tensors(model: NativeModel) -> dict[str, torch.Tensor]:
    architecture = model.architecture
    size, heads, kv_heads = architecture.hidden_size, architecture.num_heads, architecture.num_kv_heads
    inner, each = architecture.intermediate_size, architecture.head_size
    shapes = {"q": (heads * each, size), "k": (kv_heads * each, size), "v": (kv_heads * each, size), "o": (size, heads * each)}
    weights = {f"self_attn.{name}_proj": shape for name, shape in shapes.items()}
    weights |= {"mlp.gate_proj": (inner, size), "mlp.up_proj": (inner, size), "mlp.down_proj": (size, inner)}
    norms = {"input_layernorm": size, "post_attention_layernorm": size, "self_attn.q_norm": each, "self_attn.k_norm": each}
    tensors = {f"layers.0.{name}.weight": torch.randn(shape) / 6 for name, shape in weights.items()}
    tensors |= {f"layers.0.{name}.weight": torch.ones(shape) for name, shape in norms.items()}
    return tensors | {"norm.weight": torch.ones(size)}


def test_another_context_does_not_use_what_a_tree_computed() -> None:
    """A tree's nodes lie between other nodes in the cache, so that attention adds up in another order."""
    model, ids = one_width_model("llama", torch.float32), random_tokens(Random(8), 60)
    runner, tree = ModelRunner(model), [7, *ids[40:46], 8, 9]
    parents = [-1, -1, 1, 2, 3, 4, 5, 0, 0]
    context = Context(ids[:40])
    runner.logits(context, tree, parents)
    context.extend(ids[40:46])
    runner.logits(context)
    plain = PlainLogits(model, ids, range(47, 51))
    assert plain.differences(47, runner.logits(Context(ids[:47]), ids[47:50]).logits) == 0


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    target = make_model("qwen3", initializer_range=0.05)  # close logits: rounding would show
    return str(save(target, tmp_path / "target")), str(save(near_copy(target, 0.3), tmp_path / "draft"))


def _check_methods(
    pair: Pair, methods: Sequence[tuple[str, dict[str, Any]]], count: int, lengths: Sequence[int] = (1, 16, 45)
) -> None:
    """Compares the ids of all methods with plain decoding's, with empty caches and with what other runs left there."""
    sampling, rng = SamplingParams(max_new_tokens=count, ignore_eos=True), Random(9)
    for length in lengths:
        prompt = [3 + rng.randrange(80) for _ in range(length)]
        pair.forget()
        expected = pair.generate(prompt, "ar", sampling).token_ids
        for name, settings in methods:
            if rng.randrange(2):
                pair.forget()
            assert pair.generate(prompt, name, sampling, **settings).token_ids == expected, (name, settings, length)
        assert pair.generate([*prompt, *expected[:9]], "sd", sampling).token_ids[: count - 9] == expected[9:]


@pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_chains_give_plain_decodings_tokens(folders: tuple[str, str], is_long: bool) -> None:
    methods = [method for method in METHODS if not method[0].startswith("eesd")]
    with captured_pair(Counter(), *folders, exact=True, dtype="bfloat16", backend="native") as pair:
        if is_long:
            _check_methods(pair, methods, 60)
        else:
            _check_methods(pair, [("sd", {"k": MOST}), ("pearl", {"window": 3})], 20, [16])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_bundled_pair_gives_plain_decodings_tokens(dtype: str) -> None:
    with captured_pair(Counter(), exact=True, dtype=dtype) as pair:
        _check_methods(pair, METHODS, 200)


@on_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_bundled_pair_gives_plain_decodings_tokens_on_a_gpu(dtype: str) -> None:
    with specgen.load(device="cuda", exact=True, dtype=dtype) as pair:
        _check_methods(pair, METHODS, 200)


def test_buckets_follow_from_the_tokens_index_alone() -> None:
    assert [bucket_of(entries) for entries in (1, 512, 513, 4097, 8192, 8193, 16385)] == [
        512,
        512,
        1024,
        8192,
        8192,
        16384,
        24576,
    ]


def test_torchrun_and_several_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgen.base.machine.launch", lambda: object())
    monkeypatch.setattr("specgen.engine.spread.processes.follow_unless_first", lambda: None)
    monkeypatch.setattr("specgen.engine.spread.processes.device_of_rank", lambda *_: "cuda:0")
    monkeypatch.setattr("specgen.pair.loading.pick_device", torch.device)
    with pytest.raises(SpecgenError, match=r"^--exact is for the CPU and for one CUDA device, and torchrun splits the target"):
        specgen.load(exact=True)


def test_work_that_is_not_captured_runs_with_the_attention_of_graphs() -> None:
    chosen = []
    with_attention_of_graphs(lambda: chosen.append(torch.backends.cuda.flash_sdp_enabled()))()
    assert (chosen, torch.backends.cuda.flash_sdp_enabled()) == ([False], True)
