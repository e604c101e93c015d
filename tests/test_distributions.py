"""Sampling: chi-square tests of the joint distribution of the first tokens, for every way to draft and verify; warping; draws."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from families import BACKENDS, make_model, model_of
from runner_checks import uncached
from scripted_models import PROMPT, TableRunner, scripted_run
from statistics_checks import LENGTH, SIGNIFICANCE, TOKENS, Distribution, first_tokens, output_distribution, p_value
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specgen import methods
from specgen.base.types import Draft, SamplingParams, Verdict
from specgen.decoding import logits_ops
from specgen.decoding.verification import RejectionSampling
from specgen.engine.model_runner import ModelOutput, ModelRunner
from specgen.workers.worker import DraftWorker

RUNS = 400


class RunnerWithHiddenStates(ModelRunner):
    """A model runner that returns its logits as hidden states too, for an acceptance predictor."""

    def logits(self, *args: Any, **options: Any) -> ModelOutput:
        logits = super().logits(*args, **options).logits
        return ModelOutput(logits, logits)


TARGET, DRAFT = TableRunner(1), TableRunner(2)
WORKER = DraftWorker.in_this_process(DRAFT)  # type: ignore[arg-type]

WARPS = {
    "plain": SamplingParams(max_new_tokens=LENGTH, temperature=1.0),
    "top-k": SamplingParams(max_new_tokens=LENGTH, temperature=1.4, top_k=4),
    "top-p": SamplingParams(max_new_tokens=LENGTH, temperature=1.2, top_p=0.85),
    "both": SamplingParams(max_new_tokens=LENGTH, temperature=1.2, top_p=0.9, top_k=5),
}
# One entry for each different path: a way to draft, a length policy, a verifier and a schedule.
PATHS: dict[str, dict[str, object]] = {
    "ar": {},
    "sd": {"k": 3},
    "heuristic": {"k": 2},
    "confidence": {"threshold": 0.3, "max_draft": 4},
    "svip": {"threshold": 0.42, "max_draft": 4},
    "beta-ts": {"alpha": 3},
    "eesd-cali": {"sigma_model": 0.5, "theta0": 0.9},
    "selfsd": {"skip": "1", "k": 4},
    "lookup": {"ngram": 2, "k": 3},
    "lookup:adaptive": {"ngram": 2, "draft_cost": 0, "verify_cost": 0.01},
    "suffix": {"draft_cost": 0, "verify_cost": 0.01},
    "lookahead": {"window": 3, "ngram": 3, "guesses": 2},
    "ouroboros": {"k": 3, "ngram": 3, "branches": 2, "window": 2},
    "adaptive": {"draft_cost": 0.3, "verify_cost": 0.02, "ngram": 2},
    "sd:tree": {"k": 3, "width": 2},
    "sd:tree of 4": {"policy": "confidence", "width": 4, "depth": 2},
    "eesd-tree": {"width": 3, "depth": 3, "theta0": 1.0},
    "spectr": {"k": 2, "drafts": 2},
    "specinfer": {"k": 2, "drafts": 2},
    "pearl": {"window": 3},
    "pearl:pre_verify": {"window": 3, "pre_verify": False},
    "pearl:post_verify": {"window": 3, "post_verify": False},
    "pearl:policy": {"window": 4, "policy": "svip", "threshold": 0.42},
}
OFTEN = ("sd", "lookup", "sd:tree", "spectr", "specinfer", "pearl")  # every drafter, verifier and schedule


def decode(
    name: str, settings: dict[str, object], sampling: SamplingParams, seed: int, eos: frozenset[int] = frozenset()
) -> tuple[int, ...]:
    method = name.partition(":")[0]
    return first_tokens(scripted_run(method, settings, TARGET, DRAFT, sampling, eos=eos, seed=seed, worker=WORKER))


def expected(sampling: SamplingParams, eos: frozenset[int] = frozenset()) -> Distribution:
    """The exact probability of the first tokens of each output under the target."""
    return output_distribution(lambda tokens: logits_ops.warp(TARGET.row([*PROMPT, *tokens]), sampling).tolist(), TOKENS, eos)


def seldom(names: Iterable[object], *often: object) -> list[object]:
    """All parameters, the less important ones marked as slow."""
    return [pytest.param(name, marks=() if name in often else pytest.mark.slow) for name in names]


def path_of(name: str, settings: dict[str, object]) -> tuple[object, ...]:
    """What decides how the method drafts and verifies with these settings."""
    method = methods.find(name.partition(":")[0])
    values = methods.resolve(method, settings, has_predictor=True)
    return method.drafter, method.drafts_trees(values), values.policy, method.verifier, method.schedule


def test_every_lossless_method_is_tested() -> None:
    tested = {path_of(name, settings) for name, settings in PATHS.items()}
    for name, method in methods.METHODS.items():
        has_own_tests = method.head or name == "eesd-beta"
        assert not method.lossless or path_of(name, {}) in tested or has_own_tests, name


@pytest.mark.parametrize("name", seldom(PATHS, *OFTEN))
def test_the_first_tokens_have_the_targets_distribution(name: str) -> None:
    sampling = WARPS["both"]
    counts = Counter(decode(name, PATHS[name], sampling, seed) for seed in range(RUNS))
    assert p_value(counts, expected(sampling)) > SIGNIFICANCE


@pytest.mark.parametrize("name", seldom(PATHS, "pearl"))
def test_the_first_tokens_with_an_end_of_sequence(name: str) -> None:
    sampling, eos = WARPS["plain"], frozenset({1, 4})
    counts = Counter(decode(name, PATHS[name], sampling, seed, eos) for seed in range(RUNS))
    assert p_value(counts, expected(sampling, eos)) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "warp"), list(product(PATHS, WARPS)))
def test_the_first_tokens_in_many_runs(name: str, warp: str) -> None:
    """Enough runs to find a total variation of about 0.03, that of the smallest known mistake."""
    counts = Counter(decode(name, PATHS[name], WARPS[warp], seed) for seed in range(40_000 if warp == "plain" else 6000))
    assert p_value(counts, expected(WARPS[warp])) > SIGNIFICANCE


@pytest.mark.parametrize("warp", seldom(WARPS, "both"))
@pytest.mark.parametrize("beam", seldom(["greedy", "sample"], "sample"))
def test_a_threshold_of_one_makes_mtad_sample_from_the_target(beam: str, warp: str) -> None:
    """MTAD, section 5.2.2: all drafts are rejected, and only the target's own tokens remain."""
    settings = {"tau": 1, "k": 2, "beams": 2, "beam": beam}
    counts = Counter(decode("mtad", settings, WARPS[warp], seed) for seed in range(800))
    assert p_value(counts, expected(WARPS[warp])) > SIGNIFICANCE


def test_the_test_would_notice_a_draft_that_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check must be able to fail: if all drafts are accepted, the distribution is the draft's."""

    def believe(_: object, draft: Draft, rows: ModelOutput) -> Verdict:
        return Verdict(tuple(range(len(draft.tokens))), int(rows.logits[-1].argmax()))

    monkeypatch.setattr(RejectionSampling, "verify", believe)
    counts = Counter(decode("sd", {"k": 3}, WARPS["plain"], seed) for seed in range(500))
    assert p_value(counts, expected(WARPS["plain"])) < 1e-12


def every_real_run() -> Iterator[object]:
    """One method on each backend with few runs; all methods with many are slow tests."""
    yield "sd", "native", 200
    yield from (pytest.param(name, backend, 4000, marks=pytest.mark.slow) for name, backend in product(PATHS, BACKENDS))


@pytest.mark.parametrize(("name", "backend", "count"), list(every_real_run()))
def test_joint_distribution_of_a_real_model(name: str, backend: str, count: int) -> None:
    """The same on model runners with KV caches: a random Llama with a vocabulary of twelve tokens."""
    size = 12
    shape = {"vocab_size": size, "num_hidden_layers": 1, "initializer_range": 0.4}
    target, draft = make_model("llama", **shape), make_model("llama", seed=5, **shape)
    sampling = SamplingParams(max_new_tokens=LENGTH, temperature=1.0, top_k=8, top_p=0.95)
    runners = ModelRunner(model_of(target, backend)), RunnerWithHiddenStates(model_of(draft, backend))
    worker = DraftWorker.in_this_process(runners[1])

    def next_probs(tokens: tuple[int, ...]) -> list[float]:
        probs: list[float] = logits_ops.warp(uncached(target, [*PROMPT, *tokens]), sampling).tolist()
        return probs

    method = name.partition(":")[0]
    runs = (scripted_run(method, PATHS[name], *runners, sampling, seed=seed, worker=worker) for seed in range(count))
    counts = Counter(map(first_tokens, runs))
    assert p_value(counts, output_distribution(next_probs, TOKENS)) > SIGNIFICANCE


@pytest.mark.parametrize("top_k", [0, 1, 3, 40, 5000])
@pytest.mark.parametrize("top_p", [1.0, 0.99, 0.9, 0.5, 0.01])
@pytest.mark.parametrize("vocabulary", [8, 1000])
def test_warping_is_transformers(top_k: int, top_p: float, vocabulary: int) -> None:
    logits = torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(3)) * 4
    scores = TemperatureLogitsWarper(0.7)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    ours = logits_ops.warp(logits, SamplingParams(temperature=0.7, top_k=top_k, top_p=top_p))
    assert torch.allclose(ours, scores.softmax(-1), atol=1e-6)
    assert torch.equal(ours > 0, scores.softmax(-1) > 0)


def test_a_flat_distribution_has_a_nucleus_beyond_the_head() -> None:
    ours = logits_ops.warp(torch.zeros(2, 1000), SamplingParams(temperature=1.0, top_p=0.9))
    assert ((ours > 0).sum(-1) - 900).abs().max() <= 1
    assert torch.allclose(ours.sum(-1), torch.ones(2))


def test_draws_follow_the_weights_and_never_take_what_has_none() -> None:
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 1.0, 0.0])
    generator = torch.Generator().manual_seed(0)
    counts = Counter(int(logits_ops.draw(weights, generator)) for _ in range(8000))
    assert set(counts) == {1, 3, 4}
    assert abs(counts[1] / 8000 - 0.5) < 0.03


@pytest.mark.parametrize("weights", [[0.0, 0.0], [float("nan"), 1.0], [1.0, float("nan")]])
def test_a_draw_from_nothing_is_flagged(weights: list[float]) -> None:
    assert int(logits_ops.draw(torch.tensor(weights), torch.Generator())) == -1


def test_entropy_and_top_probability() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [10.0, -torch.inf, -torch.inf, -torch.inf]])
    entropy, top_prob = logits_ops.entropy_and_top_prob(logits)
    assert torch.allclose(entropy, torch.tensor([torch.log(torch.tensor(4.0)), 0.0]))
    assert torch.allclose(top_prob, torch.tensor([0.25, 1.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_statistics_of_one_row_on_a_cpu_are_those_of_torch(dtype: torch.dtype, scale: float) -> None:
    """Against float64, with many tokens, an impossible one and an offset that exp could not take."""
    logits = (torch.randn(40_000, generator=torch.Generator().manual_seed(1)) * scale + 200).to(dtype)
    logits[7] = -torch.inf
    token, entropy, top_prob = logits_ops.greedy_statistics(logits)
    probs = logits.double().softmax(dim=-1)
    assert [token] == logits_ops.argmax_tokens(logits[None])
    assert entropy == pytest.approx(torch.special.entr(probs).sum().item(), rel=1e-5)
    assert top_prob == pytest.approx(probs.max().item(), rel=1e-5)
    assert [entropy, top_prob] == pytest.approx([value.item() for value in logits_ops.entropy_and_top_prob(logits)], rel=1e-4)


@pytest.mark.parametrize("logits", [[0.0, float("nan")], [float("nan"), 0.0], [float("inf"), 0.0], [-float("inf")] * 2])
def test_statistics_of_a_row_without_a_finite_maximum_are_flagged(logits: list[float]) -> None:
    token, *numbers = logits_ops.greedy_statistics(torch.tensor(logits))
    assert token == -1
    assert all(map(math.isnan, numbers))


def test_a_single_draw_is_that_of_a_batch() -> None:
    probs = torch.rand(300, 50, generator=torch.Generator().manual_seed(2)).pow(8)
    one, batch = (torch.Generator().manual_seed(3) for _ in range(2))
    assert [logits_ops.draw_on_cpu(row, one) for row in probs] == [int(logits_ops.draw(row[None], batch)) for row in probs]
