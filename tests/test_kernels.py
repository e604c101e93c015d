"""The kernels in C against references in torch, on each set of instructions that this machine has,
with odd sizes; and that a row's bits depend neither on other rows nor on the number of threads."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from kernel_folder import shared_folder
from torch import Tensor
from torch.nn import functional

from specgen.base.errors import SpecgenError
from specgen.engine.kernels import library as kernel_library
from specgen.engine.kernels import packing
from specgen.engine.kernels.branches import LinearRuns
from specgen.engine.kernels.experts import ExpertsWeight
from specgen.engine.kernels.library import (
    INSTRUCTIONS,
    UnavailableError,
    available_instructions,
    find_compiler,
)
from specgen.engine.kernels.operators import ACTIVATIONS, Kernels, SeenSlots
from specgen.engine.kernels.packing import (
    GROUP,
    PackedWeight,
    Rounded,
    pack_floats,
    pack_rounded,
    rounded_to_4_bits,
    rounded_to_8_bits,
)
from specgen.engine.native.attention_mask import ChainSlots

# outputs and inputs: odd ones, less than a vector, several blocks, a published model's
SHAPES = [(1, 1), (50, 95), (100, 33), (192, 64), (576, 576)]
ROWS = 19  # two full tiles and a part of one
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", params=available_instructions() if find_compiler() else [])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The kernels for one set of instructions. A compiler that fails is an error here."""
    with pytest.MonkeyPatch.context() as patch, FileLock(shared_folder() / "lock"):
        patch.setenv("SPECGEN_CACHE", str(shared_folder()))
        return Kernels(kernel_library._load(request.param))


@pytest.fixture(autouse=True)
def single_thread(kernels: Kernels) -> None:
    kernels.use_threads(1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def is_close(found: Tensor, expected: Tensor, limit: float = 4e-6) -> bool:
    """Whether no element differs by more than `limit` of the largest."""
    return bool((found.double() - expected.double()).abs().max() <= limit * expected.abs().max())


def rounded_activations(x: Tensor) -> Tensor:
    """Returns x [n, in] rounded as a product in 8 bits rounds it, [n, groups, GROUP] in float64."""
    groups = functional.pad(x, (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    largest = groups.abs().amax(2, keepdim=True)
    integers = (groups * torch.where(largest > 0, 127 / largest, 0.0)).round()
    return integers.double() * (largest / 127).double()


def values(weight: Rounded) -> Tensor:
    """Returns the values of a weight, [out, groups, GROUP] in float64."""
    scaled = weight.integers.double() * weight.scales.double()[..., None]
    return scaled if weight.minimums is None else scaled + weight.minimums.double()[..., None]


def rounded(kind: str, weight: Tensor) -> Rounded:
    """Returns a weight rounded to a kind of integers, some with scales in float32."""
    if kind == "int8":
        return rounded_to_8_bits(weight)
    made = rounded_to_4_bits(weight)
    assert made.minimums is not None
    if "wide" in kind:
        made = made._replace(scales=made.scales.float() * 1.001, minimums=made.minimums.float())
    if "int8" in kind:  # as in Q5_1: integers up to 31
        made = made._replace(integers=made.integers * 2 + 1, bits=8)
    return made


INTEGERS = ["int8", "int4", "wide int4", "int8 minimum", "wide int8 minimum"]


def packed_weights(kernels: Kernels, shape: tuple[int, int]) -> list[PackedWeight]:
    weight = random(*shape) * 0.1
    floats = [pack_floats(weight.to(dtype), kernels.library) for dtype in FLOATS]
    return floats + [pack_rounded(rounded(kind, weight), kernels.library) for kind in INTEGERS]


@pytest.mark.parametrize("shape", SHAPES)
def test_products_with_weights_as_stored(kernels: Kernels, shape: tuple[int, int]) -> None:
    x = random(ROWS, shape[1], seed=1)
    bias = random(shape[0], seed=2)
    for dtype in FLOATS:
        weight = random(*shape).to(dtype)
        product = kernels.product(pack_floats(weight, kernels.library), x, bias)
        assert is_close(product, x.double() @ weight.double().T + bias)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", INTEGERS)
def test_products_with_rounded_weights(kernels: Kernels, kind: str, shape: tuple[int, int]) -> None:
    x = random(ROWS, shape[1], seed=1)
    x[3] = 0.0
    weight = rounded(kind, random(*shape) * 0.1)
    product = kernels.product(pack_rounded(weight, kernels.library), x)
    expected = torch.einsum("ngi,ogi->no", rounded_activations(x), values(weight))
    assert is_close(product, expected)


def test_largest_integers_do_not_overflow(kernels: Kernels) -> None:
    x = torch.full((1, 64), -1.0)
    for value, bits in ((-128, 8), (127, 8)):
        integers = torch.full((16, 2, GROUP), value, dtype=torch.int8)
        weight = Rounded(integers, torch.ones(16, 2).half(), None, 64, bits)
        product = kernels.product(pack_rounded(weight, kernels.library), x)
        assert is_close(product, torch.full((1, 16), -64.0 * value))
    for value, bits in ((15, 4), (31, 8)):
        integers = torch.full((16, 2, GROUP), value, dtype=torch.uint8)
        ones = torch.ones(16, 2).half()
        weight = Rounded(integers, ones, -ones, 64, bits)
        product = kernels.product(pack_rounded(weight, kernels.library), x)
        assert is_close(product, torch.full((1, 16), -64.0 * (value - 1)))


def test_a_scaled_product_is_added(kernels: Kernels) -> None:
    for weight in packed_weights(kernels, (50, 95)):
        x = random(3, 95, seed=1)
        bias = random(50, seed=2)
        hidden = random(3, 64, seed=3)
        expected = hidden[:, :50] + 0.5 * kernels.product(weight, x, bias)
        untouched = hidden[:, 50:].clone()
        kernels.add_product(hidden[:, :50], weight, x, bias, 0.5)
        assert is_close(hidden[:, :50], expected)
        assert torch.equal(hidden[:, 50:], untouched)


def test_a_rows_bits_do_not_depend_on_other_rows_or_threads(kernels: Kernels) -> None:
    x = random(ROWS, 576, seed=1)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(4))
    for weight in packed_weights(kernels, (576, 576)):
        kernels.use_threads(1)
        alone = torch.cat([kernels.product(weight, row[None]) for row in x])
        for threads in (1, 2, 3):
            kernels.use_threads(threads)
            for count in range(1, ROWS + 1):
                assert torch.equal(kernels.product(weight, x[:count]), alone[:count])
            assert torch.equal(kernels.product(weight, x[order].contiguous()), alone[order])


def test_a_rows_bits_are_the_same_among_many_rows(kernels: Kernels) -> None:
    """More rows and inputs than are computed at once."""
    x = random(257, 801, seed=1)
    for weight in packed_weights(kernels, (100, 801)):
        kernels.use_threads(1)
        alone = torch.cat([kernels.product(weight, row[None]) for row in x])
        for threads in (1, 2):
            kernels.use_threads(threads)
            for count in (7, 64, 257):
                assert torch.equal(kernels.product(weight, x[-count:]), alone[-count:])


@pytest.mark.parametrize("width", [1, 5, 16, 95, 576])
def test_norms(kernels: Kernels, width: int) -> None:
    x = random(ROWS, width)
    weight = random(width, seed=1)
    expected = functional.rms_norm(x.double(), (width,), weight.double(), 1e-5)
    assert is_close(kernels.rms_norm(x, weight, 1e-5), expected)
    expected = functional.rms_norm(x.double(), (width,), None, 1e-5)
    assert is_close(kernels.rms_norm(x, None, 1e-5), expected)


@pytest.mark.parametrize("size", [2, 20, 64])
def test_norms_of_heads(kernels: Kernels, size: int) -> None:
    heads = random(ROWS, 5, size)
    weight = random(3, size, seed=1)
    expected = heads.double()
    expected[:, :3] = functional.rms_norm(expected[:, :3], (size,), None, 1e-5) * weight
    kernels.norm_heads_(heads, weight, 1e-5)
    assert is_close(heads, expected)


@pytest.mark.parametrize(("size", "rotated"), [(64, 64), (64, 32), (20, 6), (80, 80)])
def test_rotation_and_the_caches_entries(kernels: Kernels, size: int, rotated: int) -> None:
    rows, query_heads, kv_heads, slots, first = 5, 4, 2, 12, 3
    heads = random(rows, query_heads + 2 * kv_heads, size)
    angles = random(20, rotated // 2, seed=1)
    rotation = torch.polar(torch.ones_like(angles), angles)[2 : 2 + rows]
    cache = torch.zeros(2, kv_heads, slots, size)
    expected = heads.double()
    turning = expected[:, : query_heads + kv_heads, :rotated].unflatten(2, (-1, 2))
    torch.view_as_complex(turning).mul_(rotation[:, None])

    entries = cache[:, :, first : first + rows - 1]
    kernels.rotate_and_write(heads, query_heads, kv_heads, rotation, entries)

    assert is_close(heads, expected)
    new = heads[: rows - 1, query_heads:].unflatten(1, (2, kv_heads)).permute(1, 2, 0, 3)
    assert torch.equal(entries, new)
    entries.zero_()
    assert not cache.any()


def reference_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: list[list[int]],
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    rows, heads, size = queries.shape
    group = heads // keys.shape[0]
    outputs = torch.zeros(rows, heads, size, dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            own_keys = keys[head // group, seen[row]].double()
            scores = own_keys @ queries[row, head].double() * scale
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            weights = scores.softmax(0)[: len(seen[row])]
            outputs[row, head] = weights @ values[head // group, seen[row]].double()
    return outputs.flatten(1)


def slots_of(seen: list[list[int]]) -> SeenSlots:
    """Returns slots as one range from 2 on and others after it."""
    ranges, others = [], []
    for own in seen:
        last = next((index for index, slot in enumerate(own) if slot != own[0] + index), len(own))
        ranges.append([own[0], own[0] + last, len(others), len(others) + len(own) - last])
        others += own[last:]
    return SeenSlots(
        torch.tensor(ranges, dtype=torch.int32), torch.tensor([*others, 0], dtype=torch.int32)
    )


TREE = [list(range(2, 30)), [*range(2, 30), 31], [*range(2, 29), 30, 32, 35], [7], [2, 39]]


@pytest.mark.parametrize("size", [32, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize("variant", ["plain", "capped", "sinks"])
def test_attention(kernels: Kernels, size: int, group: int, variant: str) -> None:
    kv_heads = 2
    queries = random(len(TREE), kv_heads * group, size)
    keys, new_values = random(2, kv_heads, 40, size, seed=1)
    cap = 2.0 if variant == "capped" else None
    sinks = random(kv_heads * group, seed=2) if variant == "sinks" else None
    found = kernels.attention(queries, keys, new_values, slots_of(TREE), 0.3, cap, sinks)
    assert is_close(found, reference_attention(queries, keys, new_values, TREE, 0.3, cap, sinks))


def test_attention_of_far_scores(kernels: Kernels) -> None:
    """Scores that differ by more than exp can hold."""
    keys = torch.zeros(1, 3, 32)
    keys[0, :, 0] = torch.tensor([-300.0, 0.0, 300.0])
    queries = torch.zeros(1, 1, 32)
    queries[..., 0] = 1.0
    found = kernels.attention(queries, keys, random(1, 3, 32), slots_of([[0, 1, 2]]))
    assert is_close(found, random(1, 3, 32)[:, 2])


def test_a_tokens_attention_is_the_same_in_a_chain_and_in_a_tree(kernels: Kernels) -> None:
    """Slot 5 of a chain is slot 8 of a tree, after branches that it does not see."""
    keys, new_values = random(2, 2, 40, 64, seed=1)
    queries = random(1, 6, 64)
    chain = kernels.attention(queries, keys, new_values, slots_of([list(range(20))]))
    moved = [*range(15), 17, 20, 24, 30, 39]
    keys[:, moved] = keys[:, :20].clone()
    new_values[:, moved] = new_values[:, :20].clone()
    others = queries.repeat(4, 1, 1) * 0.5
    rows = torch.cat((others, queries))
    seen = slots_of([[0], [0, 1], [3], [4, 9], moved])
    for threads in (1, 2):
        kernels.use_threads(threads)
        assert torch.equal(kernels.attention(rows, keys, new_values, seen)[-1:], chain)


@pytest.mark.parametrize(("size", "group"), [(64, 3), (32, 1), (80, 5), (20, 1)])
def test_attention_of_many_rows_and_slots(kernels: Kernels, size: int, group: int) -> None:
    """More rows and slots than are computed at once, and a tree's row among them."""
    keys, new_values = random(2, 2, 160, size, seed=1)
    queries = random(19, 2 * group, size)
    seen = [list(range(2, 120 + row)) for row in range(19)]
    seen[7] = [*range(2, 66), *range(70, 140, 3)]
    expected = reference_attention(queries, keys, new_values, seen, 0.3, None, None)
    alone = [
        kernels.attention(queries[row][None], keys, new_values, slots_of([own]), 0.3)
        for row, own in enumerate(seen)
    ]
    assert is_close(torch.cat(alone), expected)
    for threads in (1, 2):
        kernels.use_threads(threads)
        found = kernels.attention(queries, keys, new_values, slots_of(seen), 0.3)
        assert torch.equal(found, torch.cat(alone))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("inner", [1, 40, 95])
def test_gated_activations(kernels: Kernels, activation: str, inner: int) -> None:
    functions = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu": functional.relu,
    }
    x = random(ROWS, 2 * inner) * 6
    x[0, 0] = 200.0
    x[1, 0] = -200.0
    gate, up = x.double().chunk(2, dim=1)
    assert is_close(kernels.gated(x, activation), functions[activation](gate) * up)


@pytest.mark.parametrize("count", [1, 7, 40, 4099])
@pytest.mark.parametrize("scale", [0.01, 9.0])
def test_likeliest_token_and_statistics(kernels: Kernels, count: int, scale: float) -> None:
    """Of rows with a gap between them; equal logits, impossible tokens, NaNs and infinities."""
    logits = (random(5, count + 3) * scale - 300.0)[:, :count]
    logits[1, count // 2] = 0.0
    logits[1, -1] = 0.0
    logits[2, :-1] = -torch.inf
    logits[3, -1] = torch.nan
    logits[4] = -torch.inf
    logits[4, 0] = torch.inf
    expected = [*logits[:3].argmax(1).tolist(), -1, 0]
    assert kernels.likeliest(logits) == expected
    for row, token in zip(logits[:3], expected, strict=False):
        probs = row.double().softmax(0)
        wanted = [float(torch.special.entr(probs).sum()), float(probs.max())]
        found = kernels.statistics(row)
        assert found[0] == token
        assert found[1:] == pytest.approx(wanted, rel=1e-5, abs=1e-9)
    for broken in (*logits[3:], torch.full((count,), -torch.inf)):
        token, *numbers = kernels.statistics(broken)
        assert token == -1
        assert all(map(math.isnan, numbers))


@pytest.mark.parametrize("width", [1, 64, 95])
def test_products_of_rows_with_a_vector(kernels: Kernels, width: int) -> None:
    weights = random(3, width)
    x = random(width, seed=1)
    found = torch.tensor(kernels.dots(weights, x))
    assert is_close(found, weights.double() @ x.double())


@pytest.mark.parametrize("inputs", [64, 94])
def test_grouped_products_are_those_of_each_expert(kernels: Kernels, inputs: int) -> None:
    """With the same bits, in any number of threads; experts without rows, and one whose outputs
    have several kinds of weights."""
    weights = packed_weights(kernels, (50, inputs))
    others = packed_weights(kernels, (30, inputs))
    biases = [random(outputs, seed=seed) for seed, outputs in enumerate((50, 30))]
    experts = [
        LinearRuns((weight, other), (biases[0], None if number % 2 else biases[1]))
        for number, (weight, other) in enumerate(zip(weights, reversed(others), strict=True))
    ]
    counts = [0, 1, ROWS, 0, 2, 5, 1, 0]
    ends = torch.tensor(counts).cumsum(0)
    x = random(sum(counts), inputs, seed=1)
    x[2] = 0.0
    expected = []
    first = 0
    for expert, last in zip(experts, ends.tolist(), strict=True):
        if last > first:
            own = [
                kernels.product(weight, x[first:last], bias)
                for weight, bias in zip(expert.weights, expert.biases, strict=True)
            ]
            expected.append(torch.cat(own, dim=1))
        first = last
    for threads in (1, 2, 3):
        kernels.use_threads(threads)
        found = kernels.grouped_product(ExpertsWeight(experts), x, ends)
        assert torch.equal(found, torch.cat(expected))


@pytest.mark.parametrize("width", [1, 40, 95])
def test_weighted_sums_of_rows(kernels: Kernels, width: int) -> None:
    x = random(ROWS, width)
    positions = torch.randint(0, ROWS, (7, 3), generator=torch.Generator().manual_seed(1))
    weights = random(7, 3, seed=2)
    expected = (x[positions].double() * weights[..., None]).sum(1)
    found = kernels.weighted_sums(x, positions, weights)
    assert is_close(found, expected)
    kernels.use_threads(2)
    alone = kernels.weighted_sums(x, positions[4:5], weights[4:5])
    assert torch.equal(kernels.weighted_sums(x, positions, weights)[4:5], alone)


@pytest.mark.parametrize("inner", [1, 40, 95])
def test_clamped_activations(kernels: Kernels, inner: int) -> None:
    x = random(ROWS, 2 * inner) * 6
    x[0, 0] = 200.0
    x[1, 0] = -200.0
    gate, up = x.double().chunk(2, dim=1)
    gate = gate.clamp(max=5.0)
    expected = (up.clamp(-5.0, 5.0) + 1) * gate * (1.7 * gate).sigmoid()
    assert is_close(kernels.clamped_gated(x, 5.0, 1.7), expected)


def test_gelu_is_as_exact_as_its_type(kernels: Kernels) -> None:
    gates = torch.linspace(-20.0, 20.0, 40001)
    for limit in (0.01, 1.0, 3.0, 20.0):
        gate = gates[gates.abs() <= limit]
        x = torch.cat((gate, torch.ones_like(gate)))[None]
        expected = functional.gelu(gate.double())[None]
        assert is_close(kernels.gated(x, "gelu"), expected, 2e-7)


def test_quality_of_rounding() -> None:
    weight = random(64, 96)
    weight[5] = 0.0
    in_8_bits = rounded_to_8_bits(weight).restored()
    groups = weight.view(64, -1, GROUP)
    steps = groups.abs().amax(2, keepdim=True) / 127
    error = (in_8_bits - weight).view_as(groups).abs()
    assert bool((error <= 0.51 * steps + 0.001 * groups.abs()).all())
    in_4_bits = rounded_to_4_bits(weight).restored()
    steps = (groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)) / 15
    error = (in_4_bits - weight).view_as(groups).abs()
    assert bool((error <= 0.51 * steps + 0.002 * groups.abs().amax(2, keepdim=True)).all())


@pytest.mark.parametrize("round_weight", [rounded_to_8_bits, rounded_to_4_bits])
def test_a_large_weight_is_rounded_in_parts(
    monkeypatch: pytest.MonkeyPatch, round_weight: Callable[[Tensor], Rounded]
) -> None:
    weight = random(70, 96)
    at_once = round_weight(weight)
    monkeypatch.setattr(packing, "_AT_ONCE", 32 * 96)  # three parts, the last one smaller
    in_parts = round_weight(weight)
    assert in_parts.inputs == at_once.inputs
    assert torch.equal(in_parts.restored(), at_once.restored())


FORKED = """
import os, sys, torch
from specgen.engine.kernels import library
from specgen.engine.kernels.operators import Kernels
from specgen.engine.kernels.packing import pack_floats
kernels = Kernels(library._load(sys.argv[1]))
kernels.use_threads(2)
weight = pack_floats(torch.ones(640, 64), kernels.library)
assert kernels.product(weight, torch.ones(1, 64))[0, 639] == 64
child = os.fork()
product = kernels.product(weight, torch.ones(1, 64))[0, 639]
if child == 0:
    os._exit(0 if product == 64 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_has_threads_of_its_own(kernels: Kernels) -> None:
    environment = os.environ | {"SPECGEN_CACHE": str(shared_folder())}
    command = [sys.executable, "-c", FORKED, kernels.library.instructions]
    subprocess.run(command, check=True, timeout=120, env=environment)


def test_a_compiler_that_fails_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_library, "_FLAGS", ("--no-such-flag",))
    with pytest.raises(UnavailableError, match=r"the compiler .* failed"):
        kernel_library._load("avx2")
    assert list((tmp_path / "kernels").iterdir()) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match="no C compiler"):
        kernel_library._load("avx2")


def test_an_unknown_kind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECGEN_KERNELS", "sse2")
    with pytest.raises(SpecgenError, match="SPECGEN_KERNELS=sse2"):
        kernel_library._chosen()
    monkeypatch.setenv("SPECGEN_KERNELS", "avx512")
    monkeypatch.setattr(kernel_library, "_features", lambda: INSTRUCTIONS["avx2"].features)
    with pytest.raises(SpecgenError, match="lacks these instructions"):
        kernel_library._chosen()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_slots_of_a_chain_are_those_up_to_its_tokens(window: int | None, causal: bool) -> None:
    slots = ChainSlots(window, causal=causal)
    bounds = ((0, 1), (3, 7), (2, 4), (255, 258), (900, 901))
    made = [slots.rows(first, last).ranges for first, last in bounds]
    for ranges, (first, last) in zip(made, bounds, strict=True):
        tokens = range(first, last)
        earliest = [0 if window is None else max(0, own + 1 - window) for own in tokens]
        behind = 1 if causal else window or last  # with the token itself
        ends = [min(own + behind, last) for own in tokens]
        assert ranges.tolist() == [[*seen, 0, 0] for seen in zip(earliest, ends, strict=True)]
        assert ranges.is_contiguous()
