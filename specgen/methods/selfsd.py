"""Self-speculative decoding: the target drafts for itself with some of its layers left out. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from specgen.base.settings import Setting
from specgen.decoding.policy_base import DRAFT_SIGNALS
from specgen.methods.method import SKIPPED_LAYERS, Method
from specgen.methods.sd import CAPE, Confidence, model_drafter


class SelfSD(Confidence):
    """Ends a draft after a token whose probability is below a threshold that adapts to the acceptance rate (Self-SD, section
    3.4).

    The threshold rises if the moving average of the acceptance rate is below 0.9, and falls otherwise. It does not fall after a
    draft of the maximal length `k`, because the threshold did not end that draft.
    """

    name = "selfsd"
    source = "Self-SD, section 3.4"
    settings: ClassVar = {"k": Setting(12, "longest draft", 1, 1000)}

    TARGET_RATE, STEP, MEMORY, INITIAL = 0.9, 0.01, 0.9, 0.6

    def __init__(self, k: int) -> None:
        super().__init__(self.INITIAL, k)
        self._rate = self.TARGET_RATE

    def observe(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        self._rate = 0.5 * self._rate + 0.5 * accepted / drafted
        wanted = self.threshold
        if self._rate < self.TARGET_RATE:
            wanted += self.STEP
        elif drafted < self.max_draft:
            wanted -= self.STEP
        self.threshold = self.MEMORY * self.threshold + (1 - self.MEMORY) * wanted

    def state(self) -> Mapping[str, float]:
        return {"threshold": self.threshold}


_SKIP = "layers to skip, as 3+5a+7m (a: attention only, m: MLP only); auto: searched for"
SELFSD = Method(
    "selfsd",
    "Self-SD, Zhang et al. 2023",
    SKIPPED_LAYERS,
    model_drafter,
    policy="selfsd",
    any_policy=True,
    signals=DRAFT_SIGNALS,
    settings={"skip": Setting("auto", _SKIP)} | CAPE,
    drafts="skip",
)
