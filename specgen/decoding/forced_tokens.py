"""Drafts of tokens that have to follow, because a grammar leaves no choice. No model is run for
them, and the target accepts them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from specgen.base.types import Context, Draft
from specgen.decoding.drafting import Drafter, LearningDrafter, NoDrafter, Setup

if TYPE_CHECKING:
    from specgen.decoding.policy_base import LengthPolicy
    from specgen.decoding.verification import Verifier


MOST_FORCED = 64  # tokens of a draft that have to follow: each is a row of the target's pass


class ForcedTokens:
    """Drafts nothing but the tokens that have to follow: the context, for a round of their own, or
    a chain. `verifier` verifies the rounds of their own: any lossless one does."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier

    def propose(self, context: Context, limit: int) -> Draft:
        """Drafts at most `limit` tokens; an empty draft where there is a choice."""
        tokens = forced_tokens(context, (), limit)
        if not tokens:
            return Draft()
        return Draft.chain(tokens, stop_reason=with_count(None, len(tokens)))

    def after(self, context: Context, draft: Draft, limit: int) -> Draft:
        """Returns the chain `draft` with the tokens that have to follow it: at most `limit` with
        its own."""
        tokens = forced_tokens(context, draft.tokens, limit - len(draft.tokens))
        if not tokens:
            return draft
        longer = _with_last(draft, tokens)
        return replace(longer, stop_reason=with_count(draft.stop_reason, len(tokens)))


class ForcedDrafter:
    """Adds tokens that have to follow to the drafts of another drafter: after a chain, and where a
    model drafts token by token or level by level, before its draft too, so that one pass of the
    target verifies both.

    The length policy does not see them: they cost no pass of the draft model, and are never
    rejected. See `Draft.forced`. `is_before`: the drafter takes tokens that its draft follows.
    """

    def __init__(self, drafter: Drafter, setup: Setup) -> None:
        self._drafter = drafter
        self._setup = setup
        self.is_before = bool(getattr(drafter, "takes_forced", False))

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        """See `Drafter`. At most `limit` tokens with those that have to follow."""
        draft = self._after_forced(context, policy, limit)
        # other verifiers need to know how each node was drawn
        is_scored = draft.draws is not None or len(draft.log_likelihoods) > 0
        if draft.tokens and draft.is_chain and not is_scored:
            draft = self._without_end(context, draft)
            room = min(limit - len(draft.tokens), MOST_FORCED - len(draft.forced))
            draft = _with_last(draft, forced_tokens(context, draft.tokens, room))
        return replace(draft, stop_reason=with_count(draft.stop_reason, len(draft.forced)))

    def _after_forced(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        """Returns the other drafter's draft, after the tokens that have to follow the context if it
        takes them."""
        before = forced_tokens(context, (), limit) if self.is_before else []
        if not before:
            return self._drafter.propose(context, policy, limit)
        drafter: Any = self._drafter
        draft = drafter.propose(context, policy, limit - len(before), forced=before)
        if draft.probs is None and draft.draws is not None and not self._setup.sampling.greedy:
            draft = replace(draft, probs=torch.empty(0, self._setup.vocab_size))  # nothing drawn
        return _with_first(draft, before)

    def _without_end(self, context: Context, draft: Draft) -> Draft:
        """Returns the chain without an end-of-sequence token where the output ends before it."""
        constraint = context.constraint
        last = draft.tokens[-1]
        if constraint is None or last not in self._setup.eos_ids or draft.judged is not None:
            return draft
        if not constraint.is_complete(context, draft.tokens[:-1]):
            return draft
        return draft.part(0, len(draft.tokens) - 1)


def forced_tokens(context: Context, path: Sequence[int], limit: int) -> list[int]:
    """Returns tokens that have to follow the context and the drafted tokens `path`: at most
    `limit`, and at most `MOST_FORCED`."""
    if context.constraint is None or limit < 1:
        return []
    return context.constraint.forced(context, path)[: min(limit, MOST_FORCED)]


def with_forced_tokens(
    drafter: Drafter, setup: Setup, verifier: Verifier, *, is_plain: bool
) -> tuple[Drafter, ForcedTokens | None]:
    """Returns a run's drafter with tokens that have to follow in its drafts, and what drafts them
    in rounds of their own; None if the drafter alone does. Plain decoding drafts none.

    A draft that is recorded with its logits, or from which the drafter learns, stays as it is.
    """
    if is_plain:
        return drafter, None
    if setup.record or isinstance(drafter, LearningDrafter | NoDrafter):
        return drafter, ForcedTokens(verifier)
    joined = ForcedDrafter(drafter, setup)
    return joined, None if joined.is_before else ForcedTokens(verifier)


def certain(tokens: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Returns distributions that have only these tokens, one for each, as those of `like` [n,
    vocabulary]."""
    rows = like.new_zeros(len(tokens), like.shape[-1])
    rows[range(len(tokens)), list(tokens)] = 1.0
    return rows


def _with_first(draft: Draft, tokens: list[int]) -> Draft:
    """Returns the draft with `tokens` before it, as if they were drawn if its own ones are."""
    count = len(tokens)
    fields: dict[str, Any] = {}
    if draft.probs is not None:
        fields["probs"] = torch.cat((certain(tokens, draft.probs), draft.probs))
    if draft.draws is not None:
        fields["draws"] = [*range(count), *(node + count for node in draft.draws)]
    return replace(
        draft,
        tokens=[*tokens, *draft.tokens],
        parents=[*range(-1, count - 1), *(parent + count for parent in draft.parents)],
        entropies=[*[0.0] * count, *draft.entropies],
        top_probs=[*[1.0] * count, *draft.top_probs],
        forced=frozenset(range(count)),
        **fields,
    )


def _with_last(draft: Draft, tokens: list[int]) -> Draft:
    """Returns a chain with `tokens` after it."""
    count = len(tokens)
    if not count:
        return draft
    first = len(draft.tokens)
    statistics: dict[str, Any] = {}
    if draft.entropies or not first:
        statistics["entropies"] = [*draft.entropies, *[0.0] * count]
        statistics["top_probs"] = [*draft.top_probs, *[1.0] * count]
    if draft.predicted:
        statistics["predicted"] = [*draft.predicted, *[1.0] * count]
    return replace(
        draft,
        tokens=[*draft.tokens, *tokens],
        parents=range(-1, first + count - 1),
        forced=draft.forced | frozenset(range(first, first + count)),
        **statistics,
    )


def with_count(reason: str | None, count: int) -> str | None:
    """Returns why a draft with `count` forced tokens ended; `reason` is None if it has no other
    ones."""
    if not count:
        return reason
    return f"forced {count}" if reason is None else f"{reason}, {count} forced"
