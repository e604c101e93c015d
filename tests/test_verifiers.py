"""Verdicts on hand-made logits: chains and trees, greedy and sampled, and edge cases."""

from __future__ import annotations

import math

import pytest
import torch
from enumeration import PROMPT, ROUNDING, Paths, SmallRunner, exact

from specgen.base.errors import RunError
from specgen.base.types import Context, Draft, Round, SamplingParams, TokenStatus, Verdict
from specgen.decoding import logits_ops
from specgen.decoding.verification import GreedyVerifier, RejectionSampling
from specgen.engine.model_runner import ModelOutput


def rows(*choices: int, size: int = 8) -> ModelOutput:
    """Logits whose likeliest tokens are `choices`."""
    return ModelOutput(torch.nn.functional.one_hot(torch.tensor(choices), size).float() * 9)


@pytest.mark.parametrize(
    ("draft", "choices", "verdict"),
    [
        (Draft(), (3,), Verdict((), 3, None)),
        (Draft.chain((1, 2)), (1, 2, 3), Verdict((0, 1), 3, "bonus")),
        (Draft.chain((1, 2)), (1, 5, 3), Verdict((0,), 5, "correction")),
        (Draft.chain((1, 2)), (4, 2, 3), Verdict((), 4, "correction")),
        (Draft((1, 2, 3, 4), (-1, -1, 1, 1)), (2, 0, 4, 0, 6), Verdict((1, 3), 6, "bonus")),
        (Draft((1, 2, 3, 4), (-1, -1, 1, 1)), (2, 0, 7, 0, 6), Verdict((1,), 7, "correction")),
        (Draft((1, 2, 3), (-1, -1, 0)), (5, 3, 0, 0), Verdict((), 5, "correction")),
        (Draft((1, 2, 3), (-1, -1, 0)), (2, 0, 3, 6), Verdict((1,), 3, "bonus")),  # the 3 follows the other branch
    ],
)
def test_greedy_walks_along_the_argmax(draft: Draft, choices: tuple[int, ...], verdict: Verdict) -> None:
    assert GreedyVerifier().verify(draft, rows(*choices)) == verdict


@pytest.mark.parametrize(
    ("draft", "choices", "verdict"),
    [
        (Draft.chain((1, 2)), (1, 2), Verdict((0, 1), None, None)),
        (Draft.chain((1, 2)), (1, 5), Verdict((0,), 5, "correction")),
        (Draft.chain((1,)), (4,), Verdict((), 4, "correction")),
    ],
)
def test_without_a_row_behind_the_draft_there_is_no_bonus(draft: Draft, choices: tuple[int, ...], verdict: Verdict) -> None:
    """PEARL verifies the first token of the next draft with the last row."""
    assert GreedyVerifier().verify(draft, rows(*choices)) == verdict
    assert sampler(top_k=1).verify(draft, rows(*choices)) == verdict


def sampler(**options: float) -> RejectionSampling:
    return RejectionSampling(SamplingParams(temperature=1.0, **options), torch.device("cpu"), seed=0)  # type: ignore[arg-type]


def test_a_token_outside_the_targets_nucleus_is_never_accepted() -> None:
    logits = torch.tensor([[5.0, 1.0, 0.0, 0.0]] * 2)
    draft = Draft((2,), (-1,), probs=torch.tensor([[0.0, 0.0, 1.0, 0.0]]))
    for _ in range(50):
        verdict = sampler(top_k=1).verify(draft, ModelOutput(logits))
        assert verdict == Verdict((), 0, "correction")


def test_equal_distributions_accept_everything_and_an_empty_residual_is_no_nan() -> None:
    probs = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    logits = torch.tensor([[1.0, 1.0, -torch.inf, -torch.inf]] * 2)
    verifier = sampler()
    for _ in range(50):
        verdict = verifier.verify(Draft((0,), (-1,), probs=probs), ModelOutput(logits))
        assert verdict.path == (0,)
        assert verdict.source == "bonus"
        assert verdict.token in (0, 1)


# Candidates that were not drawn, as their tokens and parents, after a chain of drawn tokens with these lengths.
TREES = [
    (0, (2, 0, 1, 2), (-1, -1, 0, 0)),
    (0, (1, 0, 2), (-1, 0, 1)),
    (1, (2, 0, 1), (0, 0, 2)),
    (2, (1, 2), (1, 2)),
    (2, (0, 1), (-1, 2)),  # another candidate than the first drawn token, and one after it
]


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize(("drawn", "tokens", "parents"), TREES)
def test_candidates_that_were_not_drawn_keep_the_targets_distribution(
    drawn: int, tokens: tuple[int, ...], parents: tuple[int, ...], one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By enumeration of a chain's draws and the verifier's, with tokens drawn where needed or all at once as on a GPU."""
    target, draft, sampling = SmallRunner(1), SmallRunner(5), SamplingParams(temperature=1.0)
    monkeypatch.setattr(torch.Tensor, "is_cpu", one_by_one)
    verifier, generator = RejectionSampling(sampling, torch.device("cpu"), 0), torch.Generator()

    def round_() -> tuple[int, ...]:
        chain: list[int] = []
        probs = []
        for _ in range(drawn):
            probs.append(logits_ops.warp(draft.row([*PROMPT, *chain]), sampling))
            chain.append(int(logits_ops.draw(probs[-1], generator)))
        nodes = Draft([*chain, *tokens], [*range(-1, drawn - 1), *parents], probs=torch.stack(probs) if probs else None)
        verdict = verifier.verify(nodes, target.logits(Context(PROMPT), nodes.tokens, nodes.parents))
        return (*(nodes.tokens[node] for node in verdict.path), verdict.token)  # type: ignore[return-value]

    found = Paths(monkeypatch).all(round_)
    longest = Draft(range(drawn + len(tokens)), [*range(-1, drawn - 1), *parents]).levels
    assert max(map(len, found)) == longest + 1, "candidates are accepted"
    assert exact(target, sampling, drawn + 4, start=found) == pytest.approx(exact(target, sampling, drawn + 4), abs=ROUNDING)


@pytest.mark.parametrize("position", [0, 1])
def test_nan_logits_are_an_error(position: int) -> None:
    broken = rows(1, 2).logits
    broken[position, 3] = math.nan
    with pytest.raises(RunError, match="NaN"):
        GreedyVerifier().verify(Draft.chain((1,)), ModelOutput(broken))
    with pytest.raises(RunError, match="NaN"):
        sampler(top_k=1).verify(Draft.chain((1,)), ModelOutput(broken))


def test_greedy_forgives_a_nan_that_nothing_depends_on() -> None:
    broken = rows(4, 2).logits
    broken[1, 3] = math.nan  # the row after a rejected token
    assert GreedyVerifier().verify(Draft.chain((1,)), ModelOutput(broken)) == Verdict((), 4, "correction")


def statuses(draft: Draft, verdict: Verdict) -> str:
    return "".join(status.value[0] for status in Round(1, "sequential", draft, verdict).statuses)


def test_fates_of_a_draft() -> None:
    assert statuses(Draft.chain((1, 2, 3)), Verdict((0,), 9, "correction")) == "ard"
    assert statuses(Draft.chain((1, 2, 3)), Verdict((), 9, "correction")) == "rdd"
    assert statuses(Draft.chain((1, 2)), Verdict((0, 1), 9, "bonus")) == "aa"
    assert statuses(Draft.chain((1, 2, 3)), Verdict((0,), None, None)) == "add", "the output ended there: nothing was refused"
    assert statuses(Draft((1, 2, 3, 4), (-1, -1, 1, 0)), Verdict((1,), 9, "correction")) == "dard"
    assert TokenStatus.REJECTED.value == "rejected"
