"""Training of a head that drafts from the target's hidden states (Medusa, EAGLE) or from its keys and values (GliDe).

The target runs in every step without gradients, so what a head reads is never stored. The loss is the divergence from the
target's own predictions, on text that the target generated and on corpus text alike. What depends on the kind of head is its
`Objective`.
"""

from __future__ import annotations

from random import Random

import torch

from specgen.train.divergence import most_probable
from specgen.train.frozen_target import FrozenTarget
from specgen.train.head_objective import Objective, Predictions, RowLabels
from specgen.train.packing import IGNORED, PackedBatch
from specgen.train.training_loop import MAX_LOGITS, Labels, Training, TrainingBatches, autocast_for, greedy_matches

_CPU_ROWS = 256  # predicted tokens whose logits are computed at once on a CPU: few enough for its caches


class HeadTraining(Training):
    """A head in training. The progress reports its agreement with the target on the first token of each draft."""

    def __init__(self, objective: Objective, target: FrozenTarget, batches: TrainingBatches) -> None:
        self.objective, self.target = objective, target
        self._rng = Random()
        trained = {name: weight for name, weight in objective.module.named_parameters() if weight.requires_grad}
        super().__init__(trained, batches, target.device, target.vocabulary, rows_at_once(target))

    def advance(self) -> tuple[float, float, float]:
        self._rng = Random(f"objective {self.recipe.seed} {self.step}")
        return super().advance()

    def outputs(self, batch: PackedBatch) -> tuple[torch.Tensor, Labels]:
        rng = Random()
        rng.setstate(self._rng.getstate())  # the same numbers for all parts of a step's batch
        predicted, labels = predictions(self.objective, self.target, batch, rng)
        return predicted.outputs, labels

    def losses(self, outputs: torch.Tensor, *labels: torch.Tensor) -> torch.Tensor:
        row = RowLabels(*labels)
        with autocast_for(self.target.device, self.target.dtype):
            logits = self.objective.logits(outputs, row.depths)
            losses = self.objective.losses(outputs, logits, row)
        first = torch.where(row.depths == 0, row.top_k_ids[:, 0], IGNORED)
        return torch.cat((losses.sum()[None], greedy_matches(logits, first)))


def predictions(objective: Objective, target: FrozenTarget, batch: PackedBatch, rng: Random | None) -> tuple[Predictions, Labels]:
    """Runs target and head on a batch. Returns the head's predictions, with gradients, and the fields of their RowLabels."""
    states = target.states(batch, objective.taps, objective.kv_layers)
    with autocast_for(target.device, target.dtype):
        predicted = objective.predict(batch, states, rng)
    hidden = states.hidden.flatten(0, 1)
    with torch.no_grad():
        pieces = [most_probable(target.logits(piece)) for piece in torch.split(hidden, rows_at_once(target))]
    top_k_ids, log_probs = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    by_token = batch.labels.flatten(), top_k_ids, log_probs, hidden
    return predicted, (predicted.depths, *(tensor.index_select(0, predicted.sources) for tensor in by_token))


def rows_at_once(target: FrozenTarget) -> int:
    """Returns for how many predicted tokens logits are computed at once."""
    return min(_CPU_ROWS if target.device.type == "cpu" else MAX_LOGITS, max(1, MAX_LOGITS // target.vocabulary))
