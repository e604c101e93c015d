"""GliDe: a head that also attends to the target's KV cache drafts; CaPE adds candidates at each
position (Du et al. 2024).

Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from specgen.decoding.policy_base import DRAFT_SIGNALS
from specgen.methods.base import PartMethod, Tuning, make_run
from specgen.methods.model_drafts import (
    ADAPTIVE_GRID,
    CAPE,
    CAPE_GRID,
    HEAD,
    SVIP_GRID,
    model_drafter,
)

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.methods.base import Request
    from specgen.models.models import Models


class GliDe(PartMethod):
    name = "glide"
    paper = "GliDe, Du et al. 2024"
    needs = "glide"
    policy = "fixed"
    any_policy = True
    signals = DRAFT_SIGNALS
    settings: ClassVar = CAPE | HEAD
    tuning = Tuning(
        "glide", grids=({"k": (1, 2, 3, 4, 5, 6, 8)}, CAPE_GRID, SVIP_GRID, ADAPTIVE_GRID)
    )

    def start(self, models: Models, request: Request) -> Run:
        setup = self.setup(models, request)
        return make_run(models, request, setup, model_drafter(setup, request.settings))
