"""The base of length policies, and drafted tokens as they see them. `decoding.policies` has all policies. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from specgen.base.settings import Setting, Value

Signals = frozenset[str]
MODEL_SIGNALS: Signals = frozenset({"entropy", "prob", "top_prob", "margin", "predicted_acceptance"})  # see `signals.compute`
MATCH_LENGTH = "match_length"  # of prompt lookup: how many tokens before this one equal those before the token that it copies
SIGNALS: Signals = MODEL_SIGNALS | {MATCH_LENGTH}
NO_SIGNALS: Mapping[str, float] = MappingProxyType({})


def comparison(value: float, sign: str, limit: float) -> str:
    """Returns text such as `0.38 < 0.40`, with two decimals, or as many as the two different numbers need to look different."""
    for digits in range(2, 9):
        first, second = f"{value:.{digits}f}", f"{limit:.{digits}f}"
        if first != second:
            break
    return f"{first} {sign} {second}"


@dataclass(slots=True)  # not frozen: one is made for each token, and a frozen one takes three times as long
class DraftedToken:
    """A drafted token as a length policy sees it: its position in the draft (the first is 1) and its signals.

    Signals are numbers about the token, such as its entropy. `token[name]` returns the signal `name`. For a tree it is the
    likeliest token of a level, and `nodes` is the number of tokens that the level adds to the draft.
    """

    position: int
    signals: Mapping[str, float] = field(default_factory=dict)
    nodes: int = 1

    def __getitem__(self, signal: str) -> float:
        """Returns the signal of this name. Raises LookupError if it was not computed."""
        if signal not in self.signals:
            computed = ", ".join(self.signals) or "none"
            raise LookupError(f"the length policy reads the signal {signal!r}, which was not computed (computed: {computed})")
        return self.signals[signal]


class LengthPolicy(ABC):
    """Decides when a draft ends. `reason` says in a few words why the last draft ended.

    `name`, `source` (the paper) and `settings` (parameters by name) describe a policy to users and to `tune`. A `random` policy's
    constructor takes a `seed` besides the settings. `signals` are the numbers about a drafted token that the policy reads.
    `optional_signals` maps a boolean setting to the signals that the policy reads only if the setting is true. It reads the
    `preferred_signals` only where the drafter computes them. `predictions` are the acceptance probabilities that it predicted for
    the tokens of the last draft, if it predicts any. `seconds` is how long the policy and the acceptance predictor have taken
    since `take_seconds` was called.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""
    settings: ClassVar[Mapping[str, Setting]] = {}
    random: ClassVar[bool] = False
    signals: Signals = frozenset()
    optional_signals: ClassVar[Mapping[str, Signals]] = {}
    preferred_signals: ClassVar[Signals] = frozenset()
    predictions: Sequence[float] = ()
    reason: str = ""
    seconds: float = 0.0

    @classmethod
    def signals_with(cls, values: Mapping[str, Value]) -> Signals:
        """The names of the signals that a policy with these settings reads."""
        return cls.signals.union(*(signals for name, signals in cls.optional_signals.items() if values.get(name)))

    def starts_draft(self, *, unverified: int = 0, signals: Mapping[str, float] = NO_SIGNALS, is_last: bool = True) -> bool:
        """Whether to draft at all in this round. If not, `reason` says why, and the target computes one token.

        In PEARL the draft would follow `unverified` drafted tokens. `signals` are those of the first token that are known before
        it is drafted. If not `is_last`, another drafter of this round follows, for which the policy decides again after a no.
        """
        return True

    @abstractmethod
    def keep_drafting(self, token: DraftedToken) -> bool:
        """Whether to draft another token after this one."""

    def observe(self, drafted: int, accepted: int) -> None:  # noqa: B027  most policies learn nothing
        """Learns from a verified draft: its number of tokens (of levels, for a tree) and how many of them were accepted.

        Called after each round but the pass over the prompt, also after one without a draft. In PEARL the draft's last tokens may
        be verified in later rounds.
        """

    def observe_match(self, match_length: int, agreed: int, *, ended: bool) -> None:  # noqa: B027  most policies learn nothing
        """Learns from what prompt lookup found in the last round, also if nothing of it was drafted.

        The first `agreed` tokens of the copied text, found after `match_length` equal tokens, equal the tokens that followed in
        the context. `ended`: the copied token after them did not.
        """

    def state(self) -> Mapping[str, float] | None:
        """Numbers that the policy has learned so far, to be written to a trace; None if it learns nothing."""
        return None

    def take_seconds(self) -> float:
        """Returns `seconds` and sets it to 0."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _below(self, limit: int, token: DraftedToken) -> bool:
        self.reason = f"limit {limit}"
        return token.position < limit


class Always(LengthPolicy):
    """Never ends a draft: for methods that limit drafts in another way, as PEARL does by its window (a number of tokens)."""

    def keep_drafting(self, token: DraftedToken) -> bool:
        return True
