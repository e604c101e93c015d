"""Methods that draft n-grams made by Jacobi iteration. Imports no torch.

In `lookahead` (Fu et al. 2024) the target makes the n-grams, in `ouroboros` (Zhao et al. 2024) the draft model does. The drafters
are in `decoding.lookahead`.
"""

from __future__ import annotations

from specgen.base.settings import Setting
from specgen.methods.method import DRAFT_MODEL, Method, imported

LOOKAHEAD = Method(
    "lookahead",
    "lookahead decoding, Fu et al. 2024",
    drafter=imported("decoding.lookahead.LookaheadDrafter", "window", "ngram", "guesses"),
    settings={
        "window": Setting(3, "columns of the window, W; the authors: 15, 10, 7 for 7B, 13B, 33B on an A100", 1, 128),
        "ngram": Setting(3, "length of the n-grams, N; the authors: 5", 2, 16),
        "guesses": Setting(3, "most n-grams for a token, G; the authors: as many as the window's columns", 1, 128),
    },
    grows_trees=True,
    drafts="lookahead",
    grids=({"window": (1, 2, 3, 5, 10, 15), "ngram": (2, 3, 4, 5), "guesses": (3, 7, 15)},),
)
OUROBOROS = Method(
    "ouroboros",
    "Ouroboros, Zhao et al. 2024",
    DRAFT_MODEL,
    imported("decoding.lookahead.OuroborosDrafter", "window", "ngram", "branches"),
    policy="fixed",
    settings={
        "ngram": Setting(4, "length of the n-grams, N; the authors: 5 to 7", 2, 16),
        "branches": Setting(3, "phrases tried after the drafted tokens, K; the authors: 3", 0, 64),
        "window": Setting(4, "columns of the draft's window, and n-grams for a token; the authors: 15 to 20", 1, 128),
    },
    defaults={"fixed": {"k": 5}},
    grows_trees=True,
    drafts="ouroboros",
    grids=({"k": (3, 5, 8, 12), "ngram": (3, 4, 5, 7), "branches": (1, 3), "window": (2, 4, 8, 15)},),
)
