"""Count the kernels that a static pass launches on a GPU, for each layer and for the rest. Needs no GPU. Not a test.

    python tests/kernel_counts.py

Operators are recorded on the meta device, without views and allocations. Each launches one kernel on a CUDA device, but for those
in `LAUNCHES`; matrix products may launch a second one where cuBLAS splits a sum, which is not counted. RMSNorm and attention are
counted as the one kernel that torch has for each on CUDA (`_fused_rms_norm`, `_scaled_dot_product_efficient_attention`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from specgen.engine.native.kernels.kernel_set import KernelSet
from specgen.engine.native.kernels.torch_kernels import TORCH
from specgen.engine.native.static_pass import StaticPass
from static_checks import random_model, tensors_in
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from specgen.engine.native import attention

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 1024,
}
LAUNCHES = {
    "aten.addmm.default": 2,  # copies the addend to the result first
    "specgen.attention.default": 2,  # the parts and their sum
}
_NONE = ("aten.empty", "aten.new_empty", "aten.detach", "aten.alias", "aten._unsafe_view", "aten.lift_fresh", "prim.device")


class Launches(TorchDispatchMode):
    """Counts kernels by the operator that launches them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, known = str(func), {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        is_view = any(tensor.untyped_storage()._cdata in known for tensor in tensors_in(result))  # in inference mode, `to` may be
        if func._schema.is_mutable or not (is_view or name.startswith(_NONE)):
            self.counts[name] += LAUNCHES.get(name, 1)
        return result

    @contextmanager
    def with_fused(self) -> Iterator[None]:
        """Counts RMSNorm and attention as one kernel each: on the meta device, torch decomposes them."""

        def fused(name: str) -> Any:
            def run(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
                self.counts[name] += 1
                return torch.empty_like(x)

            return run

        with (
            patch.object(functional, "rms_norm", fused("rms_norm")),
            patch.object(attention, "scaled_dot_product_attention", fused("scaled_dot_product_attention")),
            self,
        ):
            yield


def count(layers: int, width: int, kernels: KernelSet = TORCH, family: str = "llama", **changes: Any) -> Counter[str]:
    """The kernels of one static pass of a model with so many layers of the 8B shape, by operator."""
    model = random_model(family, torch.bfloat16, "meta", num_hidden_layers=layers, **LLAMA_8B | changes)
    model.inputs.kernels = kernels
    forward, cache = model.forward(), model.new_cache()
    cache.enlarge(512)
    static = StaticPass(forward, cache, width, 512)  # type: ignore[arg-type]
    launches = Launches()
    with torch.inference_mode(), launches.with_fused():
        static.run()
    return launches.counts


def by_layer(width: int, kernels: KernelSet = TORCH, **changes: Any) -> tuple[Counter[str], Counter[str]]:
    """The kernels of one layer, and those of a pass outside of its layers."""
    one, two = (count(layers, width, kernels, **changes) for layers in (1, 2))
    return two - one, one - (two - one)


def main() -> int:
    sets = {"torch's operators": TORCH}
    try:
        from specgen.engine.native.kernels.triton_kernels import TRITON

        sets["fused kernels"] = TRITON
    except ImportError:
        print("no triton: its kernels are not counted")
    for name, kernels in sets.items():
        for width in (1, 8):
            layer, rest = by_layer(width, kernels)
            print(f"{name}, width {width}: {layer.total()} in each layer, {rest.total()} in the rest of the pass")
        for operator, launches in sorted(layer.items()):
            print(f"    {launches} {operator}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
