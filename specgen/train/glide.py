"""The training of a GliDe draft model (Du et al. 2024): one layer that also attends to the keys and values of the target's last.

When it drafts, the target has no keys of the drafted tokens yet. So texts are divided into blocks, and each token sees the
target's keys of earlier blocks alone: the rows of a block are those of a draft that begins after the block's first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

import torch

from specgen.engine.native.attention import Sight
from specgen.engine.native.inputs import InputMaker
from specgen.engine.native.layer_weights import layer_tensors
from specgen.engine.native.products import trained_product
from specgen.engine.native.rotary import RotaryTable
from specgen.engine.parts.glide import CrossInputs, GlideLayers
from specgen.engine.parts.own_layers import known_architecture
from specgen.engine.parts.part import GlideWeights
from specgen.train.batches import IGNORED, PackedBatch
from specgen.train.heads import HeadObjective, Predictions, TargetStates
from specgen.train.layer_start import DEVIATION, LayerStart
from specgen.train.texts import Text

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

_SHORTEST, _LONGEST = 2, 10  # tokens in a block


class GlideObjective(HeadObjective):
    """Trains a draft model with one layer, and the target's embedding and LM head.

    The size of the blocks is drawn for each batch, so that the drafts are of different lengths (Du et al.: always 5). A text's
    first block is left out, as it sees no key. The layer begins as a copy of the target's last one, if that is like a Llama's.
    """

    kind = "glide"
    depths = _LONGEST

    def __init__(self, target: LoadedModel) -> None:
        super().__init__(target)
        self._theirs = known_architecture(target.model, "training glide")
        self.kv_layers = (self.num_layers - 1,)

    def begin(self, texts: Sequence[Text], generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Returns the initial weights by their names in `GlideWeights`. The output of the cross-attention is zero.

        Its queries begin as those of the layer's self-attention.
        """
        self._start = start = LayerStart(self.target)
        self._inputs = InputMaker(start.architecture, self.dtype, [self.device])
        rotary = self._theirs.layers[-1].rotary
        rounded = None if self._theirs.rotary_in_float32 else self.dtype
        self._rotations = None if rotary is None else RotaryTable(self._theirs.rotary[rotary], self.device, rounded)
        made, cross = start.initial(generator), "layers.0.cross_attn."
        inner, query = (
            self._theirs.num_heads * self._theirs.head_size,
            start.last.get(layer_tensors(start.architecture, 0).qkv[0]),
        )
        random = torch.randn(inner, self.width, generator=generator) * DEVIATION
        made[f"{cross}q_proj.weight"] = random if query is None else query.clone()
        return {**made, f"{cross}o_proj.weight": torch.zeros(self.width, inner)}

    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        size = _LONGEST if rng is None else rng.randint(_SHORTEST, _LONGEST)
        keys, values = states.keys_values[0]
        own_pass, block = batch.forward_pass(), batch.positions // size
        visible = own_pass.visible & (block[:, None, :] < block[:, :, None])
        visible |= block[:, :, None] == 0  # rows that see no key are left out below; a softmax over nothing would be NaN
        mask = Sight(~visible, batch.positions, batch.positions).mask(None, self.dtype)[:, None]
        cross = CrossInputs(keys, values, self._rotation(batch), mask, batch=len(batch.ids))
        weights = GlideWeights(self._start.config, self.parameters)
        layers = GlideLayers(weights, self.model, torch.float32, trained_product)
        outputs = layers(self.embeddings(batch.ids).flatten(0, 1), self._inputs.batched(own_pass), [cross])
        sources = ((batch.labels != IGNORED) & (block > 0)).flatten().nonzero()[:, 0]
        return Predictions(outputs.index_select(0, sources), sources, (batch.positions % size).flatten()[sources])

    def weights(self, ranks: Sequence[Sequence[float]]) -> GlideWeights:
        return GlideWeights(self._start.config, {name: weight.detach() for name, weight in self.parameters.items()}, _LONGEST)

    def _rotation(self, batch: PackedBatch) -> torch.Tensor | None:
        """Returns the rotations of the target's last layer at the tokens' positions."""
        if self._rotations is None:
            return None
        length, boundary = batch.ids.shape[1], self._rotations.long_boundary
        is_long = boundary is not None and int(batch.positions.max()) >= boundary
        return self._rotations.gather(batch.positions.flatten(), is_long, length)[:, None]
