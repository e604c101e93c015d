"""BiLD (Kim et al. 2023): the draft model falls back to the target where it is unsure, and the
target rolls back bad tokens.

Not lossless. Its authors use fallback 0.6 and rollback 5, MTAD's paper 0.9 and 2. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from specgen import decoding
from specgen.base.settings import Setting
from specgen.decoding.policy_base import DRAFT_SIGNALS
from specgen.methods.base import DraftModelMethod, Tuning, make_run

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.methods.base import Request
    from specgen.models.models import Models


class BiLD(DraftModelMethod):
    name = "bild"
    paper = "BiLD, Kim et al. 2023"
    policy = "fixed"
    any_policy = True
    lossless = False
    signals = DRAFT_SIGNALS
    settings: ClassVar = {
        "fallback": Setting(0.9, "end the draft where its top probability is below this", 0, 1),
        "rollback": Setting(
            2.0, "reject tokens whose -log probability under the target is above this", 0, 1000
        ),
    }
    defaults: ClassVar = {"fixed": {"k": 10}}
    tuning = Tuning(
        "fallback",
        grids=(
            {"k": (3, 5, 10), "fallback": (0.3, 0.5, 0.7, 0.9), "rollback": (0.5, 1.0, 2.0, 4.0)},
        ),
    )

    def start(self, models: Models, request: Request) -> Run:
        setup = self.setup(models, request)
        values = request.settings.values
        drafter = decoding.ModelDrafter(setup, fallback=float(values["fallback"]))
        verifier = decoding.BildVerifier(setup, rollback=float(values["rollback"]))
        return make_run(models, request, setup, drafter, verifier=verifier)
