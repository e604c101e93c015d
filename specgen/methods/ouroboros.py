"""Ouroboros: the draft model makes n-grams by Jacobi iteration, and drafts longer with them (Zhao
et al. 2024).

Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from specgen import decoding
from specgen.base.settings import Setting
from specgen.methods.base import DraftModelMethod, Tuning, make_run

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.methods.base import Request
    from specgen.models.models import Models


class Ouroboros(DraftModelMethod):
    name = "ouroboros"
    paper = "Ouroboros, Zhao et al. 2024"
    policy = "fixed"
    grows_trees = True
    settings: ClassVar = {
        "ngram": Setting(4, "length of the n-grams, N; the authors: 5 to 7", 2, 16),
        "branches": Setting(3, "phrases tried after the drafted tokens, K; the authors: 3", 0, 64),
        "window": Setting(
            4,
            "columns of the draft's window, and n-grams for a token; the authors: 15 to 20",
            1,
            128,
        ),
    }
    defaults: ClassVar = {"fixed": {"k": 5}}
    tuning = Tuning(
        "ouroboros",
        grids=(
            {
                "k": (3, 5, 8, 12),
                "ngram": (3, 4, 5, 7),
                "branches": (1, 3),
                "window": (2, 4, 8, 15),
            },
        ),
    )

    def start(self, models: Models, request: Request) -> Run:
        setup = self.setup(models, request)
        values = request.settings.values
        drafter = decoding.OuroborosDrafter(
            setup,
            window=int(values["window"]),
            ngram=int(values["ngram"]),
            branches=int(values["branches"]),
        )
        return make_run(models, request, setup, drafter)
