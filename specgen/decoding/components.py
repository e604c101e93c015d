"""The models and parameters that a run (the generation of one output) is assembled from. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specgen.base.types import SamplingParams

if TYPE_CHECKING:
    from specgen.decoding.adaptive import AdaptiveInputs
    from specgen.decoding.costs.pearl_window import Window
    from specgen.decoding.drafters import AcceptancePredictor
    from specgen.decoding.suffix_index import SuffixHistory
    from specgen.engine.model_runner import DraftRunner, ModelRunner
    from specgen.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Components:
    """The models of a pair (target and draft) and the parameters for one run: the generation of one output.

    `draft` is None if there is no draft model and no part of the target drafts. `vocab_size` is the width of the target's logits.
    `capacity` is the number of tokens to allocate KV caches for. `window` is the number of tokens that PEARL drafts during one
    target pass, if it was measured; otherwise None. `record` is whether to record how far both models' distributions agree.
    `adaptive` is what the length policy `adaptive` decides by; None if the run has another.
    `acceptance_predictor` is trained with an exit layer and predicts whether a token is accepted; None if there is none.
    `history` has the outputs of earlier runs, if the method's setting `history` is on; otherwise None.
    `tokenizers` are the target's and the draft model's; None without a draft model.
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
    adaptive: AdaptiveInputs | None = None
    history: SuffixHistory | None = None
    tokenizers: tuple[Tokenizer, Tokenizer] | None = None
