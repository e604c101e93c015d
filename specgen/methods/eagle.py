"""EAGLE: a head of one layer drafts a tree (Li et al. 2024, 2025). EAGLE-2's dynamic tree is the
setting `nodes`.

Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from specgen.decoding.policy_base import DRAFT_SIGNALS
from specgen.methods.base import Grid, PartMethod, Tuning, make_run
from specgen.methods.model_drafts import (
    ADAPTIVE_GRID,
    CAPE,
    CAPE_GRID,
    HEAD,
    SVIP_GRID,
    model_drafter,
    tree_settings,
)

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.methods.base import Request
    from specgen.models.models import Models


_CHAIN: Grid = {"width": (1,)}


class Eagle(PartMethod):
    name = "eagle"
    paper = "EAGLE-2 and EAGLE-3, Li et al. 2024, 2025"
    needs = "eagle"
    policy = "fixed"
    any_policy = True
    signals = DRAFT_SIGNALS
    settings: ClassVar = tree_settings(4, 10, 10) | CAPE | HEAD
    defaults: ClassVar = {"svip": {"every": 2}}
    tuning = Tuning(
        "eagle",
        grids=(
            {"width": (2, 4), "nodes": (4, 6, 10, 16), "k": (2, 3, 5, 7)},
            {**_CHAIN, "k": (1, 2, 3, 5, 8)},
            {**_CHAIN, **CAPE_GRID},
            SVIP_GRID,
            ADAPTIVE_GRID,
            {**_CHAIN, **SVIP_GRID},
        ),
    )

    def start(self, models: Models, request: Request) -> Run:
        setup = self.setup(models, request)
        return make_run(models, request, setup, model_drafter(setup, request.settings))
