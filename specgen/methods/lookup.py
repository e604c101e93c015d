"""Prompt lookup: a draft is copied from the context, after an earlier occurrence of its last tokens
(Saxena 2023).

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar

from specgen.base.settings import Setting
from specgen.base.types import Context, Draft
from specgen.decoding.costs import LONG_COPIES
from specgen.decoding.policy_base import MATCH_LENGTH, DraftedToken, LengthPolicy, extend_draft
from specgen.methods.base import Method, Tuning, make_run, make_setup
from specgen.methods.drafting_knowledge import COPYING

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.methods.base import Request
    from specgen.models.models import Models


class PromptLookupDrafter:
    """Finds the longest n-gram (up to `ngram` tokens) at the context's end that occurred before,
    and proposes what followed it.

    This is prompt lookup (Saxena 2023). If the n-gram occurred several times, the latest occurrence
    counts. If the copied tokens reach the end of the context, copying continues from the draft
    itself. An index of n-grams grows with the context, so the cost of a draft does not depend on
    the context's length. The signal `match_length` of a drafted token is the length of its match:
    how many tokens before it equal the tokens before the one that it copies. It counts all tokens
    drafted before it, and at most `LONGEST_MATCH` of the context. The policy learns from each
    match, whether it was drafted or not.
    """

    LONGEST_MATCH = 32

    def __init__(self, ngram: int, eos_ids: Collection[int]) -> None:
        self._ngram = ngram
        self._eos_ids = eos_ids
        self._continuations: dict[tuple[int, ...], int] = {}
        self._context: Context | None = None
        self._indexed = 0
        # of the last match: the context's length then, the position after it, and its length
        self._last: tuple[int, int, int] | None = None

    def propose(
        self, context: Context, policy: LengthPolicy, limit: int, *, is_last: bool = True
    ) -> Draft:
        """Drafts at most `limit` tokens after the context; see `Drafter.propose`. `is_last` is
        passed to `LengthPolicy.starts_draft`."""
        self._index(context)
        self._compare_last(context, policy)
        start = self._match(context)
        if limit < 1 or start is None:
            return Draft()
        matched = self._matching_tokens(context, start)
        self._last = len(context), start, matched
        tokens: list[int] = []

        def extend(position: int) -> DraftedToken | str:
            source = start + position - 1
            beyond = source - len(context)
            token = context.ids[source] if beyond < 0 else tokens[beyond]
            tokens.append(token)
            if token in self._eos_ids:
                return "eos"
            return DraftedToken(position, {MATCH_LENGTH: matched + position - 1})

        reason = extend_draft(policy, limit, extend, known={MATCH_LENGTH: matched}, is_last=is_last)
        return Draft.chain(tokens, stop_reason=reason)

    def _compare_last(self, context: Context, policy: LengthPolicy) -> None:
        """Tells the policy how many tokens of the last match equal the tokens that have joined the
        context since."""
        if self._last is None:
            return
        length, start, matched = self._last
        self._last = None
        joined = len(context) - length
        agreed = 0
        while agreed < joined and context.ids[start + agreed] == context.ids[length + agreed]:
            agreed += 1
        begin = perf_counter()
        policy.observe_match(matched, agreed, ended=agreed < joined)
        policy.seconds += perf_counter() - begin

    def _matching_tokens(self, context: Context, start: int) -> int:
        """Returns how many tokens at the context's end equal those before position `start`, at most
        `LONGEST_MATCH`."""
        ids = context.ids
        end = len(context)
        longest = min(start, self.LONGEST_MATCH)
        count = 0
        while count < longest and ids[start - 1 - count] == ids[end - 1 - count]:
            count += 1
        return count

    def _index(self, context: Context) -> None:
        """Adds the context's new tokens to the index: each is the continuation of the n-grams that
        end just before it."""
        if context is not self._context:
            self._context = context
            self._indexed = 0
            self._last = None
            self._continuations.clear()
        for position in range(self._indexed, len(context)):
            for length in range(1, min(self._ngram, position) + 1):
                self._continuations[tuple(context.ids[position - length : position])] = position
        self._indexed = len(context)

    def _match(self, context: Context) -> int | None:
        """Finds the longest n-gram at the context's end that occurred before. Returns the position
        after its latest occurrence.

        None if not even the last token occurred before.
        """
        for length in range(min(self._ngram, len(context)), 0, -1):
            ngram = tuple(context.ids[-length:])
            if ngram in self._continuations:
                return self._continuations[ngram]
        return None


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
