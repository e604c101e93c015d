"""Penalties that a request asks for: those of OpenAI and transformers, in chains and in trees, in
all processes, without a change of the target's distribution by drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

import specgen
from specgen import demo
from specgen.base.errors import SpecgenError
from specgen.base.types import Context, SamplingParams, TokenPenalties
from specgen.engine.forward_pass import ModelOutput
from specgen.engine.penalties import GenerationConfig, PenaltyProcessor, penalised_logits
from specgen.pair.pair import Pair
from specgen.testing.enumeration import PROMPT as SHORT
from specgen.testing.enumeration import ROUNDING, Paths, SmallRunner, exact, states, total_variation

PROMPT = "def fibonacci(n):"
WIDTH = 9
ASKED = (
    TokenPenalties(presence=0.7),
    TokenPenalties(frequency=-0.4),
    TokenPenalties(1.7, 0.9, 0.3),
    TokenPenalties(0.6),
)


def by_definition(
    row: torch.Tensor, prompt: Sequence[int], output: Sequence[int], asked: TokenPenalties
) -> torch.Tensor:
    """The logits [vocabulary] after the prompt and the output: transformers' repetition penalty,
    then OpenAI's formula over the output."""
    if asked.repetition is not None:
        rule = RepetitionPenaltyLogitsProcessor(asked.repetition)
        ids = torch.tensor([[*prompt, *output]])
        row = rule(ids, row[None].clone())[0]  # type: ignore[assignment]
    amounts = torch.zeros_like(row)
    for token, count in Counter(output).items():
        amounts[token] = asked.presence + count * asked.frequency
    return row - amounts


@pytest.mark.parametrize("asked", ASKED)
def test_each_row_has_its_paths_penalties(asked: TokenPenalties) -> None:
    generator = torch.Generator().manual_seed(1)
    prompt, output = [1, 2, 2, 3], [4, 5, 4]
    context = Context(prompt, asked)
    context.extend(output)
    tokens, parents = [5, 6, 6, 1, 6], [-1, 0, 1, -1, 0]
    logits = torch.randn(4, WIDTH, generator=generator)
    found = penalised_logits(None, logits, context, tokens, parents, 2)
    assert found is not None
    paths = [[5, 6], [5, 6, 6], [1], [5, 6]]
    for row, path in enumerate(paths):
        expected = by_definition(logits[row], prompt, [*output, *path], asked)
        assert torch.equal(found[row], expected)
    # as in plain decoding, to the last bit
    context.extend(paths[1])
    plain = penalised_logits(None, logits[1:2], context, [], [], 0)
    assert plain is not None
    assert torch.equal(plain[0], found[1])


def test_tokens_beyond_the_vocabulary_and_the_generation_configs_penalties() -> None:
    processor = PenaltyProcessor(
        GenerationConfig(repetition_penalty=2.0, suppress_tokens=(3,)),
        (),
        WIDTH,
        torch.device("cpu"),
    )
    logits = torch.ones(1, WIDTH)
    context = Context([1, WIDTH + 1], TokenPenalties(presence=1.0))
    context.extend([2, WIDTH + 2])
    found = penalised_logits(processor, logits, context, [WIDTH + 3], [-1], 1)
    assert found is not None
    assert found[0].tolist() == [1, 0.5, -0.5, -torch.inf, 1, 1, 1, 1, 1]
    context.penalties = TokenPenalties(1.0)  # the request's replaces the model's
    found = penalised_logits(processor, logits, context, [], [], 0)
    assert found is not None
    assert found[0].tolist() == [1, 1, 1, -torch.inf, 1, 1, 1, 1, 1]
    context.penalties = None
    assert penalised_logits(None, logits, context, [], [], 0) is None


class PenalisedRunner(SmallRunner):
    """A `SmallRunner` that applies the context's penalties, as model runners do."""

    def logits(
        self,
        context: Context,
        draft: Sequence[int] = (),
        parents: Sequence[int] | None = None,
        *,
        start: int = 0,
    ) -> ModelOutput:
        own = super().logits(context, draft, parents, start=start)
        nodes = range(-1, len(draft) - 1) if parents is None else parents
        processed = penalised_logits(None, own.logits, context, draft, nodes, start)
        assert processed is not None
        return ModelOutput(processed, own.hidden_states, own.logits)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("sd", {"k": 3}),
        ("sd", {"k": 2, "width": 2}),
        ("sd", {"k": 2, "cape": True}),
        ("lookup", {"k": 3, "ngram": 2}),
        ("pearl", {"window": 2}),
        ("specinfer", {"k": 2, "drafts": 2}),
        ("lookahead", {"window": 2, "ngram": 3, "guesses": 2}),
        ("adaptive", {"draft_cost": 0.2, "verify_cost": 0.05}),
    ],
)
@pytest.mark.parametrize(
    "penalties",
    [
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"repetition_penalty": 1.8, "frequency_penalty": -1.0, "top_k": 2},
    ],
)
def test_sampling_has_the_penalised_distribution(
    method: str,
    settings: dict[str, Any],
    penalties: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, draft = PenalisedRunner(0), PenalisedRunner(100)
    sampling = SamplingParams(max_new_tokens=4, temperature=1.2, **penalties)
    asked = sampling.penalties
    assert asked is not None

    def row(ids: Sequence[int]) -> torch.Tensor:
        output = ids[len(SHORT) :]
        return by_definition(SmallRunner.row(target, ids), SHORT, output, asked)

    wanted: Any = SimpleNamespace(row=row)
    found = Paths(monkeypatch).of_rounds(lambda: states(method, settings, target, draft, sampling))
    assert total_variation(found, exact(wanted, sampling, 4)) < ROUNDING
    plain: Any = SimpleNamespace(row=lambda ids: SmallRunner.row(target, ids))
    assert total_variation(found, exact(plain, sampling, 4)) > 0.05, "they change something"


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with specgen.load() as loaded:
        yield loaded


PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.5,
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
}
METHODS = """
    sd svip beta-ts adaptive lookup suffix lookahead ouroboros pearl:window=3 spectr sd:width=3
    sd:cape=true eesd eesd-tree selfsd
    """.split()  # noqa: SIM905


@pytest.fixture(scope="module")
def penalised(pair: Pair) -> tuple[SamplingParams, list[int]]:
    """Sampling parameters with penalties, and the greedy ids by definition."""
    sampling = SamplingParams(max_new_tokens=24, **PENALTIES, ignore_eos=True)
    asked = sampling.penalties
    assert asked is not None
    prompt = pair.tokenizer.encode(PROMPT)
    output: list[int] = []
    for _ in range(24):
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *output]])
            row = pair.target.transformers_module(ids).logits[0, -1].float()
        output.append(int(by_definition(row, prompt, output, asked).argmax()))
    return sampling, output


def test_plain_decoding_is_penalised(
    pair: Pair, penalised: tuple[SamplingParams, list[int]]
) -> None:
    sampling, expected = penalised
    assert pair.generate(PROMPT, "ar", sampling).token_ids == expected
    plain = pair.generate(PROMPT, "ar", max_new_tokens=24, ignore_eos=True).token_ids
    assert plain != expected


@pytest.mark.parametrize("method", METHODS)
def test_greedy_ids_are_those_of_plain_decoding(
    pair: Pair, penalised: tuple[SamplingParams, list[int]], method: str
) -> None:
    sampling, expected = penalised
    assert pair.generate(PROMPT, method, sampling).token_ids == expected


@pytest.mark.parametrize("method", ["sd:k=3", "sd:k=2:width=2", "pearl:window=3"])
def test_drafts_foresee_the_penalties(method: str) -> None:
    """The draft model's logits have them too, also in a process of its own: a model that drafts for
    itself has every draft accepted."""
    folder = str(demo.folder("target"))
    sampling = SamplingParams(max_new_tokens=40, **PENALTIES, ignore_eos=True)
    with specgen.load(folder, folder, dtype="float32") as twins:
        rounds = twins.generate(PROMPT, method, sampling).rounds
    judged = [round_ for round_ in rounds if round_.draft.tokens]
    assert len(judged) > 3
    assert not [round_ for round_ in judged if round_.verdict.source == "correction"]


def test_log_probabilities_are_without_penalties(pair: Pair) -> None:
    sampling = SamplingParams(max_new_tokens=12, logprobs=0, **PENALTIES)
    result = pair.generate(PROMPT, "sd", sampling)
    prompt = pair.tokenizer.encode(PROMPT)
    found = [entry.log_prob for round_ in result.rounds for entry in round_.verdict.log_probs]
    assert sum(found) == pytest.approx(pair.log_likelihood(prompt, result.token_ids), abs=1e-3)


@pytest.mark.parametrize(
    "wrong",
    [{"presence_penalty": 2.5}, {"frequency_penalty": -3}, {"repetition_penalty": 0}],
)
def test_values_out_of_bounds_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecgenError, match=next(iter(wrong))):
        SamplingParams(**wrong)
