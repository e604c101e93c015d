"""Runs of accepted tokens: the drafted tokens that a target accepts between two rejections (PEARL, section 4.2 and Table 4).

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from specgen.base.types import Round
from specgen.pair.figures import Summary


def complete_runs(rounds: Iterable[Round]) -> Iterator[int]:
    """Yields the number of accepted tokens before each rejection of one output, as PEARL's authors count them.

    What follows the last rejection is no complete run: the output's end, not the target, ended it.
    """
    accepted = 0
    for round_ in rounds:
        accepted += len(round_.verdict.path)
        if round_.verdict.source == "correction":
            yield accepted
            accepted = 0


@dataclass(frozen=True, slots=True)
class AcceptedRuns:
    """The measured runs beside what PEARL's Theorem 2 expects of them.

    `alpha` is the probability that a token is accepted: accepted / judged tokens, where the judged ones are the accepted and the
    rejected ones. `mean` is the mean length of the `complete` runs with the token that corrects each, `expected` the same by
    Theorem 2: 1 / (1 - alpha). It may be larger than `mean`, because long runs are more often cut short by the output's end:
    `unfinished` counts the tokens that were accepted after the last rejection of their output.
    The theorem assumes that tokens are accepted independently and with the same probability. `deviation` is the standard
    deviation of the runs' lengths, `expected_deviation` its value under this assumption: sqrt(alpha) / (1 - alpha).

    `Summary.mean_accepted_run` is alpha / (1 - alpha) by its definition, so it cannot test the theorem.
    """

    complete: int
    alpha: float
    mean: float
    expected: float
    deviation: float
    expected_deviation: float
    longest: int
    unfinished: int


def accepted_runs(summary: Summary, lengths: Sequence[int]) -> AcceptedRuns | None:
    """Returns the statistics of the complete runs with these lengths; None if nothing was rejected.

    `summary` counts the accepted tokens and the rejections of the same outputs, unfinished runs included.
    """
    if not lengths:
        return None
    rejected = summary.rejections / (summary.accepted + summary.rejections)
    alpha = 1 - rejected
    deviations = pstdev(lengths), math.sqrt(alpha) / rejected
    unfinished = summary.accepted - sum(lengths)
    return AcceptedRuns(len(lengths), alpha, fmean(lengths) + 1, 1 / rejected, *deviations, max(lengths), unfinished)
