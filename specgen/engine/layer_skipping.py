"""Layer skipping (Self-SD, Zhang et al. 2023): the target drafts for itself with attentions and MLPs left out.

The draft reads the target's cache of committed tokens. Its own rows stand behind them for as long as a draft grows, and count
for nothing as soon as the target runs.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from specgen.engine.cached_prefix import ForwardRange, TreeNodes, chain, shared_length
from specgen.engine.exit_layer import ExitLayer, check_split, decoder_of, layer_kinds
from specgen.engine.forward_inputs import ForwardInputs
from specgen.engine.inference_mode import inference
from specgen.engine.model_runner import LogitsProcessor, ModelOutput, ModelRunner
from specgen.errors import SpecgenError
from specgen.types import Context

_PART = re.compile(r"(\d+)([am]?)")


@dataclass(frozen=True, slots=True)
class SkippedLayers:
    """The layers, counted from 0, whose attention and whose MLP are left out: Self-SD's z."""

    attention: frozenset[int]
    mlp: frozenset[int]

    @classmethod
    def parse(cls, text: str, layers: int) -> SkippedLayers:
        """`3+5a+7m`: layer 3, the attention of 5, the MLP of 7. Raises SpecgenError for anything else."""
        attention: set[int] = set()
        mlp: set[int] = set()
        for part in text.split("+"):
            found = _PART.fullmatch(part.strip())
            if found is None:
                raise SpecgenError(
                    f"skip is {text!r}", "Write layers as 3+5a+7m (a: its attention alone, m: its MLP alone), or auto"
                )
            number = int(found[1])
            if number >= layers:
                raise SpecgenError(f"skip names layer {number}", f"The target's layers go from 0 to {layers - 1}")
            if found[2] != "m":
                attention.add(number)
            if found[2] != "a":
                mlp.add(number)
        return cls(frozenset(attention), frozenset(mlp))

    def __str__(self) -> str:
        kinds = ((self.attention & self.mlp, ""), (self.attention - self.mlp, "a"), (self.mlp - self.attention, "m"))
        return "+".join(f"{number}{mark}" for numbers, mark in kinds for number in sorted(numbers))


class LayerSkippingRunner:
    """The target with `skips` left out, as a draft behind a session's interface; chains only.

    A pass keeps what an earlier one wrote behind the target's rows, as long as the target has not run since.
    """

    def __init__(self, target: ModelRunner, model: Any, skips: SkippedLayers, reshaping: LogitsProcessor | None = None) -> None:
        check_split(model, "layer skipping")
        self.context_limit, self.known_ids = target.context_limit, target.known_ids
        self.vocab_size, self.device = target.vocab_size, target.device
        decoder, kinds = decoder_of(model), layer_kinds(model)
        kept = [
            (_without(layer, number in skips.attention, number in skips.mlp), kind)
            for number, (layer, kind) in enumerate(zip(decoder.layers, kinds, strict=True))
            if number not in skips.attention & skips.mlp
        ]
        head = decoder.norm, model.lm_head, model.config.get_text_config()
        self._layers = ExitLayer([layer for layer, _ in kept], [kind for _, kind in kept], *head)
        self._target, self._reshaping = target, reshaping
        self._embed, self._rotary = decoder.embed_tokens, decoder.rotary_emb
        self._geometry = ForwardInputs(model)
        self._context = Context(())
        self._lent = -1  # which of the target's loans the rows below were written under
        self._own: list[int] = []  # the tokens whose rows stand behind the committed ones

    @inference
    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        """As `ModelRunner.logits`, for chains."""
        tokens = list(draft)
        if parents is not None and list(parents) != list(chain(len(tokens))):
            raise SpecgenError("layer skipping drafts no trees", "Take width=1")
        loan = self._target.lend(context)
        if context is not self._context or loan.number != self._lent:
            self._context, self._lent, self._own = context, loan.number, []
        wanted = context.ids[loan.committed :] + tokens
        needed = len(wanted) - (len(tokens) + 1 - start)  # rows up to there may be kept
        self._own = self._own[: shared_length(self._own, wanted, max(needed, 0))]
        span = ForwardRange(
            context, TreeNodes(tokens, chain(len(tokens))), loan.committed + len(self._own), len(context) + len(tokens)
        )
        positions, mask = self._geometry(span, loan.cache.capacity)
        loan.cache.length = span.first
        embedded = self._embed(torch.tensor([span.ids], device=self.device))
        keep = len(tokens) + 1 - start
        rows = self._layers(embedded, self._rotary(embedded, positions[None]), mask, loan.cache, keep=keep)
        self._own = wanted
        logits = rows.logits[0]
        if self._reshaping is not None:
            logits = self._reshaping(logits, context, tokens, chain(len(tokens)), start)
        return ModelOutput(logits)


class _NoAttention(nn.Module):
    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return torch.zeros_like(hidden_states), None


class _NoMLP(nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden_states)


def _without(layer: nn.Module, attention: bool, mlp: bool) -> nn.Module:
    """The layer with its attention or its MLP giving nothing: the residual goes on, and norms of nothing are nothing."""
    if not attention and not mlp:
        return layer
    part = copy.copy(layer)
    part._modules = dict(layer._modules)
    name, empty = ("self_attn", _NoAttention()) if attention else ("mlp", _NoMLP())
    if name not in part._modules:
        raise SpecgenError(f"the target's layers have no {name} to skip", "Skip whole layers, or take another method")
    part._modules[name] = empty
    return part
