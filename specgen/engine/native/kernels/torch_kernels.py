"""The kernels of static passes as torch's operators, for every device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from specgen.engine.native.attention import attend
from specgen.engine.native.description import Activation
from specgen.engine.native.kernels.kernel_set import AttentionSpec, KernelSet, StaticInputs
from specgen.engine.native.rotary import rotate

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def store_heads(heads: torch.Tensor, spec: AttentionSpec, inputs: StaticInputs) -> torch.Tensor:
    """Returns the queries, and writes keys and values; see `KernelSet.store`."""
    rotation = inputs.rotation(spec)
    if rotation is not None:
        rotate(heads.narrow(1, 0, spec.heads + spec.kv_heads), rotation)
    query, new = torch.split(heads, [spec.heads, 2 * spec.kv_heads], dim=1)
    new = new.view(-1, 2, spec.kv_heads, spec.size).permute(1, 2, 0, 3)
    inputs.entries(spec).written.index_copy_(2, inputs.slots(), new)
    return query


def masked_attention(query: torch.Tensor, spec: AttentionSpec, inputs: StaticInputs) -> torch.Tensor:
    """Returns the attention over all entries of the bucket with a mask; see `KernelSet.attend`."""
    _, keys, values = inputs.entries(spec)
    return attend(query, keys, values, inputs.mask(spec, query.dtype), spec.score_cap)


def gate(inner: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Returns activation(gate) * up; see `KernelSet.gate`. Differentiable."""
    half, up = inner.chunk(2, dim=-1)
    active = ACTIVATIONS[activation](half)
    return active * up if torch.is_grad_enabled() else active.mul_(up)


TORCH = KernelSet(store_heads, masked_attention, gate)
