"""Medusa: heads on the target's last hidden state each predict a later token (Cai et al. 2024, Medusa-1). Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specgen.base.settings import Setting, Settings
from specgen.decoding.policy import DRAFT_SIGNALS
from specgen.methods.adaptive import ADAPTIVE_GRID
from specgen.methods.method import DEFAULT_HEAD, Method

if TYPE_CHECKING:
    from specgen.decoding.drafting import Drafter, Setup

HEAD = {"head": Setting(DEFAULT_HEAD, "the head's folder; auto: --head, or the one found for the target")}


def _drafter(setup: Setup, settings: Settings) -> Drafter:
    """A fixed tree of the heads' likeliest tokens, or a chain with `nodes` 0."""
    if settings.values["nodes"] == 0:
        from specgen.decoding.drafting import ModelDrafter

        return ModelDrafter(setup)
    from specgen.methods.medusa_tree import MedusaTreeDrafter

    return MedusaTreeDrafter(setup, nodes=int(settings.values["nodes"]))


MEDUSA = Method(
    "medusa",
    "Medusa-1, Cai et al. 2024",
    "medusa",
    _drafter,
    policy="fixed",
    any_policy=True,
    signals=DRAFT_SIGNALS,
    settings={"nodes": Setting(10, "tokens in the tree of candidates (63 in the paper); 0: a chain", 0, 1024), **HEAD},
    defaults={"fixed": {"k": 4}},
    grows_trees=True,
    drafts="medusa",
    grids=({"nodes": (0, 5, 10, 20), "k": (2, 3, 4)}, ADAPTIVE_GRID),
)
