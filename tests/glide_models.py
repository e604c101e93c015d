"""Random GliDe draft models, and a plain reference of their rows, computed by transformers' modules without any cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from families import CONTEXT
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from specgen.engine.parts.part import GlideWeights


class GlideReference:
    """A draft model with random weights for `target`, a model of transformers.

    `shared` leaves out its embedding and its LM head: the target's are used. `layers` is the number of its layers.
    """

    def __init__(self, target: Any, *, layers: int = 1, shared: bool = False) -> None:
        torch.manual_seed(0)
        self.target, self.shared = target, shared
        other = target.config
        self.heads = other.num_attention_heads
        self.size = getattr(other, "head_dim", None) or other.hidden_size // self.heads
        width = other.hidden_size if shared else 24
        settings: dict[str, Any] = {
            "hidden_size": width,
            "intermediate_size": 40,
            "num_hidden_layers": layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "vocab_size": other.vocab_size,
            "max_position_embeddings": CONTEXT,
            "initializer_range": 0.25,
            "tie_word_embeddings": False,
        }
        self.config = LlamaConfig(**settings)
        self.model = LlamaForCausalLM(self.config).eval()
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if "norm" in name:
                    weight.add_(0.3 * torch.randn_like(weight))
        inner = self.heads * self.size
        self.cross = [(0.3 * torch.randn(inner, width), 0.3 * torch.randn(width, inner)) for _ in range(layers)]

    @property
    def weights(self) -> GlideWeights:
        tensors = {name.removeprefix("model."): weight.detach() for name, weight in self.model.state_dict().items()}
        if self.shared:
            del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
        for index, (query, output) in enumerate(self.cross):
            tensors[f"layers.{index}.cross_attn.q_proj.weight"] = query
            tensors[f"layers.{index}.cross_attn.o_proj.weight"] = output
        config = {"model_type": "llama", **self.config.to_diff_dict()}
        return GlideWeights({key: value for key, value in config.items() if key != "initializer_range"}, tensors)

    @torch.no_grad()
    def rows(self, ids: Sequence[int], seen: Sequence[int]) -> torch.Tensor:
        """The logits [n, vocabulary] after each of `ids`, where the i-th token sees the target's first `seen[i]` keys."""
        model, target = self.model.model, self.target
        tokens, at = torch.tensor([ids]), torch.arange(len(ids))[None]
        cache = target(tokens, past_key_values=DynamicCache()).past_key_values  # of all tokens, also where a window slides
        hidden = (target.get_input_embeddings() if self.shared else model.embed_tokens)(tokens)
        rotary = model.rotary_emb(hidden, at)
        causal = torch.ones(len(ids), len(ids)).tril().log()[None, None]
        first = len(target.model.layers) - len(model.layers)
        for index, layer in enumerate(model.layers):
            hidden = hidden + layer.self_attn(layer.input_layernorm(hidden), position_embeddings=rotary, attention_mask=causal)[0]
            hidden = hidden + self._cross(index, first + index, hidden[0], cache, seen)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        normed = model.norm(hidden[0])
        if not self.shared:
            return self.model.lm_head(normed)
        logits, config = target.lm_head(normed) * getattr(target, "logit_scale", 1.0), target.config
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def drafted(self, context: Sequence[int], path: Sequence[int]) -> torch.Tensor:
        """The logits [path + 1, vocabulary] after the context and after each token of a drafted path."""
        ids, committed = [*context, *path], len(context) - 1
        return self.rows(ids, [min(index, committed) for index in range(len(ids))])[committed:]

    def _cross(self, index: int, layer: int, hidden: torch.Tensor, cache: Any, seen: Sequence[int]) -> torch.Tensor:
        q_proj, o_proj = self.cross[index]
        query = functional.linear(hidden, q_proj).view(1, -1, self.heads, self.size).transpose(1, 2)
        query = self._rotated(query, layer)[0]
        keys, values = (
            part[0].repeat_interleave(self.heads // part.shape[1], 0)
            for part in (cache.layers[layer].keys, cache.layers[layer].values)
        )
        mixed = torch.zeros_like(query)
        for row, count in enumerate(seen):
            if count:
                scores = (query[:, row, None] @ keys[:, :count].transpose(1, 2)) / self.size**0.5
                mixed[:, row] = (scores.softmax(-1) @ values[:, :count])[:, 0]
        return functional.linear(mixed.transpose(0, 1).flatten(1), o_proj)

    def _rotated(self, query: torch.Tensor, layer: int) -> torch.Tensor:
        """The query with the rotation of the target's layer, by the target's own code."""
        decoder, config = self.target.model, self.target.config
        if not getattr(decoder.layers[layer].self_attn, "use_rope", True):
            return query
        options = {"layer_type": config.layer_types[layer]} if config.model_type == "gemma3_text" else {}
        cos, sin = decoder.rotary_emb(query, torch.arange(query.shape[2])[None], **options)
        apply = sys.modules[type(self.target).__module__].apply_rotary_pos_emb
        part = query[..., : cos.shape[-1]]
        return torch.cat((apply(part, part, cos, sin)[0], query[..., cos.shape[-1] :]), dim=-1)
