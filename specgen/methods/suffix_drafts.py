"""Drafts the most frequent continuation of the context's longest earlier match (SuffixDecoding,
Oliaro et al. 2024).

An index of n-grams replaces the paper's suffix trees (section 3): it costs the same for each token,
where a tree of depth D takes D steps. A match of more than three tokens is found by comparing
tokens backwards. Imports no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from time import perf_counter

from specgen.base.types import Context, Draft
from specgen.decoding.policy_base import (
    MATCH_LENGTH,
    DraftedToken,
    LengthPolicy,
    comparison,
    extend_draft,
)

LONGEST_MATCH = 32  # tokens; the depth of a suffix tree (vLLM's is 24, ArcticInference's 64)
# the latest occurrences of an n-gram that are compared with the context; 64 gain nothing
MOST_OCCURRENCES = 16
HISTORY_TOKENS = 1 << 17  # 20 to 35 MB
_BORDER = -1  # between two stored sequences; no token has this id
# The acceptance of a token was fitted on outputs of the bundled target: its odds are about _ODDS
# times the number of equal tokens before it, times (occurrences with this token) / (occurrences
# with another one + 1).
_ODDS = 0.45
NOTHING_COPIED = Draft()


class SuffixIndex:
    """Token sequences, one after the other, with the positions where each n-gram of one to three
    tokens ended. Matches of fewer than `shortest` tokens are not found, and if that is above 2,
    only n-grams of three tokens are kept.

    Tokens are only ever appended. A dictionary has the last position of each n-gram; a list for
    each n has, for each position, the position before it where the same n-gram ended.
    """

    def __init__(self, shortest: int = 1) -> None:
        self.ids: list[int] = []
        self._shortest = shortest
        self._last: dict[int | tuple[int, ...], int] = {}
        # by the length of the n-gram, the longest first; 0: none
        self._previous: dict[int, list[int]] = {3: [], 2: [], 1: []}
        if shortest > 2:
            self._previous = {3: []}

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def repeats(self) -> bool:
        """Whether the last token occurred before, with the two before it if `shortest` is above
        2."""
        return self._previous[3 if self._shortest > 2 else 1][-1] > 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the sequence."""
        if self._shortest > 2:
            self._index_triples(tokens)
        else:
            self._index_all(tokens)
        self.ids.extend(tokens)

    def _index_triples(self, tokens: Sequence[int]) -> None:
        last = self._last
        threes = self._previous[3]
        first, second = [_BORDER, _BORDER, *self.ids[-2:]][-2:]
        for end, token in enumerate(tokens, len(self.ids) + 1):
            triple = (first, second, token)
            threes.append(last.get(triple, 0))
            last[triple] = end
            first = second
            second = token

    def _index_all(self, tokens: Sequence[int]) -> None:
        last = self._last
        threes, twos, ones = self._previous.values()
        first, second = [_BORDER, _BORDER, *self.ids[-2:]][-2:]
        # one step for each token, so the three lengths are written out
        for end, token in enumerate(tokens, len(self.ids) + 1):
            pair = (second, token)
            triple = (first, second, token)
            ones.append(last.get(token, 0))
            twos.append(last.get(pair, 0))
            threes.append(last.get(triple, 0))
            last[token] = last[pair] = last[triple] = end
            first = second
            second = token

    def end_sequence(self) -> None:
        """Ends the current sequence: tokens appended later belong to a new one. No match contains
        tokens of two sequences."""
        self.ids.append(_BORDER)
        for previous in self._previous.values():
            previous.append(0)

    def find(self, ids: Sequence[int]) -> Continuation | None:
        """Returns what followed the longest earlier match of the last tokens of `ids`; None if
        fewer than `shortest` of them occurred before.

        Occurrences at the end of a sequence do not count, because nothing follows them. The longest
        n-gram of at most three tokens is looked up, and its latest `MOST_OCCURRENCES` occurrences
        are compared with `ids` backwards to find the longest match.
        """
        for length in self._previous:
            positions = self._positions(ids, length) if length <= len(ids) else []
            if positions:
                found = self._longest(ids, positions, length)
                return found if found.match_length >= self._shortest else None
        return None

    def _positions(self, ids: Sequence[int], length: int) -> list[int]:
        """Returns the positions after the latest occurrences of the last `length` tokens of `ids`,
        the latest first."""
        positions: list[int] = []
        own = self.ids
        previous = self._previous[length]
        position = self._last.get(ids[-1] if length == 1 else tuple(ids[-length:]), 0)
        while position and len(positions) < MOST_OCCURRENCES:
            if position < len(own) and own[position] != _BORDER:
                positions.append(position)
            position = previous[position - 1]
        return positions

    def _longest(self, ids: Sequence[int], positions: Sequence[int], length: int) -> Continuation:
        """Returns what follows the longest matches: the `positions` before which most tokens equal
        the last ones of `ids`."""
        own = self.ids
        tail = list(ids[-LONGEST_MATCH:])
        longest = length
        best = list[int]()
        for position in positions:
            matched = length
            most = min(position, len(tail))
            while matched < most and own[position - 1 - matched] == tail[-1 - matched]:
                matched += 1
            if matched > longest:
                longest = matched
                best = []
            if matched == longest:
                best.append(position)
        return Continuation(own, best, longest)


class Continuation:
    """The most frequent continuation of earlier occurrences, computed token by token as it is
    needed.

    `tokens` are those computed so far. `probs` has the estimated probability of each to be
    accepted, given that the tokens before it are. After each token only the occurrences that
    continue with it count; of equally frequent tokens, that of the latest occurrence is taken. A
    continuation that reaches the end of the indexed tokens continues with its own tokens.
    `match_length` is the number of equal tokens before the occurrences, at most `LONGEST_MATCH`.
    """

    def __init__(self, ids: Sequence[int], positions: Sequence[int], match_length: int) -> None:
        self.match_length = match_length
        self.tokens: list[int] = []
        self.probs: list[float] = []
        self._ids = ids
        self._length = len(ids)
        self._positions = positions

    def extend(self) -> bool:
        """Computes one more token and its probability. Returns False if no occurrence is followed
        by a token."""
        drafted = len(self.tokens)
        following = [self._at(position + drafted) for position in self._positions]
        token = following[0]
        count = counted = following.count(token)
        if count < len(following):
            tokens = [token for token in following if token != _BORDER]
            counted = len(tokens)
            token, count = Counter(tokens).most_common(1)[0]
        if token == _BORDER:
            return False
        odds = _ODDS * (self.match_length + drafted) * count / (counted - count + 1)
        self.probs.append(odds / (1 + odds))
        self.tokens.append(token)
        if count < len(following):
            self._positions = [
                position
                for position, other in zip(self._positions, following, strict=True)
                if other == token
            ]
        return True

    def agreement(self, ids: Sequence[int]) -> tuple[int, bool]:
        """Returns how many tokens of the continuation equal the first ones of `ids`, and whether
        the one after them differs.

        Computes more of the continuation if needed.
        """
        for position, token in enumerate(ids):
            if position == len(self.tokens) and not self.extend():
                return position, False
            if self.tokens[position] != token:
                return position, True
        return len(ids), False

    def _at(self, position: int) -> int:
        if position < self._length:
            return self._ids[position]
        return self.tokens[position - self._length]


class SuffixHistory:
    """The outputs of earlier runs, in memory only: at most `budget` tokens. If a new output does
    not fit, all older ones are dropped.

    The output of a run is added when the next run begins.
    """

    def __init__(self, budget: int = HISTORY_TOKENS) -> None:
        self._budget = budget
        self.clear()

    def clear(self) -> None:
        self.index = SuffixIndex()
        self._running: Context | None = None

    def begin(self, context: Context) -> None:
        """Registers the run with this context as the current one, and adds the output of the run
        that was current before.

        If several runs take turns, only what a run had generated when the next one began is added.
        """
        if self._running is not None:
            self.add(self._running.ids[self._running.prompt_length :])
        self._running = context

    def add(self, output: Sequence[int]) -> None:
        """Adds an output, or its last tokens if it is longer than the budget."""
        output = output[-(self._budget - 1) :]  # one for the border
        if len(self.index) + len(output) + 1 > self._budget:
            self.index = SuffixIndex()
        self.index.extend(output)
        self.index.end_sequence()


class SuffixDrafter:
    """Drafts a chain: after each token the one that followed most often where the context's last
    tokens, at least `shortest`, occurred before.

    It looks in the context and, if given, in a `history` of earlier outputs. The longer match of
    the two counts, the context's if they are equally long. A draft has at most `factor` times as
    many tokens as the match, and ends before the product of its tokens' estimated probabilities
    falls below `min_prob` (section 3.2 of the paper). The estimated probabilities are fitted to
    what is accepted, and depend on the match's length. In the paper they are shares of occurrences,
    which include the end of the text that nothing follows yet: one earlier occurrence gives 1/2, n
    equal ones give n / (n + 1), however long the match is. The signal `match_length` of a drafted
    token is the number of tokens before it that equal those before the earlier occurrence, and
    `prob` is its estimated probability. The policy learns from each match, whether it was drafted
    or not.
    """

    def __init__(
        self,
        eos_ids: Collection[int],
        *,
        min_prob: float = 0.0,
        factor: float = math.inf,
        shortest: int = 1,
        history: SuffixHistory | None = None,
    ) -> None:
        self._eos_ids = eos_ids
        self._min_prob = min_prob
        self._factor = factor
        self._shortest = shortest
        self._history = history
        self._context: Context | None = None
        self._index = SuffixIndex(shortest)
        self._last: Continuation | None = None

    def propose(
        self, context: Context, policy: LengthPolicy, limit: int, *, is_last: bool = True
    ) -> Draft:
        """Drafts at most `limit` tokens after the context; see `Drafter.propose`. `is_last` is
        passed to `LengthPolicy.starts_draft`."""
        if context is not self._context:
            self._begin(context)
        indexed = len(self._index)
        if self._last is not None:
            self._compare(self._last, context, indexed, policy)
            self._last = None
        self._index.extend(context.ids[indexed:])
        continuation = self._find(context) if limit > 0 else None
        if continuation is None:
            return NOTHING_COPIED

        self._last = continuation
        length = continuation.match_length
        most = self._factor * length
        tokens: list[int] = []
        path = 1.0

        def extend(position: int) -> DraftedToken | str:
            nonlocal path
            if position > most:
                return f"match of {length}"
            if not continuation.extend():
                return "end of match"
            token = continuation.tokens[-1]
            prob = continuation.probs[-1]
            path *= prob
            if path < self._min_prob:
                return f"path {comparison(path, '<', self._min_prob)}"
            tokens.append(token)
            if token in self._eos_ids:
                return "eos"
            return DraftedToken(position, {MATCH_LENGTH: length + position - 1, "prob": prob})

        reason = extend_draft(policy, limit, extend, known={MATCH_LENGTH: length}, is_last=is_last)
        return Draft.chain(tokens, stop_reason=reason)

    def _begin(self, context: Context) -> None:
        self._context = context
        self._index = SuffixIndex(self._shortest)
        self._last = None
        if self._history is not None:
            self._history.begin(context)

    def _find(self, context: Context) -> Continuation | None:
        own = self._index.find(context.ids) if self._index.repeats else None
        earlier = None if self._history is None else self._history.index.find(context.ids)
        if own is None or (earlier is not None and earlier.match_length > own.match_length):
            return earlier
        return own

    def _compare(
        self, last: Continuation, context: Context, indexed: int, policy: LengthPolicy
    ) -> None:
        """Tells the policy how many tokens of the last match equal the tokens that have joined the
        context since: those after the first `indexed` ones."""
        agreed, ended = last.agreement(context.ids[indexed:])
        begin = perf_counter()
        policy.observe_match(last.match_length, agreed, ended=ended)
        policy.seconds += perf_counter() - begin
