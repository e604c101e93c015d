"""What all length policies share: the rules that decide after each drafted token whether the draft
continues.

A policy is a class in a file of `methods/`, and is listed in `methods/__init__.py`, in `_POLICIES`.
Imports no torch.

A policy reads signals: numbers about a drafted token, such as the entropy of its distribution. It
works with any drafter that computes the signals it reads (EESD Table 5). The token stays in the
draft whatever the policy decides: dropping a token because of its own probability would change the
output's distribution. After verification the policy learns how many tokens were accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from types import MappingProxyType
from typing import Any, ClassVar

from specgen.base.settings import Setting, Value

Signals = frozenset[str]
# of any draft model: see `token_sampling.signals`
DRAFT_SIGNALS: Signals = frozenset({"entropy", "prob", "top_prob", "margin"})
MODEL_SIGNALS: Signals = DRAFT_SIGNALS | {"predicted_acceptance"}
# of prompt lookup: how many tokens before this one equal those before the token that it copies
MATCH_LENGTH = "match_length"
NO_SIGNALS: Mapping[str, float] = MappingProxyType({})
LONGEST_DRAFT = 1000  # tokens; no setting allows a longer one


def comparison(value: float, sign: str, limit: float) -> str:
    """Returns text such as `0.38 < 0.40`. The numbers have two decimals, or more if they would look
    equal."""
    for digits in range(2, 9):
        first = f"{value:.{digits}f}"
        second = f"{limit:.{digits}f}"
        if first != second:
            break
    return f"{first} {sign} {second}"


# not frozen: one is made for each token, and making a frozen one takes three times as long
@dataclass(slots=True)
class DraftedToken:
    """A drafted token as a length policy sees it: its position in the draft (the first is 1) and
    its signals.

    Signals are numbers about the token, such as its entropy. `token[name]` returns the signal
    `name`. In a tree, a level is represented by its likeliest token, and `nodes` is the number of
    tokens that the level adds to the draft.
    """

    position: int
    signals: Mapping[str, float] = field(default_factory=dict)
    nodes: int = 1

    def __getitem__(self, signal: str) -> float:
        """Returns the signal of this name. Raises LookupError if it was not computed."""
        if signal not in self.signals:
            computed = ", ".join(self.signals) or "none"
            raise LookupError(
                f"the length policy reads the signal {signal!r}, which was not computed "
                f"(computed: {computed})"
            )
        return self.signals[signal]


class LengthPolicy:
    """Decides after each drafted token whether the draft continues. This base class never ends a
    draft.

    `reason` says in a few words why the last draft ended. `name`, `source` (the paper) and
    `settings` (parameters by name) describe a policy to users and to `tune`. The constructor takes
    the settings, and if the policy is `random` also a `seed`. `signals` are the names of the
    numbers about a drafted token that the policy needs. `optional_signals` maps a boolean setting
    to the signals that the policy needs only if the setting is true. Signals in `preferred_signals`
    are read only where the drafter computes them. `reads_costs`: the constructor also takes
    `inputs`, the costs of drafting. `learns_from_tokens`: the policy's state depends on the drafted
    tokens, not only on how many were accepted. `decides_copies`: the policy also decides in which
    rounds tokens are copied from the context instead of drafted by a model. `unmeasured` are
    settings with which nothing has to be measured before a run.

    `block_levels` is how many tokens a drafter that computes them all in one pass should compute
    for the next draft; None: as many as it can. `predictions` are the acceptance probabilities that
    the policy predicted for the tokens of the last draft; empty if it predicts none. `seconds` is
    the time that the policy and the acceptance predictor have taken since the last call of
    `take_seconds`. `in_turn`: the models of PEARL take turns in this round, so that all tokens that
    are observed were drafted before the target's pass; its last logits give a bonus token if all
    are accepted.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""
    settings: ClassVar[Mapping[str, Setting]] = {}
    random: ClassVar[bool] = False
    signals: Signals = frozenset()
    optional_signals: ClassVar[Mapping[str, Signals]] = {}
    preferred_signals: ClassVar[Signals] = frozenset()
    reads_costs: ClassVar[bool] = False
    learns_from_tokens: ClassVar[bool] = False
    decides_copies: ClassVar[bool] = False
    unmeasured: ClassVar[Mapping[str, Value]] = {}
    block_levels: int | None = None
    predictions: Sequence[float] = ()
    reason: str = ""
    seconds: float = 0.0
    in_turn: bool = False

    @classmethod
    def signals_with(cls, values: Mapping[str, Value]) -> Signals:
        """The names of the signals that a policy with these settings reads."""
        return cls.signals.union(
            *(signals for name, signals in cls.optional_signals.items() if values.get(name))
        )

    @property
    def most_levels(self) -> int:
        """An upper bound of the number of tokens (levels, for a tree) in the next draft.

        By default the smaller one of the attributes `k` and `max_draft`, if the policy has them. A
        policy whose limit has another name overrides this.
        """
        return min(int(getattr(self, limit, LONGEST_DRAFT)) for limit in ("k", "max_draft"))

    @property
    def for_model(self) -> LengthPolicy:
        """The policy that ends a model's drafts, where this one ends only copied ones; itself,
        where it ends both."""
        return self

    def starts_draft(
        self,
        *,
        unverified: int = 0,
        signals: Mapping[str, float] = NO_SIGNALS,
        is_last: bool = True,
    ) -> bool:
        """Whether to draft at all in this round. If False, `reason` says why, and the target's pass
        adds one token.

        `unverified` is the number of drafted tokens, not verified yet, that the draft would follow
        (PEARL). `signals` are those of the draft's first token, as far as they are known before it
        is drafted. `is_last` False: if this call returns False, the policy is asked again in this
        round, for another drafter.
        """
        return True

    def keep_drafting(self, token: DraftedToken) -> bool:
        """Whether to draft another token after this one."""
        return True

    def observe(self, drafted: int, accepted: int) -> None:
        """Learns from a verified draft: its number of tokens (of levels, for a tree), and how many
        of them were accepted.

        Called after each round, also after one without a draft, but not after the pass over the
        prompt. In PEARL, the last tokens of a draft may be verified, and counted, in a later round.
        """

    def observe_match(self, match_length: int, agreed: int, *, ended: bool) -> None:
        """Learns how well the last match of prompt lookup predicted the tokens generated since,
        whether or not they were drafted.

        The match is an earlier occurrence of the context's last `match_length` tokens. The first
        `agreed` tokens after the occurrence equal the generated ones. `ended`: the token after
        those differs from the generated one.
        """

    def observe_seconds(
        self, levels: int, drafting: float, tokens: int, verification: float
    ) -> None:
        """Learns from the times of a round, in seconds. Called by the schedule `sequential` only.

        `drafting` is the time in which a model drafted `levels` tokens one after the other (levels,
        for a tree). `verification` is the time of the target's pass over `tokens` drafted tokens
        and of the rest of the round.
        """

    def share(self, learned: dict[Hashable, Any]) -> None:
        """Takes over what earlier runs have learned. What this run learns is added to it. Called
        before the first draft.

        `learned` has this under keys of the policies' own. It belongs to the process in which the
        policy decides.
        """

    def state(self) -> Mapping[str, float] | None:
        """Numbers that the policy has learned so far, to be written to a trace; None if it learns
        nothing."""
        return None

    def take_seconds(self) -> float:
        """Returns `seconds` and sets it to 0."""
        seconds = self.seconds
        self.seconds = 0.0
        return seconds

    def _below(self, limit: int, token: DraftedToken) -> bool:
        self.reason = f"limit {limit}"
        return token.position < limit


class Fixed(LengthPolicy):
    """Ends each draft after k tokens (Leviathan et al. 2023)."""

    name = "fixed"
    source = "Leviathan et al. 2023"
    settings: ClassVar = {
        "k": Setting(
            5, "tokens in a draft; in a tree: levels", 1, LONGEST_DRAFT, tuned=range(1, 17)
        )
    }

    def __init__(self, k: int) -> None:
        self.k = k

    def keep_drafting(self, token: DraftedToken) -> bool:
        return self._below(self.k, token)


WARM_UP = 2  # rounds at the beginning of a run that `LengthSweep` does not count


class LengthSweep(LengthPolicy):
    """Length policy for measurements: each round drafts the next of `lengths` tokens, in a cycle; 0
    drafts nothing.

    Each length is used once for each set of names in `signals`, with these signals (numbers about a
    drafted token) computed, so that their cost can be measured. In the first `WARM_UP` rounds of a
    run, which are not timed, the length stays the same; the pass over the prompt is the first of
    them. `levels` is how many tokens (levels, for a tree) the last draft computed, even if a tree
    left the last levels out of the draft.
    """

    reason = "sweep"

    def __init__(self, lengths: Sequence[int], signals: Sequence[Signals] = (frozenset(),)) -> None:
        self.combinations = [(length, names) for length in lengths for names in signals]
        self._current = 0  # the index of a combination
        self._warm_up_left = 0  # rounds
        self.longest = max(lengths)
        self.levels = 0

    def start_run(self) -> None:
        # the pass over the prompt, which `observe` does not see, is one of them
        self._warm_up_left = WARM_UP - 1

    @property
    def length(self) -> int:
        return self.combinations[self._current][0]

    @property
    def most_levels(self) -> int:
        return max(self.length, 1)

    @property
    def signals(self) -> Signals:  # type: ignore[override]
        return self.combinations[self._current][1]

    def starts_draft(
        self,
        *,
        unverified: int = 0,
        signals: Mapping[str, float] = NO_SIGNALS,
        is_last: bool = True,
    ) -> bool:
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


def longest_draft_setting(default: int, *tuned: int) -> Setting:
    """Returns the setting `max_draft` of a policy, with this default; `tuned` are the values that
    `tune` tries."""
    return Setting(default, "longest draft", 1, LONGEST_DRAFT, tuned=tuned)


def extend_draft(
    policy: LengthPolicy,
    limit: int,
    extend: Callable[[int], DraftedToken | str],
    *,
    unverified: int = 0,
    known: Mapping[str, float] = NO_SIGNALS,
    is_last: bool = True,
) -> str:
    """Extends a draft until it has `limit` tokens (levels, for a tree) or the policy ends it.
    Returns the reason for the end.

    Drafts nothing if the policy does not start a draft: see `begins_draft`, which has the other
    arguments, and `continue_draft`.
    """
    if not begins_draft(policy, unverified=unverified, known=known, is_last=is_last):
        return policy.reason
    return continue_draft(policy, limit, extend)


def begins_draft(
    policy: LengthPolicy,
    *,
    unverified: int = 0,
    known: Mapping[str, float] = NO_SIGNALS,
    is_last: bool = True,
) -> bool:
    """Returns whether the policy starts a draft; if not, `policy.reason` says why.

    A drafter asks before it prepares anything, so that a round without a draft takes no longer than
    it has to. `unverified`, `known` (as `signals`) and `is_last` are passed to
    `LengthPolicy.starts_draft`. The time that the policy takes is added to `policy.seconds`.
    """
    start = perf_counter()
    drafts = policy.starts_draft(unverified=unverified, signals=known, is_last=is_last)
    policy.seconds += perf_counter() - start
    return drafts


def continue_draft(
    policy: LengthPolicy, limit: int, extend: Callable[[int], DraftedToken | str]
) -> str:
    """Extends a draft that has begun, until it has `limit` tokens (levels, for a tree) or the
    policy ends it. Returns the reason for the end.

    `extend(position)` drafts the token or level with this number, from 1. It returns the token for
    the policy to judge, or a string, which ends the draft without asking the policy and is the
    reason, such as `eos`. At `limit` the reason is `length`. The time that the policy takes is
    added to `policy.seconds`.
    """
    for position in range(1, limit + 1):
        token = extend(position)
        if isinstance(token, str):
            return token
        start = perf_counter()
        keeps_drafting = policy.keep_drafting(token)
        policy.seconds += perf_counter() - start
        if not keeps_drafting:
            return policy.reason
    return "length"
