"""The training of Medusa heads (Cai et al. 2024, section 2.2.1: Medusa-1, the target's weights do not change)."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import nn

from specgen.engine.parts.weights import MedusaWeights
from specgen.train.frozen_target import FrozenTarget, TargetStates
from specgen.train.generated_text import GeneratedText
from specgen.train.head_objective import Objective, Predictions, reachable
from specgen.train.packing import PackedBatch

HEADS = 4  # as many as EESD compares with (4.1); the published trees use as many
OWN_SHARE = 0.3  # of the target's weights, in LM heads of their own: as many as the authors' for 7 billion


class MedusaObjective(Objective):
    """Trains four heads of one block h + SiLU(W h + b) and an LM head each.

    Head k reads the hidden state from which the target predicts the next token, and predicts the token k + 1 later. W and b begin
    as zeros, the LM heads as copies of the target's. If these would have more than OWN_SHARE times the target's weights, all
    heads share the target's, which is not trained: they predict less well then.
    """

    kind = "medusa"
    depths = HEADS

    def __init__(self, target: FrozenTarget, texts: Sequence[GeneratedText], seed: int) -> None:
        super().__init__(target, texts, seed)
        self._blocks = [nn.Linear(target.width, target.width, device=target.device) for _ in range(HEADS)]
        for block in self._blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        self._lm_heads: list[nn.Linear] = []
        if HEADS * target.vocabulary * target.width <= OWN_SHARE * target.model.num_parameters:
            start = target.last_layers(0)["head.weight"]
            self._lm_heads = [nn.Linear(target.width, target.vocabulary, bias=False, device="meta") for _ in range(HEADS)]
            for head in self._lm_heads:
                head.weight = nn.Parameter(start.clone())
        self.module = nn.ModuleDict({"blocks": nn.ModuleList(self._blocks), "lm_heads": nn.ModuleList(self._lm_heads)})

    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        hidden = states.hidden.flatten(0, 1)
        outputs, sources, depths = [], [], []
        for head, block in enumerate(self._blocks):
            read, source = reachable(batch, head + 1)  # the state of token i predicts i + 1, and head k predicts i + 2 + k
            inputs = hidden.index_select(0, read)
            outputs.append(inputs + F.silu(block(inputs)))
            sources.append(source)
            depths.append(torch.full_like(source, head))
        return Predictions(torch.cat(outputs), torch.cat(sources), torch.cat(depths))

    def logits(self, outputs: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        if not self._lm_heads:
            return super().logits(outputs, depths)
        rows = [(depths == head).nonzero()[:, 0] for head in range(HEADS)]
        by_head = [head(outputs.index_select(0, own)) for head, own in zip(self._lm_heads, rows, strict=True)]
        return torch.cat(by_head).index_select(0, torch.cat(rows).argsort()).float()

    def weights(self, ranks: Sequence[Sequence[float]]) -> MedusaWeights:
        blocks = [[(block.weight.detach(), block.bias.detach())] for block in self._blocks]
        return MedusaWeights(blocks, [head.weight.detach() for head in self._lm_heads] or None, rank_accuracies=ranks)
