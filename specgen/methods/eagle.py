"""EAGLE: a head of one layer drafts a tree (Li et al. 2024, 2025). EAGLE-2's dynamic tree is the
setting `nodes`.

Imports no torch.
"""

from __future__ import annotations

from typing import ClassVar

from specgen.methods.base import Grid, Tuning
from specgen.methods.model_drafts import (
    ADAPTIVE_GRID,
    CAPE,
    CAPE_GRID,
    COPY,
    HEAD,
    SVIP_GRID,
    HeadMethod,
    tree_settings,
)

_CHAIN: Grid = {"width": (1,)}


class Eagle(HeadMethod):
    name = "eagle"
    paper = "EAGLE-2 and EAGLE-3, Li et al. 2024, 2025"
    needs = "eagle"
    settings: ClassVar = tree_settings(4, 10, 10) | CAPE | HEAD | COPY
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
