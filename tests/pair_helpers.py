"""What tests need of a loaded pair besides its public functions."""

from __future__ import annotations

from typing import Any

from specgen.base.types import SamplingParams
from specgen.decoding.parallel_costs import ParallelCosts
from specgen.engine.loaded_model import LoadedModel
from specgen.methods.base import Request, drafting_case, make_setup
from specgen.methods.drafting_knowledge import DraftingCase, DraftingKnowledge
from specgen.methods.pass_times import PassTimes
from specgen.models.loaded_models import LoadedModels
from specgen.pair.pair import Pair


def pair_of_models(target: LoadedModel, draft: LoadedModel | None = None) -> Pair:
    """A pair of two loaded models of which nothing is known; PEARL's drafts are made in this
    process."""
    return Pair(LoadedModels(target, draft))


def draft_here(pair: Pair) -> None:
    """Has PEARL's drafts be made in this process: as many processes as there are pairs would take
    minutes."""
    pair.models.drafts_apart = False


def pass_costs(
    pair: Pair, context_length: int, sampling: SamplingParams | None = None, *, record: bool = False
) -> ParallelCosts:
    """PEARL's pass times after a context of so many tokens."""
    return pair.models.kept(PassTimes).costs(
        context_length, sampling or SamplingParams(), record=record
    )


def runners(pair: Pair) -> tuple[Any, Any]:
    """The runners of the target and of the draft model (None if there is none), whose weights are
    loaded."""
    found = pair.models.with_draft_model() or pair.models.plain()
    return found.target, found.draft


def knowledge(pair: Pair) -> DraftingKnowledge:
    """What the policy `adaptive` knows about the pair."""
    return pair.models.kept(DraftingKnowledge)


def case_of(pair: Pair, request: Request) -> DraftingCase:
    """What the costs of the request's drafts depend on, for a method that drafts with the draft
    model if there is one."""
    found = (
        pair.models.with_draft_model() if request.method.uses_draft_model else None
    ) or pair.models.plain()
    return drafting_case(pair.models, request, make_setup(pair.models, request, found))
