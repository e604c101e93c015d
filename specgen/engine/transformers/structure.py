"""The structure of models: of one without its weights, and of one whose weights are quantised."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from specgen.base.errors import SpecgenError
from specgen.engine.transformers.quiet import quiet_transformers


def model_without_weights(config: Any, trust_remote_code: bool) -> Any | None:
    """Returns the model on torch's meta device, so that its structure can be inspected before the weights are loaded.

    `config` is transformers' config. Returns None if building the model fails.
    """
    try:
        with quiet_transformers(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception:  # noqa: BLE001  loading the model reports the error
        return None


def parameter_counts(config: Any, trust_remote_code: bool) -> dict[str, int] | None:
    """Returns how many numbers each weight of a model has by its transformers config, whether or not they are quantised.

    Tied weights are counted once. Returns None if building the model fails.
    """
    model = model_without_weights(config, trust_remote_code)
    return None if model is None else {name: weight.numel() for name, weight in model.named_parameters()}


def count_parameters(config: Any, trust_remote_code: bool) -> int | None:
    """Returns the sum of `parameter_counts`."""
    counts = parameter_counts(config, trust_remote_code)
    return None if counts is None else sum(counts.values())


def is_quantised(model: Any) -> bool:
    """Whether the model's weights are quantised; they are not if they were dequantised when they were loaded."""
    return bool(getattr(model, "is_quantized", False))


@torch.no_grad()
def dequantised_layer(layer: nn.Module, index: int, config: Any, dtype: torch.dtype) -> nn.Module:
    """Returns a decoder layer with the weights of `layer`, which are quantised, as ordinary numbers.

    It is the model's layer `index`; `config` is the model's text config, `dtype` the one that it computes in. Raises SpecgenError
    if the layer has quantised modules that are not linear, such as fused experts.
    """
    made = type(layer)(config, index).to(device=next(layer.parameters()).device, dtype=dtype)
    try:
        for name, module in made.named_modules():
            source = layer.get_submodule(name)
            if isinstance(module, nn.Linear):
                parent, _, own = name.rpartition(".")
                setattr(made.get_submodule(parent), own, dequantised_linear(source, dtype))
                continue
            for key, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                value.copy_(getattr(source, key))
    except (AttributeError, RuntimeError) as error:
        raise SpecgenError(
            f"an exit layer starts as a copy of the target's last one, whose quantised weights cannot be read ({error})",
            "Take a checkpoint of the target that is not quantised, or a draft model: -m svip",
        ) from error
    return made


@torch.no_grad()
def dequantised_linear(module: Any, dtype: torch.dtype) -> nn.Linear:
    """Returns a linear module with the weights of `module`, which are quantised, as ordinary numbers.

    They are computed by running the module on the identity matrix, so this works for each format.
    """
    size, bias = module.in_features, getattr(module, "bias", None)
    device = next(iter((*module.parameters(), *module.buffers()))).device
    plain = nn.Linear(size, module.out_features, bias is not None, device=device, dtype=dtype)
    offset = 0 if bias is None else module(torch.zeros(1, size, device=device, dtype=dtype))
    for rows in torch.split(
        torch.eye(size, device=device, dtype=dtype), 512
    ):  # few enough for the memory of a large LM head's logits
        first = int(rows[0].argmax())
        plain.weight[:, first : first + len(rows)] = (module(rows) - offset).T
    if bias is not None:
        plain.bias.copy_(bias)
    return plain
