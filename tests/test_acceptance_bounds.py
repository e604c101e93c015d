"""Bounds of the acceptance probability and accepted lengths, against values computed by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import traces

from specgen.base.types import TokenStatus
from specgen.traces.acceptance import DraftedToken, bounds_of
from specgen.traces.reader import read_trace
from specgen.traces.statistics import TraceStatistics

ACCEPTED = TokenStatus.ACCEPTED
PINSKER = [1 - math.sqrt(0.4 * math.log(9)), 1 - math.sqrt(math.log(1.25) / 2), 1.0]  # 0.063, 0.666
BRETAGNOLLE_HUBER = [1 - math.sqrt(1 - 9**-0.8), 1 - math.sqrt(0.2), 1.0]  # 0.090, 0.553
ESTIMATE = [1 - math.sqrt(0.15 * 0.3250830), 1 - math.sqrt(0.15 * math.log(2)), 1.0]  # 0.779, 0.678
# q = (1/2, 1/2), p = (4/5, 1/5): exp(-KL(q||p)) = 4/5. q = (9/10, 1/10), p = (1/10, 9/10): KL = 4/5 ln 9. q = p = (1, 0).
HALVES = DraftedToken(ACCEPTED, math.log(2), 0.7, -math.log(0.8))
APART = DraftedToken(ACCEPTED, 0.3250830, 0.2, 0.8 * math.log(9))
EQUAL = DraftedToken(ACCEPTED, 0.0, 1.0, 0.0)


def token(ratio: float, overlap: float = 0.5, entropy: float = 1.0) -> DraftedToken:
    """A token with this ratio of cross-entropy to entropy."""
    return DraftedToken(ACCEPTED, entropy, overlap, (ratio - 1) * entropy)


def test_each_tokens_bounds_sorted_by_acceptance_probability() -> None:
    bounds = bounds_of([HALVES, EQUAL, APART], 0.15)
    assert bounds is not None
    figures = [(found.low, found.acceptance, found.high, found.tokens) for found in bounds.by_acceptance]
    assert figures == [(0.2, 0.2, 0.2, 1), (0.7, 0.7, 0.7, 1), (1.0, 1.0, 1.0, 1)]
    assert [found.pinsker for found in bounds.by_acceptance] == pytest.approx(PINSKER)
    assert [found.bretagnolle_huber for found in bounds.by_acceptance] == pytest.approx(BRETAGNOLLE_HUBER)
    assert [found.estimate for found in bounds.by_acceptance] == pytest.approx(ESTIMATE)
    assert bounds.below_estimate == pytest.approx(1 / 3)


def test_how_tight_both_bounds_are() -> None:
    bounds = bounds_of([HALVES, EQUAL, APART], 0.15)
    assert bounds is not None
    assert bounds.pinsker_gap == pytest.approx(1.9 / 3 - sum(PINSKER) / 3)
    assert bounds.bretagnolle_huber_gap == pytest.approx(1.9 / 3 - sum(BRETAGNOLLE_HUBER) / 3)
    assert bounds.pinsker_higher == pytest.approx(1 / 3)
    assert bounds.pinsker_tighter == pytest.approx(1 - 0.1715 / 0.2569, abs=1e-3)
    for tokens, higher in ([HALVES, HALVES, APART], 2 / 3), ([HALVES, APART, APART], 1 / 3):
        found = bounds_of(tokens, 0.15)
        assert found is not None
        assert found.pinsker_higher == pytest.approx(higher)
    looser = bounds_of([APART], 0.15)
    assert looser is not None
    assert looser.pinsker_tighter == pytest.approx(1 - 0.1375 / 0.1097, abs=1e-3)
    exact = bounds_of([EQUAL], 0.15)
    assert exact is not None
    assert exact.pinsker_tighter is None


def test_the_histogram_of_the_entropy_ratio() -> None:
    """log(2) nats with KL log(5/4) is a ratio of 1.3219; a token with almost no entropy has no ratio."""
    ratios = (0.9, 1.0, 1.0999, 1.1001, 2.9999, 3.0001, 1e30)  # a damaged trace may have a negative divergence
    tokens = [HALVES, EQUAL, *map(token, ratios), token(1.5, entropy=0.009), DraftedToken(ACCEPTED, 1.0, math.nan, 0.3)]
    bounds = bounds_of(tokens, 0.15)
    assert bounds is not None
    assert bounds.tokens == 10
    counts = {round(found.low, 6): found.tokens for found in bounds.entropy_ratios if found.tokens}
    assert counts == {1.0: 3, 1.1: 1, 1.3: 1, 2.9: 1, 3.0: 2}
    assert [(found.low, found.high) for found in bounds.entropy_ratios[::20]] == [(1.0, 1.1), (3.0, math.inf)]
    median = (1.1001 + 1.3219281) / 2  # of eight ratios
    assert bounds.entropy_ratio == pytest.approx(median, abs=1e-6)
    assert bounds.measured_c == pytest.approx((median - 1) / 2, abs=1e-6)


def test_without_ratios_or_records_there_is_nothing() -> None:
    certain = bounds_of([EQUAL], 0.15)
    assert certain is not None
    assert (certain.entropy_ratio, certain.measured_c, certain.entropy_ratios) == (None, None, ())
    assert bounds_of([DraftedToken(ACCEPTED, 1.0, math.nan, math.nan)], 0.15) is None


@pytest.mark.parametrize(("count", "sizes"), [(4, [1] * 4), (10, [1] * 10), (25, [2, 3] * 5)])
def test_sorted_tokens_are_cut_into_equal_groups(count: int, sizes: list[int]) -> None:
    tokens = [token(1.2, overlap=number / count) for number in range(count)]
    bounds = bounds_of(tokens[::-1], 0.15)
    assert bounds is not None
    assert [found.tokens for found in bounds.by_acceptance] == sizes
    assert [found.low for found in bounds.by_acceptance] == [start / count for start in np.cumsum([0, *sizes[:-1]])]


def statistics_of(path: Path, *drafts: tuple[Sequence[float | None], int, dict[str, Any]]) -> TraceStatistics:
    """The statistics of a trace with these drafts: entropies, number of accepted tokens, and changes to the round's line."""
    rounds = [traces.round_line(0)]
    for index, (entropies, accepted, changes) in enumerate(drafts, 1):
        source = "bonus" if accepted == len(entropies) else "correction"
        line = traces.round_line(index, [5] * len(entropies), accepted, 9, source, entropies=entropies)
        rounds.append(line | changes)
    found = TraceStatistics("svip")
    found.add(next(read_trace(traces.write(path / "t.jsonl", traces.start_line(), *rounds, traces.summary_line(rounds)))))
    return found


def test_accepted_length_by_the_mean_entropy_of_verified_tokens(tmp_path: Path) -> None:
    tree = {"parents": [-1, -1, 0, 0], "draft_ids": [5, 6, 7, 8], "accepted_ids": [5]}
    found = statistics_of(
        tmp_path,
        ([0.1, 0.2, 0.3], 3, {}),
        ([0.1, 0.3, 0.5, 1.2, 9.0], 3, {}),  # the last token is discarded: (0.1 + 0.3 + 0.5 + 1.2) / 4
        ([2.4], 0, {}),
        ([0.4, 0.4, 0.6, 0.6], 1, tree),  # node 0, and the first of its rejected children
        ([0.3, None, None], 0, {}),  # only the first was verified
        ([None, 0.5], 1, {}),
        ([], 0, {"source": None}),
    )
    drafts = [(0.2, 3, 3), (0.525, 5, 3), (2.4, 1, 0), (0.5, 4, 1), (0.3, 3, 0)]
    assert [(draft.drafted, draft.accepted) for draft in found.drafts] == [draft[1:] for draft in drafts]
    assert [draft.entropy for draft in found.drafts] == pytest.approx([draft[0] for draft in drafts])
    bins = found.accepted_length_by_entropy()
    assert [(each.low, each.high, each.drafts, each.longest) for each in bins] == [
        (0.1, 0.25, 1, 3),
        (0.25, 0.5, 1, 0),
        (0.5, 1.0, 2, 3),
        (2.0, 3.0, 1, 0),
    ]
    assert (bins[2].mean, bins[2].median, bins[2].mean_entropy) == pytest.approx((2.0, 2.0, 0.5125))
    expected = np.corrcoef([draft[0] for draft in drafts], [draft[2] for draft in drafts])[0, 1]
    assert found.length_correlation() == pytest.approx(expected)


def test_without_variation_there_is_no_correlation(tmp_path: Path) -> None:
    assert statistics_of(tmp_path, ([0.1], 1, {}), ([0.3], 1, {})).length_correlation() is None
    assert statistics_of(tmp_path, ([0.1], 1, {})).length_correlation() is None
    assert statistics_of(tmp_path).length_correlation() is None
