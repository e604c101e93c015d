"""Runs Triton's kernels in its interpreter, on the CPU, and computes in float64 what they should give."""

from __future__ import annotations

import os
import random
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from specgen.engine.native.description import LayerKind
from specgen.engine.native.kernels.kernel_set import SPAN, AttentionSpec, PassNumbers, StaticInputs
from specgen.engine.native.kernels.torch_kernels import TORCH

from specgen.engine.native.kv_buffer import LayerEntries

if find_spec("triton") is None:
    _REASON = "triton is not installed"
elif tuple(map(int, version("triton").split(".")[:2])) < (3, 7):
    _REASON = "the interpreter of triton before 3.7 does not work with numpy 2.4"
elif os.environ.get("TRITON_INTERPRET") != "1":  # see conftest.py
    _REASON = "with a GPU, the kernels are compiled, and compared with torch's operators on it"
else:
    _REASON = ""
interpreted = pytest.mark.skipif(bool(_REASON), reason=_REASON)


def triton_kernels() -> Any:
    """The module with Triton's kernels; only in tests that are marked with `interpreted`, or with a GPU."""
    from specgen.engine.native.kernels import triton_kernels as found

    return found


def tree_numbers(rng: random.Random, base: int, before: int, width: int) -> PassNumbers:
    """The numbers of a pass over the last `width` nodes of a random tree, `before` nodes of which are in the cache."""
    bits: list[int] = []
    depths: list[int] = []
    for node in range(before + width):
        parent = rng.randrange(-1, node) if node else -1
        bits.append((bits[parent] if parent >= 0 else 0) | 1 << node)
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    depths += [depths[-1]] * (SPAN + 1 - len(depths))
    return PassNumbers(*map(torch.tensor, ([base], [base + before], bits[before:], depths)))


def static_inputs(
    numbers: PassNumbers, cache: torch.Tensor, rotations: torch.Tensor | None = None, window: int | None = None, group: int = 1
) -> StaticInputs:
    """The inputs of a pass through one layer, whose part of the KV cache is `cache` [2, kv heads, capacity, head size]."""
    kind = LayerKind(window, None if rotations is None else "all")
    tables, indices = {} if rotations is None else {"all": rotations}, torch.arange(cache.shape[2])
    return StaticInputs(TORCH, numbers, [kind], tables, [LayerEntries(cache, *cache)], group, 0, indices)


def spec_of(
    query: torch.Tensor, kv_heads: int, score_cap: float | None = None, weight: torch.Tensor | None = None
) -> AttentionSpec:
    return AttentionSpec(0, 0, query.shape[1], kv_heads, query.shape[2], score_cap, weight, 1e-5)


def exact_attention(query: torch.Tensor, spec: AttentionSpec, inputs: StaticInputs) -> torch.Tensor:
    """The attention in float64, from a definition of its own: one token and head after the other."""
    base, first, bits, depths = (part.tolist() for part in inputs.numbers)
    _, keys, values = inputs.entries(spec)
    window, group, rows = inputs.kinds[0].window, spec.heads // spec.kv_heads, []
    for row, seen in enumerate(bits):
        position = base[0] + depths[first[0] - base[0] + row]
        visible = [(key, key) for key in range(base[0])]
        visible += [(base[0] + bit, base[0] + depths[bit]) for bit in range(SPAN) if seen >> bit & 1]
        near = [key for key, of_key in visible if window is None or position - of_key < window]
        for head in range(spec.heads):
            scores = keys[head // group, near].double() @ query[row, head].double()
            if spec.score_cap is not None:
                scores = spec.score_cap * torch.tanh(scores / spec.score_cap)
            rows.append(scores.softmax(0) @ values[head // group, near].double())
    return torch.stack(rows).view(len(bits), -1)
