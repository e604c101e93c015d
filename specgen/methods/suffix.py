"""Suffix decoding: a draft is the most frequent continuation of the context's longest earlier match
(Oliaro et al. 2024).

Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from specgen.base.errors import SpecgenError
from specgen.base.settings import Setting, Settings
from specgen.base.types import SamplingParams
from specgen.decoding.costs import LONG_COPIES
from specgen.decoding.policy_base import MATCH_LENGTH
from specgen.methods.base import Method, Tuning, make_run, make_setup
from specgen.methods.drafting_knowledge import COPYING
from specgen.methods.suffix_drafts import SuffixDrafter, SuffixHistory

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.methods.base import Request
    from specgen.models.models import Models


class EarlierOutputs:
    """Keeps the outputs of earlier runs with the models, to copy from."""

    def __init__(self, models: Models) -> None:
        self.history = SuffixHistory()

    def forget(self) -> None:
        self.history.clear()

    def save(self) -> None:
        """Stores nothing: outputs stay in memory."""


class SuffixDecoding(Method):
    name = "suffix"
    paper = "SuffixDecoding, Oliaro et al. 2024"
    policy = "adaptive"
    any_policy = True
    signals = frozenset({MATCH_LENGTH, "prob"})
    settings: ClassVar = {
        "min_prob": Setting(
            0.05, "end a draft before its probability is below this (the paper: 0.1)", 0, 1
        ),
        "factor": Setting(
            4.0, "longest draft, as a multiple of the match's length (the paper: 1)", 0.1, 1000
        ),
        "history": Setting(
            False,
            (
                "also copy from earlier outputs of the loaded models, kept in memory only; "
                "not in compare and tune"
            ),
        ),
    }
    tuning = Tuning(
        "suffix",
        recorded=True,
        own_cost_kind=COPYING,
        # with the policy `adaptive`, and `fixed`
        grids=(
            {"min_prob": (0.05, 0.1, 0.2, 0.4), "factor": (1.0, 2.0, 4.0)},
            {"k": (15, *LONG_COPIES)},
        ),
    )

    def start(self, models: Models, request: Request) -> Run:
        setup = make_setup(models, request, models.plain())
        values = request.settings.values
        history = models.kept(EarlierOutputs).history if values["history"] else None
        drafter = SuffixDrafter(
            setup.eos_ids,
            min_prob=float(values["min_prob"]),
            factor=float(values["factor"]),
            history=history,
        )
        return make_run(models, request, setup, drafter)

    def drafting_remark(self, models: Models) -> str:
        return "no draft model" if models.draft is None else ""

    def check_request(self, settings: Settings, sampling: SamplingParams) -> None:
        super().check_request(settings, sampling)
        if settings.values["history"] and sampling.seed is not None and not sampling.greedy:
            raise SpecgenError(
                (
                    f"{self.name} with history=true draws other tokens with the same seed "
                    "after other outputs"
                ),
                "Leave the seed or history out",
            )
