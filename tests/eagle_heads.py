"""EAGLE heads with random weights, and what they predict, computed from their papers' definitions in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from specgen.engine.parts.part import EagleWeights

HEAD_SIZE, HEADS, KV_HEADS, MLP, EPS, THETA = 12, 4, 2, 40, 1e-3, 500.0  # head sizes that are not width / heads
TAPS = (0, 1, 2)


def random_head(
    version: Literal[1, 3],
    width: int = 32,
    vocabulary: Sequence[int] | int = 96,
    *,
    layers: int = 1,
    biases: bool = False,
    qk_norm: bool = False,
    norm_before_residual: bool = False,
    own_embedding: int = 0,
    seed: int = 0,
) -> EagleWeights:
    """A head. `vocabulary` are the target's ids that version 3 predicts, or their number if it predicts all of them.

    `own_embedding` is the number of tokens in a table of its own, 0 for none.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    def norm(size: int) -> Tensor:
        return torch.rand(size, generator=generator) + 0.5

    tensors = {"fc.weight": random(width, (2 if version == 1 else len(TAPS)) * width)}
    if version == 1:
        tensors["fc.bias"] = torch.randn(width, generator=generator) * 0.3
    for index in range(layers):
        prefix = f"layers.{index}."
        entering = 2 * width if version == 3 and index == 0 else width
        rows = {"q": HEADS * HEAD_SIZE, "k": KV_HEADS * HEAD_SIZE, "v": KV_HEADS * HEAD_SIZE}
        for name, count in rows.items():
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = 2 * random(count, entering)
            if biases:
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = torch.randn(count, generator=generator) * 0.3
        tensors[f"{prefix}self_attn.o_proj.weight"] = random(width, HEADS * HEAD_SIZE)
        tensors[f"{prefix}mlp.gate_proj.weight"] = 2 * random(MLP, width)
        tensors[f"{prefix}mlp.up_proj.weight"] = 2 * random(MLP, width)
        tensors[f"{prefix}mlp.down_proj.weight"] = random(width, MLP)
        tensors[f"{prefix}post_attention_layernorm.weight"] = norm(width)
        if qk_norm:
            tensors[f"{prefix}self_attn.q_norm.weight"] = norm(HEAD_SIZE)
            tensors[f"{prefix}self_attn.k_norm.weight"] = norm(HEAD_SIZE)
        if index or version == 3:
            tensors[f"{prefix}input_layernorm.weight"] = norm(width)
    if own_embedding:
        tensors["embed_tokens.weight"] = torch.randn(own_embedding, width, generator=generator)
    ids = None if isinstance(vocabulary, int) else torch.tensor(sorted(vocabulary))
    if version == 3:
        tensors["layers.0.hidden_norm.weight"], tensors["norm.weight"] = norm(width), norm(width)
        tensors["lm_head.weight"] = 3 * random(vocabulary if isinstance(vocabulary, int) else len(vocabulary), width)
    config = {
        "model_type": "qwen3" if qk_norm else "qwen2" if biases else "llama",
        "hidden_size": width,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "num_hidden_layers": layers,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 16,  # no limit of the method
        "vocab_size": 96,
    }
    taps = TAPS if version == 3 else ()
    return EagleWeights(config, tensors, version, taps, ids, norm_before_residual)


def features_of(module: Any, weights: EagleWeights, ids: list[int]) -> Tensor:
    """The target's features [n, ...] of the tokens `ids`, by transformers: those of version 3 after `fc`."""
    with torch.no_grad():
        states = module(torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
    if weights.version == 1:
        return states[-1][0]
    return torch.cat([states[tap][0] for tap in weights.feature_layers], dim=-1) @ weights.tensors["fc.weight"].T


def predicted(weights: EagleWeights, embeddings: Tensor, features: Tensor) -> Tensor:
    """The layers' outputs [n, width] for the pairs of `embeddings` and `features` [n, width] at positions 0 to n - 1."""
    tensors = weights.tensors
    if weights.version == 1:
        hidden = functional.linear(torch.cat((embeddings, features), -1), tensors["fc.weight"], tensors.get("fc.bias"))
        attended = hidden
    else:
        normed = _norm(features, tensors["layers.0.hidden_norm.weight"])
        attended = torch.cat((_norm(embeddings, tensors["layers.0.input_layernorm.weight"]), normed), -1)
        hidden = normed if weights.norm_before_residual else features
    for index in range(weights.config["num_hidden_layers"]):
        prefix = f"layers.{index}."
        if index:
            attended = _norm(hidden, tensors[f"{prefix}input_layernorm.weight"])
        hidden = hidden + _attention(tensors, f"{prefix}self_attn.", attended)
        inner = _norm(hidden, tensors[f"{prefix}post_attention_layernorm.weight"])
        gate, up = (inner @ tensors[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        hidden = hidden + (functional.silu(gate) * up) @ tensors[f"{prefix}mlp.down_proj.weight"].T
    return hidden


def drafted(weights: EagleWeights, embed: Any, features: Tensor, ids: Sequence[int], draft: Sequence[int]) -> Tensor:
    """The predicted features [draft + 1, width] after the tokens `ids` and after each token of a chain, without a cache.

    `features` are the target's of all `ids` but the last; `embed` returns the embeddings of ids.
    """
    tokens, rows = list(ids[1:]), []
    features = features[: len(tokens)]
    for token in [*draft, None]:
        rows.append(predicted(weights, embed(tokens), features)[-1])
        if token is not None:
            tokens.append(token)
            features = torch.cat((features, rows[-1][None]))
    return torch.stack(rows)


def logits_of(weights: EagleWeights, model: Any, hidden: Tensor) -> Tensor:
    """The logits [n, the target's vocabulary] for predicted features [n, width]."""
    if weights.version == 1:
        logits: Tensor = model.head_logits(hidden)
        return logits
    logits = _norm(hidden, weights.tensors["norm.weight"]) @ weights.tensors["lm_head.weight"].T
    if weights.vocabulary is None:
        return logits
    wide = torch.full((len(hidden), model.shape.vocab_size), -torch.inf)
    for column, token in enumerate(weights.vocabulary.tolist()):
        wide[:, token] = logits[:, column]
    return wide


def _attention(tensors: Any, prefix: str, x: Tensor) -> Tensor:
    count = len(x)
    heads = {}
    for name, number in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        projected = functional.linear(x, tensors[f"{prefix}{name}_proj.weight"], tensors.get(f"{prefix}{name}_proj.bias"))
        heads[name] = projected.view(count, number, HEAD_SIZE).transpose(0, 1)
        if f"{prefix}{name}_norm.weight" in tensors:
            heads[name] = _norm(heads[name], tensors[f"{prefix}{name}_norm.weight"])
    angles = torch.arange(count)[:, None] * THETA ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
    query, keys = (_rotated(heads[name], angles) for name in ("q", "k"))
    keys, values = (part.repeat_interleave(HEADS // KV_HEADS, dim=0) for part in (keys, heads["v"]))
    scores = (query @ keys.transpose(1, 2)) * HEAD_SIZE**-0.5
    scores = scores.masked_fill(~torch.ones(count, count, dtype=torch.bool).tril(), -torch.inf)
    mixed = (scores.softmax(-1) @ values).transpose(0, 1).reshape(count, -1)
    return mixed @ tensors[f"{prefix}o_proj.weight"].T


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight
