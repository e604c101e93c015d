"""RMSNorm of hidden states, by our own kernels or by torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import sqrt

import torch
from torch.nn import functional

from specgen.engine.kernels.library import kernels
from specgen.engine.kernels.operators import Kernels, kernels_for
from specgen.engine.native.architecture import Architecture

# RMSNorm of hidden states [..., width]
Norm = Callable[[torch.Tensor], torch.Tensor]


def norm_gain(architecture: Architecture, dtype: torch.dtype, *devices: torch.device) -> float:
    """Returns the factor `gain` by which weights that read a norm's output are multiplied, and
    `norm_function`'s output is divided.

    It is sqrt(width) in float32 on CPUs without our own kernels, where RMSNorm then takes three
    operations instead of torch's eight, and 1 elsewhere.
    """
    is_fast = (
        architecture.pre_norms
        and dtype == torch.float32
        and all(device.type == "cpu" for device in devices)
        and kernels() is None
    )
    return sqrt(architecture.hidden_size) if is_fast else 1.0


def norm_function(eps: float, gain: float = 1.0, weight: torch.Tensor | None = None) -> Norm:
    """Returns a function that computes RMSNorm of hidden states [..., width], with the norm's
    `weight` [width] (None: without weights), and divided by `gain`.

    `gain` is 1 or sqrt(width), see `norm_gain`, and 1 with a weight.
    """
    if gain == 1.0:
        return partial(rms_norm, eps, weight)
    with torch.inference_mode(False):
        root = torch.tensor(gain * sqrt(eps))
    return lambda hidden: hidden / torch.linalg.vector_norm(hidden, 2, -1, True).hypot_(root)


def output_norm(eps: float, gain: float, weight: torch.Tensor) -> Norm:
    """Returns a function that computes RMSNorm of hidden states [..., width] with its `weight`
    [width], which contains `gain`.

    In 16-bit dtypes, the states are rounded before the weight multiplies them, as transformers
    does.
    """
    unit = norm_function(eps, gain)

    def norm(hidden: torch.Tensor) -> torch.Tensor:
        own = kernels_for(hidden.device, hidden.dtype)
        if own is None or torch.is_grad_enabled():
            return unit(hidden) * weight
        return _by_kernels(own, eps, weight, hidden)

    return norm


def rms_norm(eps: float, weight: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
    """Returns RMSNorm of `hidden` [..., width] with the norm's `weight` [width]; None: without
    weights."""
    own = kernels_for(hidden.device, hidden.dtype)
    if own is None or torch.is_grad_enabled():
        return functional.rms_norm(hidden, hidden.shape[-1:], weight, eps)
    return _by_kernels(own, eps, weight, hidden)


def _by_kernels(
    own: Kernels, eps: float, weight: torch.Tensor | None, hidden: torch.Tensor
) -> torch.Tensor:
    if hidden.dim() == 2:
        return own.rms_norm(hidden, weight, eps)
    return own.rms_norm(hidden.reshape(-1, hidden.shape[-1]), weight, eps).view(hidden.shape)
