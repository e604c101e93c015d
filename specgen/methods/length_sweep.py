"""A length policy for measurements: it drafts each of some lengths in turn. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specgen.base.types import Context, Draft
from specgen.decoding.policy import NO_SIGNALS, DraftedToken, LengthPolicy, Signals

WARM_UP = 2  # rounds at the beginning of a run that are not counted


class LengthSweep(LengthPolicy):
    """Length policy for measurements: each round has the next of `lengths` as draft length; 0 drafts nothing.

    Each length is used once for each of `signals`: with the named signals (numbers about a drafted token, such as entropy)
    computed. The first `WARM_UP` rounds of a run, which are not timed, all use the same length, so that no length is lost in
    them. The pass over the prompt counts as such a round. `levels` is how many levels (tokens, for a chain) the last draft
    computed: a tree may have left the last ones out, and they took their time all the same.
    """

    reason = "sweep"

    def __init__(self, lengths: Sequence[int], signals: Sequence[Signals] = (frozenset(),)) -> None:
        self.combinations = [(length, names) for length in lengths for names in signals]
        self._current = self._warm_up_left = 0
        self.longest = max(lengths)
        self.levels = 0

    def start_run(self) -> None:
        self._warm_up_left = WARM_UP - 1  # without the pass over the prompt

    @property
    def length(self) -> int:
        return self.combinations[self._current][0]

    @property
    def signals(self) -> Signals:  # type: ignore[override]
        return self.combinations[self._current][1]

    def starts_draft(self, *, unverified: int = 0, signals: Mapping[str, float] = NO_SIGNALS, is_last: bool = True) -> bool:
        self.levels = 0
        return self.length > 0

    def keep_drafting(self, token: DraftedToken) -> bool:
        self.levels = token.position
        return token.position < self.length

    def observe(self, drafted: int, accepted: int) -> None:
        if self._warm_up_left:
            self._warm_up_left -= 1
        else:
            self._current = (self._current + 1) % len(self.combinations)


class RepeatDrafter:
    """Drafts copies of the last token. This takes no time, so a round takes as long as the target's pass.

    The policy has to be a `LengthSweep`, which sets the number of copies.
    """

    def propose(self, context: Context, policy: Any, limit: int) -> Draft:
        return Draft.chain([context.ids[-1]] * min(policy.length, limit))
