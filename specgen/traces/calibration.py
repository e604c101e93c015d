"""How well a length policy predicts acceptance: predicted probabilities against the share of tokens that was accepted.

A prediction is judged if the token was accepted or rejected, that is if all tokens before it were accepted. In a draft that is a
tree, a level is judged: accepted if one of its tokens was. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from specgen.base.types import Round

INTERVALS = 10  # of the predicted probability, of equal width
_Z95 = 1.959964


class Prediction(NamedTuple):
    """A predicted acceptance probability, and whether the token (the level of a tree) was accepted."""

    probability: float
    accepted: bool


@dataclass(frozen=True, slots=True)
class AcceptanceBin:
    """How many of the `verified` tokens of a group were accepted.

    Tokens are grouped by a number that is at least `low` and below `high`.
    """

    low: float
    high: float
    verified: int
    accepted: int

    @property
    def rate(self) -> float:
        return self.accepted / self.verified

    @property
    def interval(self) -> tuple[float, float]:
        """Both ends of the 95 % Wilson confidence interval of the acceptance rate."""
        n, p, z = self.verified, self.rate, _Z95
        centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))

    def as_dict(self) -> dict[str, Any]:
        """The numbers for `specgen inspect --json`."""
        low, high = self.interval
        counts = {"low": self.low, "high": self.high, "judged": self.verified, "accepted": self.accepted}
        return {**counts, "rate": self.rate, "rate_low": low, "rate_high": high}


@dataclass(frozen=True, slots=True)
class CalibrationBin(AcceptanceBin):
    """The judged tokens whose predicted probability is between `low` and `high`; `predicted` is their mean prediction."""

    predicted: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Predicted against observed acceptance, over `judged` predictions.

    `predicted` is the mean prediction and `rate` the share that was accepted. `error` is the expected calibration error: the
    mean distance of the two over the `bins`, weighted by their numbers of tokens.
    """

    judged: int
    predicted: float
    rate: float
    error: float
    bins: tuple[CalibrationBin, ...]

    def as_dict(self) -> dict[str, Any]:
        """The numbers for `specgen inspect --json`."""
        bins = [{**found.as_dict(), "predicted": found.predicted} for found in self.bins]
        return {"judged": self.judged, "predicted": self.predicted, "rate": self.rate, "error": self.error, "bins": bins}


def judged_predictions(round_: Round) -> Iterator[Prediction]:
    """Yields the round's predictions that were judged: those of accepted tokens and of the first rejected one."""
    accepted = len(round_.verdict.path)
    judged = accepted + (round_.verdict.source == "correction")
    for position, probability in enumerate(round_.draft.predicted[:judged]):
        if not math.isnan(probability):
            yield Prediction(probability, position < accepted)


def calibration_of(predictions: Sequence[Prediction]) -> Calibration | None:
    """Compares predictions with what happened. Intervals without predictions are left out; None without predictions."""
    if not predictions:
        return None
    groups: dict[int, list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault(min(int(prediction.probability * INTERVALS), INTERVALS - 1), []).append(prediction)
    bins = tuple(_bin(number, groups[number]) for number in sorted(groups))
    count = len(predictions)
    return Calibration(
        count,
        fmean(prediction.probability for prediction in predictions),
        sum(prediction.accepted for prediction in predictions) / count,
        sum(found.verified * abs(found.predicted - found.rate) for found in bins) / count,
        bins,
    )


def _bin(number: int, group: Sequence[Prediction]) -> CalibrationBin:
    accepted, predicted = sum(each.accepted for each in group), fmean(each.probability for each in group)
    return CalibrationBin(number / INTERVALS, (number + 1) / INTERVALS, len(group), accepted, predicted)
