"""SVIP: drafts end where the draft's entropy says that acceptance is unlikely. Imports no torch."""

from __future__ import annotations

import math
from typing import ClassVar

from specgen.base.settings import Setting
from specgen.decoding.policy_base import (
    DraftedToken,
    LengthPolicy,
    comparison,
    longest_draft_setting,
)
from specgen.methods.model_drafts import ChainMethod

_THRESHOLDS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.85)


class SVIP(LengthPolicy):
    """Ends a draft after a token with sqrt(c * H) > h, which is unlikely to be accepted (SVIP,
    section 2.3, Algorithm 1). The paper's h is the setting `threshold`.

    H is the entropy (nats) of the draft model's distribution at temperature 1 without penalties, in
    greedy decoding too. c is the constant of Eq. 6. Algorithm 1 leaves it out, but the paper's
    values of h assume the c in the authors' code, 0.15. Only h^2 / c matters, so `tune` varies only
    h.

    If `every` is n, the rule is applied only after every n-th token (level, for a tree): the paper
    applies it after every second level of EAGLE-2's trees.
    """

    name = "svip"
    source = "SVIP, section 2.3 and Algorithm 1"
    signals = frozenset({"entropy"})
    settings: ClassVar = {
        "threshold": Setting(
            0.4, "stop where sqrt(c * entropy) is above this", 0, 100, tuned=_THRESHOLDS
        ),
        "c": Setting(
            0.15, "the authors' constant for the cross-entropy's share", 0, 100, tuned=(0.15,)
        ),
        "every": Setting(1, "decide only after every n-th token", 1, 1000),
        "max_draft": longest_draft_setting(40, 4, 6, 8, 12, 20, 40),
    }

    def __init__(self, threshold: float, c: float, max_draft: int, every: int = 1) -> None:
        self.threshold = threshold
        self.c = c
        self.max_draft = max_draft
        self.every = every

    def keep_drafting(self, token: DraftedToken) -> bool:
        scaled = math.sqrt(self.c * token["entropy"])
        if scaled > self.threshold and token.position % self.every == 0:
            self.reason = f"√cH {comparison(scaled, '>', self.threshold)}"
            return False
        return self._below(self.max_draft, token)


class SVIPMethod(ChainMethod):
    name = "svip"
    paper = "SVIP"
    policy = "svip"
