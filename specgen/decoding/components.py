"""What a run is assembled from: the pair's models and the user's sampling parameters. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specgen.types import SamplingParams

if TYPE_CHECKING:
    from specgen.cost_model.pearl_window import Window
    from specgen.decoding.drafters import AcceptancePredictor
    from specgen.engine.model_runner import DraftRunner, ModelRunner


@dataclass(frozen=True, slots=True)
class Components:
    """What a pair provides for one run.

    `vocab_size` is the width of the target's logits, `capacity` the number of tokens to allocate caches for. `window`
    is PEARL's where it was measured. `record` keeps both models' distributions. `acceptance_predictor` belongs to
    an exit layer; None if there is none.
    """

    target: ModelRunner
    draft: DraftRunner | None
    sampling: SamplingParams
    eos_ids: frozenset[int]
    vocab_size: int
    seed: int
    capacity: int = 0
    window: Window | None = None
    record: bool = False
    acceptance_predictor: AcceptancePredictor | None = None
