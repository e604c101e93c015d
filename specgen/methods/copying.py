"""Drafts that are copied from the context, alone or before those of a model. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from operator import mul
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specgen.base.settings import Setting, Value
from specgen.base.types import Context, Draft
from specgen.decoding.policy_base import (
    MATCH_LENGTH,
    NO_SIGNALS,
    DraftedToken,
    LengthPolicy,
    comparison,
    extend_draft,
)
from specgen.methods.drafting_knowledge import AUTO
from specgen.methods.learned_drafting import CopiedAcceptance, DraftingGuard
from specgen.methods.suffix_drafts import SuffixDrafter

if TYPE_CHECKING:
    from specgen.decoding.drafting import Drafter

OFF = "off"
LONGEST_NGRAM = 5  # tokens that are looked up, where no setting says otherwise
# with `CopyingPolicy`: tokens of a match, of a draft
_SHORTEST_MATCH = 3
_LONGEST_COPY = 40
# a copy ends before a token that is accepted, with all before it, with less than this probability
_LEAST_PATH = 0.1
# Copying pauses after losses: a copied token counts as this share of an accepted one, ...
_LEAST_ACCEPTED = 0.25
# ... and so many accepted tokens may be lost
_BUDGET = 3.0
# of the model's drafts: the accepted tokens that are assumed at first, how many drafts that counts
# as, and the factor on older ones
_FIRST_ACCEPTED = 2.0
_FIRST_DRAFTS = 2.0
_FADING = 0.95


def copy_setting(default: Value, auto: str) -> dict[str, Setting]:
    """Returns the setting `copy`, with this default; `auto` says when text is copied with
    `copy=auto`."""
    text = (
        f"also copy text that occurred before; auto: {auto}; N: wherever the last N tokens "
        "occurred before; off: never"
    )
    return {"copy": Setting(default, text, 1, PromptLookupDrafter.LONGEST_MATCH, (AUTO, OFF))}


class PromptLookupDrafter:
    """Finds the longest n-gram (`shortest` to `ngram` tokens) at the context's end that occurred
    before, and proposes what followed it.

    This is prompt lookup (Saxena 2023). If the n-gram occurred several times, the latest occurrence
    counts. If the copied tokens reach the end of the context, copying continues from the draft
    itself. An index of n-grams grows with the context, so the cost of a draft does not depend on
    the context's length. The signal `match_length` of a drafted token is the length of its match:
    how many tokens before it equal the tokens before the one that it copies. It counts all tokens
    drafted before it, and at most `LONGEST_MATCH` of the context. The policy learns from each
    match, whether it was drafted or not.
    """

    LONGEST_MATCH = 32

    def __init__(self, ngram: int, eos_ids: Collection[int], shortest: int = 1) -> None:
        self._ngram = ngram
        self._shortest = shortest
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
            for length in range(self._shortest, min(self._ngram, position) + 1):
                self._continuations[tuple(context.ids[position - length : position])] = position
        self._indexed = len(context)

    def _match(self, context: Context) -> int | None:
        """Finds the longest n-gram at the context's end that occurred before. Returns the position
        after its latest occurrence.

        None if not even the shortest one occurred before.
        """
        for length in range(min(self._ngram, len(context)), self._shortest - 1, -1):
            ngram = tuple(context.ids[-length:])
            if ngram in self._continuations:
                return self._continuations[ngram]
        return None


class HybridDrafter:
    """Drafts by copying, with `copying`, or with a model, as the length policy decides in each
    round.

    The policy is first asked whether to copy text of the context, and if it does not, whether to
    run the model. `model` is None if none drafts. The reason why a copied draft ended begins with
    `lookup:`. Only the model drafts after `forced` tokens, which a grammar leaves no choice about.

    The output keeps the target's distribution, because the decision depends on nothing that is
    drawn in the round, and because copied tokens, which are not drawn, have no `Draft.probs`. A
    model or head does not run in rounds that copy: its runner takes in what it has missed, with the
    target's features of each token, in the first pass of its next draft.
    """

    def __init__(self, copying: PromptLookupDrafter | SuffixDrafter, model: Drafter | None) -> None:
        self._copying = copying
        self._model = model
        self.takes_forced: bool = getattr(model, "takes_forced", False)

    def propose(
        self, context: Context, policy: LengthPolicy, limit: int, forced: Sequence[int] = ()
    ) -> Draft:
        if forced:
            model: Any = self._model
            drafted: Draft = model.propose(context, policy.for_model, limit, forced=forced)
            return drafted
        copied = self._copying.propose(context, policy, limit, is_last=self._model is None)
        if self._model is not None and not copied.tokens:
            drafted = self._model.propose(context, policy.for_model, limit)
            if drafted.stop_reason is not None:
                return drafted
            # the draft model has no room for this context
            copied = self._copying.propose(context, policy, limit)
        if not copied.tokens:
            return copied
        return replace(copied, stop_reason=f"lookup: {copied.stop_reason}", is_copied=True)


class CopyingPolicy(LengthPolicy):
    """Decides in which rounds a `HybridDrafter` copies text of the context, and how much. `own`
    ends the drafts of the model, and learns from them alone.

    All matches are copied from, if `always`; otherwise those of which more tokens are expected to
    be accepted than of the model's drafts in the mean. In no case is anything copied for some
    rounds after fewer than a quarter of the copied tokens were accepted. These decisions depend on
    the context and on what was accepted before, not on the tokens of this round's draft.
    """

    def __init__(self, own: LengthPolicy, *, always: bool) -> None:
        self._own = own
        self._always = always
        self.signals = own.signals
        self._acceptance = CopiedAcceptance()
        self._guard = DraftingGuard()
        # sums over the model's drafts, in which older ones count less
        self._accepted = _FIRST_ACCEPTED * _FIRST_DRAFTS
        self._drafts = _FIRST_DRAFTS
        # acceptances of the tokens to copy, None unless text is copied in this round
        self._copied: list[float] | None = None
        # the probability that all of these are accepted; below `_LEAST_PATH` if it includes the
        # token after them, which is then too unlikely to be copied
        self._path = 1.0

    @property
    def for_model(self) -> LengthPolicy:
        return self._own

    @property
    def predictions(self) -> Sequence[float]:  # type: ignore[override]
        return self._own.predictions if self._copied is None else self._copied

    @property
    def model_mean(self) -> float:
        """The mean number of accepted tokens of the model's last drafts."""
        return self._accepted / self._drafts

    def starts_draft(
        self,
        *,
        unverified: int = 0,
        signals: Mapping[str, float] = NO_SIGNALS,
        is_last: bool = True,
    ) -> bool:
        self._copied = None
        copied = self._worth_copying(int(signals[MATCH_LENGTH]))
        if not (self._always or is_last) and sum(accumulate(copied, mul)) < self.model_mean:
            return False
        if self._guard.pauses():
            return False
        self._copied = copied
        return True

    def _worth_copying(self, match_length: int) -> list[float]:
        """Returns the acceptance probabilities of the tokens to copy after a match, at least of
        one."""
        copied = list[float]()
        self._path = 1.0
        for acceptance in islice(self._acceptance.of_matches(match_length), _LONGEST_COPY):
            self._path *= acceptance
            if copied and self._path < _LEAST_PATH:
                break
            copied.append(acceptance)
        return copied

    def keep_drafting(self, token: DraftedToken) -> bool:
        if self._copied is not None and token.position < len(self._copied):
            return True
        self.reason = f"limit {_LONGEST_COPY}"
        if self._path < _LEAST_PATH:
            self.reason = f"path {comparison(self._path, '<', _LEAST_PATH)}"
        return False

    def observe(self, drafted: int, accepted: int) -> None:
        if self._copied is not None:
            self._guard.count(_LEAST_ACCEPTED * drafted, accepted, _BUDGET)
            self._copied = None
            return
        self._own.observe(drafted, accepted)
        if drafted:
            self._accepted = _FADING * self._accepted + accepted
            self._drafts = _FADING * self._drafts + 1

    def observe_match(self, match_length: int, agreed: int, *, ended: bool) -> None:
        self._acceptance.learn_match(match_length, agreed, ended=ended)

    def observe_seconds(
        self, levels: int, drafting: float, tokens: int, verification: float
    ) -> None:
        self._own.observe_seconds(levels, drafting, tokens, verification)

    def share(self, learned: dict[Hashable, Any]) -> None:
        self._own.share(learned)

    def state(self) -> Mapping[str, float] | None:
        return self._own.state()

    def take_seconds(self) -> float:
        return super().take_seconds() + self._own.take_seconds()


def with_copies(
    drafter: Drafter | None,
    policy: LengthPolicy,
    values: Mapping[str, Value],
    eos_ids: Collection[int],
) -> tuple[Drafter | None, LengthPolicy]:
    """Returns a run's drafter and its length policy, with copies as the setting `copy` says.

    `values` are the method's settings by name. `drafter` None: no model drafts. A policy that
    decides on copies itself stays the same, and prompt lookup copies. Otherwise suffix decoding
    does, which copies what followed most often.
    """
    copy = values.get("copy", OFF)
    if copy == OFF:
        return drafter, policy
    if policy.decides_copies:
        shortest = 1 if copy == AUTO else int(copy)
        longest = max(int(values.get("ngram", LONGEST_NGRAM)), shortest)
        return HybridDrafter(PromptLookupDrafter(longest, eos_ids, shortest), drafter), policy
    shortest = _SHORTEST_MATCH if copy == AUTO else int(copy)
    copying = SuffixDrafter(eos_ids, shortest=shortest)
    return HybridDrafter(copying, drafter), CopyingPolicy(policy, always=copy != AUTO)
