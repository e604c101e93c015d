"""What the user expects the output to be is drafted, and changes no output; log-probabilities come
from the passes that verify drafts."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import specgen
from specgen.base.errors import SpecgenError
from specgen.base.types import Context, SamplingParams
from specgen.decoding.predicted_output import FIRST_LENGTH, LONGEST, PredictedOutput
from specgen.decoding.verification import GreedyVerifier, RejectionSampling
from specgen.pair.pair import Pair
from specgen.testing.enumeration import PROMPT as SHORT
from specgen.testing.enumeration import (
    ROUNDING,
    InlineWorker,
    Paths,
    SmallRunner,
    State,
    exact,
    total_variation,
)
from specgen.testing.scripted_models import scripted_run

PROMPT = "def fibonacci(n):"
METHODS = """
    ar sd svip beta-ts adaptive lookup suffix lookahead ouroboros pearl:window=3
    pearl:pre_verify=false:window=2 spectr specinfer sd:width=3 sd:cape=true eesd eesd-tree selfsd
    mtad
    """.split()  # noqa: SIM905
TEXT = [5, 6, 7, 8, 9, 10, 11, 12, 5, 6, 20, 21, 22, 23]


def drafted(prediction: PredictedOutput, output: Sequence[int], limit: int = 100) -> list[int]:
    context = Context([1, 2])
    context.ids += output
    return list(prediction.propose(context, limit).tokens)


def test_the_expectation_is_followed_left_and_found_again() -> None:
    prediction = PredictedOutput(TEXT, GreedyVerifier())
    assert drafted(prediction, []) == TEXT[:FIRST_LENGTH]
    assert drafted(prediction, TEXT[:2]) == TEXT[2:10]
    assert drafted(prediction, TEXT[:2], limit=3) == TEXT[2:5]
    # another token, then back: two tokens that occur twice, then the longer match
    assert drafted(prediction, [*TEXT[:2], 99]) == []
    assert drafted(prediction, [*TEXT[:2], 99, 7]) == []
    assert drafted(prediction, [*TEXT[:2], 99, 7, 8]) == TEXT[4:12]
    assert drafted(prediction, [*TEXT[:2], 99, 7, 8, 98, 5, 6]) == TEXT[10:]
    assert drafted(prediction, [*TEXT[:2], 99, 7, 8, 98, 5, 6, 97, 12, 5, 6]) == TEXT[10:]
    assert drafted(prediction, [*TEXT[:2], 99, 7, 8, 98, 5, 6, 97, 12, 5, 6, *TEXT[10:]]) == []


def test_drafts_get_longer_as_long_as_they_are_accepted() -> None:
    text = list(range(100, 400))
    prediction = PredictedOutput(text, GreedyVerifier())
    lengths = []
    done = 0
    for _ in range(6):
        tokens = drafted(prediction, text[:done])
        lengths.append(len(tokens))
        done += len(tokens) + 1
    assert lengths == [FIRST_LENGTH, 16, 32, LONGEST, LONGEST, LONGEST]
    wrong = done - 30  # in the last draft
    output = [*text[:wrong], 9, *text[wrong + 1 : wrong + 3]]
    assert drafted(prediction, output) == text[wrong + 3 : wrong + 3 + FIRST_LENGTH]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with specgen.load() as loaded:
        yield loaded


def run_with(pair: Pair, method: str, sampling: SamplingParams, prediction: Sequence[int]) -> Any:
    request = replace(pair.request(PROMPT, method, sampling), prediction=list(prediction))
    return list(pair.run(request).rounds())


def ids_of(rounds: Any) -> list[int]:
    return [token for round_ in rounds for token in round_.token_ids]


@pytest.mark.parametrize("method", METHODS)
def test_greedy_ids_with_right_and_wrong_predictions(pair: Pair, method: str) -> None:
    greedy = SamplingParams(max_new_tokens=40)
    plain = pair.generate(PROMPT, "ar", greedy).token_ids
    if method == "mtad":  # not lossless: the predicted tokens are, all the same
        assert ids_of(run_with(pair, method, greedy, plain)) == plain
        return
    changed = [*plain[:5], 7, *plain[6:20], *plain[24:]]
    for prediction in (plain, changed, [3, 4, 3, 4], plain[::-1]):
        rounds = run_with(pair, method, greedy, prediction)
        assert ids_of(rounds) == plain
    assert len(run_with(pair, method, greedy, plain)) < 8
    assert len(run_with(pair, method, greedy, changed)) < 25


def test_the_policy_learns_nothing_from_predictions(pair: Pair) -> None:
    greedy = SamplingParams(max_new_tokens=40)
    plain = pair.generate(PROMPT, "ar", greedy).token_ids
    (first, *others) = run_with(pair, "beta-ts", greedy, plain)
    assert len(others) > 2
    assert {str(round_.policy_state) for round_ in others} == {str(first.policy_state)}
    assert all(round_.draft.stop_reason.startswith("prediction") for round_ in others[:-1])


@pytest.mark.parametrize(
    ("method", "settings"),
    [("sd", {"k": 2}), ("lookup", {"k": 2, "ngram": 2}), ("pearl", {"window": 2}), ("ar", {})],
)
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}])
def test_sampling_with_a_prediction_has_the_targets_distribution(
    method: str, settings: dict[str, Any], filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = SmallRunner(0)
    draft = SmallRunner(100)
    sampling = SamplingParams(max_new_tokens=4, temperature=1.2, **filters)

    def states() -> Iterator[State]:
        run = scripted_run(
            method, settings, target, draft, sampling, worker=InlineWorker(draft), prompt=SHORT
        )
        verifier = RejectionSampling(sampling, torch.device("cpu"), 7)
        run.prediction = PredictedOutput([1, 2, 0, 1, 2], verifier)
        for round_ in run.rounds():
            pending: Sequence[int] = ()
            if method == "pearl" and round_.verdict.token is None:
                pending = run.schedule.drafter.drafted.tokens[1:]  # type: ignore[attr-defined]
            run.policy.reason = ""
            run.policy.take_seconds()
            yield State(
                tuple(run.context.ids[len(SHORT) :]),
                tuple(pending),
                pickle.dumps(run.policy),
                run.prediction.state,
                run.finish_reason is not None,
            )

    found = Paths(monkeypatch).of_rounds(states)
    assert total_variation(found, exact(target, sampling, 4)) < ROUNDING


def test_its_random_numbers_are_its_own(pair: Pair) -> None:
    sampling = SamplingParams(max_new_tokens=8, temperature=1.0, seed=3)
    run = pair.run(replace(pair.request(PROMPT, "sd", sampling), prediction=[5, 6]))
    assert run.prediction is not None
    seeds = {
        verifier._generator.initial_seed()  # type: ignore[attr-defined]
        for verifier in (run.verifier, run.prediction.verifier)
    }
    assert len(seeds) == 2


# log-probabilities


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", [*METHODS[:-1], "bild", "fly"])
def test_log_probabilities_are_those_of_transformers(
    pair: Pair, method: str, temperature: float
) -> None:
    if method == "fly" and temperature:
        pytest.skip("it decodes greedily")
    sampling = SamplingParams(
        max_new_tokens=24, temperature=temperature, top_k=5, seed=1, logprobs=3
    )
    prompt = pair.tokenizer.encode(PROMPT)
    request = replace(pair.request(prompt, method, sampling), prediction=[201] * 4)
    passes = pair.models.plain().target.forward_count  # type: ignore[attr-defined]
    rounds = list(pair.run(request).rounds())
    if method in ("ar", "sd", "lookup"):
        passes = pair.models.plain().target.forward_count - passes  # type: ignore[attr-defined]
        assert passes == sum(round_.target_passes for round_ in rounds)
    ids = ids_of(rounds)
    found = [entry for round_ in rounds for entry in round_.verdict.log_probs]
    assert len(found) == len(ids)
    with torch.no_grad():
        logits = pair.target.transformers_module(torch.tensor([[*prompt, *ids]])).logits[0]
    expected = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
    for row, token, entry in zip(expected, ids, found, strict=True):
        assert entry.log_prob == pytest.approx(float(row[token]), abs=1e-3)
        best = row.topk(3)
        assert list(entry.top_log_probs) == pytest.approx(best.values.tolist(), abs=1e-3)
        assert [float(row[other]) for other in entry.top] == pytest.approx(
            best.values.tolist(), abs=1e-3
        )


def test_without_top_tokens_there_are_none_and_without_logprobs_nothing(pair: Pair) -> None:
    rounds = pair.generate(PROMPT, "sd", max_new_tokens=6, logprobs=0).rounds
    entries = [entry for round_ in rounds for entry in round_.verdict.log_probs]
    assert len(entries) == 6
    assert not any(entry.top or entry.top_log_probs for entry in entries)
    rounds = pair.generate(PROMPT, "sd", max_new_tokens=6).rounds
    assert not any(round_.verdict.log_probs for round_ in rounds)
    with pytest.raises(SpecgenError, match="joint chooses whole blocks"):
        pair.generate(PROMPT, "joint", logprobs=1)
