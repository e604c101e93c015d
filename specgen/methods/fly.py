"""FLy: tokens that differ from the target's are accepted where it was unsure and the draft then
agrees with it again.

Not lossless. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from specgen import decoding
from specgen.base.settings import Setting
from specgen.decoding.policy_base import DRAFT_SIGNALS
from specgen.methods.base import DraftModelMethod, Tuning, make_run
from specgen.methods.model_drafts import model_drafter

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.methods.base import Request
    from specgen.models.models import Models


class FLy(DraftModelMethod):
    name = "fly"
    paper = "FLy, arXiv 2511.22972"
    policy = "fixed"
    any_policy = True
    lossless = False
    decodes_greedily = True
    signals = DRAFT_SIGNALS
    settings: ClassVar = {
        "window": Setting(
            6, "a differing token is kept if the rest of a window of this many tokens agrees", 2, 64
        ),
        "entropy": Setting(
            0.3,
            "and the target's entropy over its three likeliest tokens is at least this (nats)",
            0,
            1.1,
        ),
    }
    defaults: ClassVar = {"fixed": {"k": 15}}
    tuning = Tuning("loose", grids=({"k": (8, 15), "window": (4, 6), "entropy": (0.0, 0.3)},))

    def start(self, models: Models, request: Request) -> Run:
        setup = self.setup(models, request)
        values = request.settings.values
        verifier = decoding.FlyVerifier(
            setup, window=int(values["window"]), entropy=float(values["entropy"])
        )
        return make_run(
            models, request, setup, model_drafter(setup, request.settings), verifier=verifier
        )
