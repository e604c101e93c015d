"""GliDe: a head that also attends to the target's KV cache drafts; CaPE adds candidates at each
position (Du et al. 2024).

Imports no torch.
"""

from __future__ import annotations

from typing import ClassVar

from specgen.methods.base import Tuning
from specgen.methods.model_drafts import (
    ADAPTIVE_GRID,
    CAPE,
    CAPE_GRID,
    COPY,
    HEAD,
    SVIP_GRID,
    HeadMethod,
)


class GliDe(HeadMethod):
    name = "glide"
    paper = "GliDe, Du et al. 2024"
    needs = "glide"
    settings: ClassVar = CAPE | HEAD | COPY
    tuning = Tuning(
        "glide", grids=({"k": (1, 2, 3, 4, 5, 6, 8)}, CAPE_GRID, SVIP_GRID, ADAPTIVE_GRID)
    )
