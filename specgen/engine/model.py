"""The interface of a model with its weights. Two backends implement it: our own decoder (`native`) and transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import torch

from specgen.engine.forward_pass import Cache, ForwardFunction, HiddenSource, LayerPart
from specgen.engine.model_shape import ModelShape

Backend = Literal["native", "transformers"]


class ExitLayers(Protocol):
    """A trained exit layer of EESD: decoder layers of its own, a norm and an LM head."""

    def new_cache(self) -> Cache:
        """Returns an empty KV cache for the exit layer."""
        ...

    def forward(self, inputs: HiddenSource) -> ForwardFunction:
        """Returns a function that runs the exit layer on the hidden states [n, width] that `inputs` returns."""
        ...


class Model(Protocol):
    """A model with its weights, on one device.

    `num_embeddings` is the number of token ids that the model has embeddings for, `vocab_size` the number of logits per position.
    """

    @property
    def backend(self) -> str: ...

    @property
    def shape(self) -> ModelShape: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def num_embeddings(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_parameters(self) -> int: ...

    def new_cache(self, layers: range | None = None) -> Cache:
        """Returns an empty KV cache for the layers with these indices; None: all."""
        ...

    def forward(self) -> ForwardFunction:
        """Returns the function that runs the whole model."""
        ...

    def reference_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Returns the logits [n, vocabulary] after each of the n tokens `ids`, by one forward pass without a KV cache."""
        ...

    def check_layers(self, feature: str) -> None:
        """Raises SpecgenError if the layers cannot be run one by one, which `feature` needs."""
        ...

    def layers_forward(
        self, layers: Sequence[LayerPart], inputs: HiddenSource | None = None, *, with_head: bool = True
    ) -> ForwardFunction:
        """Returns a function that runs some of the layers, then the final norm and the LM head.

        `inputs` returns the hidden states that enter the first of them; None takes the token embeddings. Without the head
        (`with_head` False) the output's `hidden_states` are those after the last layer, and its `logits` mean nothing.
        """
        ...

    def exit_layers(self, tensors: Mapping[str, torch.Tensor], count: int) -> ExitLayers:
        """Returns a trained exit layer with `count` decoder layers, of the kind of the model's last layers.

        `tensors` has its weights by name: `layers.0.self_attn.q_proj.weight`, ..., `norm.weight` and, unless it uses the model's
        own LM head, `head.weight`. Raises ValueError for missing and unknown tensors and wrong shapes, and SpecgenError if the
        model's layers cannot be run one by one.
        """
        ...
