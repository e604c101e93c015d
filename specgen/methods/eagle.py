"""EAGLE: a head of one layer on the target's hidden states drafts a tree (Li et al. 2024, 2025); GliDe: one that also attends to
the target's KV cache (Du et al. 2024). Imports no torch.

EAGLE-2's dynamic tree is `decoding.tree.TopKTreeDrafter` with `nodes`; GliDe's CaPE is `cape`.
"""

from __future__ import annotations

from specgen.decoding.policy import DRAFT_SIGNALS
from specgen.methods.adaptive import ADAPTIVE_GRID
from specgen.methods.medusa import HEAD
from specgen.methods.method import Grid, Method
from specgen.methods.sd import CAPE, CAPE_GRID, model_drafter, tree_settings
from specgen.methods.svip import SVIP_GRID

_CHAIN: Grid = {"width": (1,)}
EAGLE = Method(
    "eagle",
    "EAGLE-2 and EAGLE-3, Li et al. 2024, 2025",
    "eagle",
    model_drafter,
    policy="fixed",
    any_policy=True,
    signals=DRAFT_SIGNALS,
    settings=tree_settings(4, 10, 10) | CAPE | HEAD,
    defaults={"svip": {"every": 2}},
    drafts="eagle",
    grids=(
        {"width": (2, 4), "nodes": (4, 6, 10, 16), "k": (2, 3, 5, 7)},
        {**_CHAIN, "k": (1, 2, 3, 5, 8)},
        {**_CHAIN, **CAPE_GRID},
        SVIP_GRID,
        ADAPTIVE_GRID,
        {**_CHAIN, **SVIP_GRID},
    ),
    engines=("vllm", "sglang", "tensorrt-llm", "llama.cpp"),
)
GLIDE = Method(
    "glide",
    "GliDe, Du et al. 2024",
    "glide",
    model_drafter,
    policy="fixed",
    any_policy=True,
    signals=DRAFT_SIGNALS,
    settings=CAPE | HEAD,
    drafts="glide",
    grids=({"k": (1, 2, 3, 4, 5, 6, 8)}, CAPE_GRID, SVIP_GRID, ADAPTIVE_GRID),
)
