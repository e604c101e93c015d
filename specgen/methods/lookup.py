"""Prompt lookup: a draft is copied from the context, after an earlier occurrence of its last tokens
(Saxena 2023).

Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from specgen.base.settings import Setting
from specgen.decoding.costs import LONG_COPIES
from specgen.decoding.policy_base import MATCH_LENGTH
from specgen.methods.base import Method, Tuning, make_run, make_setup
from specgen.methods.copying import PromptLookupDrafter
from specgen.methods.drafting_knowledge import COPYING

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.methods.base import Request
    from specgen.models.models import Models


def ngram_setting(default: int) -> dict[str, Setting]:
    return {"ngram": Setting(default, "longest n-gram to look up", 1, 32)}


_NGRAMS = (1, 2, 3, 4)
_LENGTHS = (1, 2, 3, 4, 6, 8, 10, 15, *LONG_COPIES)


class PromptLookup(Method):
    name = "lookup"
    paper = "prompt lookup, Saxena 2023"
    policy = "adaptive"
    any_policy = True
    signals = frozenset({MATCH_LENGTH})
    settings: ClassVar = ngram_setting(3)
    defaults: ClassVar = {"fixed": {"k": 10}}
    tuning = Tuning(
        "lookup",
        recorded=True,
        own_cost_kind=COPYING,
        # with the policy `adaptive`, and `fixed`
        grids=({"ngram": _NGRAMS}, {"k": _LENGTHS, "ngram": _NGRAMS}),
    )

    def start(self, models: Models, request: Request) -> Run:
        setup = make_setup(models, request, models.plain())
        drafter = PromptLookupDrafter(int(request.settings.values["ngram"]), setup.eos_ids)
        return make_run(models, request, setup, drafter)

    def drafting_remark(self, models: Models) -> str:
        return "no draft model" if models.draft is None else ""
