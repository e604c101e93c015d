"""MTP: layers in the target's own files draft as EAGLE's do (multi-token prediction, DeepSeek-AI
2024). Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from specgen.base.errors import SpecgenError
from specgen.base.part_kinds import MTP
from specgen.decoding.policy_base import DRAFT_SIGNALS
from specgen.methods.base import WITHOUT_A_DRAFT, PartMethod, Tuning, make_run
from specgen.methods.model_drafts import (
    ADAPTIVE_GRID,
    CAPE,
    CAPE_GRID,
    SVIP_GRID,
    model_drafter,
    tree_settings,
)
from specgen.methods.readiness import KnownModels, Readiness

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.methods.base import Request
    from specgen.models.models import Models


class MultiTokenPrediction(PartMethod):
    name = "mtp"
    paper = "multi-token prediction, DeepSeek-V3 2024"
    needs = MTP
    policy = "fixed"
    any_policy = True
    signals = DRAFT_SIGNALS
    settings: ClassVar = tree_settings(1, "auto") | CAPE
    defaults: ClassVar = {"fixed": {"k": 3}}
    tuning = Tuning(
        "mtp",
        grids=(
            {"k": (1, 2, 3, 4, 6)},
            SVIP_GRID,
            ADAPTIVE_GRID,
            CAPE_GRID,
            {"width": (2, 3), "nodes": (4, 6, 10), "k": (2, 3, 4)},
        ),
    )

    def start(self, models: Models, request: Request) -> Run:
        setup = self.setup(models, request)
        return make_run(models, request, setup, model_drafter(setup, request.settings))

    def check(self, models: KnownModels) -> Readiness:
        readiness = super().check(models)
        if not readiness.ready:
            return readiness
        own = "drafting layers in the target's own files"
        return Readiness(True, "" if models.names_head else own)

    def without_part(self, target: str | None) -> SpecgenError:
        message = f"{self.name} needs drafting layers in the target's own files, and there are none"
        return SpecgenError(message, f"Take another target{WITHOUT_A_DRAFT}")
