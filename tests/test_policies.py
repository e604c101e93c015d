"""Length policies on scripted steps, and drafters on scripted runners."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from specgen.base.errors import RunError, SpecgenError
from specgen.base.types import Context, SamplingParams
from specgen.decoding.drafting import ModelDrafter, Setup
from specgen.decoding.policy import DraftedToken, Fixed, LengthPolicy
from specgen.engine.model_runner import ModelOutput
from specgen.methods.eesd import BetaTS, CaliTS
from specgen.methods.lookup import PromptLookupDrafter
from specgen.methods.sd import Confidence, Heuristic
from specgen.methods.selfsd import SelfSD
from specgen.methods.svip import SVIP

GREEDY = SamplingParams()
NO_EOS: frozenset[int] = frozenset()


def drafted(policy: LengthPolicy, steps: Sequence[DraftedToken]) -> int:
    """The number of tokens drafted when the policy ends the draft."""
    return next((step.position for step in steps if not policy.keep_drafting(step)), len(steps))


def with_signal(name: str, *values: float) -> list[DraftedToken]:
    return [DraftedToken(position, {name: value}) for position, value in enumerate(values, 1)]


def steps(count: int = 100, entropy: float = 0.0, prob: float = 1.0) -> list[DraftedToken]:
    return [DraftedToken(position, {"entropy": entropy, "prob": prob}) for position in range(1, count + 1)]


def test_heuristic_follows_transformers_schedule() -> None:
    policy = Heuristic(k=5, max_draft=8)
    lengths = []
    for accepted_all in (True, True, False, False, False):
        lengths.append(length := drafted(policy, steps()))
        policy.observe(length, length if accepted_all else 0)
    assert lengths == [5, 7, 8, 7, 6]
    for _ in range(20):
        policy.observe(3, 0)
    assert policy.state() == {"k": 1}
    assert drafted(Heuristic(k=20, max_draft=3), steps()) == 3
    policy.observe(0, 0)  # a round without a draft changes nothing
    assert policy.state() == {"k": 1}


def test_confidence_keeps_the_doubtful_token_and_stops() -> None:
    policy = Confidence(threshold=0.4, max_draft=20)
    assert drafted(policy, with_signal("prob", 0.9, 0.39, 0.9)) == 2
    assert policy.reason == "prob 0.39 < 0.40"
    drafted(policy, with_signal("prob", 0.9, 0.3996, 0.9))
    assert policy.reason == "prob 0.3996 < 0.4000", "two different numbers look different"
    assert drafted(policy, steps()) == 20


def test_svip_compares_the_root_of_c_times_entropy() -> None:
    policy = SVIP(threshold=0.4, c=0.15, max_draft=40)
    edge = 0.4**2 / 0.15
    assert drafted(policy, with_signal("entropy", edge - 0.01, edge + 0.01, 0.0)) == 2
    assert policy.reason.startswith("√cH 0.402 > 0.400")
    assert drafted(policy, steps(entropy=3.0)) == 1, "the token whose entropy is too high is kept: a draft is never empty"
    assert drafted(policy, steps()) == 40


def test_beta_ts_learns_the_acceptance_rate() -> None:
    policy = BetaTS(alpha=1, beta=1, max_draft=40, seed=0)
    for _ in range(200):
        policy.observe(drafted=4, accepted=3)  # three accepted, one rejected
    assert policy.state() == {"alpha": 601, "beta": 201}
    lengths = [drafted(policy, steps()) for _ in range(3000)]
    assert sum(lengths) / 3000 == pytest.approx(4, rel=0.1), "geometric with mean 1 / (1 - 3/4)"
    assert policy.reason.startswith("bandit θ 0.7")


def test_beta_ts_counts_only_what_the_target_judged() -> None:
    policy = BetaTS(alpha=1, beta=1, max_draft=40, seed=0)
    policy.observe(drafted=10, accepted=2)  # the third was rejected, the other seven were never verified
    policy.observe(drafted=3, accepted=3)
    policy.observe(drafted=0, accepted=0)
    assert policy.state() == {"alpha": 6, "beta": 2}


def cali(**changes: object) -> CaliTS:
    settings: dict[str, object] = {"sigma_model": 0.2, "sigma_sample": 0.4, "theta0": 0.7, "max_draft": 40, "seed": 0}
    parts = {"model_prediction": True, "sampling_prediction": True}
    return CaliTS(**(settings | parts | changes))  # type: ignore[arg-type]


def test_cali_ts_weighs_the_predictor_against_what_was_accepted() -> None:
    policy = cali()
    assert policy.posterior(0.9) == pytest.approx((0.9, 0.04)), "before any round, the predictor alone"
    policy.observe(drafted=10, accepted=2)  # three were verified
    policy.observe(drafted=3, accepted=3)
    policy.observe(drafted=0, accepted=0)  # changes nothing
    theta_hat = (0.7 + 5) / (1 + 6)
    assert policy.state() == {"theta_hat": pytest.approx(theta_hat), "rounds": 2}  # no draft yet, so no predictor score
    weight = 0.16 + 2 * 0.04
    mean, variance = policy.posterior(0.9)
    assert mean == pytest.approx((0.16 * 0.9 + 2 * 0.04 * theta_hat) / weight)
    assert variance == pytest.approx(0.04 * 0.16 / weight)


def test_cali_ts_tells_its_posterior_at_the_last_drafts_mean_score() -> None:
    policy = cali(max_draft=2, sigma_model=1e-3, sampling_prediction=False, seed=3)
    assert drafted(policy, with_signal("predicted_acceptance", 1.0, 0.5)) == 2
    policy.observe(drafted=2, accepted=2)
    assert (policy.state()["mean"], policy.state()["deviation"]) == pytest.approx((0.75, 1e-3))
    policy.observe(drafted=0, accepted=0)  # nothing was drafted, so the posterior stays
    assert policy.state()["mean"] == pytest.approx(0.75)
    both = cali(max_draft=1)
    assert drafted(both, [DraftedToken(1, {"predicted_acceptance": 0.9})]) == 1
    both.observe(drafted=1, accepted=1)
    state, (mean, variance) = both.state(), both.posterior(0.9)
    assert (state["mean"], state["deviation"]) == pytest.approx((mean, math.sqrt(variance)))


def test_cali_ts_ends_at_the_acceptance_rate() -> None:
    policy = cali()
    for _ in range(3000):
        policy.observe(drafted=4, accepted=3)
    assert policy.posterior(0.1)[0] == pytest.approx(0.75, abs=0.01), "the printed update ends at 1 whatever is accepted"
    lengths = [drafted(policy, with_signal("predicted_acceptance", *[0.1] * 40)) for _ in range(3000)]
    assert sum(lengths) / 3000 == pytest.approx(4, rel=0.1)
    assert policy.reason.startswith("bandit θ 0.7")


def test_cali_ts_with_one_part_switched_off() -> None:
    sampling, model = cali(model_prediction=False), cali(sampling_prediction=False)
    assert (sampling.signals, model.signals) == (frozenset(), frozenset({"predicted_acceptance"}))
    for policy in (sampling, model):
        for _ in range(4):
            policy.observe(drafted=2, accepted=0)
    assert sampling.posterior(None) == pytest.approx((0.7 / 5, 0.16 / 4))
    assert model.posterior(0.9) == pytest.approx((0.9, 0.04))
    with pytest.raises(SpecgenError, match="neither model_prediction nor sampling_prediction"):
        cali(model_prediction=False, sampling_prediction=False)


def test_cali_ts_has_a_cap_and_clips() -> None:
    policy = cali(sampling_prediction=False, sigma_model=1e-3, max_draft=6)
    assert drafted(policy, with_signal("predicted_acceptance", *[1.5] * 40)) == 6
    assert policy.reason == "limit 6"
    assert drafted(policy, with_signal("predicted_acceptance", *[-0.5] * 40)) == 1


def test_selfsd_adapts_its_threshold_to_the_acceptance_rate() -> None:
    policy = SelfSD(k=12)
    assert drafted(policy, with_signal("prob", 0.9, 0.59, 0.9)) == 2
    assert policy.reason == "prob 0.59 < 0.60"
    assert drafted(policy, steps()) == 12
    policy.observe(drafted=12, accepted=12)
    assert policy.threshold == pytest.approx(0.6), "the cap ended it, not the threshold"
    policy.observe(drafted=5, accepted=5)
    assert policy.threshold == pytest.approx(0.9 * 0.6 + 0.1 * 0.59)
    before = policy.threshold
    policy.observe(drafted=5, accepted=0)
    assert policy.threshold == pytest.approx(0.9 * before + 0.1 * (before + 0.01))
    policy.observe(drafted=0, accepted=0)
    assert policy.state() == {"threshold": pytest.approx(before + 0.001)}


@pytest.mark.parametrize("policy", [Confidence(0.4, 20), SVIP(0.4, 0.15, 20), SelfSD(12), cali()])
def test_a_policy_raises_where_its_signal_was_not_computed(policy: LengthPolicy) -> None:
    """A missing signal must not compare as false: the draft would never stop."""
    with pytest.raises(LookupError, match=r"reads the signal '\w+', which was not computed \(computed: margin\)"):
        policy.keep_drafting(DraftedToken(1, {"margin": 0.5}))


class ScriptedRunner:
    """A runner whose likeliest token after n is n + 1, with the logit `certainty`; all other logits are 0."""

    device = torch.device("cpu")

    def __init__(self, vocab_size: int = 10, context_limit: int = 100, certainty: float = 8.0) -> None:
        self.vocab_size = self.num_embeddings = vocab_size
        self.context_limit, self.certainty = context_limit, certainty

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        last = [*context.ids, *draft][-1]
        row = torch.zeros(self.vocab_size)
        row[(last + 1) % self.vocab_size] = self.certainty
        return ModelOutput(row[None])


def model_draft(runner: ScriptedRunner, policy: LengthPolicy, prompt: list[int], limit: int, **options: object) -> object:
    settings = {"sampling": GREEDY, "eos_ids": NO_EOS, "vocab_size": runner.vocab_size} | options
    return ModelDrafter(Setup(runner, **settings)).propose(Context(prompt), policy, limit)  # type: ignore[arg-type]


def test_a_draft_says_why_it_ended() -> None:
    runner = ScriptedRunner()
    assert model_draft(runner, Fixed(3), [1], 9).tokens == [2, 3, 4]
    assert model_draft(runner, Fixed(3), [1], 9).stop_reason == "limit 3"
    assert model_draft(runner, Fixed(9), [1], 2).stop_reason == "length"
    ended = model_draft(runner, Fixed(9), [1], 9, eos_ids=frozenset({4}))
    assert (ended.tokens, ended.stop_reason) == ([2, 3, 4], "eos")


def test_a_draft_tells_its_entropies_whoever_asked_for_them() -> None:
    runner = ScriptedRunner()
    asked = model_draft(runner, SVIP(10, 0.15, 3), [1], 9)
    unasked = model_draft(runner, Fixed(3), [1], 9)
    assert asked.entropies == pytest.approx(unasked.entropies)
    assert asked.top_probs == pytest.approx(unasked.top_probs)
    prob = math.exp(8) / (math.exp(8) + 9)
    rest = (1 - prob) / 9
    assert unasked.top_probs[0] == pytest.approx(prob, rel=1e-5)
    assert unasked.entropies[0] == pytest.approx(-prob * math.log(prob) - 9 * rest * math.log(rest), rel=1e-4)


def test_no_draft_beyond_the_drafts_own_context_or_vocabulary() -> None:
    assert model_draft(ScriptedRunner(context_limit=5), Fixed(9), [1, 2, 3], 9).tokens == [4, 5]
    assert model_draft(ScriptedRunner(context_limit=3), Fixed(9), [1, 2, 3], 9).tokens == ()
    assert model_draft(ScriptedRunner(vocab_size=4), Fixed(9), [1, 7, 3], 9).tokens == ()
    assert model_draft(ScriptedRunner(), Fixed(9), [1], 0).tokens == ()


@pytest.mark.parametrize("policy", [Fixed(3), SVIP(0.4, 0.15, 5)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_in_a_draft_is_an_error(policy: LengthPolicy, temperature: float) -> None:
    with pytest.raises(RunError, match="NaN"):
        model_draft(ScriptedRunner(certainty=math.nan), policy, [1], 5, sampling=SamplingParams(temperature=temperature))


def lookup(ids: list[int], k: int = 5, ngram: int = 3, limit: int = 100, eos: frozenset[int] = NO_EOS) -> list[int]:
    return list(PromptLookupDrafter(ngram, eos).propose(Context(ids), Fixed(k), limit).tokens)


def test_lookup_continues_the_longest_match() -> None:
    assert lookup([1, 2, 3, 9, 8, 7, 5, 3, 6, 1, 2, 3], k=3) == [9, 8, 7]
    assert lookup([1, 2, 3, 9, 8, 7, 5, 3, 6, 1, 2, 3], k=3, ngram=1) == [6, 1, 2], "the latest of several places"
    assert lookup([1, 2, 3, 4]) == []


def test_lookup_goes_round_where_the_text_repeats() -> None:
    assert lookup([1, 2, 1, 2, 1, 2], k=5) == [1, 2, 1, 2, 1]
    assert lookup([4, 4], k=3) == [4, 4, 4]


def test_lookup_ends_at_its_limit_and_at_an_end_of_sequence() -> None:
    assert lookup([1, 2, 3, 1], limit=2) == [2, 3]
    assert lookup([1, 2, 3, 1], eos=frozenset({3})) == [2, 3]
    assert lookup([1, 2, 3, 1], limit=0) == []


def test_lookup_keeps_up_with_a_growing_context_without_reading_it_again() -> None:
    drafter, context = PromptLookupDrafter(3, NO_EOS), Context([1, 2, 3])
    assert drafter.propose(context, Fixed(2), 9).tokens == ()
    context.extend([7, 2, 3])
    assert drafter.propose(context, Fixed(2), 9).tokens == [7, 2]
    before = drafter._indexed
    context.extend([5])
    drafter.propose(context, Fixed(2), 9)
    assert (before, drafter._indexed) == (6, 7)
