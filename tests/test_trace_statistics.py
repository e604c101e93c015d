"""The figures of a trace: each computed a second time, in another way, or by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import traces
from scipy import stats

from specgen.base.types import Draft, Round, Verdict
from specgen.traces import acceptance as acceptance_bounds
from specgen.traces import statistics
from specgen.traces.reader import TracedRun, read_trace
from specgen.traces.statistics import TraceStatistics, beta_quantile, known_number, posteriors


@pytest.fixture
def recorded(tmp_path: Path) -> TracedRun:
    return next(read_trace(traces.write(tmp_path / "t.jsonl", *traces.a_recorded_run(300))))


def folded(run: TracedRun) -> TraceStatistics:
    found = TraceStatistics(run.method)
    found.add(run)
    return found


def test_acceptance_by_entropy_counts_verified_tokens_only(recorded: TracedRun) -> None:
    verified = []
    for traced in recorded.rounds:
        accepted = len(traced.round.verdict.path)
        refused = traced.round.verdict.source == "correction"
        verified += [
            (entropy, position < accepted) for position, entropy in enumerate(traced.round.draft.entropies[: accepted + refused])
        ]
    bins = folded(recorded).acceptance_by_entropy()
    assert sum(found.verified for found in bins) == len(verified)
    for found in bins:
        inside = [accepted for entropy, accepted in verified if found.low <= entropy < found.high]
        assert (found.verified, found.accepted) == (len(inside), sum(inside))
        expected = stats.binomtest(found.accepted, found.verified).proportion_ci(0.95, method="wilson")
        assert found.interval == pytest.approx((expected.low, expected.high), abs=1e-5)
        assert found.mean_entropy == pytest.approx(
            np.mean([entropy for entropy, _ in verified if found.low <= entropy < found.high])
        )


def test_calibration_compares_predictions_of_judged_tokens(recorded: TracedRun) -> None:
    predicted, accepted = [], []
    for traced in recorded.rounds:
        count = len(traced.round.verdict.path)
        for position, share in enumerate(traced.round.draft.predicted):
            if not math.isnan(share) and (
                position < count or (position == count and traced.round.verdict.source == "correction")
            ):
                predicted.append(share)
                accepted.append(position < count)
    found = folded(recorded).calibration()
    assert found is not None
    assert (found.judged, found.predicted, found.rate) == pytest.approx((len(predicted), np.mean(predicted), np.mean(accepted)))
    assert len(predicted) > 300
    numbers = np.minimum(np.array(predicted) * 10, 9).astype(int)
    inside = [numbers == number for number in range(10) if (numbers == number).any()]
    expected = [(chosen.sum(), np.mean(np.array(accepted)[chosen]), np.mean(np.array(predicted)[chosen])) for chosen in inside]
    assert [(each.verified, each.rate, each.predicted) for each in found.bins] == [pytest.approx(each) for each in expected]
    assert found.error == pytest.approx(sum(count * abs(rate - mean) for count, rate, mean in expected) / len(predicted))
    assert folded(replace(recorded, rounds=[])).calibration() is None


def test_bounds_are_medians_of_each_tokens_own(recorded: TracedRun) -> None:
    tokens = [
        figures
        for traced in recorded.rounds
        for figures in zip(traced.round.draft.entropies, traced.overlap, traced.kl, strict=True)
    ]
    bounds = folded(recorded).bounds()
    assert bounds is not None
    assert bounds.tokens == len(tokens) == sum(found.tokens for found in bounds.by_entropy)
    assert bounds.c == statistics.AUTHORS_C
    below = [overlap < max(0.0, 1 - math.sqrt(0.15 * entropy)) for entropy, overlap, _ in tokens]
    assert bounds.below_estimate == pytest.approx(np.mean(below))
    ratio = median((entropy + kl) / entropy for entropy, _, kl in tokens if entropy > 0.01)
    assert bounds.entropy_ratio == pytest.approx(ratio)
    assert bounds.measured_c == pytest.approx((ratio - 1) / 2)
    for found in bounds.by_entropy:
        inside = [token for token in tokens if found.low <= token[0] < found.high]
        assert found.entropy == pytest.approx(median(entropy for entropy, _, _ in inside))
        assert found.acceptance == pytest.approx(median(overlap for _, overlap, _ in inside))
        assert found.pinsker == pytest.approx(median(max(0.0, 1 - math.sqrt(kl / 2)) for _, _, kl in inside))
        assert found.bretagnolle_huber == pytest.approx(median(1 - math.sqrt(1 - math.exp(-kl)) for _, _, kl in inside))
        assert found.estimate == pytest.approx(median(max(0.0, 1 - math.sqrt(0.15 * entropy)) for entropy, _, _ in inside))


def test_pinsker_and_bretagnolle_huber_bound_the_true_acceptance_probability() -> None:
    generator = np.random.default_rng(1)
    broken = 0
    for _ in range(500):
        q, p = (generator.dirichlet(np.full(12, sharpness)) for sharpness in generator.choice([0.1, 0.5, 2.0], 2))
        overlap, divergence, entropy = np.minimum(p, q).sum(), stats.entropy(q, p), stats.entropy(q)
        assert acceptance_bounds.pinsker(divergence) <= overlap + 1e-9
        assert acceptance_bounds.bretagnolle_huber(divergence) <= overlap + 1e-9
        broken += acceptance_bounds.estimate(entropy, 0.15) > overlap
    assert broken > 100  # it is no bound, and is not called one


def test_a_run_uses_its_own_constant(tmp_path: Path) -> None:
    run = traces.a_recorded_run(5, method="svip", settings={"c": 0.3, "threshold": 0.5, "max_draft": 40})
    own = folded(next(read_trace(traces.write(tmp_path / "t.jsonl", *run))))
    assert own.c == 0.3
    other = traces.a_recorded_run(5, method="svip", settings={"c": 0.6, "threshold": 0.5, "max_draft": 40})
    own.add(next(read_trace(traces.write(tmp_path / "t.jsonl", *other))))
    bounds = own.bounds()
    assert bounds is not None
    assert bounds.c == 0.3, "of several runs, the first one's"


def test_runs_of_a_method_add_up(tmp_path: Path) -> None:
    paths = [traces.write(tmp_path / f"{seed}.jsonl", *traces.a_recorded_run(50, seed)) for seed in (1, 2)]
    runs = [next(read_trace(path)) for path in paths]
    both, (first, second) = TraceStatistics("beta-ts"), [folded(run) for run in runs]
    for run in runs:
        both.add(run)
    assert both.runs == 2
    assert both.summary.drafted == first.summary.drafted + second.summary.drafted
    assert len(both.tokens) == len(first.tokens) + len(second.tokens)
    assert both.speeds == pytest.approx([first.summary.tokens_per_second, second.summary.tokens_per_second])
    assert both.summary.mean_draft_length == pytest.approx(both.summary.drafted / 98)
    assert both.mean_accepted_length == pytest.approx(both.summary.accepted / 98), "prefills have no draft"
    assert TraceStatistics("ar").mean_accepted_length is None


def test_another_programs_run_has_what_its_summary_tells(tmp_path: Path) -> None:
    start, *_ = traces.a_run("transformers")
    summary = {"type": "summary", "text": "abc", "token_ids": [1, 2, 3], "finish_reason": "length"}
    summary |= {"seconds": 1.5, "target_passes": 3}
    run = next(read_trace(traces.write(tmp_path / "t.jsonl", start, summary)))
    assert run.notes == ["the run has no rounds: another program decoded it"]
    found = folded(run)
    assert found.summary.tokens_per_second == 2.0
    assert found.summary.block_efficiency == 1.0
    for wrong in ("1.5", -1.5, 1e12, None):
        run = next(read_trace(traces.write(tmp_path / "t.jsonl", start, summary | {"seconds": wrong})))
        assert folded(run).summary.tokens_per_second is None, wrong
    for wrong in (2.5, True, "3", -1, 10**12):
        assert known_number({"drafted": wrong}, "drafted") == 0, wrong
    assert known_number({"drafted": 3}, "drafted") == 3


def test_beta_quantiles_are_scipys() -> None:
    rng = random.Random(3)
    for _ in range(60):
        alpha, beta, share = 10 ** rng.uniform(-2, 5), 10 ** rng.uniform(-2, 5), rng.choice((0.05, 0.5, 0.95))
        assert beta_quantile(alpha, beta, share) == pytest.approx(stats.beta.ppf(share, alpha, beta), abs=2e-6)


def test_posteriors_are_of_evenly_spaced_rounds_up_to_the_last(recorded: TracedRun) -> None:
    rounds = [traced.round for traced in recorded.rounds]
    found = posteriors(rounds, most=30)
    assert 25 <= len(found) <= 30
    assert found[-1].index == 299
    steps = {later.index - earlier.index for earlier, later in pairwise(found)}
    assert len(steps) == 1
    state = rounds[-1].policy_state
    assert state is not None
    assert found[-1].mean == state["alpha"] / (state["alpha"] + state["beta"])
    assert posteriors([]) == []


def test_a_normal_posterior_has_its_own_interval() -> None:
    states = ({"theta_hat": 0.7, "rounds": 0}, {"mean": 0.6, "deviation": 0.1}, {"mean": 0.95, "deviation": 0.2})
    rounds = [Round(index, "sequential", Draft(), Verdict(), policy_state=state) for index, state in enumerate(states)]
    first, second = posteriors(rounds)
    assert (first.index, first.mean) == (1, 0.6)
    assert (first.low, first.high) == pytest.approx(stats.norm.ppf((0.05, 0.95), 0.6, 0.1), abs=1e-5)
    assert (second.low, second.high) == pytest.approx((stats.norm.ppf(0.05, 0.95, 0.2), 1.0), abs=1e-5)


def test_states_with_impossible_parameters_have_no_posterior() -> None:
    below, above = 9.9e11, 1.1e12  # tokens that a Beta distribution's parameters may count
    possible: list[dict[str, float]] = [
        *({"alpha": alpha, "beta": beta} for alpha, beta in ((below, 1.0), (1.0, below), (5e-324, 1.0))),
        *({"mean": mean, "deviation": deviation} for mean, deviation in ((0.0, 0.0), (1.0, 1e299))),
    ]
    impossible: list[dict[str, float]] = [
        *({"alpha": alpha, "beta": beta} for alpha, beta in ((above, 1.0), (1.0, above), (1e25, 3e24), (0.0, 1.0), (1.0, 0.0))),
        *({"mean": mean, "deviation": deviation} for mean, deviation in ((-0.1, 0.1), (1.1, 0.1), (0.5, -0.1))),
    ]
    rounds = [
        Round(index, "sequential", Draft(), Verdict(), policy_state=state) for index, state in enumerate(possible + impossible)
    ]
    assert [posterior.index for posterior in posteriors(rounds)] == list(range(len(possible)))
