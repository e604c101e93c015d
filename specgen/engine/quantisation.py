"""Checkpoints with quantised weights: which formats there are, and which packages each one needs.

transformers loads them with its own quantisers (`transformers/quantizers/auto.py`). The packages are those that its quantisers of
versions 5.17 to 5.23 import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from textwrap import shorten
from typing import Any

from specgen.base.errors import SpecgenError

GGUF_HINT = "llama.cpp runs GGUF files: specgen tune --export llama.cpp prints its options. Here, name the safetensors model"


@dataclass(frozen=True, slots=True)
class Format:
    """A format of quantised weights. `title` is its name in messages.

    `packages` are those that transformers loads it with: pip's name of each, and the name that is imported. `gpu_only`: there are
    no products for a CPU. `hub_kernels`: its products on an accelerator are code that the package `kernels` downloads from the
    hub. `can_dequantise`: transformers can turn the weights into ordinary ones when it loads them, and does so where those
    products cannot run.
    """

    title: str
    packages: Mapping[str, str] = field(default_factory=dict)
    gpu_only: bool = False
    hub_kernels: bool = False
    can_dequantise: bool = False


_ACCELERATE = {"accelerate": "accelerate"}
_KERNELS = {"kernels": "kernels"}
FORMATS: Mapping[str, Format] = {
    "aqlm": Format("AQLM", {"aqlm": "aqlm"} | _ACCELERATE),
    "auto-round": Format("AutoRound", {"auto-round": "auto_round"}),
    "awq": Format("AWQ", {"gptqmodel": "gptqmodel"} | _ACCELERATE),
    "bitnet": Format("BitNet", _ACCELERATE),
    "bitsandbytes": Format("bitsandbytes", {"bitsandbytes": "bitsandbytes"} | _ACCELERATE),
    "compressed-tensors": Format("compressed-tensors", {"compressed-tensors": "compressed_tensors"}),
    "eetq": Format("EETQ", _KERNELS | _ACCELERATE, gpu_only=True, hub_kernels=True),
    "fbgemm_fp8": Format("FBGEMM FP8", {"fbgemm-gpu": "fbgemm_gpu"} | _ACCELERATE, gpu_only=True),
    "fouroversix": Format("Four Over Six", {"fouroversix": "fouroversix"}),
    "fp8": Format("FP8", _ACCELERATE, hub_kernels=True, can_dequantise=True),
    "fp_quant": Format("FP-Quant", {"fp-quant": "fp_quant"} | _ACCELERATE, gpu_only=True),
    "gemma": Format("Gemma's own quantisation"),
    "gptq": Format("GPTQ", {"optimum": "optimum", "gptqmodel": "gptqmodel"} | _ACCELERATE),
    "higgs": Format(
        "HIGGS",
        {"flute-kernel": "flute", "fast-hadamard-transform": "fast_hadamard_transform"} | _ACCELERATE,
        gpu_only=True,
    ),
    "hqq": Format("HQQ", {"hqq": "hqq"} | _ACCELERATE, gpu_only=True),
    "metal": Format("Metal", hub_kernels=True, can_dequantise=True),
    "mxfp4": Format("MXFP4", _ACCELERATE, hub_kernels=True, can_dequantise=True),
    "mxfp8": Format("MXFP8", _ACCELERATE, hub_kernels=True, can_dequantise=True),
    "nvfp4": Format("NVFP4", _KERNELS | _ACCELERATE, gpu_only=True, hub_kernels=True),
    "quanto": Format("Quanto", {"optimum-quanto": "optimum.quanto"} | _ACCELERATE),
    "quark": Format("Quark", {"amd-quark": "quark"}),
    "sinq": Format("SINQ", {"sinq": "sinq"}),
    "spqr": Format("SpQR", {"spqr_quant[gpu]": "spqr_quant"} | _ACCELERATE, gpu_only=True),
    "torchao": Format("torchao", {"torchao": "torchao"}),
    "vptq": Format("VPTQ", {"vptq": "vptq"} | _ACCELERATE, gpu_only=True),
}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The quantised format of a checkpoint: `settings` is the `quantization_config` of its config.json.

    `dequantises`: its weights become ordinary ones when they are loaded on the device that it was asked for.
    """

    format: Format
    settings: Mapping[str, Any]
    dequantises: bool = False


def read_quantisation(config: Mapping[str, Any], name: str) -> Quantisation | None:
    """Returns how the weights of the model `name` are quantised, by its config.json; None if they are not.

    Raises SpecgenError for GGUF, and for settings that are no JSON object.
    """
    settings = _settings(config, name)
    if settings is None:
        return None
    method = settings.get("quant_method")
    if settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        method = "bitsandbytes"  # older files do not name it
    method = method[:40] if isinstance(method, str) else "a nameless format"
    if method == "gguf":
        raise SpecgenError(f"{name} is a GGUF model, which specgen does not run", GGUF_HINT)
    return Quantisation(FORMATS.get(method, Format(method)), settings)


def _settings(config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Returns the model's `quantization_config`; a model with vision or audio may have it in its text part."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        settings = part.get("quantization_config")
        if settings is not None and not isinstance(settings, dict):
            shown = shorten(repr(settings), 40, placeholder=" …")
            raise SpecgenError(
                f"the config.json of {name} has a quantization_config that is no JSON object: {shown}",
                "Download or save it again",
            )
        if settings is not None:
            return settings
    return None


def is_installed(module: str) -> bool:
    """Whether a package can be imported, without importing it."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # the package around it is missing, or half imported
        return False
