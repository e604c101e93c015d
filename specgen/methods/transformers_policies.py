"""The length policies of transformers' assisted generation, and the methods that use them. Imports
no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from specgen.base.settings import Setting
from specgen.decoding.policy_base import (
    DraftedToken,
    LengthPolicy,
    comparison,
    longest_draft_setting,
)
from specgen.methods.model_drafts import ChainMethod

_THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


class Heuristic(LengthPolicy):
    """The rule of transformers: after a fully accepted draft the next one is two tokens longer,
    otherwise one token shorter.

    The length stays between 1 and `max_draft`. The first draft has `k` tokens.
    """

    name = "heuristic"
    source = "transformers' schedule"
    settings: ClassVar = {
        "k": Setting(5, "tokens in the first draft", 1, 1000, tuned=(2, 3, 5, 8)),
        "max_draft": longest_draft_setting(40, 4, 6, 8, 12, 20, 40),
    }

    def __init__(self, k: int, max_draft: int) -> None:
        self.k = min(k, max_draft)
        self.max_draft = max_draft

    def keep_drafting(self, token: DraftedToken) -> bool:
        return self._below(self.k, token)

    def observe(self, drafted: int, accepted: int) -> None:
        if drafted:
            self.k = min(self.k + 2, self.max_draft) if accepted == drafted else max(self.k - 1, 1)

    def state(self) -> Mapping[str, float]:
        return {"k": self.k}


class Confidence(LengthPolicy):
    """Ends a draft after a token whose probability is below the threshold (transformers' dynamic
    length), or after `max_draft` tokens.

    The probability is the one in the distribution that the token was chosen from (the signal
    `prob`).
    """

    name = "confidence"
    source = "transformers' dynamic length"
    signals = frozenset({"prob"})
    settings: ClassVar = {
        "threshold": Setting(
            0.4, "stop after a token with a lower probability than this", 0, 1, tuned=_THRESHOLDS
        ),
        "max_draft": longest_draft_setting(20, 4, 6, 8, 12, 20),
    }

    def __init__(self, threshold: float, max_draft: int) -> None:
        self.threshold = threshold
        self.max_draft = max_draft

    def keep_drafting(self, token: DraftedToken) -> bool:
        prob = token["prob"]
        if prob < self.threshold:
            self.reason = f"prob {comparison(prob, '<', self.threshold)}"
            return False
        return self._below(self.max_draft, token)


class HeuristicMethod(ChainMethod):
    name = "heuristic"
    paper = "transformers' assisted generation"
    policy = "heuristic"


class ConfidenceMethod(ChainMethod):
    name = "confidence"
    paper = "transformers' assisted generation"
    policy = "confidence"
