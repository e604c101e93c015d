"""MTP: layers in the target's own files draft as EAGLE's do (multi-token prediction, DeepSeek-AI
2024). Imports no torch."""

from __future__ import annotations

from typing import ClassVar

from specgen.base.errors import SpecgenError
from specgen.base.part_kinds import MTP
from specgen.methods.base import WITHOUT_A_DRAFT, Tuning
from specgen.methods.model_drafts import (
    ADAPTIVE_GRID,
    CAPE,
    CAPE_GRID,
    COPY,
    SVIP_GRID,
    HeadMethod,
    tree_settings,
)
from specgen.methods.readiness import KnownModels, Readiness


class MultiTokenPrediction(HeadMethod):
    name = "mtp"
    paper = "multi-token prediction, DeepSeek-V3 2024"
    needs = MTP
    needed_part = "drafting layers in the target's files"
    settings: ClassVar = tree_settings(1, "auto") | CAPE | COPY
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

    def check(self, models: KnownModels) -> Readiness:
        readiness = super().check(models)
        if not readiness.ready:
            return readiness
        own = "drafting layers in the target's own files"
        return Readiness(True, "" if models.names_head else own)

    def without_part(self, target: str | None) -> SpecgenError:
        message = f"{self.name} needs drafting layers in the target's own files, and there are none"
        return SpecgenError(message, f"Take another target{WITHOUT_A_DRAFT}")
