"""MTAD: a beam search drafts, and prefixes are accepted by their joint likelihood (MTAD, sections
2.1 and 3.2).

Not lossless. Imports no torch.
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


class MTAD(DraftModelMethod):
    """A beam search with the draft model finds a likely draft, a chain. The target accepts its
    longest prefix whose joint likelihood, divided by that under the draft model, is above `tau`,
    and chooses one more token.

    Beyond the paper: in greedy decoding (temperature 0) the joint likelihoods are those at
    temperature 1. At temperature 0 each would be 0 or 1, and only the target's argmax would be
    accepted.
    """

    name = "mtad"
    paper = "MTAD, section 3.2"
    policy = "fixed"
    any_policy = True
    lossless = False
    signals = DRAFT_SIGNALS
    settings: ClassVar = {
        "beams": Setting(8, "width of the beam search", 1, 256),
        "tau": Setting(
            0.1, "accept the longest prefix whose joint likelihood ratio is above this", 0, 1
        ),
        "beam": Setting(
            "greedy", "keep the likeliest beams, or sample them", choices=("greedy", "sample")
        ),
    }
    defaults: ClassVar = {"fixed": {"k": 4}}
    tuning = Tuning(
        "beams",
        grids=(
            {
                "beams": (2, 4, 8, 16),
                "k": (2, 3, 4, 6, 8),
                "tau": (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9),
            },
        ),
    )

    def start(self, models: Models, request: Request) -> Run:
        setup = self.setup(models, request)
        values = request.settings.values
        drafter = decoding.BeamSearchDrafter(
            setup, width=int(values["beams"]), is_stochastic=values["beam"] == "sample"
        )
        verifier = decoding.JointLikelihoodVerifier(setup, tau=float(values["tau"]))
        return make_run(models, request, setup, drafter, verifier=verifier)
