"""Several drafts verified as one tree: SpecTr (Sun et al. 2023) and SpecInfer (Miao et al. 2023). Both lossless.

`spectr` is k-sequential selection, `specinfer` multi-round rejection sampling (Algorithm 2): see `multi_draft_tree`. Imports no
torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specgen.base.settings import Setting, Settings
from specgen.decoding.policy import DRAFT_SIGNALS
from specgen.methods.method import DRAFT_MODEL, Method

if TYPE_CHECKING:
    from specgen.decoding.drafting import Drafter, Setup
    from specgen.decoding.verification import Verifier


def _drafter(setup: Setup, settings: Settings) -> Drafter:
    from specgen.methods.multi_draft_tree import MultiDraftDrafter

    return MultiDraftDrafter(setup, drafts=int(settings.values["drafts"]))


def _k_sequential(setup: Setup, settings: Settings) -> Verifier:
    from specgen.methods.multi_draft_tree import k_sequential, tree_verifier

    return tree_verifier(setup, k_sequential)


def _multi_round(setup: Setup, settings: Settings) -> Verifier:
    from specgen.methods.multi_draft_tree import multi_round, tree_verifier

    return tree_verifier(setup, multi_round)


SPECTR = Method(
    "spectr",
    "SpecTr, Sun et al. 2023",
    DRAFT_MODEL,
    _drafter,
    _k_sequential,
    policy="fixed",
    any_policy=True,
    signals=DRAFT_SIGNALS,
    settings={"drafts": Setting(4, "number of drafts", 1, 64)},
    defaults={"fixed": {"k": 4}},
    grows_trees=True,
    drafts="chains",
    grids=({"drafts": (2, 4, 8), "k": (1, 2, 3, 4, 6, 8)},),
)
SPECINFER = replace(SPECTR, name="specinfer", paper="SpecInfer, Miao et al. 2023", verifier=_multi_round)
