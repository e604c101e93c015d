"""Joint decoding against a search of every block, and the verdicts of MTAD and BiLD on hand-made
logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import pytest
import torch

from specgen.base.errors import RunError
from specgen.base.types import Context, Draft, Round, SamplingParams, Verdict
from specgen.decoding import joint_greedy
from specgen.decoding.beam_search import BeamSearchDrafter
from specgen.decoding.drafting import Setup
from specgen.decoding.lossy_verification import BildVerifier, FlyVerifier, JointLikelihoodVerifier
from specgen.decoding.policy_base import Fixed
from specgen.engine.model_runner import ModelOutput
from specgen.testing.scripted_models import PROMPT, VOCAB, TableRunner, scripted_run

CPU = torch.device("cpu")
SAMPLING = SamplingParams(temperature=1.0)
GREEDY = SamplingParams()
Eos = tuple[int, ...]


def every_block(
    runner: TableRunner, ids: Sequence[int], length: int, eos: Eos = ()
) -> list[tuple[float, list[int]]]:
    """The log-likelihood of each block of `length` tokens, or fewer that end with `eos`, the
    likeliest first."""
    ended: list[tuple[float, list[int]]] = []
    unfinished: list[tuple[float, list[int]]] = [(0.0, [])]
    for position in range(length):
        longer = []
        for likelihood, tokens in unfinished:
            log_probs = runner.row([*ids, *tokens]).double().log_softmax(-1).tolist()
            longer += [(likelihood + log_probs[token], [*tokens, token]) for token in range(VOCAB)]
        unfinished = [
            block for block in longer if block[1][-1] not in eos and position < length - 1
        ]
        ended += [block for block in longer if block not in unfinished]
    return sorted(ended, reverse=True)


def joint(target: TableRunner, count: int, eos: Eos = (), **settings: object) -> list[Round]:
    return list(
        scripted_run(
            "joint", settings, target, None, SamplingParams(max_new_tokens=count), eos=eos
        ).rounds()
    )


@pytest.mark.parametrize(("length", "scale"), [(1, 1.5), (2, 1.5), (3, 0.3), (4, 1.5)])
@pytest.mark.parametrize(("eos", "batch"), [((), 1), ((1, 4), 16)])
def test_each_block_is_the_likeliest_of_all(
    length: int, scale: float, eos: Eos, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MTAD, Definition 3.1. With `batch` 1 the first block is the greedy one, so that branch and
    bound finds the others."""
    monkeypatch.setattr(joint_greedy, "BATCH", batch)
    differs = 0
    for seed in range(3):
        runner = TableRunner(seed, scale)
        context = list(PROMPT)
        for round_ in joint(runner, 11, eos, k=length):
            rest = min(length, len(PROMPT) + 11 - len(context))
            best, second = every_block(runner, context, rest, eos)[:2]
            assert best[0] - second[0] > 1e-6, "a tie proves nothing"
            assert round_.token_ids == best[1]
            differs += best[1][0] != int(runner.row(context).argmax())
            context += round_.token_ids
        assert len(context) == len(PROMPT) + 11 or context[-1] in eos
    assert differs or length == 1, "joint decoding would be plain decoding"


def test_a_search_that_takes_too_long_and_nan_logits_are_one_line() -> None:
    flat = TableRunner(1, scale=0.1)
    with pytest.raises(
        RunError, match="the likeliest block of 4 tokens is not found among 60 prefixes"
    ) as error:
        joint(flat, 10, k=4, nodes=60)
    assert "smaller k" in error.value.hint
    assert joint(flat, 10, k=4, nodes=16, beams=200), "the limit is that of the exact search"
    flat.table[3, 1] = math.nan
    with pytest.raises(RunError, match="target model's logits hold NaN"):
        joint(flat, 5, k=2)


def beams(runner: TableRunner, length: int, eos: Eos) -> Draft:
    setup = Setup(runner, SAMPLING, frozenset(eos), VOCAB, 3)
    return BeamSearchDrafter(setup, width=64, is_stochastic=False).propose(
        Context(PROMPT), Fixed(length), 10
    )


@pytest.mark.parametrize(("length", "eos"), [(1, ()), (2, ()), (3, ()), (3, (1, 4))])
def test_wide_beams_find_the_likeliest_block(length: int, eos: Eos) -> None:
    for seed in range(4):
        found = beams(TableRunner(seed), length, eos)
        (best, tokens) = every_block(TableRunner(seed), PROMPT, length, eos)[0]
        assert found.tokens == tokens
        assert found.log_likelihoods[-1] == pytest.approx(best, abs=1e-5)


def rows(*probs: Sequence[float]) -> ModelOutput:
    return ModelOutput(torch.tensor(probs).log())


def verifying(sampling: SamplingParams) -> Setup:
    return Setup(None, sampling, target=TableRunner(0))


def accepted(
    tau: float, tokens: Sequence[int], probs: Sequence[float], given: ModelOutput, top_k: int = 0
) -> int:
    """How many tokens of a chain MTAD accepts, from the draft's conditional probability of each."""
    likelihoods = torch.tensor(probs).double().log().cumsum(0).tolist()
    draft = Draft(tokens, range(-1, len(tokens) - 1), log_likelihoods=likelihoods)
    return len(
        JointLikelihoodVerifier(verifying(SamplingParams(temperature=1.0, top_k=top_k)), tau=tau)
        .verify(draft, given)
        .path
    )


GIVEN = rows((0.1, 0.6, 0.3), (0.05, 0.9, 0.05), (0.5, 0.3, 0.2), (0.2, 0.2, 0.6))
LIKELIHOOD_ZERO = rows((0.6, 0.4, 0.0), (0.5, 0.0, 0.5), (0.0, 0.0, 1.0), (1.0, 0.0, 0.0))


def test_mtad_accepts_the_longest_prefix_above_the_threshold() -> None:
    """P / Q of the prefixes of (0, 1, 2) is 0.125, 0.28, 0.07: with tau 0.2 the first token fails
    and passes with the second."""
    for tau, count in ((0.0, 3), (0.06, 3), (0.08, 2), (0.2, 2), (0.28, 2), (0.285, 0), (1.0, 0)):
        assert accepted(tau, (0, 1, 2), (0.8, 0.4, 0.8), GIVEN) == count, tau
    assert accepted(0.0, (0, 1, 2), (0.6, 0.5, 0.01), LIKELIHOOD_ZERO) == 1, (
        "zero ends all longer prefixes"
    )
    assert accepted(0.0, (0, 1, 2), (0.8, 0.4, 0.8), GIVEN, top_k=2) == 0, (
        "so does a token that is cut"
    )
    assert [accepted(tau, (1, 1), (0.1, 0.1), GIVEN) for tau in (0.999, 1.0)] == [2, 0], (
        "a ratio above one counts as one"
    )
    tiny = torch.tensor([1e-9, 1 - 1e-9]).log().expand(41, 2)
    assert accepted(0.5, [0] * 40, [1e-9] * 40, ModelOutput(tiny)) == 40, (
        "a product in float32 would be zero"
    )


def test_bild_rolls_back_from_the_first_token_that_the_target_finds_bad() -> None:
    """By the unwarped likelihoods, whereas its own token is warped. -ln 0.2 is 1.6, -ln 0.05 is
    3.0."""
    given = rows((0.2, 0.5, 0.3), (0.05, 0.9, 0.05), (0.6, 0.2, 0.2), (0.1, 0.1, 0.8))
    verdicts = {
        0.1: Verdict((), 1, "correction"),
        2.0: Verdict((0,), 1, "correction"),
        3.1: Verdict((0, 1, 2), 2, "bonus"),
    }
    for sampling in (GREEDY, SamplingParams(temperature=5.0, top_k=1)):
        for rollback, verdict in verdicts.items():
            assert (
                BildVerifier(verifying(sampling), rollback=rollback).verify(
                    Draft((0, 0, 0), (-1, 0, 1)), given
                )
                == verdict
            )
        with pytest.raises(RunError, match="target model's logits hold NaN"):
            BildVerifier(verifying(sampling), rollback=2.0).verify(
                Draft((0,), (-1,)), ModelOutput(torch.full((2, 3), torch.nan))
            )
    flat = rows(*[[0.26, 0.25, 0.25, 0.24]] * 2)
    paths = [
        BildVerifier(verifying(GREEDY), rollback=0.0).verify(Draft((token,), (-1,)), flat).path
        for token in (0, 1)
    ]
    assert paths == [(0,), ()], "the target's likeliest token always stands"


def fly(tokens: Sequence[int], given: ModelOutput, window: int, entropy: float) -> int:
    draft = Draft(list(tokens), range(-1, len(tokens) - 1))
    return len(
        FlyVerifier(verifying(GREEDY), window=window, entropy=entropy).verify(draft, given).path
    )


def test_fly_keeps_a_differing_token_where_the_target_was_unsure_and_the_draft_agrees_again() -> (
    None
):
    """In all chains of right and wrong tokens, by the definition. -sum p ln p over the three
    likeliest is 1.06 or 0.21 there."""
    unsure = (0.4, 0.35, 0.2, 0.05)
    sure = (0.95, 0.02, 0.02, 0.01)
    for pattern in product((0, 1), repeat=7):  # 1: a token that is not the target's likeliest
        given = rows(*(unsure if index % 3 else sure for index in range(7)), sure)
        for window, entropy in ((2, 0.3), (3, 0.3), (3, 0.0), (3, 1.07), (6, 0.3)):
            count = 0
            for index, wrong in enumerate(pattern):
                agrees = index < 7 - window and not any(pattern[index + 1 : index + window])
                if wrong and not (agrees and (1.056 if index % 3 else 0.205) >= entropy):
                    break
                count += 1
            assert fly(pattern, given, window, entropy) == count, (pattern, window, entropy)
    with pytest.raises(RunError, match="target model's logits hold NaN"):
        fly((0,), ModelOutput(torch.full((2, 3), torch.nan)), 2, 0.3)
