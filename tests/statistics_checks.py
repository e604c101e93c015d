"""The chi-square test of sampled outputs against their exact distribution."""

from __future__ import annotations

from collections import Counter
from contextlib import closing

from scipy.stats import chi2

from specgen.decoding.run import Run
from specgen.testing.enumeration import Distribution

# One false alarm in 10,000 for each test. A total variation of 0.1 and more is certain to be found;
# smaller errors are found by the enumerations of `test_enumeration.py`, and by more runs under `-m
# slow`.
SIGNIFICANCE = 1e-4
TOKENS = 3  # whose joint distribution is tested
# new tokens of a run: enough that several tokens are drafted before the first `TOKENS` are there
LENGTH = 8


def first_tokens(run: Run) -> tuple[int, ...]:
    """The first `TOKENS` tokens of a run's output, or fewer if it ends before. The run is ended as
    soon as they are there."""
    tokens: list[int] = []
    with closing(run.rounds()) as rounds:  # type: ignore[type-var]
        for round_ in rounds:
            tokens += round_.token_ids
            if len(tokens) >= TOKENS:
                break
    return tuple(tokens[:TOKENS])


def p_value(counts: Counter[tuple[int, ...]], probs: Distribution) -> float:
    """The chi-square test's p-value; cells that expect fewer than five are merged."""
    runs = counts.total()
    assert set(counts) <= set(probs), "an output that the target never gives"
    rare = [cell for cell, prob in probs.items() if prob * runs < 5]
    cells = [(counts[cell], prob * runs) for cell, prob in probs.items() if prob * runs >= 5]
    cells.append((sum(counts[cell] for cell in rare), sum(probs[cell] for cell in rare) * runs))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells if wanted > 0)
    return float(chi2.sf(statistic, len(cells) - 1))
