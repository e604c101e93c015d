"""Drafts the most frequent continuation of the context's longest earlier match (SuffixDecoding, Oliaro et al. 2024)."""

from __future__ import annotations

from collections.abc import Collection
from time import perf_counter

from specgen.base.types import Context, Draft
from specgen.decoding.drafters import extend_draft
from specgen.decoding.length_policy import MATCH_LENGTH, DraftedToken, LengthPolicy, comparison
from specgen.decoding.suffix_index import Continuation, SuffixHistory, SuffixIndex, longest


class SuffixDrafter:
    """Drafts a chain: after each token the one that followed most often where the context's last tokens occurred before.

    It looks in the context and, if given, in a `history` of earlier outputs. The longest match counts, the context's of equally
    long ones. A draft has at most `factor` times as many tokens as the match, and ends before the product of its tokens'
    estimated probabilities falls below `min_prob` (section 3.2 of the paper).
    The probabilities are not the paper's shares of occurrences. There the present end of the text, which nothing follows yet,
    counts as an occurrence: one earlier occurrence gives 1/2, n equal ones give n / (n + 1), however long the match. Here they
    are fitted to what is accepted, and depend on the match's length (`suffix_index`).
    A token's signal `match_length` is the number of tokens before it that equal those before the earlier occurrence, and `prob`
    its estimated probability. The policy learns from each match whether it was drafted or not.
    """

    def __init__(self, min_prob: float, factor: float, eos_ids: Collection[int], history: SuffixHistory | None = None) -> None:
        self._min_prob, self._factor, self._eos_ids, self._history = min_prob, factor, eos_ids, history
        self._context: Context | None = None
        self._index = SuffixIndex()
        self._last: Continuation | None = None

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        if context is not self._context:
            self._begin(context)
        known = len(self._index)
        self._compare_last(context, known, policy)
        self._index.extend(context.ids[known:])
        if limit < 1 or (found := self._find(context)) is None:
            return Draft()
        self._last = found
        length = found.match_length
        most = int(self._factor * length)
        tokens: list[int] = []
        path = 1.0

        def extend(position: int) -> DraftedToken | str:
            nonlocal path
            if position > most:
                return f"match of {length}"
            if not found.extend():
                return "end of match"
            token, prob = found.tokens[-1], found.probs[-1]
            path *= prob
            if path < self._min_prob:
                return f"path {comparison(path, '<', self._min_prob)}"
            tokens.append(token)
            if token in self._eos_ids:
                return "eos"
            return DraftedToken(position, {MATCH_LENGTH: length + position - 1, "prob": prob})

        reason = extend_draft(policy, limit, extend, known={MATCH_LENGTH: length})
        return Draft.chain(tokens, stop_reason=reason)

    def _begin(self, context: Context) -> None:
        self._context, self._index, self._last = context, SuffixIndex(), None
        if self._history is not None:
            self._history.begin(context)

    def _find(self, context: Context) -> Continuation | None:
        found = self._index.find(context.ids)
        return found if self._history is None else longest(found, self._history.find(context.ids))

    def _compare_last(self, context: Context, known: int, policy: LengthPolicy) -> None:
        """Shows the policy how far the last match agreed with the tokens that have joined the context since."""
        if self._last is None:
            return
        agreed, ended = self._last.agreement(context.ids[known:])
        begin = perf_counter()
        policy.observe_match(self._last.match_length, agreed, ended=ended)
        policy.seconds += perf_counter() - begin
        self._last = None
