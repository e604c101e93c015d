"""Training of Medusa's heads (Medusa-1: Cai et al. 2024, section 2.2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from specgen.engine.native.layer_weights import EXIT_HEAD
from specgen.engine.parts.part import MedusaWeights
from specgen.train.heads import HeadObjective, Predictions, TargetStates, reachable
from specgen.train.loop import PackedBatch
from specgen.train.texts import Text

HEADS = 4  # as many as EESD compares with (4.1); the published trees use as many
OWN_SHARE = 0.3  # most weights in Medusa's own LM heads, as a share of the target's; the authors' heads for 7 billion have it


class MedusaObjective(HeadObjective):
    """Trains four heads of one block h + SiLU(W h + b) and an LM head each (Medusa-1: Cai et al. 2024, section 2.2.1).

    Head k (from 0) reads the hidden state from which the target predicts the next token, and predicts the token k + 1 places
    after that next token. W and b begin as zeros, the LM heads as copies of the target's. If the LM heads would have more than
    OWN_SHARE times as many weights as the target, all heads use the target's LM head instead, which is not trained. They then
    predict less well.
    """

    kind = "medusa"
    depths = HEADS

    def initial_weights(self, texts: Sequence[Text], generator: torch.Generator) -> dict[str, Tensor]:
        width = self.width
        self._has_lm_heads = HEADS * self.vocabulary * width <= OWN_SHARE * sum(self.target.prepared.parameters.values())
        made = dict[str, Tensor]()
        for head in range(HEADS):
            made |= {f"{head}.weight": torch.zeros(width, width), f"{head}.bias": torch.zeros(width)}
        if self._has_lm_heads:
            start = self.model.last_layers(self.target.folder, 0)[EXIT_HEAD]
            made |= {f"{head}.lm_head": start.clone() for head in range(HEADS)}
        return made

    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        hidden = states.hidden.flatten(0, 1)
        rows = []
        for head in range(HEADS):
            read, source = reachable(batch, head + 1)  # the state of token i predicts i + 1, and head k predicts i + 2 + k
            inputs = hidden.index_select(0, read)
            block = F.linear(inputs, self.parameters[f"{head}.weight"], self.parameters[f"{head}.bias"])
            rows.append((inputs + F.silu(block), source, torch.full_like(source, head)))
        return Predictions(*map(torch.cat, zip(*rows, strict=True)))

    def logits(self, outputs: Tensor, depths: Tensor) -> Tensor:
        if not self._has_lm_heads:
            return super().logits(outputs, depths)
        rows = [(depths == head).nonzero()[:, 0] for head in range(HEADS)]
        by_head = [F.linear(outputs.index_select(0, own), self.parameters[f"{head}.lm_head"]) for head, own in enumerate(rows)]
        return torch.cat(by_head).index_select(0, torch.cat(rows).argsort()).float()

    def weights(self, ranks: Sequence[Sequence[float]]) -> MedusaWeights:
        found = {name: weight.detach() for name, weight in self.parameters.items()}
        blocks = [[(found[f"{head}.weight"], found[f"{head}.bias"])] for head in range(HEADS)]
        lm_heads = [found[f"{head}.lm_head"] for head in range(HEADS)] if self._has_lm_heads else None
        return MedusaWeights(blocks, lm_heads, rank_accuracies=ranks)
