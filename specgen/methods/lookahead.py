"""Lookahead decoding: the target makes n-grams by Jacobi iteration, and drafts with them (Fu et al.
2024). Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from specgen import decoding
from specgen.base.settings import Setting
from specgen.methods.base import Method, Tuning, make_run, make_setup

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.methods.base import Request
    from specgen.models.models import Models


class Lookahead(Method):
    name = "lookahead"
    paper = "lookahead decoding, Fu et al. 2024"
    grows_trees = True
    settings: ClassVar = {
        "window": Setting(
            3,
            "columns of the window, W; the authors: 15, 10, 7 for 7B, 13B, 33B on an A100",
            1,
            128,
        ),
        "ngram": Setting(3, "length of the n-grams, N; the authors: 5", 2, 16),
        "guesses": Setting(
            3, "most n-grams for a token, G; the authors: as many as the window's columns", 1, 128
        ),
    }
    tuning = Tuning(
        "lookahead",
        grids=({"window": (1, 2, 3, 5, 10, 15), "ngram": (2, 3, 4, 5), "guesses": (3, 7, 15)},),
    )

    def start(self, models: Models, request: Request) -> Run:
        setup = make_setup(models, request, models.plain())
        values = request.settings.values
        drafter = decoding.LookaheadDrafter(
            setup,
            window=int(values["window"]),
            ngram=int(values["ngram"]),
            guesses=int(values["guesses"]),
        )
        return make_run(models, request, setup, drafter)
