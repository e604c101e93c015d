"""BiLD: the draft model falls back to the target where it is unsure, the target rolls back bad tokens (Kim et al. 2023).

Not lossless. The authors use fallback 0.6 and rollback 5, MTAD's paper 0.9 and 2. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specgen.base.settings import Setting, Settings
from specgen.decoding.policy import DRAFT_SIGNALS
from specgen.methods.method import DRAFT_MODEL, Method

if TYPE_CHECKING:
    from specgen.decoding.drafting import Drafter, Setup
    from specgen.decoding.verification import Verifier


def _drafter(setup: Setup, settings: Settings) -> Drafter:
    from specgen.methods.bild_drafting import BildDrafter

    return BildDrafter(setup, float(settings.values["fallback"]))


def _verifier(setup: Setup, settings: Settings) -> Verifier:
    from specgen.methods.bild_drafting import BildVerifier

    return BildVerifier(*setup.for_verifier, rollback=float(settings.values["rollback"]))


BILD = Method(
    "bild",
    "BiLD, Kim et al. 2023",
    DRAFT_MODEL,
    _drafter,
    _verifier,
    policy="fixed",
    any_policy=True,
    signals=DRAFT_SIGNALS,
    settings={
        "fallback": Setting(0.9, "end the draft where its top probability is below this", 0, 1),
        "rollback": Setting(2.0, "reject tokens whose -log probability under the target is above this", 0, 1000),
    },
    defaults={"fixed": {"k": 10}},
    lossless=False,
    drafts="fallback",
    grids=({"k": (3, 5, 10), "fallback": (0.3, 0.5, 0.7, 0.9), "rollback": (0.5, 1.0, 2.0, 4.0)},),
)
