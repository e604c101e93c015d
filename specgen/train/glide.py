"""The training of a GliDe draft model (Du et al. 2024): one layer that also attends to the keys and values of the target's last.

When it drafts, the target has no keys of the drafted tokens yet. So texts are divided into blocks, and each token sees the
target's keys of earlier blocks alone: the rows of a block are those of a draft that begins after the block's first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

import torch

from specgen.engine.batch_pass import BatchPass
from specgen.engine.native.architecture import Architecture
from specgen.engine.native.attention import Sight
from specgen.engine.native.families import read_architecture, read_config
from specgen.engine.native.inputs import InputMaker
from specgen.engine.native.layer_weights import layer_tensors
from specgen.engine.native.native_model import NativeModel
from specgen.engine.native.products import trained_product
from specgen.engine.native.rotary import RotaryTable
from specgen.engine.parts.exit_layers import known_architecture
from specgen.engine.parts.glide_layers import CrossInputs, GlideLayers
from specgen.engine.parts.weights import GlideWeights
from specgen.train.heads import HeadObjective, Predictions, TargetStates
from specgen.train.layer_start import DEVIATION, initial_layer, last_layer, layer_config
from specgen.train.packing import IGNORED, PackedBatch
from specgen.train.texts import GeneratedText

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

    def begin(self, texts: Sequence[GeneratedText], seed: int) -> dict[str, torch.Tensor]:
        self._config = layer_config(self._theirs, read_config(self.target.folder, self.target.name))
        self._own = read_architecture(self._config)
        self._inputs = InputMaker(self._own, self.dtype, [self.device])
        rotary = self._theirs.layers[-1].rotary
        rounded = None if self._theirs.rotary_in_float32 else self.dtype
        self._rotations = None if rotary is None else RotaryTable(self._theirs.rotary[rotary], self.device, rounded)
        self._boundary = None if rotary is None else self._theirs.rotary[rotary].long_boundary
        return _initial_weights(self._own, self._theirs, self, torch.Generator().manual_seed(seed))

    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        size = _LONGEST if rng is None else rng.randint(_SHORTEST, _LONGEST)
        keys, values = states.keys_values[0]
        own_pass = BatchPass(batch.ids, batch.positions, batch.attention_mask(), batch.positions)
        block = batch.positions // size
        visible = own_pass.visible & (block[:, None, :] < block[:, :, None])
        visible |= block[:, :, None] == 0  # rows that see no key are left out below; a softmax over nothing would be NaN
        mask = Sight(~visible, batch.positions, batch.positions).mask(None, self.dtype)[:, None]
        cross = CrossInputs(keys, values, self._rotation(batch), mask, batch=len(batch.ids))
        layers = GlideLayers(
            self._own,
            self._theirs,
            self.parameters.__getitem__,
            torch.float32,
            trained_product,
            self.device,
            native_keys=isinstance(self.model, NativeModel),
        )
        embeddings = self.embeddings(batch.ids).flatten(0, 1)
        outputs = layers(embeddings, self._inputs.batched(own_pass), [cross])
        sources = ((batch.labels != IGNORED) & (block > 0)).flatten().nonzero()[:, 0]
        return Predictions(outputs.index_select(0, sources), sources, (batch.positions % size).flatten()[sources])

    def weights(self, ranks: Sequence[Sequence[float]]) -> GlideWeights:
        return GlideWeights(self._config, {name: weight.detach() for name, weight in self.parameters.items()}, _LONGEST)

    def _rotation(self, batch: PackedBatch) -> torch.Tensor | None:
        """Returns the rotations of the target's last layer at the tokens' positions."""
        if self._rotations is None:
            return None
        length = batch.ids.shape[1]
        last = length if self._boundary is None else int(batch.positions.max()) + 1
        return self._rotations.gather(batch.positions.flatten(), last > (self._boundary or last), length)[:, None]


def _initial_weights(
    own: Architecture, theirs: Architecture, target: GlideObjective, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Returns the initial weights by their names in `GlideWeights`. The output of the cross-attention is zero.

    Its queries begin as those of the layer's self-attention.
    """
    start = last_layer(own, theirs, target)
    made = initial_layer(own, start, generator)
    inner, cross = theirs.num_heads * theirs.head_size, "layers.0.cross_attn."
    query = start.get(layer_tensors(own, 0).qkv[0])
    made[f"{cross}q_proj.weight"] = (
        torch.randn(inner, own.hidden_size, generator=generator) * DEVIATION if query is None else query.clone()
    )
    made[f"{cross}o_proj.weight"] = torch.zeros(own.hidden_size, inner)
    return made
