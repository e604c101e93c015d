"""Drafts by prompt lookup in some rounds and with a draft model in others, whichever is expected to gain more."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specgen.base.types import Context, Draft
from specgen.decoding.length_policy import LengthPolicy

if TYPE_CHECKING:
    from specgen.decoding.drafters import Drafter
    from specgen.decoding.prompt_lookup import PromptLookupDrafter


class HybridDrafter:
    """Asks the length policy in each round whether to copy text of the context, and if not, whether to run the draft model.

    The policy compares what both are expected to gain (`adaptive` does). `model` is None if there is no draft model. The reason
    why a draft of prompt lookup ended begins with `lookup:`.
    """

    def __init__(self, lookup: PromptLookupDrafter, model: Drafter | None) -> None:
        self._lookup, self._model = lookup, model

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        copied = self._lookup.propose(context, policy, limit, is_last=self._model is None)
        if self._model is not None and not copied.tokens:
            drafted = self._model.propose(context, policy, limit)
            if drafted.stop_reason is not None:
                return drafted
            copied = self._lookup.propose(context, policy, limit)  # the draft model has no room for this context
        return replace(copied, stop_reason=f"lookup: {copied.stop_reason}") if copied.tokens else copied
