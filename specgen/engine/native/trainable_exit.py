"""An exit layer of EESD in training, run by the native decoder."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from specgen.engine.batch_pass import BatchPass
from specgen.engine.native.description import Architecture
from specgen.engine.native.inputs import InputMaker, layer_kinds
from specgen.engine.native.layer import NativeLayer
from specgen.engine.native.layer_weights import layer_weights
from specgen.engine.native.products import TrainedProduct
from specgen.engine.native.residual import PlainResidual
from specgen.engine.native.tensor_names import EMBEDDING, EXIT_HEAD, FINAL_NORM, HEAD, bias_of, layer_tensors
from specgen.engine.native.weight_files import WeightFiles


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
        inputs = self._inputs.batched(batch)
        residual = PlainResidual(hidden.flatten(0, 1), self._architecture.norm_eps, layer_norm=self._has_layer_norm)
        for layer in self._layers():
            layer(residual, inputs)
        return residual.values.view(hidden.shape)

    def norm_and_head(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = PlainResidual(hidden, self._architecture.norm_eps, layer_norm=self._has_layer_norm).normed()
        normed = normed * (self._parameters[FINAL_NORM] + self._architecture.norm_weight_offset)
        if self._architecture.norm_has_bias:
            normed = normed + self._parameters[bias_of(FINAL_NORM)]
        return self.head_logits(normed), normed

    def head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the LM head's logits; see `engine.model.TrainableExit`."""
        return final_logits(self._architecture, functional.linear(hidden, self._parameters[EXIT_HEAD]))

    @property
    def _has_layer_norm(self) -> bool:
        return self._architecture.norm == "layer"

    def _layers(self) -> list[NativeLayer]:
        """Returns native layers with the parameters' present values."""
        architecture, kinds = self._architecture, layer_kinds(self._architecture)
        made = []
        for index in range(self._count):
            with torch.autocast(self._parameters[EXIT_HEAD].device.type, enabled=False):  # products of weights with norms
                weights = layer_weights(architecture, layer_tensors(architecture, index), self._take, torch.float32)
            kind = kinds.index(architecture.layers[index - self._count])
            made.append(NativeLayer(architecture, index, kind, weights, TrainedProduct))
        return made

    def _take(self, name: str, _: tuple[int, ...]) -> torch.Tensor:
        return self._parameters[name]


def untrained_exit(architecture: Architecture, files: WeightFiles, count: int) -> dict[str, torch.Tensor]:
    """Returns float32 copies of a model's last `count` layers, norm and LM head, by their names in an exit layer's file."""
    taken: dict[str, torch.Tensor] = {}

    def take(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        taken[name] = files.take(name, shape).to(torch.float32, copy=True)
        return taken[name]

    first, norm, width = len(architecture.layers) - count, FINAL_NORM, architecture.hidden_size
    for index in range(first, first + count):
        layer_weights(architecture, layer_tensors(architecture, index), take, torch.float32)  # takes all that a layer has
    tensors = {_renumbered(name, first): weight for name, weight in taken.items()}
    for name in (norm, bias_of(norm)) if architecture.norm_has_bias else (norm,):
        tensors[name] = take(name, (width,))
    tensors[EXIT_HEAD] = take(HEAD if HEAD in files or not architecture.tied else EMBEDDING, (architecture.vocab_size, width))
    return tensors


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
