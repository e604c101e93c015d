"""The target while a head is trained: it runs in every step without gradients, which pass only through its LM head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from specgen.engine.batch_pass import BatchPass
from specgen.engine.model import TrainableExit
from specgen.train.packing import PackedBatch

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel


class TargetStates(NamedTuple):
    """What the target computes for a batch of n tokens in each sequence. All tensors are without gradients.

    `features` [batch, n, len(taps) * width], float32, are the hidden states that the objective's `taps` name. `hidden`
    [batch, n, width], float32, are those after the final norm. `keys_values` has the keys and values, each [batch, kv heads, n,
    head size], of the objective's `kv_layers`, as the target's KV cache stores them.
    """

    features: torch.Tensor
    hidden: torch.Tensor
    keys_values: Sequence[tuple[torch.Tensor, torch.Tensor]]


class FrozenTarget:
    """A target whose weights do not change, for the training of a head.

    `width` is the size of its hidden states, `num_layers` the number of its layers, `vocabulary` that of the logits per token.
    Its matrix products have the target's dtype, and all results are float32.
    """

    def __init__(self, target: LoadedModel) -> None:
        self.loaded, self.model = target, target.model
        self.device, self.dtype = target.model.device, target.model.dtype
        self.width, self.num_layers = target.model.shape.hidden_size, target.model.shape.num_layers
        self.vocabulary = target.model.vocab_size

    @torch.no_grad()
    def states(self, batch: PackedBatch, taps: Sequence[int], kv_layers: Sequence[int]) -> TargetStates:
        """Runs the target on a batch. `taps` are as for `Model.batch_features`."""
        sequences, tokens = batch.ids.shape
        cache = self.model.batch_cache(sequences) if kv_layers else None
        forward_pass = BatchPass(batch.ids, batch.positions, batch.attention_mask(), batch.positions, cache)
        features = self.model.batch_features(forward_pass, [*taps, self.num_layers]).float()
        keys_values = []
        if cache is not None:
            for layer in kv_layers:
                keys, values = cache.keys_and_values(layer, tokens)
                keys_values.append((keys.view(sequences, -1, *keys.shape[1:]), values.view(sequences, -1, *values.shape[1:])))
        return TargetStates(features[..., : -self.width], features[..., -self.width :], keys_values)

    @torch.no_grad()
    def embeddings(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the token embeddings [..., width] of `ids` [...], as the first layer gets them."""
        return self.model.embeddings(ids).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the LM head's logits [..., vocabulary] for hidden states [..., width] after the final norm. Differentiable."""
        return self._head.head_logits(hidden.to(self.dtype)).float()

    def last_layers(self, count: int) -> dict[str, torch.Tensor]:
        """Returns float32 copies of the weights of the last `count` layers, of the final norm and of the LM head.

        Their names are those of an exit layer: `layers.0.self_attn.q_proj.weight`, ..., `norm.weight`, `head.weight`.
        """
        copied = self.model.trainable_exit(self.loaded.folder, count).module.state_dict()
        return {name: weight.detach().to(self.device, torch.float32) for name, weight in copied.items()}

    @cached_property
    def _head(self) -> TrainableExit:
        head = self.model.trainable_exit(self.loaded.folder, 0)
        head.module.to(self.device, self.dtype).requires_grad_(False)
        return head
