"""What the length policy `adaptive` learns about a drafter, from run to run: what drafting costs,
and what is accepted.

Imports no torch.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import median

from specgen.base.measuring import spread
from specgen.decoding.costs import RoundCosts

# a further token also shows whether those after it are worth drafting, which its own worth does not
# count
OPTION = 1.1
# rounds
SHORTEST_PAUSE = 4
LONGEST_PAUSE = 1024
# acceptance rates from which the first worth of a token is computed
_MODEL_RATE = 0.8
_LOOKUP_RATE = 0.5
_COST_TOKENS = 10.0  # the worth that is assumed at first counts as much as this many tokens
# score of a copied token: a constant and the weight of ln(match length); fitted to the bundled
# target
_COPIED = (-1.2, 0.8)
# sums over rounds are multiplied by this for each round, sums of gains for each draft
_FADING = 0.97
_IDLE_FADING = 0.98  # sums of gains are multiplied by this for each round without a draft
# the gain assumed at first, how many drafts it counts as, and the fewest
_FIRST_GAIN = 0.6
_DRAFTS = 10.0
_FEWEST_DRAFTS = 0.2
_SHRINKING = 0.85
# factors on sums over all tokens and over the last ones, for each token
_LONG = 0.999
_RECENT = 0.95
_RECENT_STRENGTH = 5.0
_USUAL = 6  # drafted tokens: costs per token are taken at this length
# seconds: other times are no measurement
_SHORTEST = 1e-9
_LONGEST = 1e9
# from which costs are learned
_LAST_PASSES = 64
_LAST_DRAFTS = 32
_OUTLIER = 3.0  # a time counts as at most this many times the usual one
# each of the first rounds changes the costs, later every eighth, and in long pauses, in which only
# the unit of costs changes, every 64th: it takes as long as drafting a token
_EACH = 16
_EVERY = 8
_EVERY_IDLE = _LAST_PASSES
# target passes: a draft that is usually shorter may take this many times `_OUTLIER` too
_LEAST_DRAFT = 0.1
# if the first token costs more than this many further ones, the drafter makes all in one pass
_BLOCK_RATIO = 3.0
_WIDEST = 8  # drafted tokens; the guess counts as measured passes of none and of this many
# as how many passes each of the two: more would pull the line, as few widths are seen and this is
# far from them
_TRUST = 0.05
# of acceptance by level: a factor on its sums for each draft, and how many tokens of the level
# before each level's begin with
_LEVEL_FADING = 0.97
_LEVEL_TRUST = 3.0
_EXTENDED = 0.5  # as how many passes without drafted tokens the line through the others counts


@dataclass(frozen=True, slots=True)
class DraftingCosts:
    """The costs of drafting and of verifying one more token, in units of a target pass over one
    token.

    `draft` is the cost of one more drafted token (one more level, for a tree), `verify` what a
    drafted token adds to the target's pass. `start` is a cost per draft: that of the pass of a
    drafter that computes all its tokens at once, 0 for other drafters. `verify_start` is what the
    first drafted token adds to the target's pass besides `verify`: much in a mixture of experts,
    where the first few tokens of a pass need more new experts than later ones.
    """

    draft: float
    verify: float
    start: float = 0.0
    verify_start: float = 0.0

    @classmethod
    def of_rounds(cls, costs: RoundCosts, context_length: int) -> DraftingCosts:
        """Converts measured seconds of rounds to costs in target passes, for a context of
        `context_length` tokens."""
        single = costs.verification_cost.at(1, context_length)
        verify, verify_start = verifying(
            lambda tokens: costs.verification_cost.at(tokens, context_length), _USUAL + 1
        )
        first, whole = (costs.draft_cost.at(length, context_length) for length in (1, _USUAL))
        further = max(0.0, whole - first) / (_USUAL - 1)
        # a drafter of single tokens takes about as long for the first as for each further one
        start = first - further if first > _BLOCK_RATIO * further else 0.0
        draft = (whole - start) / _USUAL + costs.signal_cost
        return cls(draft / single, verify, start / single, verify_start)

    def with_values(self, draft: float | None, verify: float | None) -> DraftingCosts:
        """Returns these costs with the given `draft` and `verify`; None keeps its own. A given
        `verify` holds for all drafted tokens: `verify_start` is then 0."""
        drafting = self.draft if draft is None else draft
        if verify is not None:
            return DraftingCosts(drafting, verify, self.start)
        return replace(self, draft=drafting)

    def of_draft(self, levels: int, tokens: int) -> float:
        """Returns the cost of drafting `levels` tokens in a row (levels of a tree) and of verifying
        `tokens` drafted tokens."""
        return (
            (self.start if levels else 0.0)
            + (self.verify_start if tokens else 0.0)
            + self.of_further(levels, tokens)
        )

    def of_further(self, levels: int, tokens: int) -> float:
        """Returns the cost of `levels` more drafted tokens and of verifying `tokens` more, in a
        draft that has begun."""
        return levels * self.draft + tokens * self.verify

    def at_most(self, bounds: DraftingCosts) -> DraftingCosts:
        """Returns these costs, each at most as large as that of `bounds`."""
        return DraftingCosts(
            min(self.draft, bounds.draft),
            min(self.verify, bounds.verify),
            min(self.start, bounds.start),
            min(self.verify_start, bounds.verify_start),
        )

    def time_per_token(self, acceptance: float, longest: int = 16) -> float:
        """Returns the lowest expected cost per output token with drafts of a fixed length, at most
        `longest` tokens.

        Each drafted token is accepted with probability `acceptance`, independently. At most 1:
        plain decoding.
        """
        tokens = 1.0
        best = 1.0
        for length in range(1, longest + 1):
            tokens += acceptance**length
            best = min(best, (1 + self.of_draft(length, length)) / tokens)
        return best

    def differs(self, other: DraftingCosts, factor: float) -> bool:
        """Whether drafting and verifying one token costs more than `factor` times as much as with
        the `other` costs, or the reverse."""
        own = self.of_draft(1, 1)
        its = other.of_draft(1, 1)
        return max(own, its) > factor * min(own, its)


_MOST = DraftingCosts(2.0, 1.0, 8.0, 1.0)  # learned costs; a token does not pay from 1 on
_TRIAL = DraftingCosts(0.5, 0.2, 0.5, 0.2)  # with which a short draft pays if it is accepted
_TRIAL_INTERVAL = 16  # rounds without a draft before the first trial
_STALL = 8.0  # target passes: a drafted token that takes longer says little about drafting, ...
_EQUAL_TRIALS = 6  # ... so this many of such trials double the interval, as one other does


def verifying(seconds: Callable[[int], float], widest: int) -> tuple[float, float]:
    """Returns `DraftingCosts.verify` and `verify_start` for the seconds of target passes over 1, 2
    and `widest` (above 2) tokens.

    By these costs the pass over `widest` tokens takes as long as it did. So does the pass over 2,
    unless it took less than the straight line from 1 token to `widest` says: then `verify_start` is
    0.
    """
    single = seconds(1)
    further = widest - 1
    mean = max(0.0, seconds(widest) / single - 1) / further
    start = max(0.0, seconds(2) / single - 1 - mean) * further / (further - 1)
    return max(0.0, mean - start / further), start


class LearnedCosts:
    """Learns the costs of drafting from the times of rounds. `guess` are the costs at the
    beginning, `costs` those learned so far.

    The cost of verification is the slope of a line through the seconds of target passes with
    drafted tokens, over their number. The median of the passes without drafted tokens is the unit;
    `verify_start` is what the line is above it at 0. The cost of drafting is the mean of the
    seconds per drafted token. If the guess has a `start` (all tokens of a draft are computed in one
    pass), it is the slope of another line, through the seconds of drafts over their tokens, and
    `start` is what that line is at 0. Target passes and drafts with the times that the guess
    predicts are counted as if they had been measured.

    A disturbance (a stall, a busy machine) makes a round longer, never shorter. So each time counts
    as at most `_OUTLIER` times the lower quartile of the last ones, which stays right while fewer
    than three quarters of them are disturbed. The costs follow from the last rounds alone: nothing
    that came before them is left in an estimate.

    Costs that forbid a draft would stay for good, because only drafts show what drafting costs.
    After some rounds without a draft `costs` are therefore low enough for a short one, and its
    times decide.
    """

    def __init__(self, guess: DraftingCosts) -> None:
        self.guess = self.costs = guess
        self.is_lowered = False  # the costs were lowered for a trial after the last round
        self.rounds = 0
        # drafted tokens, seconds of the target's pass
        self._passes: deque[tuple[int, float]] = deque(maxlen=_LAST_PASSES)
        # drafted tokens (levels of a tree), seconds
        self._drafts: deque[tuple[int, float]] = deque(maxlen=_LAST_DRAFTS)
        self._idle = 0  # rounds since the last draft
        # drafts after such a pause, one after the other, that were too expensive again
        self._refused = 0

    def add(self, levels: int, drafting: float, tokens: int, verification: float) -> None:
        """Learns from the times of a round. The arguments are those of
        `LengthPolicy.observe_seconds`.

        Times that cannot be, as of a clock that stands or is set, are left out.
        """
        has_model = self.guess.draft > 0 or self.guess.start > 0
        has_drafted = levels > 0 if has_model else tokens > 0
        was_trial = has_drafted and self.is_trial
        self._idle = 0 if has_drafted else self._idle + 1

        if _SHORTEST < verification < _LONGEST:
            if was_trial:
                self._judge_trial(levels, drafting, tokens, verification)
            self.rounds += 1
            self._passes.append((tokens, verification))
            if levels and _SHORTEST < drafting < _LONGEST:
                self._drafts.append((levels, drafting))
            if was_trial or self._is_due:
                self.costs = self._estimate()
            if self._refused and has_drafted and self.costs == self.costs.at_most(_TRIAL):
                self._refused = 0

        learned = self.costs
        if self.is_trial:
            self.costs = learned.at_most(_TRIAL)
        self.is_lowered = self.costs != learned

    @property
    def spread(self) -> float:
        """How much the times of the last passes scatter, relative to what the costs predict: see
        `measuring.spread`."""
        return spread(
            [seconds / (1 + self.costs.of_draft(0, tokens)) for tokens, seconds in self._passes]
        )

    def _judge_trial(self, levels: int, drafting: float, tokens: int, verification: float) -> None:
        """Forgets the drafts before the pause if this draft after it was cheap; counts it as
        refused otherwise."""
        single = self._verification()[0]
        allowed = single * (1 + _TRIAL.of_draft(levels, tokens))
        if drafting + verification > allowed:
            is_stall = drafting > _STALL * levels * single or verification > single * (2 + tokens)
            self._refused += 1 if is_stall else _EQUAL_TRIALS
            return
        self._drafts.clear()
        while len(self._passes) > _TRIAL_INTERVAL:
            self._passes.popleft()

    @property
    def is_trial(self) -> bool:
        """Whether the next round shall draft, whatever was learned, because so many rounds had no
        draft.

        This number of rounds grows with each such trial that was too expensive, and less if only a
        stall of the machine made it expensive.
        """
        doublings = self._refused // _EQUAL_TRIALS
        return self._idle >= min(_TRIAL_INTERVAL << min(doublings, 10), LONGEST_PAUSE)

    @property
    def _is_due(self) -> bool:
        """Whether the costs are to be estimated after this round."""
        if self.rounds <= _EACH:
            return True
        every = _EVERY if self._idle < _LAST_PASSES else _EVERY_IDLE
        return self.rounds % every == 0

    def _estimate(self) -> DraftingCosts:
        guess = self.guess
        single, first, slope = self._verification()
        if guess.start:
            start, drafting = self._block_drafting(single)
        else:
            start, drafting = 0.0, self._drafting(single)
        verify_start = max(0.0, first / single - 1)
        return DraftingCosts(drafting, slope / single, start, verify_start).at_most(_MOST)

    def _verification(self) -> tuple[float, float, float]:
        """Returns the seconds of a pass over one token (the unit), and the line through the passes
        with drafted tokens: see `_verification_line`."""
        widths = {tokens for tokens, _ in self._passes}
        expected = {tokens: 1 + self.costs.of_draft(0, tokens) for tokens in widths}
        usual = _lower([seconds / expected[tokens] for tokens, seconds in self._passes], 4)
        most = {tokens: _OUTLIER * usual * times for tokens, times in expected.items()}
        plain = list[float]()
        verified = list[tuple[int, float]]()
        for tokens, seconds in self._passes:
            limit = most[tokens]
            if seconds > limit:
                seconds = limit
            if tokens:
                verified.append((tokens, seconds))
            else:
                plain.append(seconds)
        first, slope = self._verification_line(verified, usual)
        single = first
        if plain:
            single = (len(plain) * median(plain) + _EXTENDED * first) / (len(plain) + _EXTENDED)
        return single, first, slope

    def _verification_line(
        self, verified: Sequence[tuple[int, float]], single: float
    ) -> tuple[float, float]:
        """Returns the line through the target passes with drafted tokens: its seconds for none, and
        its slope.

        `single` is about the time of a pass over one token. A drafted token takes no longer than a
        pass of its own, which bounds the slope.
        """
        begin = single * (1 + self.guess.verify_start)
        least = min((seconds / (1 + tokens) for tokens, seconds in verified), default=0.0)
        return _line(verified, begin, single * self.guess.verify, least)

    def _drafting(self, single: float) -> float:
        """Returns the mean cost of a drafted token in units of `single` seconds."""
        guess = self.guess.draft
        costs = [(levels, seconds / single) for levels, seconds in self._drafts]
        usual = _lower([guess, *(cost / levels for levels, cost in costs)], 3)
        total = guess
        counted = 1
        for levels, cost in costs:
            total += min(cost, _OUTLIER * max(usual * levels, _LEAST_DRAFT))
            counted += levels
        return total / counted

    def _block_drafting(self, single: float) -> tuple[float, float]:
        """Returns the costs of a draft's pass and of a token in it, in units of `single`
        seconds."""
        guess = self.guess
        costs = [(levels, seconds / single) for levels, seconds in self._drafts]
        expected = {levels: guess.start + levels * guess.draft for levels, _ in costs}
        usual = _lower([1.0, *(cost / expected[levels] for levels, cost in costs)], 3)
        measured = [
            (levels, min(cost, _OUTLIER * max(usual * expected[levels], _LEAST_DRAFT)))
            for levels, cost in costs
        ]
        return _line(measured, guess.start, guess.draft, 0.0)


def _line(
    points: Sequence[tuple[int, float]], begin: float, slope: float, least: float
) -> tuple[float, float]:
    """Returns the line through points (x, y): its value at 0, which is at least `least`, and its
    slope, which is not negative.

    A line that is `begin` at 0 and has this `slope` counts as two further points, of little weight.
    """
    far = begin + slope * _WIDEST
    count = len(points) + 2 * _TRUST
    x = _TRUST * _WIDEST
    xx = _TRUST * _WIDEST**2
    y = _TRUST * (begin + far)
    xy = _TRUST * _WIDEST * far
    for at, value in points:
        x += at
        xx += at * at
        y += value
        xy += at * value
    slope = max(0.0, (count * xy - x * y) / (count * xx - x * x))
    first = (y - slope * x) / count
    if first < least:
        first = least
        slope = max(0.0, y - least * count) / x
    return first, slope


def _lower(values: Sequence[float], parts: int) -> float:
    """Returns a quantile of the values: with 4 `parts` the lower quartile."""
    return sorted(values)[len(values) // parts]


@dataclass(slots=True)
class Acceptance:
    """Predicts from a token's score (log odds) whether it is accepted, and learns from tokens that
    were accepted or rejected.

    The score is corrected by two learned offsets. `offset` is learned from all tokens, by a Newton
    step of logistic regression after each; the second one, from the last tokens alone. `strength`
    is the weight of the prior, which is an offset of 0, in units of p (1 - p): a larger one makes
    the offset move less with each token.
    """

    strength: float
    offset: float = 0.0
    information: float = 0.0  # sum of p (1 - p) over the tokens
    residuals: float = 0.0  # sum of (accepted - p) over the last tokens
    recent: float = 0.0  # as `information`, over the last tokens

    def predict(self, score: float) -> float:
        """Returns the probability that a token with this score is accepted, given that the tokens
        before it were."""
        return _probability(score + self.offset + self.residuals / (self.recent + _RECENT_STRENGTH))

    def learn(self, score: float, accepted: bool) -> None:
        """Learns that a drafted token with this score was `accepted`, or was not: `predict` then
        returns more, or less, for all tokens.

        Call it for each token that the target has accepted, and for the first one that it has
        rejected.
        """
        expected = _probability(score + self.offset)
        residual = accepted - expected
        information = expected * (1 - expected)
        self.residuals = _RECENT * self.residuals + residual
        self.recent = _RECENT * self.recent + information
        self.information = _LONG * self.information + information
        self.offset += residual / (self.information + self.strength)


@dataclass(slots=True)
class CopiedAcceptance(Acceptance):
    """Predicts whether tokens that are copied from the context are accepted, from the lengths of
    their matches: how many tokens before a token equal those before the one that it copies."""

    strength: float = 10.0

    def of_matches(self, match_length: int) -> Iterator[float]:
        """Yields the acceptance probability of each copied token after a match, given that those
        before it are accepted. Endless: each copied token makes the match longer."""
        for length in itertools.count(match_length):
            yield self.predict(_copied_score(length))

    def learn_match(self, match_length: int, agreed: int, *, ended: bool) -> None:
        """Learns how well a match predicted: see `LengthPolicy.observe_match`."""
        for position in range(agreed + ended):
            self.learn(_copied_score(match_length + position), position < agreed)


@cache
def _copied_score(match_length: int) -> float:
    return _COPIED[0] + _COPIED[1] * math.log(match_length)


def _probability(odds: float) -> float:
    return 1 / (1 + math.exp(-odds)) if odds > -700 else 0.0


@dataclass(slots=True)
class LevelAcceptance:
    """How often a draft's token on each level is accepted, given that those before it are.

    `accepted` and `judged` are numbers of tokens by level, of which older ones count less. A level
    of which little is known counts as the level before it.
    """

    accepted: list[float] = field(default_factory=list)
    judged: list[float] = field(default_factory=list)

    def learn(self, drafted: int, accepted: int) -> None:
        """Learns from a draft of so many tokens."""
        missing = drafted - len(self.judged)
        self.accepted += [0.0] * missing
        self.judged += [0.0] * missing
        for level in range(len(self.judged)):
            self.accepted[level] = _LEVEL_FADING * self.accepted[level] + (level < accepted)
            is_judged = level < min(accepted + 1, drafted)
            self.judged[level] = _LEVEL_FADING * self.judged[level] + is_judged

    def longest(self, worth: float, cost: float, most: int) -> int:
        """Returns how many tokens, at least 1 and at most `most`, are expected to be worth more
        than they cost, where an accepted token is worth `worth`, and each costs `cost`."""
        survival = 1.0
        rate = _MODEL_RATE
        for level in range(most):
            if level < len(self.judged):
                known = self.accepted[level] + _LEVEL_TRUST * rate
                rate = known / (self.judged[level] + _LEVEL_TRUST)
            survival *= rate
            if survival * worth * OPTION <= cost:
                return max(level, 1)
        return most


@dataclass(slots=True)
class DraftingGuard:
    """Pauses drafting after it has lost more than a budget, so that what drafting can lose is
    bounded, whatever the predictions say.

    Losses are in units of a target pass over one token: the cost of a round minus the tokens that
    it gave, because plain decoding pays one unit for each token. They are summed over rounds with a
    draft. If the sum is above the budget, drafting pauses, the budget is subtracted from the sum,
    and the next pause will be twice as long. If the sum is below minus the budget, it is set to 0,
    and the next pause will be half as long. So whatever is accepted, n rounds lose at most b * (3 +
    log2(1 + n / `SHORTEST_PAUSE`) + n / `LONGEST_PAUSE`) units against plain decoding, where b is
    the budget or the loss of one round, whichever is larger.
    """

    loss: float = 0.0
    pause: int = SHORTEST_PAUSE  # rounds of the next pause
    left: int = 0  # rounds that are left of this pause

    def pauses(self) -> bool:
        """Whether the next round drafts nothing because of a pause. If so, this call counts the
        round as one of the pause."""
        if not self.left:
            return False
        self.left -= 1
        return True

    def count(self, cost: float, tokens: int, budget: float) -> None:
        """Adds a round with a draft: its cost, in target passes over one token, and the output
        tokens that it gave. May begin a pause."""
        self.loss += cost - tokens
        if self.loss > budget:
            self.left = self.pause
            # one huge loss costs one pause, not one after another
            self.loss = min(self.loss - budget, budget)
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
        elif self.loss < -budget:
            self.pause = max(self.pause // 2, SHORTEST_PAUSE)
            self.loss = 0.0


@dataclass(slots=True)
class Learned:
    """What the length policy `adaptive` has learned about a drafter of a pair. Kept from run to
    run.

    `token` predicts the acceptance of a drafted token, `following` that of the token after it,
    `lookup` that of a token copied by prompt lookup, and `levels` that of a block's tokens before
    they are computed. `cost` and `tokens` are sums over rounds, from which the worth of a token is
    computed. `gain`, `squares` and `drafts` are sums over the draft model's drafts: what they
    gained, the squares of this, and their number. In all sums, older rounds count less. Costs and
    gains are in units of a target pass over one token. The mean gain begins at an assumed value,
    which counts as `trust` drafts. `trust` falls with each draft of which nothing is accepted, so
    that drafts of a useless model are tried ever more rarely. `guard` and `lookup_guard` pause
    drafting by the model and by prompt lookup after losses.
    """

    cost: float
    tokens: float
    gain: float = 0.0
    squares: float = 0.0
    drafts: float = 0.0
    trust: float = _DRAFTS
    token: Acceptance = field(default_factory=lambda: Acceptance(5.0))
    following: Acceptance = field(default_factory=lambda: Acceptance(10.0))
    lookup: CopiedAcceptance = field(default_factory=CopiedAcceptance)
    levels: LevelAcceptance = field(default_factory=LevelAcceptance)
    guard: DraftingGuard = field(default_factory=DraftingGuard)
    lookup_guard: DraftingGuard = field(default_factory=DraftingGuard)

    @classmethod
    def prior(cls, costs: DraftingCosts, *, has_model: bool = True) -> Learned:
        """Returns what is assumed before anything is learned, at these costs. `has_model`: a model
        drafts; otherwise prompt lookup alone."""
        return cls(
            _COST_TOKENS * costs.time_per_token(_MODEL_RATE if has_model else _LOOKUP_RATE),
            _COST_TOKENS,
        )

    @property
    def worth(self) -> float:
        """The worth of an output token: the cost per output token so far. At most 1, which is the
        cost in plain decoding."""
        return min(1.0, self.cost / self.tokens)

    @property
    def mean_gain(self) -> float:
        """The mean gain of the model's last drafts. While nothing is drafted, it returns towards
        the gain that is assumed at first."""
        return (self.gain + self.trust * _FIRST_GAIN) / (self.drafts + self.trust)

    @property
    def highest_gain(self) -> float:
        """The mean gain and its standard error: a few drafts that were rejected by chance do not
        show that the next one loses."""
        if not self.drafts:
            return self.mean_gain
        variance = self.squares / self.drafts - (self.gain / self.drafts) ** 2
        return self.mean_gain + math.sqrt(max(0.0, variance) / max(self.drafts, 1.0))

    def add_round(self, cost: float, tokens: int) -> None:
        """Adds a round, with or without a draft: its cost, and the number of output tokens that it
        gave."""
        self.cost = _FADING * self.cost + cost
        self.tokens = _FADING * self.tokens + tokens

    def add_draft(self, accepted: int, cost: float) -> None:
        """Adds a model's draft: the number of accepted tokens, and its cost of drafting and
        verification."""
        gain = accepted * self.worth - cost
        self.gain = _FADING * self.gain + gain
        self.squares = _FADING * self.squares + gain * gain
        self.drafts = _FADING * self.drafts + 1
        self.trust = _DRAFTS if accepted else max(_FEWEST_DRAFTS, _SHRINKING * self.trust)

    def forget_gains(self) -> None:
        """Goes back to the gain that is assumed at first: the learned one came from wrong costs."""
        self.gain = 0.0
        self.squares = 0.0
        self.drafts = 0.0

    def add_idle(self) -> None:
        """Adds a round in which the model did not draft."""
        self.gain = _IDLE_FADING * self.gain
        self.squares = _IDLE_FADING * self.squares
        self.drafts = _IDLE_FADING * self.drafts


@dataclass(frozen=True, slots=True)
class AdaptiveInputs:
    """What a run's length policy `adaptive` decides by: the costs of drafting, and what was learned
    about the drafter.

    `costs` are the costs at the beginning of the run. `timed` learns them from the times of the
    run's rounds; None: they stay as they are. `learned` changes during the run. `in_parallel`:
    drafts are made during the target's passes (PEARL), and cost nothing. `temperature` is 0 in
    greedy decoding. Runs with the same `key` share what they learn, also those whose policy decides
    in another process; None: this run shares nothing. `sizes_blocks`: the drafter computes a whole
    draft in one pass, whose length has to be chosen before.
    """

    costs: DraftingCosts
    learned: Learned
    in_parallel: bool = False
    temperature: float = 0.0
    key: Hashable = None
    timed: LearnedCosts | None = None
    sizes_blocks: bool = False
