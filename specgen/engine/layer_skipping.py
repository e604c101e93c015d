"""Layer skipping (Self-SD, Zhang et al. 2023): the target drafts for itself with some attention blocks and MLPs left out.

The draft reads the target's KV cache of the committed tokens, and writes its own entries after them. They are reused while a
draft grows, and dropped as soon as the target runs.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from specgen.engine.cached_prefix import ForwardRange, TreeNodes, chain_parents, common_prefix_length
from specgen.engine.decoder_layers import DecoderLayers, check_llama_structure, decoder_of
from specgen.engine.forward_inputs import ForwardInputs
from specgen.engine.inference_mode import inference
from specgen.engine.model_runner import LogitsProcessor, ModelOutput, ModelRunner
from specgen.errors import SpecgenError
from specgen.types import Context

_PART = re.compile(r"(\d+)([am]?)")


@dataclass(frozen=True, slots=True)
class SkippedLayers:
    """The indices, from 0, of the layers whose attention and whose MLP are skipped: Self-SD's z."""

    attention: frozenset[int]
    mlp: frozenset[int]

    @classmethod
    def parse(cls, text: str, layers: int) -> Self:
        """`3+5a+7m`: layer 3, the attention of 5, the MLP of 7. Raises SpecgenError for anything else."""
        attention: set[int] = set()
        mlp: set[int] = set()
        for part in text.split("+"):
            found = _PART.fullmatch(part.strip())
            if found is None:
                raise SpecgenError(
                    f"skip is {text!r}", "Write layers as 3+5a+7m (a: its attention alone, m: its MLP alone), or auto"
                )
            index = int(found[1])
            if index >= layers:
                raise SpecgenError(f"skip names layer {index}", f"The target has the layers 0 to {layers - 1}")
            if found[2] != "m":
                attention.add(index)
            if found[2] != "a":
                mlp.add(index)
        return cls(frozenset(attention), frozenset(mlp))

    def __str__(self) -> str:
        kinds = ((self.attention & self.mlp, ""), (self.attention - self.mlp, "a"), (self.mlp - self.attention, "m"))
        return "+".join(f"{index}{mark}" for indices, mark in kinds for index in sorted(indices))


class LayerSkippingRunner:
    """A `DraftRunner` that runs the target with `skips` left out, on the cache of the `target` runner; chains only.

    Raises SpecgenError for a model without Llama's structure.
    """

    def __init__(
        self, target: ModelRunner, model: Any, skips: SkippedLayers, logits_processor: LogitsProcessor | None = None
    ) -> None:
        check_llama_structure(model, "layer skipping")
        self.context_limit, self.num_embeddings = target.context_limit, target.num_embeddings
        self.vocab_size, self.device = target.vocab_size, target.device
        whole = DecoderLayers.upper(model, 0)
        run = [index for index in range(len(whole.layers)) if index not in skips.attention & skips.mlp]
        layers = [_without(whole.layers[index], index in skips.attention, index in skips.mlp) for index in run]
        types = [whole.layer_types[index] for index in run]
        self._layers = DecoderLayers(layers, types, whole.norm, whole.head, model.config.get_text_config())
        self._target, self._logits_processor = target, logits_processor
        self._embed, self._rotary = decoder_of(model).embed_tokens, decoder_of(model).rotary_emb
        self._inputs = ForwardInputs(model)
        self._context = Context(())
        self._forward_count = -1  # the target's, when the entries of `_cached_ids` were written
        self._cached_ids: list[int] = []  # the tokens whose entries follow the shared prefix

    @inference
    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        """As `ModelRunner.logits`, for chains."""
        tokens = list(draft)
        chain = chain_parents(len(tokens))
        if parents is not None and list(parents) != list(chain):
            raise SpecgenError("layer skipping drafts no trees", "Take width=1")
        shared = self._target.share_prefix(context)
        if context is not self._context or shared.forward_count != self._forward_count:
            self._context, self._forward_count, self._cached_ids = context, shared.forward_count, []
        ids = context.ids[shared.committed :] + tokens
        logits_to_keep = len(tokens) + 1 - start
        reused = common_prefix_length(self._cached_ids, ids, max(len(ids) - logits_to_keep, 0))
        self._cached_ids = self._cached_ids[:reused]
        forward_range = ForwardRange(context, TreeNodes(tokens, chain), shared.committed + reused, len(context) + len(tokens))
        positions, mask = self._inputs.prepare(forward_range, shared.cache)
        embeddings = self._embed(torch.tensor([forward_range.token_ids], device=self.device))
        rotary = self._rotary(embeddings, positions[None])
        logits = self._layers(embeddings, rotary, mask, shared.cache, logits_to_keep=logits_to_keep).logits[0]
        self._cached_ids = ids
        if self._logits_processor is not None:
            logits = self._logits_processor(logits, context, tokens, chain, start)
        return ModelOutput(logits)


class _NoAttention(nn.Module):
    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return torch.zeros_like(hidden_states), None


class _NoMLP(nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden_states)


def _without(layer: nn.Module, attention: bool, mlp: bool) -> nn.Module:
    """The layer with its attention or its MLP replaced by zeros, which leave the residual stream as it is."""
    if not attention and not mlp:
        return layer
    part = copy.copy(layer)
    part._modules = dict(layer._modules)
    name, empty = ("self_attn", _NoAttention()) if attention else ("mlp", _NoMLP())
    if name not in part._modules:
        raise SpecgenError(f"the target's layers have no {name} to skip", "Skip whole layers, or take another method")
    part._modules[name] = empty
    return part
