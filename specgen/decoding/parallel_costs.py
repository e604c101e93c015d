"""PEARL's window, computed from the times of passes while both models run (PEARL, section 4.1).
Imports no torch.

A fixed window is the ratio of the target's pass time to the draft model's, so that both finish
together; in a flexible window, drafting ends when the target pass does. Theorem 1 takes the time of
a target pass as given. Where it grows by more than a draft pass with each token, both would finish
together at no window or at a huge one: the window is then as long as verifying its tokens pays.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING

from specgen.decoding.costs import Curve

if TYPE_CHECKING:
    from specgen.base.types import Mode, Round
    from specgen.decoding.costs import RoundCosts

LONGEST_WINDOW = 64
_ACCEPTANCE = 0.7  # assumed probability that a drafted token is accepted
_HIGH_ACCEPTANCE = 0.9  # with which no longer window must pay
# where a target pass takes long: how many times its expected number of tokens the draft may have
_MARGIN = 1.5
_LEAST_PASS = 1e-9  # seconds: a stored profile may say 0
_PERIOD = 16  # rounds after which a run decides again whether passes overlap
_PATIENCE = 8  # periods before the slower way is tried again; then twice as many, and so on
_SLOWER = 1.05  # overlapping passes may take this many times as long for each token as turns
_PRIOR_TOKENS = 32.0  # as how many judged tokens the assumed acceptance rate counts at first
_LONGEST_PATIENCE = 64  # periods
_PERIOD_FADING = 0.8  # a factor on sums over tokens for each period
_HIGHEST_ACCEPTANCE = 0.99  # assumed where a run has accepted all tokens


@dataclass(frozen=True, slots=True)
class Window:
    """PEARL's window: the number of tokens that the draft model drafts during one target pass.

    `size` (PEARL's gamma) is this number while the target verifies a whole window of `size` tokens,
    `first` while it passes over one token (PEARL's pre-verify), which takes less time on a CPU, and
    `second` while it passes over two (None: interpolated between `first` and `size`).

    If `is_flexible`, a draft ends with the target pass, and `size` only limits its length. Then
    `lead` is the number of new tokens that the target waits for after a rejection, and verifies in
    its next pass; in the paper it waits for none.
    """

    size: int
    first: int
    lead: int = 0
    is_flexible: bool = False
    second: int | None = None

    @property
    def longest(self) -> int:
        """The largest number of tokens in one draft."""
        return self.lead + self.size

    def beside(self, width: int) -> int:
        """Returns how many tokens to draft during a target pass over `width` tokens, so that both
        models finish together."""
        if width >= self.size:
            return self.size
        windows = {1: self.first, self.size: self.size}
        if self.second is not None:
            windows[2] = self.second
        return round(Curve(windows).at(width))


@dataclass(frozen=True)  # without slots, for cached properties: each run asks for them
class ParallelCosts:
    """Seconds of forward passes while target and draft model run at the same time, with
    `context_length` tokens in the caches.

    `draft_pass` is one draft pass, `target_pass` a target pass over `width` tokens, `single_pass`
    and `double_pass` are target passes over one token and over two. `draft_alone`, `target_alone`
    and `single_alone` are the same while the other model rests; 0: not measured.
    """

    draft_pass: float
    target_pass: float
    single_pass: float
    double_pass: float
    width: int
    context_length: int
    draft_alone: float = 0.0
    target_alone: float = 0.0
    single_alone: float = 0.0

    @classmethod
    def of_rounds(
        cls, overlapping: RoundCosts, in_turn: RoundCosts, context_length: int
    ) -> ParallelCosts:
        """Returns the seconds of passes by the costs of PEARL's rounds and of rounds that draft
        with the same model first."""

        def target_pass(tokens: int) -> float:
            passes = overlapping.verification_cost.at(tokens, context_length)
            return passes + overlapping.synchronisation_overhead

        draft_pass = max(overlapping.draft_cost.at(1, context_length), _LEAST_PASS)
        width = max(2, _rounded(target_pass(1) / draft_pass))
        return cls(
            draft_pass,
            target_pass(width),
            target_pass(1),
            target_pass(2),
            width,
            context_length,
            in_turn.draft_cost.at(width, context_length) / width,
            in_turn.verification_cost.at(width, context_length),
            in_turn.verification_cost.at(1, context_length),
        )

    @property
    def ratio(self) -> float:
        """c = time of a target pass over `width` tokens / time of a draft pass."""
        return self.target_pass / self.draft_pass

    @cached_property
    def window(self) -> Window:
        """The window with which neither model waits for the other: c, rounded, from 1 to
        `LONGEST_WINDOW` (PEARL, Theorem 1), but none that is longer than pays."""
        size = min(_rounded(self.ratio), self._longest_that_pays)
        first = min(size, _rounded(self.single_pass / self.draft_pass))
        second = min(size, _rounded(self.double_pass / self.draft_pass))
        return Window(size, first, second=second)

    @property
    def _longest_that_pays(self) -> int:
        """The number of tokens in a target pass with the least time for each that is accepted,
        where drafted tokens are often right."""
        passes = self.target_passes
        sizes = range(1, LONGEST_WINDOW + 1)
        return min(sizes, key=lambda size: passes.at(size) / (1 - _HIGH_ACCEPTANCE**size))

    @cached_property
    def flexible_window(self) -> Window:
        """The window for drafts that end with the target pass. Its `lead` has the shortest expected
        time between two rejections.

        In this time about the same number of tokens is generated whatever `lead` is. With a lead of
        n, the time is n draft passes, a target pass that verifies n + 1 drafted tokens, and, if all
        of them are accepted, further passes that verify a whole window each.
        """
        window = self.window
        further = self.target_pass / (1 - _ACCEPTANCE**window.size)

        def seconds(lead: int) -> float:
            return (
                lead * self.draft_pass
                + self.target_passes.at(lead + 1)
                + _ACCEPTANCE ** (lead + 1) * further
            )

        longest = min(LONGEST_WINDOW, round(_MARGIN * window.size))
        return Window(longest, longest, min(range(window.size), key=seconds), is_flexible=True)

    def run_window(self, *, is_flexible: bool) -> Window:
        """The window of a run: if `is_flexible`, the one for drafts that end with the target pass,
        otherwise the fixed one."""
        return self.flexible_window if is_flexible else self.window

    @property
    def overlaps(self) -> bool:
        """Whether drafting during the target's passes is expected to be faster than before them.

        Both models slow each other down where they share cores or memory, which is part of the
        measured times.
        """
        gain = self.expected_gain
        return gain is None or gain >= 1

    @cached_property
    def expected_gain(self) -> float | None:
        """`gain` where each token is accepted with probability `_ACCEPTANCE`. None if passes of one
        model alone were not measured."""
        return self.gain(_ACCEPTANCE) if self.draft_alone else None

    def gain(self, acceptance: float, length: int | None = None) -> float:
        """The expected time of drafting and verifying in turn over that of PEARL, for the same
        tokens, each accepted with probability `acceptance` (below 1). In turn, drafts have this
        `length`; None: the best one. Passes of one model alone must have been measured.
        """
        if length is None:
            length = self.fastest_in_turn(acceptance)
        return self.seconds_in_turn(length, acceptance) / self.seconds_overlapping(acceptance)

    def seconds_overlapping(self, acceptance: float) -> float:
        """The expected time for each output token with overlapping passes. The acceptance rate is
        below 1.

        In PEARL, one pre-verify follows each rejection, and then post-verifies, until one of them
        rejects a token; in between are 1 / (1 - acceptance) tokens.
        """
        window = self.window
        pre_verify = max(self.single_pass, window.first * self.draft_pass)
        post_verify = max(self.target_passes.at(window.size), window.size * self.draft_pass)
        post_verifies = acceptance / (1 - acceptance**window.size)
        return (pre_verify + post_verifies * post_verify) * (1 - acceptance)

    @cached_property
    def length_in_turn(self) -> int:
        """The length of drafts with the least time for each output token where the models take
        turns."""
        return self.fastest_in_turn(_ACCEPTANCE)

    def fastest_in_turn(self, acceptance: float) -> int:
        """The same, for drafted tokens that are accepted with this probability."""
        seconds = self.seconds_in_turn(1, acceptance)
        for length in range(1, LONGEST_WINDOW):
            longer = self.seconds_in_turn(length + 1, acceptance)
            if longer >= seconds:  # from here on, each further token adds less than it costs
                return length
            seconds = longer
        return LONGEST_WINDOW

    def seconds_in_turn(self, length: int, acceptance: float = _ACCEPTANCE) -> float:
        """The expected time for each output token with drafts of a `length` and the models taking
        turns."""
        tokens = (1 - acceptance ** (length + 1)) / (1 - acceptance)
        return (length * self.draft_alone + self._passes_alone.at(length + 1)) / tokens

    @cached_property
    def _passes_alone(self) -> Curve:
        return Curve({self.width: self.target_alone, 1: self.single_alone})

    @cached_property
    def target_passes(self) -> Curve:
        """Seconds of a target pass by its number of tokens."""
        return Curve({2: self.double_pass, self.width: self.target_pass, 1: self.single_pass})

    def as_dict(self) -> dict[str, float]:
        """The fields, `ratio` (c), and the sizes `window` (`Window.size`) and `first_window`
        (`Window.first`). The first line of a trace file has them under `costs`."""
        return {
            **asdict(self),
            "ratio": self.ratio,
            "window": self.window.size,
            "first_window": self.window.first,
        }


def acceptance_of(accepted: float, rejected: float) -> float:
    """Returns the share of judged tokens that were accepted, below 1 as `ParallelCosts` needs
    it."""
    return min(accepted / max(accepted + rejected, 1), _HIGHEST_ACCEPTANCE)


@dataclass(slots=True)
class Period:
    """Rounds of one kind, in runs with the same `costs`: with passes in turn and drafts of `length`
    tokens, or with overlapping passes (None).

    The seconds are medians, one for pre-verify and one for post-verify, each times its number of
    rounds, so that a few disturbed rounds do not decide. Tokens that a grammar forces do not count:
    they are accepted in both ways.
    """

    costs: ParallelCosts
    length: int | None
    rounds: int = 0
    accepted: int = 0
    rejected: int = 0
    _tokens: int = 0
    _seconds: dict[Mode, list[float]] = field(default_factory=dict)

    def add(self, round_: Round) -> None:
        accepted = sum(node not in round_.draft.forced for node in round_.verdict.path)
        self.rounds += 1
        self.accepted += accepted
        self.rejected += round_.verdict.source == "correction"
        self._tokens += accepted + (round_.verdict.token is not None)
        self._seconds.setdefault(round_.mode, []).append(sum(round_.seconds.values()))

    def over_predicted(self) -> float:
        """Returns how many times as long the rounds took as `costs` predict for the share of tokens
        that they accepted."""
        seconds = sum(len(taken) * median(taken) for taken in self._seconds.values())
        acceptance = acceptance_of(self.accepted, self.rejected)
        if self.length is None:
            predicted = self.costs.seconds_overlapping(acceptance)
        else:
            predicted = self.costs.seconds_in_turn(self.length, acceptance)
        return seconds / max(self._tokens, 1) / predicted


@dataclass(slots=True)
class Overlapping:
    """Decides whether the models' passes overlap in runs of PEARL, by the seconds that rounds took.

    A round also takes time outside of both passes, and passes may take longer than when they were
    measured. So after each `Period` of `_PERIOD` rounds it is known how many times as long as
    predicted rounds of its kind take (1 before there was one). The models take turns, `is_in_turn`,
    where the predicted seconds for each token, times this, are fewer than those of overlapping
    passes. Both are predicted for the acceptance rate of the last periods, as that of one text says
    little about the next. After `_PATIENCE` periods the slower way is tried again, because its last
    period may have been disturbed.

    Runs that are made in turn or at the same time decide together: see `RunOverlapping`.
    """

    is_in_turn: bool = field(default=False, init=False)
    # the last decision was to try the slower way
    is_trial: bool = field(default=False, init=False)
    _overlapping_over_predicted: float = field(default=1.0, init=False)
    _in_turn_over_predicted: float | None = field(default=None, init=False)
    # numbers of tokens in all periods, of which older ones count less
    _accepted: float = field(init=False)
    _rejected: float = field(init=False)
    _patience: int = field(default=_PATIENCE, init=False)
    _left: int = field(default=0, init=False)  # periods before the slower way is tried again
    _periods: dict[tuple[ParallelCosts, int | None], Period] = field(
        default_factory=dict, init=False
    )

    def __post_init__(self) -> None:
        self.forget_acceptance()

    def forget_acceptance(self) -> None:
        """Goes back to the acceptance rate that is assumed at first."""
        self._accepted = _ACCEPTANCE * _PRIOR_TOKENS
        self._rejected = (1 - _ACCEPTANCE) * _PRIOR_TOKENS

    def length_in_turn(self, costs: ParallelCosts, longest: int) -> int:
        """Returns the fastest length, at most `longest`, of drafts in turn."""
        return min(costs.fastest_in_turn(self._acceptance), longest)

    def add(self, round_: Round, costs: ParallelCosts, length: int | None, longest: int) -> None:
        """Counts a round of a run with these `costs`, in turn after a draft of at most `length`
        tokens, or with overlapping passes (None). At the end of a period, decides how the next one
        drafts, with drafts in turn of at most `longest` tokens. A round of the kind that was
        decided against does not count."""
        if (length is not None) != self.is_in_turn:
            return
        period = self._periods.setdefault((costs, length), Period(costs, length))
        period.add(round_)
        if period.rounds == _PERIOD:
            del self._periods[costs, length]
            self._learn(period)
            self._decide(costs, longest)

    def skip_period(self) -> None:
        """Counts a period in turn whose seconds say nothing."""
        if not self.is_in_turn:
            return
        self._left -= 1
        if self._left <= 0:
            self._switch(is_trial=True)

    def _learn(self, period: Period) -> None:
        if period.length is None:
            self._overlapping_over_predicted = period.over_predicted()
        else:
            self._in_turn_over_predicted = period.over_predicted()
        self._accepted = _PERIOD_FADING * self._accepted + period.accepted
        self._rejected = _PERIOD_FADING * self._rejected + period.rejected

    def _decide(self, costs: ParallelCosts, longest: int) -> None:
        times = self._times_as_long(costs, longest)
        is_slower = times < 1 if self.is_in_turn else times > _SLOWER
        if is_slower:
            self._switch(is_trial=False)
            return
        if self.is_trial:  # what was tried is faster
            self._left = self._patience = _PATIENCE
            self.is_trial = False
        self._left -= 1
        if self._left <= 0 and self._in_turn_over_predicted is not None:
            self._switch(is_trial=True)

    def _switch(self, *, is_trial: bool) -> None:
        """Changes between turns and overlapping passes. Each further trial comes later."""
        if is_trial:
            self._patience = min(2 * self._patience, _LONGEST_PATIENCE)
        self._left = self._patience
        self.is_in_turn = not self.is_in_turn
        self.is_trial = is_trial
        self._periods.clear()

    def _times_as_long(self, costs: ParallelCosts, longest: int) -> float:
        """Returns the expected seconds with overlapping passes over those with turns."""
        acceptance = self._acceptance
        length = self.length_in_turn(costs, longest)
        in_turn = costs.seconds_in_turn(length, acceptance) * (self._in_turn_over_predicted or 1.0)
        overlapping = costs.seconds_overlapping(acceptance) * self._overlapping_over_predicted
        return overlapping / in_turn

    @property
    def _acceptance(self) -> float:
        return acceptance_of(self._accepted, self._rejected)


class RunOverlapping:
    """Whether passes overlap in one run of PEARL: the run follows what `runs` decides, and counts
    its rounds there.

    `costs` are those of the run, `longest` is the greatest length of its drafts in turn.
    `length_in_turn` is the length of drafts where the run begins with turns, which it keeps to its
    end; None where it begins with overlapping passes.

    Such a run has the draft model in a worker, in turn too, and with small models the messages to
    it take as long as overlapping may lose. So it takes turns only if overlapping is slower, not to
    try them, and its rounds in turn say nothing of the seconds in turn.
    """

    def __init__(self, runs: Overlapping, costs: ParallelCosts, longest: int) -> None:
        self._costs = costs
        self.length_in_turn: int | None = None
        if runs.is_in_turn:
            self.length_in_turn = runs.length_in_turn(costs, longest)
        self._runs = runs
        self._longest = longest
        self._has_drafted = False
        self._rounds_in_turn = 0  # of a run that began with overlapping passes

    @property
    def length_of_next(self) -> int | None:
        """The length of the next draft in turn; None: its passes overlap."""
        if self.length_in_turn is not None:
            return self.length_in_turn
        if not self._runs.is_in_turn or self._runs.is_trial:
            return None
        return self._runs.length_in_turn(self._costs, self._longest)

    def add(self, round_: Round, *, in_turn: bool) -> None:
        """Counts a round with passes in turn or with overlapping ones.

        A round without a token of the draft model does not count, nor does the first one with such
        a token, which also waits for the draft model's pass over the prompt.
        """
        draft = round_.draft
        if not draft.entropies or len(draft.forced) == len(draft.tokens):
            return
        if not self._has_drafted:
            self._has_drafted = True
        elif self.length_in_turn is not None or not in_turn:
            self._runs.add(round_, self._costs, self.length_in_turn, self._longest)
        else:
            self._rounds_in_turn += 1
            if self._rounds_in_turn % _PERIOD == 0:
                self._runs.skip_period()


def usual_window(draft_cost: float) -> int:
    """Returns the window where nothing may be measured, for a draft pass that costs `draft_cost`
    target passes."""
    return _rounded(1 / draft_cost)


def _rounded(ratio: float) -> int:
    return min(max(1, round(ratio)), LONGEST_WINDOW)
