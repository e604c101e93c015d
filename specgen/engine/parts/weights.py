"""The weights of a trained part under one set of names, whatever the layout of the files that they were read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch

from specgen.engine.native.architecture import Architecture
from specgen.engine.native.families import read_architecture
from specgen.engine.parts.exit_layers import ExitWeights

HeadKind = Literal["medusa", "eagle", "glide"]
Kind = Literal["exit", "medusa", "eagle", "glide"]
KINDS: tuple[HeadKind, ...] = ("medusa", "eagle", "glide")


@dataclass(frozen=True)
class MedusaWeights:
    """The heads of Medusa-1 (Cai et al. 2024, section 2.1). Head k predicts the k-th token (from 0) of a draft.

    `blocks[k][j]` are weight [width, width] and bias [width] of head k's block j, which computes h + SiLU(W h + b). `lm_heads[k]`
    [head vocabulary, width] turns its output into logits; None: the target's LM head serves all heads. `vocabulary` [head
    vocabulary], int64, has the target's id of each of the head's ids, ascending; None: they are equal.
    `rank_accuracies[k][r]` is the share of held-out tokens that head k predicts with rank r (0: its likeliest token), measured
    in training; empty if it is not known.
    """

    kind: ClassVar[HeadKind] = "medusa"
    blocks: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]
    lm_heads: Sequence[torch.Tensor] | None = None
    vocabulary: torch.Tensor | None = None
    rank_accuracies: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class EagleWeights:
    """A head of EAGLE-1 and EAGLE-2 (`version` 1; Li et al. 2024) or of EAGLE-3 (`version` 3; Li et al. 2025).

    `config` describes its decoder layers as the config.json of a Llama, or of a Qwen with its biases or norms. `tensors` has the
    weights under the names of EAGLE's authors, without a prefix: `fc.weight`, `fc.bias` (optional),
    `layers.0.self_attn.q_proj.weight`, ..., `layers.0.mlp.down_proj.weight`, `layers.0.post_attention_layernorm.weight`; for
    version 3 also `layers.0.input_layernorm.weight` (of the embedding), `layers.0.hidden_norm.weight` (of the features),
    `norm.weight` and `lm_head.weight` [head vocabulary, width]. `embed_tokens.weight` [target vocabulary, width] is there only if
    it differs from the target's embedding.

    Version 3: `feature_layers` are the three layers whose inputs are the features, counted as transformers counts
    `hidden_states` (entry j is the input of layer j). `vocabulary` [head vocabulary], int64, has the target's id of each of the
    head's ids, ascending; None: they are equal. `norm_before_residual`: the residual is the normed feature, not the feature.
    """

    kind: ClassVar[HeadKind] = "eagle"
    version: Literal[1, 3]
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    feature_layers: tuple[int, ...] = ()
    vocabulary: torch.Tensor | None = None
    norm_before_residual: bool = False

    @cached_property
    def architecture(self) -> Architecture:
        return read_architecture(dict(self.config))


@dataclass(frozen=True)
class GlideWeights:
    """A GliDe draft model (Du et al. 2024), whose layers also attend to the target's KV cache.

    `config` is as in `EagleWeights`. `tensors` has its weights under Llama's names without the prefix `model.`:
    `layers.0.self_attn.q_proj.weight`, ..., `norm.weight`, and for each layer j also `layers.j.cross_attn.q_proj.weight` [target
    heads * target head size, width] and `layers.j.cross_attn.o_proj.weight` (transposed shape). `embed_tokens.weight` and
    `lm_head.weight` are missing where the target's are used. Its layer j of m reads the keys and values of the target's layer L -
    m + j. `block_size` is the number of tokens in a block of its training, and so the longest distance to the newest visible key
    that it was trained for.
    """

    kind: ClassVar[HeadKind] = "glide"
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    block_size: int = 5

    @cached_property
    def architecture(self) -> Architecture:
        return read_architecture(dict(self.config))


HeadWeights = MedusaWeights | EagleWeights | GlideWeights
Weights = ExitWeights | HeadWeights
