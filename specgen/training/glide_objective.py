"""The training of a GliDe draft model (Du et al. 2024): one layer that also attends to the keys and values of the target's last.

When it drafts, the target has no keys of the drafted tokens yet. So texts are divided into blocks, and each token sees the
target's keys of earlier blocks alone: the rows of a block are those of a draft that begins after the block's first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from specgen.engine.batch_pass import BatchPass
from specgen.engine.heads.glide_runner import draft_architecture, target_architecture
from specgen.engine.heads.weights import GlideWeights
from specgen.engine.native.architecture import read_architecture, read_config
from specgen.engine.native.description import Architecture, UnsupportedConfig
from specgen.engine.native.glide_layers import CrossInputs, GlideLayers
from specgen.engine.native.inputs import InputMaker
from specgen.engine.native.masks import additive
from specgen.engine.native.products import TrainedProduct
from specgen.engine.native.rotary import RotaryTable
from specgen.engine.native.tensor_names import FINAL_NORM, bias_of, layer_tensors
from specgen.engine.native.trainable_exit import module_of
from specgen.training.frozen_target import FrozenTarget, TargetStates
from specgen.training.generated_text import GeneratedText
from specgen.training.head_objective import Objective, Predictions
from specgen.training.packing import IGNORED, PackedBatch

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

_SHORTEST, _LONGEST = 2, 10  # tokens in a block
_DEVIATION = 0.02  # of random initial weights
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}  # in config.json
_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")


class GlideObjective(Objective):
    """Trains a draft model with one layer, and the target's embedding and LM head.

    The size of the blocks is drawn for each batch, so that the drafts are of different lengths (Du et al.: always 5). A text's
    first block is left out, as it sees no key. The layer begins as a copy of the target's last one, if that is like a Llama's.
    """

    kind = "glide"
    depths = _LONGEST

    def __init__(self, target: FrozenTarget, texts: Sequence[GeneratedText], seed: int) -> None:
        super().__init__(target, texts, seed)
        self._theirs = target_architecture(target.model)
        self._config = _layer_config(self._theirs, read_config(target.loaded.folder, target.loaded.name))
        self._own = draft_architecture(GlideWeights(self._config, {}))
        device = target.device
        self.module = module_of(_initial_weights(self._own, self._theirs, target, torch.Generator().manual_seed(seed))).to(device)
        self.kv_layers = (target.num_layers - 1,)
        self._parameters = dict(self.module.named_parameters())
        self._inputs = InputMaker(self._own, target.dtype, device)
        rotary = self._theirs.layers[-1].rotary
        rounded = None if self._theirs.rotary_in_float32 else target.dtype
        self._rotations = None if rotary is None else RotaryTable(self._theirs.rotary[rotary], device, rounded)
        self._boundary = None if rotary is None else self._theirs.rotary[rotary].long_boundary

    @classmethod
    def check(cls, target: LoadedModel) -> None:
        super().check(target)
        target_architecture(target.model)

    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        size = _LONGEST if rng is None else rng.randint(_SHORTEST, _LONGEST)
        keys, values = states.keys_values[0]
        own_pass = BatchPass(batch.ids, batch.positions, batch.attention_mask(), batch.positions)
        block = batch.positions // size
        visible = own_pass.visible & (block[:, None, :] < block[:, :, None])
        visible |= block[:, :, None] == 0  # rows that see no key are left out below; a softmax over nothing would be NaN
        mask = additive(visible, self.target.dtype)[:, None]
        cross = CrossInputs(keys, values, self._rotation(batch), mask, batch=len(batch.ids))
        layers = GlideLayers(
            self._own,
            self._theirs,
            lambda name, _: self._parameters[name],
            torch.float32,
            TrainedProduct,
            native_keys=self.target.model.backend == "native",
        )
        embeddings = self.target.embeddings(batch.ids).flatten(0, 1)
        outputs = layers(embeddings, self._inputs.batched(own_pass), [cross])
        sources = ((batch.labels != IGNORED) & (block > 0)).flatten().nonzero()[:, 0]
        return Predictions(outputs.index_select(0, sources), sources, (batch.positions % size).flatten()[sources])

    def weights(self, ranks: Sequence[Sequence[float]]) -> GlideWeights:
        return GlideWeights(self._config, {name: weight.detach() for name, weight in self._parameters.items()}, _LONGEST)

    def _rotation(self, batch: PackedBatch) -> torch.Tensor | None:
        """Returns the rotations of the target's last layer at the tokens' positions."""
        if self._rotations is None:
            return None
        length = batch.ids.shape[1]
        last = length if self._boundary is None else int(batch.positions.max()) + 1
        return self._rotations.gather(batch.positions.flatten(), last > (self._boundary or last), length)[:, None]


def _layer_config(target: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of a Llama with one layer of the target's sizes, or of a Qwen with its biases or norms.

    Its rotary embedding is that of the target's `config`, if a Llama can have it.
    """
    with_norms, one_bias = target.qk_norm == "head", target.qkv_bias and not target.output_bias
    made = {
        "model_type": "qwen3" if with_norms else "qwen2" if one_bias else "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_size,
        "hidden_act": _ACTIVATIONS[target.activation],
        "rms_norm_eps": target.norm_eps,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "attention_bias": target.output_bias,
        "tie_word_embeddings": False,
    }
    rope = {name: config[name] for name in _ROPE_FIELDS if config.get(name) is not None}
    try:
        read_architecture({**made, **rope})
    except UnsupportedConfig:
        return made
    return {**made, **rope}


def _initial_weights(
    own: Architecture, theirs: Architecture, target: FrozenTarget, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Returns the initial weights by their names in `GlideWeights`. The output of the cross-attention is zero."""
    copied = _last_layer(own, theirs, target)
    weights = {}
    for name, shape in _shapes(own, theirs).items():
        if name in copied:
            weights[name] = copied[name]
        elif name.endswith(("cross_attn.o_proj.weight", "bias")):
            weights[name] = torch.zeros(shape)
        elif "norm" in name:
            weights[name] = torch.ones(shape)
        else:
            weights[name] = torch.randn(shape, generator=generator) * _DEVIATION
    return weights


def _shapes(own: Architecture, theirs: Architecture) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all weights by name."""
    names, width, size = layer_tensors(own, 0), own.hidden_size, own.head_size
    heads = own.num_heads, own.num_kv_heads, own.num_kv_heads
    rows = {name: count * size for name, count in zip(names.qkv, heads, strict=True)}
    inner = theirs.num_heads * theirs.head_size
    shapes: dict[str, tuple[int, ...]] = {name: (count, width) for name, count in rows.items()}
    shapes |= {bias_of(name): (count,) for name, count in rows.items() if own.qkv_bias}
    shapes |= {name: (size,) for name in (names.q_norm, names.k_norm) if isinstance(name, str)}
    shapes |= {name: (width,) for name in (names.attention_norm, names.mlp_norm, FINAL_NORM) if name is not None}
    shapes |= {bias_of(names.output): (width,)} if own.output_bias else {}
    shapes[names.output] = width, own.num_heads * size
    shapes |= dict.fromkeys(names.gate_up, (own.intermediate_size, width))
    shapes[names.down] = width, own.intermediate_size
    cross = "layers.0.cross_attn."
    return shapes | {f"{cross}q_proj.weight": (inner, width), f"{cross}o_proj.weight": (width, inner)}


def _last_layer(own: Architecture, theirs: Architecture, target: FrozenTarget) -> dict[str, torch.Tensor]:
    """Returns the weights of the target's last layer and final norm under the draft's names: none unless it is like a Llama's.

    Queries of the cross-attention begin as the layer's own, without the norms.
    """
    is_alike = theirs.pre_norms and not theirs.post_norms and not theirs.parallel and theirs.gated_mlp and not theirs.mlp_bias
    if not is_alike or theirs.norm != "rms" or theirs.qk_norm not in (None, "head"):
        return {}
    found, offset = target.last_layers(1), theirs.norm_weight_offset
    names, made = layer_tensors(theirs, 0), layer_tensors(own, 0)
    heads = [theirs.num_heads, theirs.num_kv_heads, theirs.num_kv_heads]
    qkv = torch.split(torch.cat([found[name] for name in names.qkv]), [count * theirs.head_size for count in heads])
    weights = dict(zip(made.qkv, qkv, strict=True))
    if theirs.qkv_bias:
        biases = torch.split(torch.cat([found[bias_of(name)] for name in names.qkv]), [len(part) for part in qkv])
        weights |= dict(zip(map(bias_of, made.qkv), biases, strict=True))
    weights |= dict(zip(made.gate_up, torch.cat([found[name] for name in names.gate_up]).chunk(2), strict=True))
    weights[made.output] = found[names.output] * theirs.residual_scale
    weights[made.down] = found[names.down] * theirs.residual_scale
    if theirs.output_bias:
        weights[bias_of(made.output)] = found[bias_of(names.output)] * theirs.residual_scale
    news = made.attention_norm, made.mlp_norm, made.q_norm, made.k_norm, FINAL_NORM
    olds = names.attention_norm, names.mlp_norm, names.q_norm, names.k_norm, FINAL_NORM
    for new, old in zip(news, olds, strict=True):
        if isinstance(new, str) and isinstance(old, str):
            weights[new] = found[old] + offset
    scale = theirs.attention_scale * theirs.head_size**0.5  # a Llama's is 1 / sqrt(head size)
    scaled = (
        [made.q_norm] if isinstance(made.q_norm, str) else [made.qkv[0], *([bias_of(made.qkv[0])] if theirs.qkv_bias else [])]
    )
    for name in scaled:
        weights[name] = weights[name] * scale
    weights["layers.0.cross_attn.q_proj.weight"] = qkv[0].clone()
    return {name: weight.cpu().clone() for name, weight in weights.items()}
