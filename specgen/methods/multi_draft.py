"""Several drafts verified as one tree: k-sequential selection (`spectr`, Sun et al. 2023) and multi-round rejection sampling
(`specinfer`, Miao et al. 2023). Drafter and verifiers are in `decoding.multi_draft`. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from specgen.base.settings import Setting
from specgen.decoding.policy_base import DRAFT_SIGNALS
from specgen.methods.method import DRAFT_MODEL, Method, imported

SPECTR = Method(
    "spectr",
    "SpecTr, Sun et al. 2023",
    DRAFT_MODEL,
    imported("decoding.multi_draft.MultiDraftDrafter", "drafts"),
    imported("decoding.multi_draft.k_sequential_verifier"),
    policy="fixed",
    any_policy=True,
    signals=DRAFT_SIGNALS,
    settings={"drafts": Setting(4, "number of drafts", 1, 64)},
    defaults={"fixed": {"k": 4}},
    grows_trees=True,
    drafts="chains",
    grids=({"drafts": (2, 4, 8), "k": (1, 2, 3, 4, 6, 8)},),
)
SPECINFER = replace(
    SPECTR,
    name="specinfer",
    paper="SpecInfer, Miao et al. 2023",
    verifier=imported("decoding.multi_draft.multi_round_verifier"),
)
