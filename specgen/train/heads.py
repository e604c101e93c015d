"""Training of a head that drafts from the target's hidden states (Medusa, EAGLE) or from its keys
and values (GliDe).

The target runs in every step without gradients, so what a head reads is never stored. The loss is
the divergence from the target's own predictions, on text that the target generated and on corpus
text alike.

Medusa-1: Cai et al. 2024, section 2.2.1. EAGLE (arXiv:2401.15077) and GliDe (Du et al. 2024) have a
decoder layer, which begins with the weights of the target's last one. EAGLE learns from its own
drafts: in EAGLE-3's training-time test (arXiv:2503.01840, section 3.2), the predicted features of
one step are the input of the next. GliDe's layer also attends to the keys and values of the
target's last layer. When it drafts, the target has no keys of the drafted tokens yet. So texts are
divided into blocks, and each token sees the target's keys of earlier blocks alone: the rows of a
block are those of a draft that begins after the block's first token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from specgen.base.part_kinds import HeadKind
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.native.attention import AttentionFiles
from specgen.engine.native.attention_mask import AttentionMask
from specgen.engine.native.config_reading import read_architecture
from specgen.engine.native.inputs import InputMaker
from specgen.engine.native.layer_files import (
    FINAL_NORM,
    HEAD,
    layer_files,
)
from specgen.engine.native.linear import trained_linear
from specgen.engine.native.rotary import RotaryTable
from specgen.engine.native.tensors import tensor_shapes
from specgen.engine.parts.eagle import FC, FIRST_NORM, EagleLayers, UnrolledLayer
from specgen.engine.parts.glide import CrossInputs, GlideLayers
from specgen.engine.parts.own_layers import known_architecture
from specgen.engine.parts.part import EagleWeights, GlideWeights, HeadWeights
from specgen.engine.parts.trained_part import (
    check_head_folder,
    describe_head,
    round_as_saved,
    save_head,
)
from specgen.engine.weights import bias_of
from specgen.train.loop import (
    IGNORED,
    PackedBatch,
    held_out_agreement,
)
from specgen.train.start import LinearMap, least_squares
from specgen.train.states import Predictions, StatesObjective, TargetStates, reachable
from specgen.train.target_layer import last_layers, layer_config, output_names
from specgen.train.task import TrainingTask
from specgen.train.texts import Text

# tokens in a block of GliDe
_SHORTEST = 2
_LONGEST = 10
_DEVIATION = 0.02  # of random initial weights


class HeadObjective(StatesObjective):
    """Trains one kind of head (`kind`)."""

    kind: ClassVar[HeadKind]

    def __init__(self, task: TrainingTask, target: LoadedModel) -> None:
        super().__init__(task, target)
        self.settings = {"--methods": self.kind}
        self.model.check_layers(f"training {self.kind}")
        check_head_folder(task.out)

    @abstractmethod
    def weights(self, ranks: Sequence[Sequence[float]]) -> HeadWeights:
        """Returns the trained weights. `ranks[n][r]` is the share of n-th drafted tokens at which
        the target's token had rank r in the head's prediction (`held_out_agreement`)."""

    def finish(self, texts: Sequence[Text], figures: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
        round_as_saved(self.parameters)
        self.task.announce("measuring on held-out text")
        agreement, ranks = held_out_agreement(texts, self.ranks_of)
        figures = {
            **figures,
            "held_out_agreement": agreement,
            "cross_entropy": self.cross_entropy(texts),
        }
        description = describe_head(self.kind, self.target, figures, self.task.made_with())
        save_head(self.task.out, self.weights(ranks), description)
        return self.task.out, asdict(description)


class LayerObjective(HeadObjective):
    """Trains a head with `layers` decoder layers: those of a Llama with the target's sizes, or of a
    Qwen if the target has its biases or norms.

    `config` is the head's config.json as a mapping, `architecture` what it describes.
    """

    layers = 1

    def initial_weights(
        self, texts: Sequence[Text], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Returns the initial weights of the layers and of the final norm: those of the target's
        last ones, or random ones."""
        self.config = layer_config(self.target, self.layers)
        self.architecture = read_architecture(self.config)
        self.inputs = InputMaker(self.architecture, self.dtype, [self.device] * self.layers)
        last = last_layers(self.target, self.architecture)
        made = {}
        shapes: dict[str, tuple[int, ...]] = {FINAL_NORM: (self.width,)}
        for index in range(self.layers):
            shapes |= tensor_shapes(layer_files(self.architecture, index))
        for name, shape in shapes.items():
            if name in last:
                made[name] = last[name]
            elif len(shape) == 1:
                made[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
            else:
                made[name] = torch.randn(shape, generator=generator) * _DEVIATION
        return made


class EagleObjective(LayerObjective):
    """Trains a head of EAGLE-1 with one decoder layer, as EAGLE-3 is trained: on the target's
    predictions, and from its own drafts. It uses the target's embedding and LM head, which are not
    trained; of a large vocabulary, only the most frequent tokens of the texts.

    Its `fc` begins as the linear map of a token's embedding and the target's state before it to the
    target's state there, which is solved for by least squares, and its layer adds nothing at first.
    EAGLE-3's head, whose first states do not know the next token, has no such beginning.
    """

    kind = "eagle"
    depths = 5
    reduces_head = True

    def initial_weights(
        self, texts: Sequence[Text], generator: torch.Generator
    ) -> dict[str, Tensor]:
        made = super().initial_weights(texts, generator)
        width = self.width
        del made[FINAL_NORM]
        norm = made.pop(FIRST_NORM)
        found, sizes = self._to_next_state(texts)
        files = layer_files(self.architecture, 0)
        assert isinstance(files.mixer, AttentionFiles)
        for projection in files.mixer.projections:  # they read states without the norm
            made[projection.weight.name] *= norm / float(sizes[-1])
        for name in output_names(self.architecture, 0):
            made[name].zero_()
        weight = torch.eye(width, 2 * width).roll(width, 1)
        bias = torch.zeros(width)
        if found is not None:
            weight = (found.weight / sizes).cpu()
            bias = found.bias.cpu()

        def scaled(scale: float) -> dict[str, Tensor]:
            return {**made, FC: weight * scale, bias_of(FC): bias * scale}

        return scaled(self.best_scale(texts, scaled))

    def _to_next_state(self, texts: Sequence[Text]) -> tuple[LinearMap | None, Tensor]:
        """Returns the map by least squares of embedding and state, each divided by its size, to the
        next state; None if there is too little text. The second result are the sizes [2 width]:
        root mean squares."""
        inputs = []
        outputs = []
        for batch, states in self.solved_for(texts):
            before, at = reachable(batch, 1)
            embeddings, hidden = (each.flatten(0, 1) for each in (states.embeddings, states.hidden))
            inputs.append(torch.cat((embeddings[at], hidden[before]), dim=-1))
            outputs.append(hidden[at])
        if not inputs:
            return None, torch.ones(2 * self.width)
        read = torch.cat(inputs)
        parts = read.view(len(read), 2, self.width)
        sizes = parts.square().mean(dim=(0, 2)).sqrt().repeat_interleave(self.width)
        return least_squares(read / sizes, torch.cat(outputs)), sizes

    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        """Runs the head once per depth. At depth 0 it reads the target's states, then its own
        output of the depth before (EAGLE-3's training-time test)."""
        weights = EagleWeights(self.config, self.parameters, 1)
        layers = EagleLayers(
            weights, self.device, torch.float32, trained_linear, first_layer=UnrolledLayer
        )
        features = states.hidden.flatten(0, 1)
        forward_pass = batch.forward_pass()
        rows = []
        for depth in range(self.depths):
            at, padding = batch.positions + depth, min(1 + depth, batch.ids.shape[1])
            following = F.pad(states.embeddings[:, 1 + depth :], (0, 0, 0, padding)).flatten(0, 1)
            inputs = self.inputs.batched(forward_pass._replace(positions=at, key_positions=at))
            features = layers(following, features, inputs)
            pairs, sources = reachable(batch, 1 + depth)
            rows.append((features.index_select(0, pairs), sources, torch.full_like(sources, depth)))
        return Predictions(*map(torch.cat, zip(*rows, strict=True)))

    def logits(self, outputs: Tensor, depths: Tensor) -> Tensor:
        return self.known_logits(outputs)

    def weights(self, ranks: Sequence[Sequence[float]]) -> EagleWeights:
        tensors = {name: weight.detach() for name, weight in self.parameters.items()}
        if self.ids is None:
            return EagleWeights(self.config, tensors, 1)
        tensors[HEAD] = self.head_start()
        return EagleWeights(self.config, tensors, 1, vocabulary=self.ids.cpu())


class GlideObjective(LayerObjective):
    """Trains a GliDe draft model with one layer, and the target's embedding and LM head.

    Texts are divided into blocks, and a token sees the target's keys of earlier blocks alone, as in
    drafting. The blocks' number of tokens is drawn for each batch, so that the drafts are of
    different lengths (Du et al.: always 5). A text's first block is not trained on, because its
    tokens see none of the target's keys.
    """

    kind = "glide"
    depths = _LONGEST
    reads_cache = True

    def __init__(self, task: TrainingTask, target: LoadedModel) -> None:
        super().__init__(task, target)
        self._theirs = theirs = known_architecture(target.shape, "training glide")
        rotary = theirs.layers[-1].rotary
        rounded = None if theirs.rotary_in_float32 else self.dtype
        self._rotations = (
            None if rotary is None else RotaryTable(theirs.rotary[rotary], self.device, rounded)
        )

    def initial_weights(
        self, texts: Sequence[Text], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Returns the initial weights by their names in `GlideWeights`. The output of the
        cross-attention is zero."""
        made = super().initial_weights(texts, generator)
        cross = "layers.0.cross_attn."
        width = self.width
        query = made["layers.0.self_attn.q_proj.weight"]
        return {
            **made,
            f"{cross}q_proj.weight": query.clone(),
            f"{cross}o_proj.weight": torch.zeros(width, len(query)),
        }

    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        size = _LONGEST if rng is None else rng.randint(_SHORTEST, _LONGEST)
        own_pass = batch.forward_pass()
        block = batch.positions // size
        visible = own_pass.visible & (block[:, None, :] < block[:, :, None])
        # rows that see no key are left out below; a softmax over nothing would be NaN
        visible |= block[:, :, None] == 0
        attention_mask = AttentionMask(~visible, batch.positions, batch.positions)
        mask = attention_mask.additive(None, self.dtype)[:, None]
        assert states.keys_values is not None
        keys, values = (each.float() for each in states.keys_values)
        cross = CrossInputs(keys, values, self._rotation(batch), mask, batch=len(batch.ids))
        layers = GlideLayers(
            GlideWeights(self.config, self.parameters), self.model, torch.float32, trained_linear
        )
        outputs = layers(states.embeddings.flatten(0, 1), self.inputs.batched(own_pass), [cross])
        sources = ((batch.labels != IGNORED) & (block > 0)).flatten().nonzero()[:, 0]
        return Predictions(
            outputs.index_select(0, sources), sources, (batch.positions % size).flatten()[sources]
        )

    def weights(self, ranks: Sequence[Sequence[float]]) -> GlideWeights:
        return GlideWeights(
            self.config,
            {name: weight.detach() for name, weight in self.parameters.items()},
            _LONGEST,
        )

    def _rotation(self, batch: PackedBatch) -> Tensor | None:
        """Returns the rotations of the target's last layer at the tokens' positions."""
        if self._rotations is None:
            return None
        length = batch.ids.shape[1]
        boundary = self._rotations.long_boundary
        is_long = boundary is not None and int(batch.positions.max()) >= boundary
        return self._rotations.gather(batch.positions.flatten(), is_long, length)[:, None]
