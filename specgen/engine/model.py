"""The interface of a model with its weights. Two backends implement it: our own decoder (`native`) and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import torch

from specgen.engine.batch_pass import BatchCache, BatchPass
from specgen.engine.forward_pass import Cache, ForwardFunction, HiddenSource, LayerPart, ModelOutput
from specgen.engine.model_shape import ModelShape
from specgen.engine.native.architecture import Architecture

Backend = Literal["native", "transformers"]


class Model(Protocol):
    """A model with its weights, on one device.

    `num_embeddings` is the number of token ids that the model has embeddings for, `vocab_size` the number of logits per position.
    `exact`: a token's logits have the same bits whichever tokens are run with it, in drafts without trees.
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

    @property
    def exact(self) -> bool: ...

    @property
    def capture_seconds(self) -> float:
        """The seconds that it took so far to capture passes on a GPU, each of which happens when a pass is first needed."""
        ...

    def capture_passes(self, shortest: int, longest: int) -> None:
        """Captures the passes on a GPU that runs may need, so that no capture falls into the time of a run.

        Those are runs whose prompts have at least `shortest` tokens, and at most `longest` together with their output. Only for
        forward functions that have run a pass before, and for ways to choose tokens that were used. Does nothing for a model
        whose passes are not captured. What KV caches hold stays valid.
        """
        ...

    @property
    def architecture(self) -> Architecture:
        """What config.json describes. Raises UnsupportedConfig if the native decoder does not support the model."""
        ...

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

    def feature_forward(self, taps: Sequence[int]) -> ForwardFunction:
        """Returns a function that runs the whole model and also returns hidden states between its layers.

        Its output's `features` [m, len(taps) * width] are, for each of the m tokens of the pass, one hidden state for each number
        in `taps`: the input of the layer with this index, or with `num_layers` the output of the final norm. These numbers are
        the indices of transformers' `hidden_states`. Raises SpecgenError if the model's layers cannot be run one by one.
        """
        ...

    def embeddings(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [..., width] of token ids [...] on the device, as they enter the first layer."""
        ...

    def head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits [n, vocabulary] that the LM head computes from hidden states [n, width] after the final norm."""
        ...

    def batch_cache(self, sequences: int) -> BatchCache:
        """Returns an empty KV cache for so many sequences, for all layers."""
        ...

    def batch_logits(self, batch: BatchPass, logits_to_keep: int | None = None) -> torch.Tensor:
        """Runs the whole model, and returns the logits [batch, kept, vocabulary] of each sequence's last tokens (None: all)."""
        ...

    def batch_layers(self, batch: BatchPass, layers: int, *, with_head: bool = False) -> ModelOutput:
        """Runs the first `layers` layers, then the final norm and the LM head if `with_head`, for all tokens.

        The output's tensors are [batch, n, ...]. Without the head its `hidden_states` are those after the last layer, and its
        `logits` mean nothing.
        """
        ...

    def batch_features(self, batch: BatchPass, taps: Sequence[int]) -> torch.Tensor:
        """Runs the whole model on several sequences, and returns the hidden states [batch, n, len(taps) * width] of all tokens.

        `taps` are as for `feature_forward`.
        """
        ...

    def last_layers(self, folder: Path, count: int) -> dict[str, torch.Tensor]:
        """Returns float32 copies of the weights of the model's last `count` layers, of its norm and of its LM head.

        Their names are those in an exit layer's file: `layers.0.self_attn.q_proj.weight`, ..., `norm.weight`, `head.weight`.
        `folder` holds the model's files. Raises SpecgenError if the weights cannot be read.
        """
        ...

    def free_weights(self, kept_layers: int = 0) -> None:
        """Frees the memory of the weights, but for the embedding and the first `kept_layers` layers; 0: of all weights.

        After that, the model can only run the layers that it has kept.
        """
        ...
