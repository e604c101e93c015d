"""The published model's layers in plain torch, for the recipe of its draft model: all tokens of a
text at once, with gradients, or one token a text with a cache. Products are of bfloat16, with AMX
many times as fast as in float32; the residual stream is float32."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the customary name
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from published_model import target_folder

LAYERS = 30
WIDTH = 576
HEADS = 9
KV_HEADS = 3
HEAD_SIZE = 64
VOCABULARY = 49_152
CONTEXT = 640  # tokens of a generated text at most
EPS = 1e-5
THETA = 1e5
END = 2  # <|im_end|>
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUT, GATE, UP, DOWN = "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
NORM_1, NORM_2 = "input_layernorm", "post_attention_layernorm"
TENSORS = (NORM_1, *QKV, OUT, NORM_2, GATE, UP, DOWN)

Layer = dict[str, Tensor]  # the tensors of a layer, by `TENSORS`


class Target:
    """The model's tensors: `embedding` [vocabulary, width], which is also the LM head, `norm`
    [width] and `layers`."""

    def __init__(self) -> None:
        weights = load_file(target_folder() / "model.safetensors")
        self.embedding = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"].float()
        self.layers: list[Layer] = [
            {name: weights[f"model.layers.{index}.{name}.weight"] for name in TENSORS}
            for index in range(LAYERS)
        ]


def normed(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(hidden, (WIDTH,), weight.to(hidden.dtype), EPS).bfloat16()


def linear(inputs: Tensor, layer: Layer, name: str) -> Tensor:
    return F.linear(inputs, layer[name].bfloat16())


def rotation_angles(length: int) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines [length, head size] of the rotary embedding."""
    frequencies = 1 / THETA ** (torch.arange(0, HEAD_SIZE, 2).float() / HEAD_SIZE)
    angles = torch.arange(length).float()[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().bfloat16(), angles.sin().bfloat16()


_COSINES, _SINES = rotation_angles(CONTEXT)


def rotated(heads: Tensor, positions: Tensor) -> Tensor:
    """`heads` [..., head size] at `positions`, whose shape broadcasts with the dimensions before
    the last."""
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return heads * _COSINES[positions] + turned * _SINES[positions]


def split_heads(inputs: Tensor, layer: Layer, positions: Tensor) -> list[Tensor]:
    """Returns queries, keys and values [batch, heads, tokens, head size] of normed `inputs`
    [batch, tokens, width]."""
    batch, tokens, _ = inputs.shape
    query, key, value = (
        linear(inputs, layer, name).view(batch, tokens, -1, HEAD_SIZE).transpose(1, 2)
        for name in QKV
    )
    return [rotated(query, positions), rotated(key, positions), value]


def attention(layer: Layer, hidden: Tensor) -> Tensor:
    """Returns what enters the output projection [batch, tokens, width], for whole texts `hidden`
    [batch, tokens, width]."""
    positions = torch.arange(hidden.shape[1])
    query, key, value = split_heads(normed(hidden, layer[NORM_1]), layer, positions)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(2)


def mlp(layer: Layer, hidden: Tensor) -> Tensor:
    """Returns what enters the down projection [batch, tokens, MLP width]."""
    inputs = normed(hidden, layer[NORM_2])
    return F.silu(linear(inputs, layer, GATE)) * linear(inputs, layer, UP)


def run_layer(layer: Layer, hidden: Tensor) -> Tensor:
    hidden = hidden + linear(attention(layer, hidden), layer, OUT).float()
    return hidden + linear(mlp(layer, hidden), layer, DOWN).float()


class CachedTarget:
    """Runs the target on `texts` texts, one token of each at a time."""

    def __init__(self, target: Target, texts: int) -> None:
        self._target = target
        self._texts = torch.arange(texts)
        shape = (LAYERS, texts, KV_HEADS, CONTEXT, HEAD_SIZE)
        self.keys, self.values = (torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2))

    def step(self, ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Reads the tokens `ids` at `positions` [texts], and returns the states after the final
        norm [texts, width], bfloat16."""
        at = torch.tensor(positions)
        length = max(positions) + 1
        visible = (torch.arange(length) <= at[:, None])[:, None, None]
        hidden = self._target.embedding[torch.tensor(ids)][:, None].float()
        for layer, keys, values in zip(self._target.layers, self.keys, self.values, strict=True):
            inputs = normed(hidden, layer[NORM_1])
            query, key, value = split_heads(inputs, layer, at[:, None, None])
            keys[self._texts, :, at] = key[:, :, 0]
            values[self._texts, :, at] = value[:, :, 0]
            # the queries that share a key and value head are the rows of one product
            mixed = F.scaled_dot_product_attention(
                query.view(-1, KV_HEADS, HEADS // KV_HEADS, HEAD_SIZE),
                keys[:, :, :length],
                values[:, :, :length],
                attn_mask=visible,
            )
            hidden = hidden + linear(mixed.reshape(-1, 1, WIDTH), layer, OUT).float()
            hidden = hidden + linear(mlp(layer, hidden), layer, DOWN).float()
        return normed(hidden[:, 0], self._target.norm)

    def fork(self, length: int, slot: int, prefix: tuple[Tensor, Tensor]) -> None:
        """Gives the text `slot` the first `length` keys and values of `prefix`."""
        self.keys[:, slot, :, :length], self.values[:, slot, :, :length] = prefix


def likeliest(target: Target, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the ids and the logits, float32, of the `count` likeliest tokens [texts, count] after
    the final states `hidden`, best first.

    They are found with logits rounded to bfloat16, and sorted by exact ones.
    """
    ids = F.linear(hidden, target.embedding).topk(count).indices
    logits = torch.einsum("tcw,tw->tc", target.embedding[ids].float(), hidden.float())
    logits, order = logits.sort(descending=True)
    return ids.gather(1, order), logits
