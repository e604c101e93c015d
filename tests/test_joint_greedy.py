"""Multi-token joint greedy decoding (MTAD, Definition 3.1) against a search of every block: scripted tables and tiny models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from scripted_models import PROMPT, VOCAB, TableRunner, ids_of, scripted_run

from specgen.base.errors import RunError
from specgen.base.types import Context, Round, SamplingParams
from specgen.engine.model_runner import ModelOutput
from specgen.methods import joint_search
from specgen.pair.figures import Figures
from specgen.pair.pair import Pair

PairOf = Callable[..., Pair]
Block = tuple[list[int], float]  # tokens and joint log-likelihood
TINY = 20  # tokens of the vocabulary of a tiny model


class Counted:
    """Passes calls to a model runner, and counts the passes and the rows that they return."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.passes, self.rows = runner, 0, 0
        self.vocab_size, self.device, self.context_limit = runner.vocab_size, runner.device, runner.context_limit
        self.num_embeddings = runner.num_embeddings

    def logits(self, context: Context, draft: Sequence[int] = (), parents: Any = None, *, start: int = 0) -> ModelOutput:
        self.passes += 1
        self.rows += len(draft) + 1 - start
        output: ModelOutput = self.runner.logits(context, draft, parents, start=start)
        return output


def decoded(
    target: Any, count: int, *, eos: Iterable[int] = (), prompt: Sequence[int] = PROMPT, **settings: object
) -> list[Round]:
    return list(
        scripted_run("joint", settings, target, None, SamplingParams(max_new_tokens=count), eos=eos, prompt=prompt).rounds()
    )


def every_block(
    rows: Callable[[Sequence[int]], torch.Tensor], vocabulary: int, length: int, eos: Iterable[int] = ()
) -> list[Block]:
    """All blocks with their log-likelihoods, the likeliest first. `rows` returns the logits after the context and a prefix."""
    found: list[Block] = []
    unfinished: list[Block] = [([], 0.0)]
    for position in range(length):
        continued = []
        for tokens, likelihood in unfinished:
            log_probs = rows(tokens).double().log_softmax(-1).tolist()
            continued += [([*tokens, token], likelihood + log_probs[token]) for token in range(vocabulary)]
        ends = [position == length - 1 or tokens[-1] in set(eos) for tokens, _ in continued]
        found += [block for block, has_ended in zip(continued, ends, strict=True) if has_ended]
        unfinished = [block for block, has_ended in zip(continued, ends, strict=True) if not has_ended]
    return sorted(found, key=lambda block: -block[1])


def greedy(runner: TableRunner, count: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(int(runner.row([*PROMPT, *tokens]).argmax()))
    return tokens


@pytest.mark.parametrize(("length", "scale"), [(1, 1.5), (2, 1.5), (3, 0.3), (4, 1.5), (4, 0.0001), (5, 3.0)])
@pytest.mark.parametrize(("eos", "batch"), [((), 1), ((1, 4), 16)])
def test_each_block_is_the_likeliest_of_all(
    length: int, scale: float, eos: tuple[int, ...], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `batch` 1 the first complete block is the greedy one, so that branch and bound finds the others."""
    monkeypatch.setattr(joint_search, "BATCH", batch)
    differs = 0
    for seed in range(4):
        runner = TableRunner(seed, scale)
        rounds, context = decoded(runner, 11, k=length, eos=eos), list(PROMPT)
        for round_ in rounds:
            rest = min(length, len(PROMPT) + 11 - len(context))
            best, second = every_block(lambda tokens: runner.row([*context, *tokens]), VOCAB, rest, eos)[:2]  # noqa: B023
            assert best[1] - second[1] > 1e-6 or scale < 0.01, "a tie proves nothing"
            assert round_.token_ids == best[0] or scale < 0.01
            assert len(round_.token_ids) == rest or round_.token_ids[-1] in eos
            context += round_.token_ids
        assert len(context) == len(PROMPT) + 11 or context[-1] in eos
        differs += ids_of(rounds) != greedy(runner, 11)[: len(ids_of(rounds))]
    assert differs or length == 1 or eos, "joint decoding would be plain decoding"


def test_a_block_may_end_with_an_end_of_sequence_that_greedy_decoding_passes_by() -> None:
    """After 1: 0.6 for 2, followed by even tokens; 0.4 for the end, which needs no more tokens."""
    runner = TableRunner(0, 0.0)
    runner.table[3, 1] = torch.tensor([-99, -99, math.log(0.6), math.log(0.4), -99, -99])
    (round_,) = decoded(runner, 10, k=3, eos=(3,))
    assert round_.token_ids == [3]
    assert round_.verdict.token is None
    assert decoded(runner, 10, k=1, eos=(3,))[0].token_ids == [2]


def beam_search(runner: TableRunner, length: int, width: int) -> list[int]:
    beams: list[Block] = [([], 0.0)]
    for _ in range(length):
        continued = [
            ([*tokens, token], likelihood + float(log_prob))
            for tokens, likelihood in beams
            for token, log_prob in enumerate(runner.row([*PROMPT, *tokens]).log_softmax(-1))
        ]
        beams = sorted(continued, key=lambda beam: -beam[1])[:width]
    return beams[0][0]


@pytest.mark.parametrize("beams", [1, 2, 5])
def test_a_beam_search_approximates_the_block(beams: int) -> None:
    missed = 0
    for seed in range(8):
        runner = Counted(TableRunner(seed))
        (found,) = decoded(runner, 4, k=4, beams=beams)
        assert found.token_ids == beam_search(runner.runner, 4, beams)
        assert (runner.passes, runner.rows, found.target_passes) == (4, 1 + 3 * beams, 4)
        missed += found.token_ids != decoded(runner.runner, 4, k=4)[0].token_ids
    assert missed or beams == 5


def test_prefixes_below_the_best_block_are_not_extended() -> None:
    """A prefix of likelihood p is extended only if no complete block of likelihood p is known: at most 1 / P per length."""
    for seed in range(6):
        counted = Counted(TableRunner(seed, scale=4.0))
        (round_,) = decoded(counted, 5, k=5)
        best = every_block(lambda tokens: counted.runner.row([*PROMPT, *tokens]), VOCAB, 5)[0][1]  # noqa: B023
        in_beams = 1 + 4 * 16
        assert counted.rows <= in_beams + 4 * math.exp(-best) < 1 + 6 + 6**2 + 6**3 + 6**4
        assert len(round_.draft.tokens) == counted.rows, "each prefix but the empty one, and the block's last token"


def test_passes_are_those_of_the_target() -> None:
    runner = Counted(TableRunner(1, scale=0.3))
    rounds = decoded(runner, 10, k=4)
    summary = Figures("joint", rounds)
    assert summary.target_passes == sum(round_.target_passes for round_ in rounds) == runner.passes > summary.rounds == 3
    assert summary.block_efficiency == 10 / runner.passes < 1
    assert summary.accepted == summary.new_tokens == 10
    assert summary.drafted == sum(len(round_.draft.tokens) for round_ in rounds)
    assert [round_.mode for round_ in rounds] == ["prefill", "sequential", "sequential"]
    assert f"likeliest block, {rounds[1].target_passes} passes" == rounds[1].draft.stop_reason
    assert {round_.seconds["draft"] for round_ in rounds} == {0.0}
    assert [round_.seconds["prefill"] > 0 for round_ in rounds] == [True, False, False]


def test_an_exact_search_that_takes_too_long_is_one_line() -> None:
    runner = Counted(TableRunner(1, scale=0.1))
    with pytest.raises(RunError, match="the likeliest block of 4 tokens is not found among 60 prefixes") as error:
        decoded(runner, 10, k=4, nodes=60)
    assert "smaller k" in error.value.hint
    assert runner.rows <= 61
    assert ids_of(decoded(TableRunner(1, scale=0.1), 10, k=4, nodes=10_000))
    assert ids_of(decoded(TableRunner(1, scale=0.1), 10, k=4, nodes=16, beams=200)), "the limit is that of the exact search"


def test_nan_logits_are_an_error() -> None:
    for position in (slice(None), (3, 1)):
        runner = TableRunner(1)
        runner.table[position] = math.nan
        with pytest.raises(RunError, match="target model's logits hold NaN"):
            decoded(runner, 5, k=2)
