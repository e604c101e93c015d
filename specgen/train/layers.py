"""Training of heads with a decoder layer: EAGLE-3 (arXiv:2503.01840, section 3.2), and GliDe (Du et al. 2024).

The layer is a Llama's of the target's sizes, and begins with the weights of the target's last one.

EAGLE-3 learns from its own drafts: in its training-time test, the predicted features of one step are the input of the next.
GliDe's layer also attends to the keys and values of the target's last layer. When it drafts, the target has no keys of the
drafted tokens yet. So texts are divided into blocks, and each token sees the target's keys of earlier blocks alone: the rows of a
block are those of a draft that begins after the block's first token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specgen.base.errors import SpecgenError
from specgen.engine.model_loading import LoadedModel
from specgen.engine.native.architecture import Architecture, UnsupportedConfig
from specgen.engine.native.attention import Sight
from specgen.engine.native.families import read_architecture, read_config
from specgen.engine.native.inputs import InputMaker
from specgen.engine.native.layer_weights import EXIT_HEAD, FINAL_NORM, HEAD, bias_of, layer_shapes, layer_tensors
from specgen.engine.native.products import trained_product
from specgen.engine.native.rotary import RotaryTable
from specgen.engine.parts.eagle import FC, FEATURE_NORM, EagleLayers, UnrolledLayer
from specgen.engine.parts.glide import CrossInputs, GlideLayers
from specgen.engine.parts.own_layers import known_architecture
from specgen.engine.parts.part import EagleWeights, GlideWeights
from specgen.train.heads import HeadObjective, Predictions, TargetStates, reachable
from specgen.train.loop import IGNORED, PackedBatch
from specgen.train.measures import divergence
from specgen.train.task import TrainingTask
from specgen.train.texts import Text

_LAYERS_FOR_DEFAULT = 7  # the least number of layers in which the authors' three features are of different layers
_LARGEST_VOCABULARY = 32_000  # tokens that EAGLE's LM head predicts at most, as in the published heads
_OUTSIDE = -1e4  # in place of the infinite log-probability of a token outside the vocabulary
_SHORTEST, _LONGEST = 2, 10  # tokens in a block of GliDe
_DEVIATION = 0.02  # of random initial weights
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}  # in config.json
_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")


class LayerObjective(HeadObjective):
    """Trains a head with one decoder layer: that of a Llama with the target's sizes, or of a Qwen with its biases or norms.

    `config` is its config.json, `architecture` what that describes.
    """

    def begin(self, texts: Sequence[Text], generator: torch.Generator) -> dict[str, Tensor]:
        """Returns the initial weights of layer 0 and of the final norm: the target's, or random ones."""
        self.config = layer_config(self.target)
        self.architecture = read_architecture(self.config)
        self.inputs = InputMaker(self.architecture, self.dtype, [self.device])
        last, made = last_layer(self.target, self.architecture), {}
        for name, shape in (layer_shapes(self.architecture, 0) | {FINAL_NORM: (self.width,)}).items():
            if name in last:
                made[name] = last[name]
            elif len(shape) == 1:
                made[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
            else:
                made[name] = torch.randn(shape, generator=generator) * _DEVIATION
        return made


class EagleObjective(LayerObjective):
    """Trains an EAGLE-3 head with one layer, and the target's embedding.

    Its LM head begins as a copy of the target's, and predicts the most frequent tokens of the texts.
    """

    kind = "eagle"
    depths = 5

    def __init__(self, task: TrainingTask, target: LoadedModel) -> None:
        super().__init__(task, target)
        count = self.num_layers
        if count < 3:
            raise SpecgenError(f"{target.name} has {count} layers, and an EAGLE head reads from three", "Train --methods medusa")
        self.taps = (2, count // 2, count - 3) if count >= _LAYERS_FOR_DEFAULT else (0, count // 2, count - 1)

    def begin(self, texts: Sequence[Text], generator: torch.Generator) -> dict[str, Tensor]:
        self._ids = _vocabulary(self.vocabulary, texts, self.device)
        made, width = super().begin(texts, generator), self.width
        names = layer_tensors(self.architecture, 0)
        made[FC] = torch.cat((torch.zeros(width, 2 * width), torch.eye(width)), dim=1)
        for name in names.qkv:  # the embedding has no influence at first
            made[name] = torch.cat((torch.zeros_like(made[name]), made[name]), dim=1)
        assert names.attention_norm is not None
        made |= {FEATURE_NORM: made[names.attention_norm], names.attention_norm: torch.ones(width)}
        head = self.model.last_layers(self.target.folder, 0)[EXIT_HEAD]
        return {**made, HEAD: head.clone() if self._ids is None else head[self._ids.to(head.device)]}

    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        """Runs the head on all pairs of the batch: with its own predictions as features for each further token."""
        weights = EagleWeights(self.config, self.parameters)
        layers = EagleLayers(weights, self.device, torch.float32, trained_product, first_layer=UnrolledLayer)
        features, embeddings = layers.fc(states.features.flatten(0, 1)).float(), self.embeddings(batch.ids)
        forward_pass, rows = batch.forward_pass(), []
        for depth in range(self.depths):
            at, padding = batch.positions + depth, min(1 + depth, batch.ids.shape[1])
            following = functional.pad(embeddings[:, 1 + depth :], (0, 0, 0, padding)).flatten(0, 1)
            inputs = self.inputs.batched(forward_pass._replace(positions=at, key_positions=at))
            features = layers(following, features, inputs)
            pairs, sources = reachable(batch, 1 + depth)
            rows.append((features.index_select(0, pairs), sources, torch.full_like(sources, depth)))
        return Predictions(*map(torch.cat, zip(*rows, strict=True)))

    def logits(self, outputs: Tensor, depths: Tensor) -> Tensor:
        normed = functional.rms_norm(outputs, (self.width,), self.parameters[FINAL_NORM], self.architecture.norm_eps)
        logits = functional.linear(normed, self.parameters[HEAD]).float()
        if self._ids is None:
            return logits
        return logits.new_full((len(logits), self.vocabulary), -torch.inf).index_copy(1, self._ids, logits)

    def row_losses(self, logits: Tensor, top_k_ids: Tensor, log_probs: Tensor) -> Tensor:
        """Returns the divergence from the target's distribution over the vocabulary; 0 if its likeliest token is not there."""
        if self._ids is None:
            return super().row_losses(logits, top_k_ids, log_probs)
        inside = torch.isin(top_k_ids, self._ids)
        outside = (log_probs.exp() * ~inside).sum(-1, keepdim=True)
        log_probs = log_probs - torch.log1p(-outside.clamp_max(1 - 1e-6))
        log_probs = log_probs.masked_fill(~inside, _OUTSIDE)
        return divergence(logits.clamp_min(_OUTSIDE), top_k_ids, log_probs) * inside[:, 0]

    def weights(self, ranks: Sequence[Sequence[float]]) -> EagleWeights:
        tensors = {name: weight.detach() for name, weight in self.parameters.items()}
        return EagleWeights(self.config, tensors, 3, tuple(self.taps), None if self._ids is None else self._ids.cpu())


def _vocabulary(size: int, texts: Sequence[Text], device: torch.device) -> Tensor | None:
    """Returns the ids of the most frequent tokens that the target generated, ascending; None if the head can have all `size`."""
    if size <= _LARGEST_VOCABULARY:
        return None
    counts = Counter[int]()
    for text in texts:
        counts.update(text.ids[text.prompt_length :])
    frequent = [token for token, _ in counts.most_common(_LARGEST_VOCABULARY)]
    others = islice((token for token in range(size) if token not in counts), _LARGEST_VOCABULARY - len(frequent))
    return torch.tensor(sorted([*frequent, *others]), device=device)


class GlideObjective(LayerObjective):
    """Trains a GliDe draft model with one layer, and the target's embedding and LM head.

    The size of the blocks is drawn for each batch, so that the drafts are of different lengths (Du et al.: always 5). A text's
    first block is left out, as it sees no key.
    """

    kind = "glide"
    depths = _LONGEST
    reads_cache = True

    def __init__(self, task: TrainingTask, target: LoadedModel) -> None:
        super().__init__(task, target)
        self._theirs = theirs = known_architecture(target.model, "training glide")
        rotary, rounded = theirs.layers[-1].rotary, None if theirs.rotary_in_float32 else self.dtype
        self._rotations = None if rotary is None else RotaryTable(theirs.rotary[rotary], self.device, rounded)

    def begin(self, texts: Sequence[Text], generator: torch.Generator) -> dict[str, Tensor]:
        """Returns the initial weights by their names in `GlideWeights`. The output of the cross-attention is zero."""
        made, cross, width = super().begin(texts, generator), "layers.0.cross_attn.", self.width
        query = made[layer_tensors(self.architecture, 0).qkv[0]]
        return {**made, f"{cross}q_proj.weight": query.clone(), f"{cross}o_proj.weight": torch.zeros(width, len(query))}

    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        size = _LONGEST if rng is None else rng.randint(_SHORTEST, _LONGEST)
        own_pass, block = batch.forward_pass(), batch.positions // size
        visible = own_pass.visible & (block[:, None, :] < block[:, :, None])
        visible |= block[:, :, None] == 0  # rows that see no key are left out below; a softmax over nothing would be NaN
        mask = Sight(~visible, batch.positions, batch.positions).mask(None, self.dtype)[:, None]
        assert states.keys_values is not None
        cross = CrossInputs(*states.keys_values, self._rotation(batch), mask, batch=len(batch.ids))
        layers = GlideLayers(GlideWeights(self.config, self.parameters), self.model, torch.float32, trained_product)
        outputs = layers(self.embeddings(batch.ids).flatten(0, 1), self.inputs.batched(own_pass), [cross])
        sources = ((batch.labels != IGNORED) & (block > 0)).flatten().nonzero()[:, 0]
        return Predictions(outputs.index_select(0, sources), sources, (batch.positions % size).flatten()[sources])

    def weights(self, ranks: Sequence[Sequence[float]]) -> GlideWeights:
        return GlideWeights(self.config, {name: weight.detach() for name, weight in self.parameters.items()}, _LONGEST)

    def _rotation(self, batch: PackedBatch) -> Tensor | None:
        """Returns the rotations of the target's last layer at the tokens' positions."""
        if self._rotations is None:
            return None
        length, boundary = batch.ids.shape[1], self._rotations.long_boundary
        is_long = boundary is not None and int(batch.positions.max()) >= boundary
        return self._rotations.gather(batch.positions.flatten(), is_long, length)[:, None]


def layer_config(target: LoadedModel) -> dict[str, Any]:
    """Returns the config of a Llama with one layer of the target's sizes, or of a Qwen with its biases or norms."""
    shape = target.model.shape
    config = {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size or 4 * shape.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.context_limit,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
    }
    if isinstance(shape, Architecture):
        biased_qkv = shape.qkv_bias and not shape.output_bias
        config["model_type"] = "qwen3" if shape.qk_norm == "head" else "qwen2" if biased_qkv else "llama"
        config["hidden_act"], config["rms_norm_eps"] = _ACTIVATIONS[shape.activation], shape.norm_eps
        config["attention_bias"] = shape.output_bias
        theirs = read_config(target.folder, target.name)
        rope = {name: theirs[name] for name in _ROPE_FIELDS if theirs.get(name) is not None}
        with suppress(UnsupportedConfig):  # a Llama cannot have all that a target can
            read_architecture(config | rope)
            config |= rope
    return config


def last_layer(target: LoadedModel, own: Architecture) -> dict[str, Tensor]:
    """Returns the weights of the target's last layer and final norm under the names of a layer `own`.

    Nothing unless the target's layer computes as a Llama's.
    """
    theirs = target.model.shape
    if not isinstance(theirs, Architecture) or theirs.qk_norm not in (None, "head") or not theirs.pre_norms:
        return {}
    if theirs.post_norms or theirs.mlp_bias or theirs.norm_weight_offset:
        return {}
    if theirs.residual_scale != 1 or theirs.attention_scale != theirs.head_size**-0.5:
        return {}
    found, names, made = target.model.last_layers(target.folder, 1), layer_tensors(theirs, 0), layer_tensors(own, 0)

    def split(old: Iterable[str], new: Iterable[str], rows: list[int]) -> dict[str, Tensor]:
        stacked = torch.cat([found[name] for name in old])
        return dict(zip(new, torch.split(stacked, rows), strict=True))

    rows = [count * theirs.head_size for count in (theirs.num_heads, theirs.num_kv_heads, theirs.num_kv_heads)]
    weights = split(names.qkv, made.qkv, rows)
    weights |= split(names.gate_up, made.gate_up, [theirs.intermediate_size] * 2)
    if theirs.qkv_bias:
        weights |= split(map(bias_of, names.qkv), map(bias_of, made.qkv), rows)
    weights |= {name: found[name] for name in layer_shapes(own, 0) | {FINAL_NORM: ()} if name not in weights}
    return {name: weight.cpu().clone() for name, weight in weights.items()}
