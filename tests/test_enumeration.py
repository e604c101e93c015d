"""Lossless methods by enumeration: over all random paths of whole runs, the output has exactly the
target's distribution."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import make_model, model_of, near_copy
from runner_checks import every, uncached

from specgen import methods
from specgen.base.types import Round, SamplingParams
from specgen.decoding.parallel_costs import Window
from specgen.engine.model_runner import ModelRunner
from specgen.methods import copying
from specgen.testing.enumeration import (
    PROMPT,
    ROUNDING,
    Case,
    InlineWorker,
    Paths,
    SmallRunner,
    distance,
    exact,
    states,
    total_variation,
)
from specgen.testing.scripted_models import scripted_run

THREE = (3, 3)
CHAINS = [  # block verification
    Case("sd", {"k": 1}, 5),
    Case("sd", {"k": 2}, 5),
    Case("sd", {"k": 3}, 5),
    Case("sd", {"k": 4}, 6, seed=1),
    Case("sd", {"k": 3}, 5, THREE, {"top_k": 2}),
    Case("sd", {"k": 3}, 5, THREE, {"top_p": 0.8, "temperature": 1.3}, seed=1),
    Case("sd", {"k": 3}, 5, THREE, {"min_p": 0.4, "temperature": 1.2}, seed=1),
    Case("sd", {"k": 2}, 4, THREE, eos=(2,)),
    Case("sd", {"k": 3}, 5, THREE, {"top_k": 2}, eos=(0,), zero=True),
    Case("sd", {"k": 2}, 4, THREE, zero=True, seed=1),
    Case("sd", {"k": 2}, 4, (3, 2)),
    Case("sd", {"k": 3}, 5, (2, 4)),
    Case("lookup", {"k": 3, "ngram": 2}, 6),  # a draft that is not drawn at random
    Case("lookup", {"k": 3, "ngram": 2}, 5, THREE, {"top_p": 0.8}, eos=(1,)),
    Case("suffix", {"policy": "fixed", "k": 3, "min_prob": 0}, 6),
    Case("suffix", {"policy": "confidence", "threshold": 0.3}, 5, THREE, {"top_p": 0.8}, eos=(1,)),
    # nothing is accepted: the output is the target's own
    Case("mtad", {"tau": 1, "k": 2, "beams": 2}, 5),
]
# the draft model alone drafts
UNMIXED = {"draft_cost": 0.3, "verify_cost": 0.1, "exploration": 0.1, "lookup": False}
POLICIES = [  # that read the drawn token or what was accepted before
    Case("sd", {"policy": "confidence", "threshold": 0.5, "max_draft": 4}, 5),
    Case(
        "sd", {"policy": "confidence", "threshold": 0.3, "max_draft": 3}, 5, THREE, {"top_p": 0.9}
    ),
    Case("sd", {"policy": "svip", "threshold": 0.25, "max_draft": 4}, 5),
    Case(
        "sd",
        {"policy": "svip", "threshold": 0.35, "max_draft": 4},
        5,
        THREE,
        {"top_k": 2},
        eos=(1,),
        seed=6,
    ),
    Case("sd", {"policy": "selfsd"}, 5, seed=3),
    Case("sd", {"policy": "heuristic", "k": 1}, 5, seed=1),
    Case("sd", {"policy": "beta-ts", "alpha": 3.0}, 5),
    Case("eesd-cali", {"theta0": 0.9}, 4),
    Case("adaptive", {"draft_cost": 0.2, "verify_cost": 0.05}, 5, seed=4),
    Case("adaptive", UNMIXED, 5, THREE, {"top_p": 0.9}, eos=(2,), seed=4),
    Case(
        "adaptive",
        {"draft_cost": 0.1, "verify_cost": 0.1, "exploration": 0.5},
        5,
        THREE,
        {"top_k": 2},
        zero=True,
        seed=1,
    ),
    Case("eesd", {"draft_cost": 0.2, "verify_cost": 0.05}, 5, seed=2),
    # prompt lookup's drafts, which are not drawn, take turns with the draft model's
    Case("adaptive", {"draft_cost": 0.3, "verify_cost": 0.02, "max_draft": 2}, 5, seed=5),
]
PARALLEL = [
    Case("pearl", {"window": 1}, 5),
    Case("pearl", {"window": 2}, 4),
    Case("pearl", {"window": 3}, 5, seed=1),
    Case("pearl", {"window": 4}, 5),
    Case("pearl", {"window": 2}, 4, THREE, {"top_p": 0.8}),
    Case("pearl", {"window": 3}, 5, THREE, {"top_k": 2}, eos=(2,)),
    Case("pearl", {"window": 3}, 6, eos=(1,)),
    Case("pearl", {"window": 2, "pre_verify": False}, 4),
    Case("pearl", {"window": 3, "pre_verify": False}, 6, eos=(1,), seed=1),
    Case("pearl", {"window": 2, "post_verify": False}, 5),
    Case("pearl", {"window": 4, "post_verify": False}, 6, eos=(1,), seed=1),
    Case("pearl", {"window": 3, "policy": "confidence", "threshold": 0.5}, 5),
    Case("pearl", {"window": 5}, 5, window=Window(3, 3, lead=2, is_flexible=True)),
    Case("pearl", {"window": 3, "policy": "adaptive", "verify_cost": 0.2, "exploration": 0.1}, 4),
    Case(
        "pearl",
        {"window": 3, "policy": "adaptive", "verify_cost": 0.3, "post_verify": False},
        4,
        seed=1,
    ),
    *(Case("pearl", {"window": 3}, limit) for limit in (1, 2, 3, 4)),
]
TREES = [
    Case("sd", {"k": 2, "width": 2}, 5),
    Case("sd", {"k": 2, "width": 2}, 5, THREE),
    Case("sd", {"depth": 3, "width": 2}, 5, THREE, {"top_k": 2}, eos=(2,)),
    Case(
        "sd", {"policy": "confidence", "width": 3, "depth": 2}, 4, THREE, {"top_p": 0.9}, zero=True
    ),
    Case("eesd-tree", {"width": 2, "depth": 3, "theta0": 1.0}, 5),
    Case("eesd-tree", {"width": 1, "depth": 2, "theta0": 1.0}, 4),
    Case("sd", {"depth": 3, "width": 2, "nodes": 4}, 4, THREE, eos=(2,)),
    Case(
        "sd",
        {"policy": "svip", "width": 3, "nodes": 5, "threshold": 0.35, "every": 2},
        5,
        (3, 4),
        {"top_k": 2},
    ),
    Case("sd", {"k": 2, "cape": True}, 4, THREE),
    Case("sd", {"k": 2, "cape": True}, 3, (4, 4), {"temperature": 1.3}, seed=2),
    Case("sd", {"k": 3, "cape": True}, 4, (3, 4), {"top_k": 2}, eos=(1,), zero=True),
    Case("sd", {"k": 2, "cape": True}, 4, (4, 3), {"top_p": 0.8}, seed=5),
    Case("sd", {"policy": "confidence", "max_draft": 3, "cape": True}, 5, eos=(1,), seed=1),
    Case(
        "sd",
        {
            "policy": "adaptive",
            "cape": True,
            "draft_cost": 0.1,
            "verify_cost": 0.05,
            "exploration": 0.1,
        },
        4,
    ),
    Case(
        "eesd-tree",
        {
            "width": 2,
            "policy": "adaptive",
            "draft_cost": 0.1,
            "verify_cost": 0.1,
            "exploration": 0.1,
        },
        5,
    ),
    Case("medusa", {"k": 2, "nodes": 4}, 4, THREE, {"top_p": 0.9}),
    Case("block", {"k": 2, "nodes": 4}, 4, THREE, eos=(2,)),
    Case("eagle", {"k": 2, "width": 2, "nodes": 3}, 4, THREE, seed=1),
    Case("mtp", {"k": 2}, 5, THREE),
    Case("mtp", {"k": 2, "width": 2, "nodes": 3}, 4, THREE, {"top_p": 0.9}),
    Case(
        "specinfer",
        {"drafts": 2, "policy": "adaptive", "draft_cost": 0.2, "verify_cost": 0.1, "max_draft": 2},
        4,
    ),
    Case("specinfer", {"k": 2, "drafts": 2}, 4),
    Case("specinfer", {"k": 1, "drafts": 3}, 4, THREE, {"top_p": 0.9}, zero=True),
    Case("specinfer", {"k": 3, "drafts": 2}, 4, eos=(1,)),
    Case("specinfer", {"k": 1, "drafts": 4}, 3),
    Case("spectr", {"k": 2, "drafts": 2}, 3),
    Case("spectr", {"k": 1, "drafts": 4}, 3),
    Case(
        "spectr",
        {"drafts": 2, "policy": "adaptive", "draft_cost": 0.3, "verify_cost": 0.1, "max_draft": 2},
        3,
    ),
    Case("spectr", {"k": 1, "drafts": 3}, 3, THREE, {"top_p": 0.9}, zero=True),
    Case("spectr", {"k": 2, "drafts": 2}, 4, THREE, {"top_k": 2}, eos=(2,)),
]
NGRAMS = [
    Case("lookahead", {"window": 2, "ngram": 3, "guesses": 2}, 5),
    Case("lookahead", {"window": 2, "ngram": 2, "guesses": 2}, 4, THREE),  # Jacobi decoding
    Case(
        "lookahead",
        {"window": 3, "ngram": 4, "guesses": 2},
        4,
        THREE,
        {"top_k": 2},
        eos=(2,),
        zero=True,
        seed=1,
    ),
    Case("ouroboros", {"k": 2, "ngram": 3, "branches": 2, "window": 2}, 4),
    Case(
        "ouroboros",
        {"k": 1, "ngram": 2, "branches": 2, "window": 2},
        4,
        THREE,
        {"top_k": 2},
        eos=(2,),
        zero=True,
    ),
    Case("ouroboros", {"k": 3, "ngram": 3, "branches": 1, "window": 1}, 4, seed=1),
]

# copied drafts, which are not drawn, and those of a model
COPIES = [
    Case("sd", {"k": 2, "copy": 2}, 5),
    Case("sd", {"k": 2, "copy": "auto"}, 4, THREE, {"top_p": 0.9}, eos=(2,), zero=True),
    Case("sd", {"policy": "confidence", "max_draft": 3, "copy": "auto"}, 4, seed=1),
    Case(
        "sd",
        {"policy": "adaptive", "draft_cost": 0.3, "verify_cost": 0, "copy": 2, "max_draft": 2},
        4,
        seed=1,
    ),
    Case("sd", {"k": 2, "width": 2, "copy": 2}, 4, THREE),
    Case("sd", {"k": 2, "cape": True, "copy": "auto"}, 3, THREE),
    Case("eesd", {"policy": "fixed", "k": 2, "copy": "auto"}, 4, seed=2),
    Case("medusa", {"k": 2, "nodes": 4, "copy": 2}, 4, THREE, {"top_p": 0.9}),
    Case("eagle", {"k": 2, "width": 2, "nodes": 3, "copy": "auto"}, 4, THREE, seed=1),
    Case("mtp", {"k": 2, "copy": 2}, 4, THREE),
    Case("block", {"k": 2, "copy": "auto"}, 5, eos=(1,)),
]


# Lossless methods without a case: the method whose cases cover theirs, and why.
COVERED = {
    "ar": ("sd", "no drafts: each token is the target's own"),
    "heuristic": ("sd", "sd with another default of policy"),
    "confidence": ("sd", "sd with another default of policy"),
    "svip": ("sd", "sd with another default of policy"),
    "beta-ts": ("sd", "sd with another default of policy"),
    "selfsd": ("sd", "sd's drafter and verifier; the target without some layers is the draft"),
    "glide": ("sd", "sd's drafter and verifier; a head is the draft model"),
}


def test_every_lossless_method_has_a_case() -> None:
    cases = [*CHAINS, *POLICIES, *PARALLEL, *TREES, *NGRAMS, *COPIES]
    own = {methods.find(case.method).alias_of or case.method for case in cases}
    lossless = {name for name, method in methods.METHODS.items() if method.lossless}
    assert lossless - own == COVERED.keys(), (
        "each method with lossless = True needs a Case in one of the lists above, or an entry in "
        "COVERED if another method's cases run all of its drafter and verifier"
    )
    assert {method for method, _ in COVERED.values()} <= own


@pytest.mark.parametrize("case", CHAINS, ids=str)
def test_chains(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert distance(case) < ROUNDING


@pytest.mark.parametrize("method", ["sd", "pearl"])
@pytest.mark.parametrize(
    "cuts", [{"top_k": 2}, {"top_k": 2, "top_p": 0.8}, {"top_p": 0.8}, {"min_p": 0.5}], ids=str
)
def test_on_a_gpu(method: str, cuts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The method takes tensors for those of a GPU."""
    settings = {"k": 2} if method == "sd" else {"window": 2}
    assert distance(Case(method, settings, 4, (4, 4), cuts, eos=(2,)), on_gpu=True) < ROUNDING


@pytest.mark.parametrize("case", POLICIES, ids=str)
def test_length_policies(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert distance(case) < ROUNDING


def rounds_of(case: Case, seed: int) -> list[Round]:
    target, draft = case.models
    run = scripted_run(
        case.method,
        case.settings,
        target,
        draft,
        case.sampling,
        eos=case.eos,
        seed=seed,
        prompt=PROMPT,
    )
    return list(run.rounds())


@pytest.mark.parametrize("case", [case for case in POLICIES if case.method == "adaptive"], ids=str)
def test_adaptive_decides_by_what_was_drafted_in_these_cases(case: Case) -> None:
    """Drafts end at different lengths after tokens drawn before, or some rounds draft nothing."""
    lengths = set()
    reasons = set()
    for seed in range(40):
        for round_ in rounds_of(case, seed)[1:]:
            reason = (round_.draft.stop_reason or "").split(": ")[0].split(" 0")[0]
            reasons.add(reason)
            if reason == "gain":
                lengths.add(len(round_.draft.tokens))
    assert "gain" in reasons
    assert len(lengths) > 1
    assert "no draft" in reasons or "exploration" not in case.settings


@pytest.mark.parametrize("case", every(2, PARALLEL), ids=str)
def test_pearl(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert distance(case) < ROUNDING


@pytest.mark.parametrize("case", TREES, ids=str)
def test_trees(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert distance(case) < ROUNDING


@pytest.mark.parametrize("case", NGRAMS, ids=str)
def test_ngram_pools(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert distance(case) < ROUNDING


@pytest.fixture
def early_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `copy=auto`, short matches are copied from the first rounds on."""
    monkeypatch.setattr(copying, "_SHORTEST_MATCH", 2)
    monkeypatch.setattr(copying, "_FIRST_ACCEPTED", 0.7)


@pytest.mark.parametrize("case", COPIES, ids=str)
@pytest.mark.usefixtures("early_copies")
def test_copies_before_a_model(case: Case) -> None:
    assert distance(case) < ROUNDING


@pytest.mark.parametrize("case", COPIES, ids=str)
@pytest.mark.usefixtures("early_copies")
def test_both_sources_draft_in_these_cases(case: Case) -> None:
    sources = set()
    for seed in range(20):
        sources |= {
            round_.draft.is_copied for round_ in rounds_of(case, seed) if round_.draft.tokens
        }
    assert sources == {True, False}


@pytest.mark.parametrize("settings", [{"k": 2}, {"k": 2, "width": 2}])
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text"])
def test_experts_and_recurrent_layers(
    family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native decoder's, against transformers' passes over each sequence."""
    module = make_model(family, vocab_size=3)
    target, draft = (
        ModelRunner(model_of(each, "native")) for each in (module, near_copy(module, 0.5))
    )
    sampling = SamplingParams(max_new_tokens=3, temperature=1.5)
    wanted: Any = SimpleNamespace(row=lambda ids: uncached(module, ids))
    found = Paths(monkeypatch).of_rounds(lambda: states("sd", settings, target, draft, sampling))
    assert total_variation(found, exact(wanted, sampling, 3)) < 10 * ROUNDING
    assert max(found.values()) < 0.5


class RecordedUniforms:
    """Records the uniform numbers that `torch.rand` gives, by the seed of the generator that each
    came from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of_seed: defaultdict[int, list[float]] = defaultdict(list)
        rand = torch.rand

        def recorded(*size: Any, generator: torch.Generator, **options: Any) -> torch.Tensor:
            numbers = rand(*size, generator=generator, **options)
            self.of_seed[generator.initial_seed()] += numbers.flatten().tolist()
            return numbers

        monkeypatch.setattr(torch, "rand", recorded)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("sd", {"k": 5}),
        ("pearl", {"window": 4}),
        ("pearl", {"window": 4, "post_verify": False}),
        ("specinfer", {"k": 4, "drafts": 3}),
        ("spectr", {"k": 4, "drafts": 3}),
        ("ouroboros", {"k": 4}),
        ("lookup", {"k": 4}),
        ("lookahead", {}),
        ("sd", {"k": 3, "width": 2}),
    ],
)
def test_each_random_number_is_used_once(
    method: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each drafted and each verified token has a uniform number of its own; draft and verifier have
    different seeds."""
    target = SmallRunner(0)
    draft = SmallRunner(100)
    uniforms = RecordedUniforms(monkeypatch)
    sampling = SamplingParams(max_new_tokens=60, temperature=1.0)
    worker: Any = InlineWorker(draft)
    rounds = list(
        scripted_run(
            method, settings, target, draft, sampling, worker=worker, seed=3, prompt=PROMPT
        ).rounds()
    )
    for numbers in uniforms.of_seed.values():
        assert len(set(numbers)) == len(numbers)
    used = sorted(map(len, uniforms.of_seed.values()))
    judged = sum(len(round_.draft.tokens) for round_ in rounds)
    draws = method not in ("lookup", "lookahead") and "width" not in settings
    assert len(used) == 1 + draws, "the verifier's generator, and the drafter's if it draws"
    assert judged > 30
    if not draws:  # one for each accepted token and each correction or bonus
        assert used == [60]
    # one for each drafted token; one for each judged token and each correction or bonus
    elif method == "sd":
        assert used == [judged, judged + len(rounds)]
