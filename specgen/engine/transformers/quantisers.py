"""Checks transformers' quantisers, which load checkpoints with quantised weights, before they load any."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, partialmethod
from textwrap import shorten
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers.utils import is_accelerate_available

from specgen.base.errors import SpecgenError
from specgen.engine.quantisation import Format, Quantisation, is_installed
from specgen.engine.transformers.quiet import quiet_transformers


def quantisation_on(device: torch.device, quantisation: Quantisation, name: str, *, trust_remote_code: bool) -> Quantisation:
    """Returns how the weights of the model `name` are kept on a device: quantised, or dequantised on loading.

    Raises SpecgenError for a device that the format does not run on, for packages that are not installed, and for what
    transformers' own check finds. Code from the hub is used only with `trust_remote_code`.
    """
    known = quantisation.format
    missing = [package for package, module in known.packages.items() if not is_installed(module)]
    lacks_gpu = known.gpu_only and device.type != "cuda"
    if missing or lacks_gpu:
        lacking = ["a CUDA GPU"] * lacks_gpu + (
            [f"the package{'s' * (len(missing) > 1)} {' and '.join(missing)}"] if missing else []
        )
        raise SpecgenError(_refusal(name, known, f"needs {', and '.join(lacking)}"), _hint(missing, lacks_gpu=lacks_gpu))
    uses_kernels = known.hub_kernels and device.type != "cpu" and trust_remote_code and is_installed("kernels")
    if known.gpu_only and known.hub_kernels and not trust_remote_code:
        raise SpecgenError(
            _refusal(name, known, "computes with code that the package kernels downloads from the hub"),
            "If you trust its authors with your machine, add --trust-remote-code",
        )
    settings = dict(quantisation.settings)
    if known.can_dequantise and not uses_kernels:
        settings["dequantize"] = True
    return Quantisation(known, settings, _check(settings, device, partial(_refusal, name, known)))


def _refusal(name: str, known: Format, reason: str) -> str:
    return f"the weights of {name} are quantised with {known.title}, which {reason}"


def _hint(missing: Sequence[str], *, lacks_gpu: bool) -> str:
    install = f"pip install {shlex.join(missing)}"
    if not lacks_gpu:
        return f"Install what is missing: {install}"
    return "Take --device cuda" + (f" after {install}" if missing else "") + ", or another checkpoint of the model"


def _check(settings: Mapping[str, Any], device: torch.device, message: Callable[[str], str]) -> bool:
    """Makes transformers check that it can load weights with these quantisation settings onto a device. Loads no weights.

    Returns whether it will dequantise them. Raises SpecgenError if it cannot: `message` makes its text from the reason, a clause
    without a subject.
    """
    try:
        with quiet_quantisers():
            from transformers.quantizers.auto import AutoHfQuantizer

            quantiser = AutoHfQuantizer.from_config(dict(settings), pre_quantized=True)
            quantiser.validate_environment(device_map={"": str(device)}, weights_only=True)
    except Exception as error:
        if "Unknown quantization type" in str(error) or not isinstance(settings.get("quant_method"), str):
            raise SpecgenError(
                message("transformers does not know"), "Install a newer transformers, or take another checkpoint of the model"
            ) from error
        reason = shorten(" ".join(str(error).split()), 200, placeholder=" …").rstrip(".") or type(error).__name__
        hint = "Install what it names" if isinstance(error, ImportError) else "Take another checkpoint of the model"
        raise SpecgenError(message(f"transformers cannot load here: {reason}"), hint) from error
    return bool(getattr(quantiser.quantization_config, "dequantize", False))


def device_map(device: torch.device) -> dict[str, str] | None:
    """Returns the device map that loads a whole model onto a device; None without accelerate, which transformers needs for it."""
    return {"": str(device)} if is_accelerate_available() else None


@contextmanager
def quiet_quantisers() -> Iterator[None]:
    """Switches off warnings, log messages and progress bars of transformers and of the quantisers' packages."""
    disabled, bars = logging.root.manager.disable, tqdm.__init__
    logging.disable(logging.WARNING)
    tqdm.__init__ = partialmethod(bars, disable=True)
    try:
        with quiet_transformers():
            yield
    finally:
        logging.disable(disabled)
        tqdm.__init__ = bars
