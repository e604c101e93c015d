"""Length policies on scripted steps, all of them in runs of each method, the time they take, and
drafts under penalties."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import accumulate, islice
from operator import mul
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specgen import methods
from specgen.base.errors import RunError, SpecgenError
from specgen.base.settings import parse_pairs
from specgen.base.types import Context, SamplingParams
from specgen.decoding import drafting
from specgen.decoding import policy_base as policy_module
from specgen.decoding import run as run_module
from specgen.decoding.policy_base import LONGEST_DRAFT, DraftedToken, Fixed, LengthPolicy
from specgen.engine.model_runner import ModelOutput
from specgen.methods.adaptive import Adaptive
from specgen.methods.copying import PromptLookupDrafter
from specgen.methods.drafting_knowledge import AUTO
from specgen.methods.learned_drafting import AdaptiveInputs, DraftingCosts, Learned
from specgen.methods.selfsd import SelfSD
from specgen.methods.svip import SVIP
from specgen.methods.thompson import BetaTS, CaliTS
from specgen.methods.transformers_policies import Confidence, Heuristic
from specgen.testing.scripted_models import TableRunner, TopProbPredictor, ids_of, scripted_run
from specgen.workers.worker import DraftWorker


def cali(**changes: Any) -> CaliTS:
    settings: dict[str, Any] = {
        "sigma_model": 0.2,
        "sigma_sample": 0.4,
        "theta0": 0.7,
        "max_draft": 6,
        "seed": 0,
    }
    parts = {"model_prediction": True, "sampling_prediction": True}
    return CaliTS(**(settings | parts | changes))


def drafted(policy: LengthPolicy, signal: str = "prob", *values: float) -> int:
    """The number of tokens drafted with these values of the signal, and after them with the last
    one, until the policy ends."""
    steps = enumerate([*values, *[values[-1] if values else 0.0] * 99], 1)
    return next(
        position
        for position, value in steps
        if not policy.keep_drafting(DraftedToken(position, {signal: value}))
    )


@pytest.mark.parametrize(
    ("policy", "signal", "values", "length", "reason"),
    [
        # the doubtful token is kept
        (Confidence(0.4, 20), "prob", (0.9, 0.39, 0.9), 2, "prob 0.39 < 0.40"),
        # two numbers look different
        (Confidence(0.4, 20), "prob", (0.9, 0.3996, 0.9), 2, "prob 0.3996 < 0.4000"),
        (Confidence(0.4, 20), "prob", (0.9,), 20, "limit 20"),
        # √0.15 is 0.387, √0.18 is 0.424
        (SVIP(0.4, 0.15, 40), "entropy", (0.5, 1.0, 1.2), 3, "√cH 0.42 > 0.40"),
        (SVIP(0.4, 0.15, 40), "entropy", (3.0,), 1, "√cH 0.67 > 0.40"),  # a draft is never empty
        (SVIP(0.4, 0.15, 40, 3), "entropy", (3.0,), 3, "√cH 0.67 > 0.40"),
        (SVIP(0.4, 0.15, 40), "entropy", (0.0,), 40, "limit 40"),
        (SelfSD(12), "prob", (0.9, 0.59, 0.9), 2, "prob 0.59 < 0.60"),
        (SelfSD(12), "prob", (0.9,), 12, "limit 12"),
        (
            cali(sampling_prediction=False, sigma_model=1e-3),
            "predicted_acceptance",
            (1.5,),
            6,
            "limit 6",
        ),
        (
            cali(sampling_prediction=False, sigma_model=1e-3),
            "predicted_acceptance",
            (-0.5,),
            1,
            "bandit θ 0.00",
        ),
    ],
)
def test_where_drafts_end(
    policy: LengthPolicy, signal: str, values: Sequence[float], length: int, reason: str
) -> None:
    assert (drafted(policy, signal, *values), policy.reason) == (length, reason)
    with pytest.raises(
        LookupError, match=r"reads the signal '\w+', which was not computed \(computed: other\)"
    ):
        # as false, the draft would never stop
        policy.keep_drafting(DraftedToken(1, {"other": 0.5}))


def test_lengths_and_thresholds_follow_what_was_accepted() -> None:
    """transformers' schedule of lengths, and Self-SD's threshold, which only drafts that it ended
    change."""
    heuristic = Heuristic(k=5, max_draft=8)
    lengths = []
    for accepts in (True, True, False, False, False):
        lengths.append(drafted(heuristic))
        heuristic.observe(lengths[-1], lengths[-1] * accepts)
    assert lengths == [5, 7, 8, 7, 6]
    selfsd = SelfSD(k=12)
    thresholds = []
    for judged in ((12, 12), (5, 5), (5, 0), (0, 0)):
        selfsd.observe(*judged)
        thresholds.append(selfsd.threshold)
    assert thresholds == pytest.approx([0.6, 0.599, 0.6, 0.6])


def test_bandits_learn_the_acceptance_rate_from_what_the_target_judged() -> None:
    beta = BetaTS(alpha=1, beta=1, max_draft=40, seed=0)
    both = cali(max_draft=40)
    assert both.posterior(0.9) == pytest.approx((0.9, 0.04)), (
        "before any round, the predictor alone"
    )
    for policy in (beta, both):
        # the third was rejected, the other seven were never verified
        policy.observe(drafted=10, accepted=2)
        policy.observe(drafted=3, accepted=3)
        policy.observe(drafted=0, accepted=0)
    assert beta.state() == {"alpha": 6, "beta": 2}
    rate = (0.7 + 5) / (1 + 6)
    weight = 0.16 + 2 * 0.04
    assert both.state() == {"theta_hat": pytest.approx(rate), "rounds": 2}
    assert both.posterior(0.9) == pytest.approx(
        ((0.16 * 0.9 + 2 * 0.04 * rate) / weight, 0.04 * 0.16 / weight)
    )
    sampling, model = cali(model_prediction=False), cali(sampling_prediction=False)
    for policy in (sampling, model):
        policy.observe(drafted=2, accepted=0)
    assert sampling.posterior(None) == pytest.approx((0.7 / 2, 0.16))
    assert model.posterior(0.9) == pytest.approx((0.9, 0.04))
    with pytest.raises(SpecgenError, match="neither model_prediction nor sampling_prediction"):
        cali(model_prediction=False, sampling_prediction=False)
    for policy in (beta, both):
        for _ in range(3000):
            policy.observe(drafted=4, accepted=3)
        lengths = [drafted(policy, "predicted_acceptance", 0.1) for _ in range(2000)]
        assert sum(lengths) / 2000 == pytest.approx(4, rel=0.1), "geometric with mean 1 / (1 - 3/4)"


def test_the_printed_rules_of_the_bandits() -> None:
    """Beta-TS's alpha falls below 0 at an acceptance rate of a half, and drafts then have one
    token; Cali-TS's estimate only rises, whatever was rejected."""
    beta = BetaTS(alpha=1, beta=1, max_draft=40, seed=0, rule="printed")
    cali_ts = cali(theta0=0.5, rule="printed")
    for policy in (beta, cali_ts):
        policy.observe(drafted=4, accepted=3)
        policy.observe(drafted=0, accepted=0)
    assert beta.state() == {"alpha": 3, "beta": 3}
    assert cali_ts.theta_hat == pytest.approx((3 + 0.5) / (3 + 1))
    for _ in range(4):
        for policy in (beta, cali_ts):
            policy.observe(drafted=4, accepted=0)
            policy.observe(drafted=2, accepted=1)
    assert beta.state() == {"alpha": -1, "beta": 3 + 4 * (2 + 2)}
    assert cali_ts.theta_hat == pytest.approx((3 + 4 + 0.5) / (3 + 4 + 1))
    assert {drafted(beta, "predicted_acceptance", 0.9) for _ in range(50)} == {1}


def test_lookup_continues_the_latest_longest_match_and_goes_round() -> None:
    def lookup(ids: list[int], k: int, ngram: int = 3) -> list[int]:
        return list(
            PromptLookupDrafter(ngram, frozenset({0})).propose(Context(ids), Fixed(k), 100).tokens
        )

    text = [1, 2, 3, 9, 8, 7, 5, 3, 6, 1, 2, 3]
    assert lookup(text, 3) == [9, 8, 7]
    assert lookup(text, 3, ngram=1) == [6, 1, 2]
    assert lookup([1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert lookup([4, 4], 3) == [4, 4, 4]
    assert lookup([1, 2, 3], 9) == []


def test_a_draft_of_prompt_lookup_has_the_length_of_the_largest_gain() -> None:
    rng = Random(0)
    for _ in range(50):
        costs = DraftingCosts(0.5, rng.choice((0.02, 0.05, 0.4)))
        match = rng.randint(1, 20)
        learned = Learned.prior(costs)
        made = Adaptive(AUTO, AUTO, 3.0, 6, AdaptiveInputs(costs, learned))
        for _ in range(rng.randrange(60)):
            made.observe_match(rng.randint(1, 20), rng.randrange(3), ended=rng.random() < 0.6)
        acceptances = list(islice(learned.lookup.of_matches(match), 6))
        # expected accepted tokens of each length
        values = enumerate(accumulate(accumulate(acceptances, mul)), 1)
        gains = [
            0.0,
            *(learned.worth * value - costs.of_draft(0, length) for length, value in values),
        ]
        assert made.starts_draft(signals={"match_length": match}) == (max(gains) > 0)
        assert list(made.predictions) == acceptances[: gains.index(max(gains))]


REASONS = {  # of each length policy: the first word of the reason why it ended a draft
    "fixed": "limit",
    "heuristic": "limit",
    "confidence": "prob",
    "svip": "√cH",
    "beta-ts": "bandit",
    "selfsd": "prob",
    "cali-ts": "bandit",
    "adaptive": "gain",
}
SETTINGS = {
    "sd": {},
    "sd:tree": {"width": 2},
    "lookup": {"ngram": 1},
    "suffix": {},
    "spectr": {"drafts": 3},
    "specinfer": {"drafts": 2},
    "mtad": {"beams": 3},
    "bild": {"fallback": 0.1},
    "eesd-tree": {"width": 2},
    "pearl": {"window": 6},
}


def test_every_policy_has_a_reason_here() -> None:
    assert REASONS.keys() == methods.POLICIES.keys(), (
        "REASONS has to name the reason of each length policy in methods.POLICIES"
    )


@pytest.mark.parametrize("name", methods.POLICIES)
def test_every_policy_bounds_its_drafts(name: str) -> None:
    """Also where the policy would draft on for ever."""
    given = {"policy": name, **({"model_prediction": False} if name == "cali-ts" else {})}
    sampling = SamplingParams(max_new_tokens=1)
    policy = scripted_run("sd", given, TableRunner(1), TableRunner(2), sampling).policy
    signals = {"entropy": 0.0, "prob": 1.0, "top_prob": 1.0, "margin": 1.0}
    for _ in range(50):
        bound = policy.most_levels
        assert bound < LONGEST_DRAFT, (
            f"the policy {name} has neither of the attributes k and max_draft: "
            "it has to override most_levels"
        )
        length = 1
        while policy.keep_drafting(DraftedToken(length, signals)):
            length += 1
        assert length <= bound
        policy.observe(length, length)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_policy_that_a_method_may_have_ends_drafts(name: str, temperature: float) -> None:
    """And greedy outputs of lossless methods are plain decoding's."""
    method = methods.find(name.partition(":")[0])
    target = TableRunner(1)
    draft = TableRunner(5)
    sampling = SamplingParams(max_new_tokens=24, temperature=temperature)
    plain = ids_of(scripted_run("ar", {}, target, None, sampling).rounds())
    for policy in methods.available_policies(method):
        given = SETTINGS[name] | {"policy": policy}
        given |= {"model_prediction": False} if policy == "cali-ts" and name != "eesd-tree" else {}
        with closing(DraftWorker.in_this_process(draft)) as worker:
            rounds = list(
                scripted_run(method, given, target, draft, sampling, worker=worker).rounds()
            )
        reasons = [(round_.draft.stop_reason or "").removeprefix("lookup: ") for round_ in rounds]
        assert method.is_parallel or any(
            reason.startswith(REASONS.get(policy, "")) for reason in reasons
        ), policy
        assert ids_of(rounds) == plain or temperature or not method.lossless, policy


def test_k_and_depth_of_a_tree_of_fixed_depth() -> None:
    """The one that is given alone sets both; of two given ones the smaller ends the tree."""
    for given, k, depth in (
        ({}, 5, 5),
        ({"k": "3"}, 3, 3),
        ({"depth": "8"}, 8, 8),
        ({"k": 4, "depth": 2}, 4, 2),
    ):
        values = methods.resolve(methods.find("eesd-tree"), {"policy": "fixed", **given}).values  # type: ignore[dict-item]
        assert (values["k"], values["depth"]) == (k, depth)


@pytest.mark.parametrize("name", ["eesd-cali", "eesd-tree"])
def test_the_policy_and_its_predictor_have_a_phase_of_their_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only advances in them and in passes."""
    now = [0.0]

    def takes(owner: Any, method: str, seconds: float) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            now[0] += seconds
            return inner(*arguments, **named)

        monkeypatch.setattr(owner, method, timed)

    for module in (drafting, policy_module):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    monkeypatch.setattr(run_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    takes(TableRunner, "logits", 1000)
    takes(CaliTS, "keep_drafting", 100)
    takes(CaliTS, "observe", 10)
    takes(TopProbPredictor, "begin", 1)
    takes(TopProbPredictor, "score", 0.125)
    run = scripted_run(
        name, {"theta0": 1.0}, TableRunner(1), TableRunner(2), SamplingParams(max_new_tokens=16)
    )
    prefill, *rounds = run.rounds()
    assert prefill.seconds == dict.fromkeys(prefill.seconds, 0.0) | {"prefill": 1000}
    for round_ in rounds:
        levels = round_.draft.levels
        wanted = {
            "draft": 1000 * levels,
            "verify": 1000,
            "policy": 10 + (levels > 0) + 100.125 * levels,
        }
        assert round_.seconds == pytest.approx(dict.fromkeys(round_.seconds, 0.0) | wanted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_in_a_draft_is_an_error(temperature: float) -> None:
    draft = TableRunner(1)
    draft.table.fill_(math.nan)
    for written in ("sd", "sd:policy=svip", "sd:width=2", "mtad", "mtad:beam=sample", "bild"):
        name, *given = written.split(":")
        run = scripted_run(
            name,
            dict(parse_pairs(given)),
            TableRunner(2),
            draft,
            SamplingParams(temperature=temperature),
        )
        with pytest.raises(RunError, match="NaN"):
            list(run.rounds())


class ForbiddingRunner(TableRunner):
    """A draft model whose penalties forbid every token after token 2. Without penalties all its
    tokens are equally likely."""

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Any = None, *, start: int = 0
    ) -> ModelOutput:
        own = super().logits(context, draft, parents, start=start).logits
        last = torch.tensor([context.ids[-1], *draft][start:])
        return ModelOutput(
            own.masked_fill((last == 2)[:, None], -math.inf), own, torch.zeros_like(own)
        )


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("sd", {"policy": "confidence"}),
        ("sd", {"k": 4, "cape": True}),
        ("sd", {"policy": "svip", "width": 2, "nodes": 5}),
        ("mtad", {"beams": 3}),
        ("bild", {"fallback": 0}),
        ("spectr", {"drafts": 2}),
        ("ouroboros", {}),
        ("pearl", {"window": 3}),
    ],
    ids=str,
)
def test_a_draft_ends_where_penalties_forbid_all_its_tokens(
    method: str, settings: dict[str, object]
) -> None:
    """And its entropies and top probabilities are those of the model's own distribution."""
    reasons: set[str | None] = set()
    for seed in range(12):
        draft = ForbiddingRunner(seed)
        sampling = SamplingParams(max_new_tokens=20, temperature=float(seed % 2))
        with closing(DraftWorker.in_this_process(draft)) as worker:
            rounds = list(
                scripted_run(
                    method, settings, TableRunner(seed), draft, sampling, worker=worker
                ).rounds()
            )
        assert len(ids_of(rounds)) == 20
        for round_ in rounds:
            reasons.add(round_.draft.stop_reason)
            assert list(round_.draft.entropies) == pytest.approx(
                [math.log(6)] * len(round_.draft.entropies)
            )
            assert list(round_.draft.top_probs) == pytest.approx(
                [1 / 6] * len(round_.draft.top_probs)
            )
    assert any("no candidates" in str(reason) for reason in reasons)


@pytest.mark.parametrize(
    ("older", "given"),
    [
        ("eesd-fixed", {"policy": "fixed"}),
        ("eesd-beta", {"policy": "beta-ts"}),
        ("eesd-cali", {"policy": "cali-ts"}),
        ("eesd-tree", {"policy": "cali-ts", "width": "3", "depth": "5"}),
    ],
)
def test_an_older_name_is_a_method_with_settings(older: str, given: dict[str, str]) -> None:
    assert older not in methods.METHODS
    assert methods.resolve(methods.find(older), {}) == methods.resolve(methods.find("eesd"), given)


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({}, "adaptive"),
        ({"max_draft": 5}, "adaptive"),
        ({"k": 3}, "fixed"),
        ({"theta0": 0.5, "max_draft": 5}, "cali-ts"),
        ({"model_prediction": False}, "cali-ts"),
        ({"alpha": 2}, "beta-ts"),
        ({"policy": "fixed", "k": 3}, "fixed"),
    ],
)
def test_a_setting_of_a_policy_of_early_exit_selects_it(given: dict[str, Any], policy: str) -> None:
    """The setting itself is read, too."""
    settings = methods.resolve(methods.find("eesd"), given)
    assert settings.policy == policy
    assert all(settings.values[name] == value for name, value in given.items() if name != "policy")


def test_settings_of_two_policies_of_early_exit_are_refused() -> None:
    with pytest.raises(SpecgenError, match="with policy=cali-ts has no setting 'alpha'"):
        methods.resolve(methods.find("eesd"), {"theta0": 0.5, "alpha": 2.0})


@pytest.mark.parametrize(
    ("method", "given", "problem"),
    [
        (
            "eesd",
            {"policy": "cali-ts", "alpha": 3},
            "eesd with policy=cali-ts has no setting 'alpha', which belongs to policy=beta-ts",
        ),
        (
            "eesd",
            {"rule": "printed"},
            "eesd has no setting 'rule', which belongs to policy=beta-ts or policy=cali-ts",
        ),
        ("lookup", {"treshold": 0.3}, "lookup has no setting 'treshold'"),  # svip's needs entropy
        (
            "sd",
            {"threshold": 0.3},
            "sd has no setting 'threshold', which belongs to policy=confidence or policy=svip",
        ),
    ],
)
def test_a_setting_of_another_policy_is_refused_with_its_name(
    method: str, given: dict[str, object], problem: str
) -> None:
    with pytest.raises(SpecgenError) as refused:
        methods.resolve(methods.find(method), given)
    assert refused.value.message == problem
    names = refused.value.hint.removeprefix("It has ").split(", ")
    assert "policy" in names
    assert not names.count("alpha") > ("policy" not in given)
