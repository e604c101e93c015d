"""The stage of `measure_gpu.py` about fused kernels: static passes with them against the same passes with torch's operators."""

from __future__ import annotations

import os
from itertools import product

import torch
from gpu_bench import Bench
from gpu_models import static_pass
from specgen.engine.native.kernels.checked_kernels import checked_kernels
from specgen.engine.native.kernels.kernel_set import KernelSet
from specgen.engine.native.kernels.torch_kernels import TORCH

from specgen.engine.native.native_model import NativeModel

WIDTHS = (1, 8)


def fused_kernels(model: NativeModel) -> KernelSet | str:
    """The fused kernels that work for the model, or why there are none. On a CPU, they are run by Triton's interpreter."""
    if model.device.type == "cuda":
        found = checked_kernels(model.architecture, model.dtype, model.device, WIDTHS)
        return "skipped: none of them works here, see the log" if found == TORCH else found
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "skipped: without a GPU, they need TRITON_INTERPRET=1"
    try:
        from specgen.engine.native.kernels.triton_kernels import TRITON
    except ImportError as error:
        return f"skipped: {error}"
    return TRITON


def kernels(bench: Bench) -> None:
    """Times of replayed passes after a short and a long context, and the logits' largest difference over the largest logit.

    The fused attention gets the whole cache as its bucket, torch's the smallest that holds the tokens.
    """
    buckets = bench.sizes.buckets
    for name in ("draft", "target"):
        model = bench.model(name)
        fused = fused_kernels(model)
        if isinstance(fused, str):
            bench.figures[name] = fused
            continue
        used = [f"{part.__module__.rpartition('.')[2]}.{part.__name__}" for part in (fused.store, fused.attend, fused.gate)]
        bench.figures[f"{name}_kernels"] = ", ".join(used)
        for width, context in product(WIDTHS, (100, buckets[-1] - max(WIDTHS))):
            key, logits = f"{name}_{width}_after_{context}", []
            for how, chosen in (("operators", TORCH), ("fused", fused)):
                model.inputs.kernels = chosen
                bucket = next(size for size in buckets if size >= (buckets[-1] if chosen.finds_keys else context + width))
                static, _ = static_pass(model, width, bucket, context)
                bench.figures[f"{key}_{how}_ms"] = bench.time(bench.capture(name, static.run))
                logits.append(static.output(width).logits.float().clone())
            model.inputs.kernels = TORCH
            largest = logits[0].abs().max()
            bench.figures[f"{key}_difference"] = float((logits[1] - logits[0]).abs().max() / largest)
            bench.figures[f"{key}_same_choice"] = bool(torch.equal(*(part.argmax(-1) for part in logits)))
