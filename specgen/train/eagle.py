"""The training of an EAGLE head: EAGLE-1 (arXiv:2401.15077, section 3.2) and EAGLE-3 (arXiv:2503.01840, section 3.2).

EAGLE-1 imitates the target's next feature, from features with noise. EAGLE-3 learns from its own drafts: in its training-time
test, the predicted features of one step are the input of the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from specgen.engine.batch_pass import BatchPass
from specgen.engine.native.architecture import Architecture, UnsupportedConfig
from specgen.engine.native.eagle_layers import FC, FEATURE_NORM, EagleLayers, UnrolledLayer
from specgen.engine.native.families import read_architecture, read_config
from specgen.engine.native.inputs import InputMaker
from specgen.engine.native.layer_weights import EXIT_HEAD, FINAL_NORM, HEAD, bias_of, layer_tensors
from specgen.engine.native.products import trained_product
from specgen.engine.parts.weights import EagleWeights
from specgen.train.divergence import divergence
from specgen.train.heads import HeadObjective, Predictions, RowLabels, TargetStates, reachable
from specgen.train.layer_start import initial_layer, last_layer, layer_config
from specgen.train.packing import PackedBatch
from specgen.train.texts import GeneratedText

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

Version = Literal[1, 3]

_LAYERS_FOR_3 = 7  # the least number of layers in which EAGLE-3's three features are of different layers
_DEPTHS = 5  # drafted tokens that EAGLE-3 is trained for; EAGLE-1 learns from one, and both are measured for so many
_NOISE = 0.1  # the largest absolute value of the noise on EAGLE-1's features
_TOKEN_LOSS = 0.1  # the weight of the divergence of EAGLE-1's predicted tokens
_LARGEST_VOCABULARY = 32_000  # tokens that EAGLE-3's LM head predicts at most, as in the published heads
_OUTSIDE = -1e4  # in place of the infinite log-probability of a token outside the vocabulary


class EagleObjective(HeadObjective):
    """Trains an EAGLE head with one layer, and the target's embedding. EAGLE-1 also uses the target's LM head.

    `version` None takes EAGLE-3 for targets that have enough layers. The layer begins as a copy of the target's last one, if that
    is like a Llama's, EAGLE-3's LM head as a copy of the target's. It predicts the most frequent tokens of `texts`.
    """

    kind = "eagle"
    depths = _DEPTHS

    def __init__(self, target: LoadedModel, version: Version | None = None) -> None:
        super().__init__(target)
        count = self.num_layers
        self.version: Version = version or (3 if count >= _LAYERS_FOR_3 else 1)
        self.taps = (2, count // 2, count - 3) if self.version == 3 else ()

    def begin(self, texts: Sequence[GeneratedText], seed: int) -> dict[str, Tensor]:
        self._ids = _vocabulary(self.vocabulary, texts) if self.version == 3 else None
        self._on_device = None if self._ids is None else self._ids.to(self.device)
        config = read_config(self.target.folder, self.target.name)
        theirs = _architecture_of(config)
        self._config = _sizes_alone(self) if theirs is None else layer_config(theirs, config)
        self._architecture = own = read_architecture(self._config)
        self._inputs = InputMaker(own, self.dtype, [self.device])
        start = {} if theirs is None else last_layer(own, theirs, self)
        tensors = _initial_weights(self.version, own, start, torch.Generator().manual_seed(seed))
        if self.version == 3:
            head = self.last_layers(0)[EXIT_HEAD].cpu()
            tensors[HEAD] = head.clone() if self._ids is None else head[self._ids]
        return tensors

    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        """Runs the head on all pairs of the batch: once, or with its own predictions as features for each further token."""
        tokens, take = batch.ids.shape[1], self.parameters.__getitem__
        layers = EagleLayers(
            self.version,
            self._architecture,
            take,
            torch.float32,
            trained_product,
            self.device,
            has_bias=self.version == 1,
            first_layer=UnrolledLayer,
        )
        if self.version == 3:
            features = layers.fc(states.features.flatten(0, 1)).float()
        else:
            features = states.hidden.flatten(0, 1)
            if rng is not None:
                generator = torch.Generator().manual_seed(rng.getrandbits(62))
                noise = 2 * torch.rand(features.shape, generator=generator) - 1
                features = features + _NOISE * noise.to(features.device)
        embeddings, visible = self.embeddings(batch.ids), batch.attention_mask()
        rows = []
        for depth in range(self.depths if rng is None or self.version == 3 else 1):
            at = batch.positions + depth
            following = functional.pad(embeddings[:, 1 + depth :], (0, 0, 0, min(1 + depth, tokens))).flatten(0, 1)
            features = layers(following, features, self._inputs.batched(BatchPass(batch.ids, at, visible, at)))
            pairs, sources = reachable(batch, 1 + depth)
            rows.append((features.index_select(0, pairs), sources, torch.full_like(sources, depth)))
        return Predictions(*map(torch.cat, zip(*rows, strict=True)))

    def logits(self, outputs: Tensor, depths: Tensor) -> Tensor:
        if self.version == 1:
            return self.target_logits(outputs)
        weight, eps = self.parameters[FINAL_NORM], self._architecture.norm_eps
        normed = functional.rms_norm(outputs, outputs.shape[-1:], weight, eps)
        logits = functional.linear(normed, self.parameters[HEAD]).float()
        if self._on_device is None:
            return logits
        return logits.new_full((len(logits), self.vocabulary), -torch.inf).index_copy(1, self._on_device, logits)

    def row_losses(self, outputs: Tensor, logits: Tensor, labels: RowLabels) -> Tensor:
        """Returns the loss of each row: of EAGLE-3 the divergence from the target's distribution over the head's vocabulary.

        Of EAGLE-1 the smooth L1 distance from the target's feature, and a tenth of the divergence.
        """
        if self.version == 1:
            distance = functional.smooth_l1_loss(outputs.float(), labels.hidden, reduction="none").mean(-1)
            return distance + _TOKEN_LOSS * divergence(logits, labels.top_k_ids, labels.top_k_log_probs)
        if self._on_device is None:
            return super().row_losses(outputs, logits, labels)
        is_inside = torch.zeros(self.vocabulary, dtype=torch.bool, device=logits.device)
        is_inside[self._on_device] = True
        inside = is_inside[labels.top_k_ids]
        outside = (labels.top_k_log_probs.exp() * ~inside).sum(-1, keepdim=True)
        log_probs = labels.top_k_log_probs - torch.log1p(-outside.clamp_max(1 - 1e-6))
        log_probs = log_probs.masked_fill(~inside, _OUTSIDE)
        losses = divergence(logits.clamp_min(_OUTSIDE), labels.top_k_ids, log_probs)
        return self.decay**labels.depths * losses * inside[:, 0]

    def weights(self, ranks: Sequence[Sequence[float]]) -> EagleWeights:
        tensors = {name: weight.detach() for name, weight in self.parameters.items()}
        return EagleWeights(self.version, self._config, tensors, tuple(self.taps), self._ids)


def _architecture_of(config: dict[str, Any]) -> Architecture | None:
    try:
        return read_architecture(config)
    except UnsupportedConfig:
        return None


def _sizes_alone(target: EagleObjective) -> dict[str, Any]:
    """Returns the config of a Llama with one layer of the sizes of a target that the native decoder does not know."""
    shape = target.model.shape
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size or 4 * shape.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.context_limit,
        "vocab_size": target.vocabulary,
        "tie_word_embeddings": False,
    }


def _vocabulary(size: int, texts: Sequence[GeneratedText]) -> Tensor | None:
    """Returns the ids of the most frequent tokens that the target generated, ascending; None if the head can have all `size`."""
    if size <= _LARGEST_VOCABULARY:
        return None
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text.ids[text.prompt_length :].tolist())
    frequent = [token for token, _ in counts.most_common(_LARGEST_VOCABULARY)]
    known = set(frequent)
    others = islice((token for token in range(size) if token not in known), _LARGEST_VOCABULARY - len(frequent))
    return torch.tensor(sorted([*frequent, *others]))


def _initial_weights(
    version: Version, own: Architecture, start: dict[str, Tensor], generator: torch.Generator
) -> dict[str, Tensor]:
    """Returns the initial weights by their names in `EagleWeights`, but for the LM head.

    `start` is the result of `last_layer`.
    """
    width, names = own.hidden_size, layer_tensors(own, 0)
    made = initial_layer(own, start, generator)
    assert names.attention_norm is not None
    before = torch.zeros(width, (2 if version == 3 else 1) * width)
    made[FC] = torch.cat((before, torch.eye(width)), dim=1)
    if version == 1:
        del made[names.attention_norm], made[FINAL_NORM]
        return {**made, bias_of(FC): torch.zeros(width)}
    for name in names.qkv:  # the embedding has no influence at first
        made[name] = torch.cat((torch.zeros_like(made[name]), made[name]), dim=1)
    return {**made, FEATURE_NORM: made[names.attention_norm], names.attention_norm: torch.ones(width)}
