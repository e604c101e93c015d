"""The training of an EAGLE-3 head (arXiv:2503.01840, section 3.2).

It learns from its own drafts: in its training-time test, the predicted features of one step are the input of the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from specgen.base.errors import SpecgenError
from specgen.engine.native.inputs import InputMaker
from specgen.engine.native.layer_weights import EXIT_HEAD, FINAL_NORM, HEAD, layer_tensors
from specgen.engine.native.products import trained_product
from specgen.engine.parts.eagle import FC, FEATURE_NORM, EagleLayers, UnrolledLayer
from specgen.engine.parts.part import EagleWeights
from specgen.train.batches import PackedBatch
from specgen.train.divergence import divergence
from specgen.train.heads import HeadObjective, Predictions, RowLabels, TargetStates, reachable
from specgen.train.layer_start import LayerStart
from specgen.train.texts import Text

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

_LAYERS_FOR_DEFAULT = 7  # the least number of layers in which the authors' three features are of different layers
_LARGEST_VOCABULARY = 32_000  # tokens that the LM head predicts at most, as in the published heads
_OUTSIDE = -1e4  # in place of the infinite log-probability of a token outside the vocabulary


class EagleObjective(HeadObjective):
    """Trains an EAGLE-3 head with one layer, and the target's embedding.

    The layer begins as a copy of the target's last one, if that is like a Llama's, its LM head as a copy of the target's. It
    predicts the most frequent tokens of `texts`.
    """

    kind = "eagle"
    depths = 5

    def __init__(self, target: LoadedModel) -> None:
        super().__init__(target)
        count = self.num_layers
        if count < 3:
            raise SpecgenError(f"{target.name} has {count} layers, and an EAGLE head reads from three", "Train --methods medusa")
        self.taps = (2, count // 2, count - 3) if count >= _LAYERS_FOR_DEFAULT else (0, count // 2, count - 1)

    def begin(self, texts: Sequence[Text], generator: torch.Generator) -> dict[str, Tensor]:
        self._ids = _vocabulary(self.vocabulary, texts)
        self._on_device = None if self._ids is None else self._ids.to(self.device)
        self._start = start = LayerStart(self.target)
        self._inputs = InputMaker(start.architecture, self.dtype, [self.device])
        made, names, width = start.initial(generator), layer_tensors(start.architecture, 0), self.width
        made[FC] = torch.cat((torch.zeros(width, 2 * width), torch.eye(width)), dim=1)
        for name in names.qkv:  # the embedding has no influence at first
            made[name] = torch.cat((torch.zeros_like(made[name]), made[name]), dim=1)
        assert names.attention_norm is not None
        made |= {FEATURE_NORM: made[names.attention_norm], names.attention_norm: torch.ones(width)}
        head = self.model.last_layers(self.target.folder, 0)[EXIT_HEAD].cpu()
        return {**made, HEAD: head.clone() if self._ids is None else head[self._ids]}

    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        """Runs the head on all pairs of the batch: with its own predictions as features for each further token."""
        weights = EagleWeights(self._start.config, self.parameters)
        layers = EagleLayers(weights, self.device, torch.float32, trained_product, first_layer=UnrolledLayer)
        features, embeddings = layers.fc(states.features.flatten(0, 1)).float(), self.embeddings(batch.ids)
        forward_pass, rows = batch.forward_pass(), []
        for depth in range(self.depths):
            at, padding = batch.positions + depth, min(1 + depth, batch.ids.shape[1])
            following = functional.pad(embeddings[:, 1 + depth :], (0, 0, 0, padding)).flatten(0, 1)
            inputs = self._inputs.batched(forward_pass._replace(positions=at, key_positions=at))
            features = layers(following, features, inputs)
            pairs, sources = reachable(batch, 1 + depth)
            rows.append((features.index_select(0, pairs), sources, torch.full_like(sources, depth)))
        return Predictions(*map(torch.cat, zip(*rows, strict=True)))

    def logits(self, outputs: Tensor, depths: Tensor) -> Tensor:
        weight, eps = self.parameters[FINAL_NORM], self._start.architecture.norm_eps
        normed = functional.rms_norm(outputs, outputs.shape[-1:], weight, eps)
        logits = functional.linear(normed, self.parameters[HEAD]).float()
        if self._on_device is None:
            return logits
        return logits.new_full((len(logits), self.vocabulary), -torch.inf).index_copy(1, self._on_device, logits)

    def row_losses(self, logits: Tensor, labels: RowLabels) -> Tensor:
        """Returns the divergence from the target's distribution over the vocabulary; 0 if its likeliest token is not there."""
        if self._on_device is None:
            return super().row_losses(logits, labels)
        inside = torch.isin(labels.top_k_ids, self._on_device)
        outside = (labels.top_k_log_probs.exp() * ~inside).sum(-1, keepdim=True)
        log_probs = labels.top_k_log_probs - torch.log1p(-outside.clamp_max(1 - 1e-6))
        log_probs = log_probs.masked_fill(~inside, _OUTSIDE)
        return divergence(logits.clamp_min(_OUTSIDE), labels.top_k_ids, log_probs) * inside[:, 0]

    def weights(self, ranks: Sequence[Sequence[float]]) -> EagleWeights:
        tensors = {name: weight.detach() for name, weight in self.parameters.items()}
        return EagleWeights(self._start.config, tensors, 3, tuple(self.taps), self._ids)


def _vocabulary(size: int, texts: Sequence[Text]) -> Tensor | None:
    """Returns the ids of the most frequent tokens that the target generated, ascending; None if the head can have all `size`."""
    if size <= _LARGEST_VOCABULARY:
        return None
    counts = Counter[int]()
    for text in texts:
        counts.update(text.ids[text.prompt_length :])
    frequent = [token for token, _ in counts.most_common(_LARGEST_VOCABULARY)]
    others = islice((token for token in range(size) if token not in counts), _LARGEST_VOCABULARY - len(frequent))
    return torch.tensor(sorted([*frequent, *others]))
