"""Compile the Triton kernels for GPUs that need not be there, and print the resources that they take. Not a test.

    python tests/kernel_resources.py [--capabilities 80,90] [--all]

Needs triton, and its own `cuobjdump`. Without `--all`, a sample of the shapes is compiled.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from specgen.engine.native.kernels.triton_attention import NUMBERS, attention_parts, attention_sum
from specgen.engine.native.kernels.triton_kernels import block_sizes
from specgen.engine.native.kernels.triton_layer import gated_activation, heads_to_cache
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_INT64, _FLOAT32 = ("base_at", "first_at", "bits", "depths"), ("sums", "tops", "rotations")
_NUMBERS = {"score_cap": "fp32", "eps": "fp32"}
_TENSORS = ("query", "keys", "values", "heads", "weight", "inner", "output")
_ALIGNED = ("query_token_stride", "query_head_stride", "key_head_stride", "key_stride")


class Resources(NamedTuple):
    """What one program takes: bytes of shared memory, registers per thread, and bytes of stack per thread (spilled registers)."""

    shared: int
    registers: int
    stack: int


def compiled(kernel: Any, constants: dict[str, Any], dtype: str, capability: int, warps: int) -> Resources:
    """Compiles a kernel for a CUDA compute capability (80: 8.0)."""
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[index,] = "constexpr", constants[name]
            continue
        pointers = dict.fromkeys(_INT64, "*i64") | dict.fromkeys(_FLOAT32, "*fp32") | dict.fromkeys(_TENSORS, f"*{dtype}")
        signature[name] = (pointers | _NUMBERS).get(name, "i32")
        if (signature[name].startswith("*") and name not in NUMBERS) or name in _ALIGNED:
            attributes[index,] = [["tt.divisibility", 16]]
    source, target = ASTSource(kernel, signature, values, attributes), GPUTarget("cuda", capability, 32)
    made = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": 2})
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    assert found is not None
    return Resources(made.metadata.shared, int(found[1]), int(found[2]))


def attention_cases(every: bool) -> Iterator[tuple[str, int, int, int, bool]]:
    """Yields dtype, head size, group, width, and whether there are a window and a score cap."""
    for dtype in DTYPES:
        for size in (64, 80, 128, 256) if every else (128,):
            seen = set()
            for group in (1, 4, 8) if every else (4,):
                for width in (1, 2, 4, 8, 16) if every else (1, 16):
                    blocks = block_sizes(width * group, size, DTYPES[dtype])
                    if (group, blocks) not in seen:
                        seen.add((group, blocks))
                        yield dtype, size, group, width, False
        yield dtype, 256, 2, 16, True


def all_resources(capability: int, every: bool) -> Iterator[tuple[str, Resources]]:
    """Yields a name and the resources of each kernel and shape."""
    for dtype, size, group, width, special in attention_cases(every):
        rows, keys, padded, warps = block_sizes(width * group, size, DTYPES[dtype])
        common = {"SIZE": size, "PADDED_SIZE": padded}
        constants = {
            "GROUP": group,
            "CAPPED": special,
            "WINDOWED": special,
            "IN_FLOAT32": dtype == "fp32",
            "ROWS": rows,
            "KEYS": keys,
            **common,
        }
        name = f"{dtype} attention_parts size {size}, group {group}, width {width}{', window and cap' if special else ''}"
        yield name, compiled(attention_parts, constants, dtype, capability, warps)
        if (group, width) == (4, 1) or special:
            yield f"{dtype} attention_sum size {size}", compiled(attention_sum, common, dtype, capability, 4)
    for dtype in DTYPES:
        for size in (64, 128, 256) if every else (128,):
            for is_normed in (False, True):
                constants = {"KV_HEADS": 8, "SIZE": size, "ROTATED": size, "NORMED": is_normed, "PAIRS": max(16, size // 2)}
                name = f"{dtype} heads_to_cache size {size}{', normalised' if is_normed else ''}"
                yield name, compiled(heads_to_cache, constants, dtype, capability, 1)
        for activation in ("silu", "gelu", "gelu_tanh", "relu"):
            constants = {"ACTIVATION": activation, "BLOCK": 256}
            yield f"{dtype} gated_activation {activation}", compiled(gated_activation, constants, dtype, capability, 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--capabilities", default="80,90")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    print(f"triton {triton.__version__}: shared bytes, registers, stack bytes")
    for capability in map(int, options.capabilities.split(",")):
        for name, found in all_resources(capability, options.all):
            print(f"sm_{capability} {name:64} {found.shared:7} {found.registers:4} {found.stack:4}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
