"""Learns from verified drafts how likely a drafted token is accepted, given what its drafter knows about it. Imports no torch.

A prior gives each token a score (log odds of acceptance). Offsets of the score are learned, each by a Newton step of logistic
regression after each judged token: one for all tokens, one for each interval of the score, and one for the last tokens only.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from typing import ClassVar

_SMALLEST, _LARGEST = 1e-3, 1 - 1e-3  # probabilities are kept between these
_LARGEST_OFFSET = 1000  # in log odds


def features(entropy: float, top_prob: float, prob: float) -> tuple[float, float, float, float]:
    """Returns what a drafted token's acceptance is predicted from: ln p, -ln(1 - p), sqrt(H) and the log odds of q.

    p is the draft's largest probability and H its entropy (nats), at temperature 1 and without penalties. q is the probability of
    the token in the distribution that it was chosen from. Probabilities are kept between 0.001 and 0.999.
    """
    top = _SMALLEST if top_prob < _SMALLEST else _LARGEST if top_prob > _LARGEST else top_prob
    log_top, log_rest = math.log(top), -math.log(1 - top)
    root = math.sqrt(entropy) if entropy > 0 else 0.0
    if prob == top_prob:
        return log_top, log_rest, root, log_top + log_rest
    chosen = _SMALLEST if prob < _SMALLEST else _LARGEST if prob > _LARGEST else prob
    return log_top, log_rest, root, math.log(chosen / (1 - chosen))


@dataclass(frozen=True, slots=True)
class Prior:
    """The score of a token before anything is learned, and how fast it is corrected.

    The score is `bias` plus the sum of `weights` times features. `edges` are the bounds of the intervals of scores. `strength`
    and `interval_strength` are the weights of the prior, in the unit of p (1 - p) summed over tokens, against what all tokens and
    those of one interval say. `recent_strength` is the same for the last tokens; 0: they have no offset of their own.
    """

    bias: float
    weights: Sequence[float]
    edges: Sequence[float]
    strength: float
    interval_strength: float
    recent_strength: float = 0.0

    def score(self, token: Sequence[float]) -> float:
        return self.bias + float(sum(map(mul, self.weights, token)))

    def mixed(self, other: Prior, share: float) -> Prior:
        """Returns a prior whose bias and weights are between these (share 0) and those of the `other` (share 1)."""
        weights = [own + share * (its - own) for own, its in zip(self.weights, other.weights, strict=True)]
        return replace(self, bias=self.bias + share * (other.bias - self.bias), weights=weights)


@dataclass(slots=True)
class AcceptanceCalibration:
    """Predicts acceptance from a token's score, and learns from judged tokens.

    `offset` is added to all scores, `offsets` to those of each interval. `information` and `informations` are the sums of
    p (1 - p) over the tokens that they were learned from, fading with each further one. `recent` are the sums of the last tokens'
    residuals (accepted - p) and of their p (1 - p); they fade fast.
    """

    prior: Prior
    offset: float = 0.0
    information: float = 0.0
    offsets: list[float] = field(default_factory=list)
    informations: list[float] = field(default_factory=list)
    recent: list[float] = field(default_factory=lambda: [0.0, 0.0])

    FADING: ClassVar[float] = 0.999
    RECENT_FADING: ClassVar[float] = 0.95

    def __post_init__(self) -> None:
        intervals = len(self.prior.edges) + 1
        self.offsets += [0.0] * (intervals - len(self.offsets))
        self.informations += [0.0] * (intervals - len(self.informations))

    def predict(self, score: float) -> float:
        """Returns the probability that a token with this score is accepted, given that the tokens before it were."""
        odds = score + self.offset + self.offsets[bisect(self.prior.edges, score)]
        if strength := self.prior.recent_strength:
            residuals, information = self.recent
            odds += residuals / (information + strength)
        return 1 / (1 + math.exp(-odds)) if odds > -700 else 0.0

    def learn(self, score: float, accepted: bool) -> None:
        """Learns from a judged token: one that the target accepted, or the first one that it rejected."""
        prior, interval, fading = self.prior, bisect(self.prior.edges, score), self.FADING
        odds = score + self.offset + self.offsets[interval]
        expected = 1 / (1 + math.exp(-odds)) if odds > -700 else 0.0
        residual, information = accepted - expected, expected * (1 - expected)
        if prior.recent_strength:
            residuals, informations = self.recent
            self.recent = [residuals * self.RECENT_FADING + residual, informations * self.RECENT_FADING + information]
        self.information = self.information * fading + information
        self.offset += residual / (self.information + prior.strength)
        self.informations[interval] = self.informations[interval] * fading + information
        self.offsets[interval] += residual / (self.informations[interval] + prior.interval_strength)

    def as_dict(self) -> dict[str, list[float]]:
        """Returns the learned numbers, to be saved in a profile."""
        sums = [self.offset, self.information, *self.recent]
        return {"offsets": list(self.offsets), "informations": list(self.informations), "sums": sums}

    @classmethod
    def of_dict(cls, prior: Prior, saved: Mapping[str, Sequence[float]]) -> AcceptanceCalibration:
        """Returns the calibration with the numbers that `as_dict` returned. Raises ValueError for impossible ones."""
        offset, information, *recent = saved["sums"]
        if min(information, recent[1], *saved["informations"]) < 0:
            raise ValueError("a sum of p (1 - p) is negative")
        if max(abs(number) for number in (offset, recent[0], *saved["offsets"])) > _LARGEST_OFFSET:
            raise ValueError(f"an offset is larger than {_LARGEST_OFFSET}")
        return cls(prior, offset, information, list(saved["offsets"]), list(saved["informations"]), list(recent))

    def copy(self) -> AcceptanceCalibration:
        return replace(self, offsets=list(self.offsets), informations=list(self.informations), recent=list(self.recent))
