"""Several drafts verified as one tree: k-sequential selection (`spectr`, Sun et al. 2023) and
multi-round rejection sampling (`specinfer`, Miao et al. 2023). Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from specgen import decoding
from specgen.base.settings import Setting
from specgen.decoding.policy_base import DRAFT_SIGNALS
from specgen.methods.base import DraftModelMethod, Tuning, make_run

if TYPE_CHECKING:
    from specgen.decoding.drafting import Setup
    from specgen.decoding.run import Run
    from specgen.decoding.verification import Verifier
    from specgen.methods.base import Request
    from specgen.models.models import Models


class SpecTr(DraftModelMethod):
    name = "spectr"
    paper = "SpecTr, Sun et al. 2023"
    policy = "fixed"
    any_policy = True
    grows_trees = True
    signals = DRAFT_SIGNALS
    settings: ClassVar = {"drafts": Setting(4, "number of drafts", 1, 64)}
    defaults: ClassVar = {"fixed": {"k": 4}}
    tuning = Tuning("chains", grids=({"drafts": (2, 4, 8), "k": (1, 2, 3, 4, 6, 8)},))

    def start(self, models: Models, request: Request) -> Run:
        setup = self.setup(models, request)
        drafter = decoding.MultiDraftDrafter(setup, drafts=int(request.settings.values["drafts"]))
        return make_run(models, request, setup, drafter, verifier=self.verifier(setup))

    def verifier(self, setup: Setup) -> Verifier:
        return decoding.k_sequential_verifier(setup)


class SpecInfer(SpecTr):
    name = "specinfer"
    paper = "SpecInfer, Miao et al. 2023"

    def verifier(self, setup: Setup) -> Verifier:
        return decoding.multi_round_verifier(setup)
