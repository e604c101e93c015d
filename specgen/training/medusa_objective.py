"""The training of Medusa heads (Cai et al. 2024, section 2.2.1: Medusa-1, the target's weights do not change)."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import nn

from specgen.engine.heads.weights import MedusaWeights
from specgen.training.frozen_target import FrozenTarget, TargetStates
from specgen.training.generated_text import GeneratedText
from specgen.training.head_objective import Objective, Predictions, reachable
from specgen.training.packing import PackedBatch

HEADS = 4  # as many as EESD compares with (4.1); the published trees use as many


class MedusaObjective(Objective):
    """Trains four heads of one block h + SiLU(W h + b) each, which share the target's LM head. W and b begin as zeros.

    Head k reads the hidden state from which the target predicts the next token, and predicts the token k + 1 later. LM heads of
    its own would have far more weights than the blocks, unless the target is wide and its vocabulary small.
    """

    kind = "medusa"
    depths = HEADS

    def __init__(self, target: FrozenTarget, texts: Sequence[GeneratedText], seed: int) -> None:
        super().__init__(target, texts, seed)
        blocks = [nn.Linear(target.width, target.width, device=target.device) for _ in range(HEADS)]
        for block in blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        self.module, self._blocks = nn.ModuleList(blocks), blocks

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

    def weights(self, ranks: Sequence[Sequence[float]]) -> MedusaWeights:
        blocks = [[(block.weight.detach(), block.bias.detach())] for block in self._blocks]
        return MedusaWeights(blocks, rank_accuracies=ranks)
