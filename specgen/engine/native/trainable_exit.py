"""An exit layer of EESD in training, run by the native decoder."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from specgen.engine.batch_pass import BatchPass
from specgen.engine.native.architecture import Architecture
from specgen.engine.native.inputs import InputMaker
from specgen.engine.native.layer import NativeLayer, norm_function
from specgen.engine.native.layer_weights import EMBEDDING, EXIT_HEAD, FINAL_NORM, HEAD, layer_shapes, layer_weights
from specgen.engine.native.products import trained_product
from specgen.engine.weights import WeightFiles


def final_logits(architecture: Architecture, logits: torch.Tensor) -> torch.Tensor:
    """Returns the logits that a model predicts with, from the output of its LM head's product: scaled, then capped."""
    if architecture.logit_scale != 1.0:
        logits = logits * architecture.logit_scale
    if (cap := architecture.logit_cap) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits


class NativeTrainableExit:
    """Implements `engine.model.TrainableExit`. The parameters of `module` are the weights as in files, not fused.

    Each pass makes the native layers' fused weights from the parameters, so that these get the gradients.
    """

    def __init__(self, architecture: Architecture, inputs: InputMaker, tensors: Mapping[str, torch.Tensor], count: int) -> None:
        self.module = module_of(tensors)
        self._architecture, self._inputs, self._count = architecture, inputs, count
        self._parameters = dict(self.module.named_parameters())

    def run_layers(self, hidden: torch.Tensor, batch: BatchPass) -> torch.Tensor:
        """Runs the decoder layers under autograd; see `engine.model.TrainableExit`."""
        inputs, states = self._inputs.batched(batch), hidden.flatten(0, 1)
        for layer in self._layers(hidden.device):
            states = layer(states, inputs)
        return states.view(hidden.shape)

    def norm_and_head(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = norm_function(self._architecture.norm_eps)(hidden)
        states = states * (self._parameters[FINAL_NORM] + self._architecture.norm_weight_offset)
        return self.head_logits(states), states

    def head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the LM head's logits; see `engine.model.TrainableExit`."""
        return final_logits(self._architecture, functional.linear(hidden, self._parameters[EXIT_HEAD]))

    def _layers(self, device: torch.device) -> list[NativeLayer]:
        """Returns native layers with the parameters' present values."""
        architecture, made = self._architecture, []
        for index in range(self._count):
            with torch.autocast(device.type, enabled=False):  # products of weights with norms
                weights = layer_weights(architecture, index, self._parameters.__getitem__, torch.float32)
            kind = self._inputs.kinds.index((architecture.layers[index - self._count], device))
            made.append(NativeLayer(architecture, index, kind, weights, trained_product))
        return made


def untrained_exit(architecture: Architecture, files: WeightFiles, count: int) -> dict[str, torch.Tensor]:
    """Returns float32 copies of a model's last `count` layers, norm and LM head, by their names in an exit layer's file."""
    first = len(architecture.layers) - count
    names = [name for index in range(first, first + count) for name in layer_shapes(architecture, index)]
    named = {_renumbered(name, first): name for name in names}
    named[FINAL_NORM] = FINAL_NORM
    named[EXIT_HEAD] = HEAD if HEAD in files or not architecture.tied else EMBEDDING
    return {own: files.take(name).to(torch.float32, copy=True) for own, name in named.items()}


def _renumbered(name: str, first: int) -> str:
    """Returns the name of a layer's weight with the layers counted from the layer `first` on."""
    _, index, rest = name.split(".", 2)
    return f"layers.{int(index) - first}.{rest}"


def module_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Returns a module, made of nested ones, whose parameters have these names and values."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(tensor))
    return root
