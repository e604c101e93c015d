"""The kernels of static passes in Triton, each as an operator of torch, which can be recorded and captured in a CUDA graph.

Importing this module needs triton, which torch's builds for CUDA bring along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from specgen.engine.native.description import Activation
from specgen.engine.native.kernels.kernel_set import AttentionSpec, KernelSet, StaticInputs
from specgen.engine.native.kernels.triton_attention import SPLIT, attention_parts, attention_sum
from specgen.engine.native.kernels.triton_layer import gated_activation, heads_to_cache

_SPLIT = int(SPLIT.value)
_LIBRARY: Any = torch.library.Library("specgen", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "attention(Tensor query, Tensor keys, Tensor values, Tensor base, Tensor first, Tensor bits, Tensor depths, "
    "int window, float? score_cap) -> Tensor"
)
_LIBRARY.define(
    "heads_to_cache(Tensor(a!) heads, Tensor(b!) cache, Tensor? rotations, Tensor? weight, Tensor base, Tensor first, "
    "Tensor depths, float eps) -> ()"
)
_LIBRARY.define("gated_activation(Tensor inner, str activation) -> Tensor")


def _power_of_two(number: int, least: int = 16) -> int:
    return max(least, 1 << (number - 1).bit_length())


def block_sizes(query_rows: int, head_size: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Returns the rows and keys of a block of attention, the padded head size, and the number of warps.

    Chosen with `tests/kernel_resources.py`: on compute capability 8.0 and 9.0, at most 86 KB of shared memory are used, and in
    float32 at most 24 bytes of registers per thread are spilled, otherwise none.
    """
    padded = _power_of_two(head_size)
    if dtype == torch.float32:
        return 16, 32, padded, 8
    most = 64 if padded <= 128 else 32
    return min(_power_of_two(query_rows), most), most, padded, 4


def _attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    base: torch.Tensor,
    first: torch.Tensor,
    bits: torch.Tensor,
    depths: torch.Tensor,
    window: int,
    score_cap: float | None,
) -> torch.Tensor:
    width, heads, size = query.shape
    kv_heads, capacity, _ = keys.shape
    group, splits = heads // kv_heads, triton.cdiv(capacity, _SPLIT)
    rows, block, padded, warps = block_sizes(width * group, size, query.dtype)
    sums = torch.empty(width * heads, splits, size, dtype=torch.float32, device=query.device)
    tops = torch.empty(2, width * heads, splits, dtype=torch.float32, device=query.device)
    output = query.new_empty(width, heads * size)
    attention_parts[kv_heads, triton.cdiv(width * group, rows), splits](
        query,
        keys,
        values,
        base,
        first,
        bits,
        depths,
        sums,
        tops,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        width,
        splits,
        width * heads * splits,
        window,
        score_cap or 0.0,
        GROUP=group,
        SIZE=size,
        WINDOWED=window > 0,
        CAPPED=score_cap is not None,
        IN_FLOAT32=query.dtype == torch.float32 or not query.is_cuda,  # Triton's interpreter multiplies no bfloat16
        ROWS=rows,
        KEYS=block,
        PADDED_SIZE=padded,
        num_warps=warps,
        num_stages=2,
    )
    attention_sum[(width * heads,)](
        sums,
        tops,
        base,
        first,
        output,
        width,
        splits,
        width * heads * splits,
        window,
        SIZE=size,
        PADDED_SIZE=padded,
        num_warps=4,
    )
    return output


def _heads_to_cache(
    heads: torch.Tensor,
    cache: torch.Tensor,
    rotations: torch.Tensor | None,
    weight: torch.Tensor | None,
    base: torch.Tensor,
    first: torch.Tensor,
    depths: torch.Tensor,
    eps: float,
) -> None:
    width, count, size = heads.shape
    keys, values = cache[0], cache[1]
    kv_heads = keys.shape[0]
    heads_to_cache[width, count](
        heads,
        keys,
        values,
        depths if rotations is None else rotations,
        heads if weight is None else weight,
        base,
        first,
        depths,
        count - 2 * kv_heads,
        keys.stride(0),
        keys.stride(1),
        eps,
        KV_HEADS=kv_heads,
        SIZE=size,
        ROTATED=0 if rotations is None else 2 * rotations.shape[1],
        NORMED=weight is not None,
        PAIRS=_power_of_two(size // 2),
        num_warps=1,
    )


def _gated_activation(inner: torch.Tensor, activation: str) -> torch.Tensor:
    width, size = inner.shape[0], inner.shape[1] // 2
    output, block = inner.new_empty(width, size), 256
    gated_activation[width, triton.cdiv(size, block)](inner, output, size, ACTIVATION=activation, BLOCK=block, num_warps=2)
    return output


def _on_its_device(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the operator with its first tensor's device as the current one, on which Triton launches kernels."""

    def run(first: torch.Tensor, *others: Any) -> Any:
        with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
            return operator(first, *others)

    return run


_LIBRARY.impl("attention", _on_its_device(_attention), "CompositeExplicitAutograd")
_LIBRARY.impl("heads_to_cache", _on_its_device(_heads_to_cache), "CompositeExplicitAutograd")
_LIBRARY.impl("gated_activation", _on_its_device(_gated_activation), "CompositeExplicitAutograd")
_LIBRARY.impl("attention", lambda query, *_: query.new_empty(query.shape[0], query[0].numel()), "Meta")
_LIBRARY.impl("heads_to_cache", lambda *_: None, "Meta")
_LIBRARY.impl("gated_activation", lambda inner, _: inner.new_empty(inner.shape[0], inner.shape[1] // 2), "Meta")


def store_heads(heads: torch.Tensor, spec: AttentionSpec, inputs: StaticInputs) -> torch.Tensor:
    """Returns the queries, and writes keys and values, in one kernel; see `KernelSet.store`. They are part of `heads`."""
    heads = heads.contiguous()
    base, first, _, depths = inputs.numbers
    name = inputs.kinds[spec.kind].rotary
    rotations = None if name is None else torch.view_as_real(inputs.rotations[name])
    cache = inputs.entries(spec).written
    torch.ops.specgen.heads_to_cache(heads, cache, rotations, spec.qk_weight, base, first, depths, spec.eps)
    return heads.narrow(1, 0, spec.heads)


def attend(query: torch.Tensor, spec: AttentionSpec, inputs: StaticInputs) -> torch.Tensor:
    """Returns the attention over the cache's valid entries, without a mask, in two kernels; see `KernelSet.attend`."""
    _, keys, values = inputs.entries(spec)
    window = inputs.kinds[spec.kind].window or 0  # also one that excludes nothing yet: the same kernels in every cache
    output: torch.Tensor = torch.ops.specgen.attention(query, keys, values, *inputs.numbers, window, spec.score_cap)
    return output


def gate(inner: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Returns activation(gate) * up in one kernel; see `KernelSet.gate`."""
    output: torch.Tensor = torch.ops.specgen.gated_activation(inner.contiguous(), activation)
    return output


TRITON = KernelSet(store_heads, attend, gate, norms=frozenset({"head"}), finds_keys=True)
