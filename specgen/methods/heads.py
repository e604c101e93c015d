"""Methods that draft with a head trained on the target's hidden states. Imports no torch.

Medusa: each of several heads predicts another later token from the last hidden state (Cai et al. 2024, Medusa-1);
`decoding.marginal_tree` makes a tree of the predictions. EAGLE: a head of one layer drafts a tree (Li et al. 2024, 2025);
EAGLE-2's dynamic tree is `decoding.tree.TopKTreeDrafter` with `nodes`. MTP: layers in the target's own files draft as EAGLE's
do (DeepSeek-AI 2024). GliDe: a head that also attends to the target's KV cache; its candidates at each position are the setting
`cape` (CaPE; Du et al. 2024). DFlash and DSpark: a head of some layers drafts a block in one pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specgen.base.settings import Setting, Settings
from specgen.decoding.policy_base import DRAFT_SIGNALS, MODEL_SIGNALS
from specgen.methods.adaptive import ADAPTIVE_GRID
from specgen.methods.method import DEFAULT_HEAD, MTP, Grid, Method
from specgen.methods.sd import CAPE, CAPE_GRID, model_drafter, tree_settings
from specgen.methods.svip import SVIP_GRID

if TYPE_CHECKING:
    from specgen.decoding.drafting import Drafter, Setup

HEAD = {"head": Setting(DEFAULT_HEAD, "the head's folder; auto: --head, or the one found for the target")}


def _drafter(setup: Setup, settings: Settings) -> Drafter:
    """A fixed tree of the heads' likeliest tokens, or a chain with `nodes` 0."""
    if settings.values["nodes"] == 0:
        from specgen.decoding.chain import ModelDrafter

        return ModelDrafter(setup)
    from specgen.decoding.marginal_tree import MarginalTreeDrafter

    return MarginalTreeDrafter(setup, nodes=int(settings.values["nodes"]), is_fixed=True)


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


def _block_drafter(setup: Setup, settings: Settings) -> Drafter:
    """A chain; with `nodes`, a tree of the likeliest paths, or of continuations where a row depends on the token before."""
    nodes = int(settings.values["nodes"])
    if nodes == 0:
        from specgen.decoding.chain import ModelDrafter

        return ModelDrafter(setup)
    if getattr(setup.draft, "independent", False):
        from specgen.decoding.marginal_tree import MarginalTreeDrafter

        return MarginalTreeDrafter(setup, nodes=nodes)
    from specgen.decoding.tree import TopKTreeDrafter

    return TopKTreeDrafter(setup, width=_BLOCK_WIDTH, nodes=nodes)


_BLOCK_WIDTH = 4  # candidates after each node of a tree whose rows depend on the token before
BLOCK = Method(
    "block",
    "DFlash, DSpark, 2026",
    "block",
    _block_drafter,
    policy="fixed",
    any_policy=True,
    signals=MODEL_SIGNALS,
    settings={"nodes": Setting(0, "tokens in a tree of candidates; 0: a chain", 0, 1024), **HEAD},
    defaults={"fixed": {"k": 7}},
    drafts_blocks=True,
    drafts="block",
    grids=({"k": (2, 3, 4, 5, 7)}, {"nodes": (8, 24), "k": (4, 7)}, SVIP_GRID, ADAPTIVE_GRID),
)

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
MTP_METHOD = replace(
    EAGLE,
    name="mtp",
    paper="multi-token prediction, DeepSeek-V3 2024",
    needs=MTP,
    settings=tree_settings(1, "auto") | CAPE,
    defaults={"fixed": {"k": 3}},
    drafts="mtp",
    grids=(
        {"k": (1, 2, 3, 4, 6)},
        SVIP_GRID,
        ADAPTIVE_GRID,
        CAPE_GRID,
        {"width": (2, 3), "nodes": (4, 6, 10), "k": (2, 3, 4)},
    ),
    engines=(),
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
