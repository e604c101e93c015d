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
MATRICES = (*QKV, OUT, GATE, UP, DOWN)
NORM_1, NORM_2 = NORMS = "input_layernorm", "post_attention_layernorm"


@torch.compile(dynamic=True)
def normed(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(hidden, (WIDTH,), weight.to(hidden.dtype), EPS).bfloat16()


@torch.compile(dynamic=True)
def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@torch.compile(dynamic=True)
def rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """`heads` [..., head size], turned by angles whose cosines and sines broadcast with them."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat([-second, first], dim=-1) * sines


def rotation_angles(length: int) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines [length, head size] of the rotary embedding."""
    frequencies = 1 / THETA ** (torch.arange(0, HEAD_SIZE, 2).float() / HEAD_SIZE)
    angles = torch.arange(length).float()[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().bfloat16(), angles.sin().bfloat16()


_COSINES, _SINES = rotation_angles(CONTEXT)


class Layer:
    """A decoder layer. `matrices` [outputs, inputs] are bfloat16, `norms` float32."""

    def __init__(self, matrices: dict[str, Tensor], norms: dict[str, Tensor]) -> None:
        self.matrices = matrices
        self.norms = norms

    def linear(self, inputs: Tensor, name: str) -> Tensor:
        return F.linear(inputs, self.matrices[name])

    def split_heads(self, hidden: Tensor, cosines: Tensor, sines: Tensor) -> list[Tensor]:
        """Returns queries, keys and values [texts, heads, tokens, head size] of `hidden`
        [texts, tokens, width]."""
        inputs = normed(hidden, self.norms[NORM_1])
        texts, tokens, _ = inputs.shape
        query, key, value = (
            self.linear(inputs, name).view(texts, tokens, -1, HEAD_SIZE).transpose(1, 2)
            for name in QKV
        )
        return [rotated(query, cosines, sines), rotated(key, cosines, sines), value]

    def attended(self, hidden: Tensor) -> Tensor:
        """Returns `hidden` [texts, tokens, width] of whole texts after the attention."""
        length = hidden.shape[1]
        query, key, value = self.split_heads(hidden, _COSINES[:length], _SINES[:length])
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return hidden + self.linear(mixed.transpose(1, 2).flatten(2), OUT)

    def inner(self, hidden: Tensor) -> Tensor:
        """Returns what enters the down projection [texts, tokens, MLP width]."""
        inputs = normed(hidden, self.norms[NORM_2])
        return gated(self.linear(inputs, GATE), self.linear(inputs, UP))

    def run(self, hidden: Tensor) -> Tensor:
        hidden = self.attended(hidden)
        return hidden + self.linear(self.inner(hidden), DOWN)


class Target:
    """The model's tensors: `embedding` [vocabulary, width], which is also the LM head, `norm`
    [width] and `layers`."""

    def __init__(self) -> None:
        weights = load_file(target_folder() / "model.safetensors")
        self.embedding = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"].float()
        self.layers = [
            Layer(
                {name: weights[f"model.layers.{index}.{name}.weight"] for name in MATRICES},
                {name: weights[f"model.layers.{index}.{name}.weight"].float() for name in NORMS},
            )
            for index in range(LAYERS)
        ]

    def embedded(self, ids: Tensor) -> Tensor:
        return self.embedding[ids].float()


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
        cosines, sines = (angles[at][:, None, None] for angles in (_COSINES, _SINES))
        hidden = self._target.embedded(torch.tensor(ids)[:, None])
        for layer, keys, values in zip(self._target.layers, self.keys, self.values, strict=True):
            query, key, value = layer.split_heads(hidden, cosines, sines)
            keys[self._texts, :, at] = key[:, :, 0]
            values[self._texts, :, at] = value[:, :, 0]
            # the queries that share a key and value head are the rows of one product
            mixed = F.scaled_dot_product_attention(
                query.view(-1, KV_HEADS, HEADS // KV_HEADS, HEAD_SIZE),
                keys[:, :, :length],
                values[:, :, :length],
                attn_mask=visible,
            )
            hidden = hidden + layer.linear(mixed.reshape(-1, 1, WIDTH), OUT)
            hidden = hidden + layer.linear(layer.inner(hidden), DOWN)
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
