"""Learns from verified drafts how likely a drafted token is accepted, given what its drafter knows about it. Imports no torch.

A prior gives each token a score (log odds of acceptance). What is learned is an offset of the score: one for all tokens and one
for each interval of the score, both from counts of accepted tokens. Old counts fade, so that it follows a change of the text.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_SMALLEST, _LARGEST = 1e-3, 1 - 1e-3  # probabilities are kept between these


def _bounded(probability: float) -> float:
    return _SMALLEST if probability < _SMALLEST else _LARGEST if probability > _LARGEST else probability


def log_odds(probability: float) -> float:
    """Returns ln(p / (1 - p)), with p kept between 0.001 and 0.999."""
    bounded = _bounded(probability)
    return math.log(bounded / (1 - bounded))


def probability(odds: float) -> float:
    """Returns the probability with these log odds."""
    return 1 / (1 + math.exp(-odds)) if odds > -700 else 0.0


def features(entropy: float, top_prob: float, prob: float) -> tuple[float, float, float, float]:
    """Returns what a drafted token's acceptance is predicted from: ln p, -ln(1 - p), sqrt(H) and the log odds of q.

    p is the draft's largest probability and H its entropy (nats), at temperature 1 and without penalties. q is the probability of
    the token in the distribution that it was chosen from. Probabilities are kept between 0.001 and 0.999.
    """
    top, chosen = _bounded(top_prob), _bounded(prob)
    return math.log(top), -math.log(1 - top), math.sqrt(max(entropy, 0.0)), math.log(chosen / (1 - chosen))


@dataclass(frozen=True, slots=True)
class Prior:
    """The score of a token before anything is learned, and how fast it is corrected.

    The score is `bias` plus the sum of `weights` times features. `edges` are the bounds of the intervals of scores. `strength`
    and `interval_strength` are how many tokens the prior counts as, for all tokens and for those of one interval; `rate` is the
    acceptance rate assumed at the beginning.
    """

    bias: float
    weights: Sequence[float]
    edges: Sequence[float]
    strength: float
    interval_strength: float
    rate: float = 0.8

    def score(self, token: Sequence[float]) -> float:
        return self.bias + sum(map(float.__mul__, self.weights, token))


@dataclass(slots=True)
class AcceptanceCalibration:
    """Predicts acceptance from a token's score, and learns from judged tokens.

    `accepted`, `predicted` and `judged` count tokens by interval of the score (`predicted`: the sum of the prior's
    probabilities); the `all_` fields count all tokens. Counts fade with each judged token.
    """

    prior: Prior
    accepted: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    judged: list[float] = field(default_factory=list)
    all_accepted: float = 0.0
    all_predicted: float = 0.0
    all_judged: float = 0.0
    _offset: float | None = field(default=None, init=False, compare=False)  # of all scores; None after a token was judged
    _corrections: dict[int, float] = field(default_factory=dict, init=False, compare=False)  # by interval, likewise

    FADING = 0.998  # of the counts of all tokens, for each judged token
    INTERVAL_FADING = 0.9994  # of the counts of an interval, for each judged token in it

    def __post_init__(self) -> None:
        intervals = len(self.prior.edges) + 1
        for counts in (self.accepted, self.predicted, self.judged):
            counts.extend([0.0] * (intervals - len(counts)))

    def predict(self, score: float) -> float:
        """Returns the probability that a token with this score is accepted, given that the tokens before it were."""
        interval = bisect(self.prior.edges, score)
        correction = self._corrections.get(interval)
        if correction is None:
            correction = self._corrections[interval] = self._correction(interval)
        return probability(score + correction)

    def learn(self, score: float, accepted: bool) -> None:
        """Counts a judged token: one that the target accepted, or the first one that it rejected."""
        expected, fading = probability(score), self.FADING
        self.all_accepted = self.all_accepted * fading + accepted
        self.all_predicted = self.all_predicted * fading + expected
        self.all_judged = self.all_judged * fading + 1
        interval, fading = bisect(self.prior.edges, score), self.INTERVAL_FADING
        self.accepted[interval] = self.accepted[interval] * fading + accepted
        self.predicted[interval] = self.predicted[interval] * fading + expected
        self.judged[interval] = self.judged[interval] * fading + 1
        self._offset = None
        self._corrections.clear()

    def _correction(self, interval: int) -> float:
        """Returns what to add to the scores in an interval: the offset of all tokens, corrected by the interval's own."""
        prior, judged = self.prior, self.judged[interval]
        if self._offset is None:
            weight, assumed = self.all_judged + prior.strength, prior.strength * prior.rate
            rates = (self.all_accepted + assumed) / weight, (self.all_predicted + assumed) / weight
            self._offset = log_odds(rates[0]) - log_odds(rates[1])
        if not judged:
            return self._offset
        predicted, strength = log_odds(self.predicted[interval] / judged), prior.interval_strength
        accepted = self.accepted[interval] + strength * probability(predicted + self._offset)
        return log_odds(accepted / (judged + strength)) - predicted

    def as_dict(self) -> dict[str, list[float]]:
        """Returns the counts, to be saved in a profile."""
        total = [self.all_accepted, self.all_predicted, self.all_judged]
        return {"accepted": self.accepted, "predicted": self.predicted, "judged": self.judged, "all": total}

    @classmethod
    def of_dict(cls, prior: Prior, counts: Mapping[str, Sequence[float]]) -> AcceptanceCalibration:
        """Returns the calibration with the counts that `as_dict` returned.

        Raises ValueError if more tokens were accepted than judged.
        """
        pairs = zip((*counts["accepted"], counts["all"][0]), (*counts["judged"], counts["all"][2]), strict=True)
        if any(accepted > judged for accepted, judged in pairs):
            raise ValueError("more tokens were accepted than judged")
        accepted, predicted, judged = (list(counts[name]) for name in ("accepted", "predicted", "judged"))
        all_accepted, all_predicted, all_judged = counts["all"]
        return cls(prior, accepted, predicted, judged, all_accepted, all_predicted, all_judged)

    def copy(self) -> AcceptanceCalibration:
        counts = list(self.accepted), list(self.predicted), list(self.judged)
        return AcceptanceCalibration(self.prior, *counts, self.all_accepted, self.all_predicted, self.all_judged)
