"""Lookahead decoding and Ouroboros: the window's tree, the n-gram pool, what both drafters learn, and what rounds report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import CONTEXT, prompt
from scripted_models import TableRunner, ids_of, scripted_run
from traces import start_line, summary_line

from specgen.base.types import Context, Draft, SamplingParams, Verdict
from specgen.decoding.drafting import Setup
from specgen.decoding.policy import Fixed, LengthPolicy
from specgen.decoding.tree import Tree
from specgen.engine.forward_pass import ForwardPass, ModelOutput, TreeNodes, positions
from specgen.engine.native.inputs import ancestry
from specgen.methods.lookahead_drafter import LookaheadDrafter, LookaheadWindow, NgramPool
from specgen.methods.ouroboros_drafter import OuroborosDrafter
from specgen.pair.figures import Figures
from specgen.pair.pair import Pair
from specgen.pair.records import round_line
from specgen.traces.reader import read_trace

GREEDY = SamplingParams(max_new_tokens=20)


def filled(width: int, ngram: int) -> LookaheadWindow:
    """A full window. The token of level j, column i is 1000 + 100 * j + i."""
    window = LookaheadWindow(width, ngram, (), Random(0))
    levels = [[1000 + 100 * level + column for column in range(width)] for level in range(ngram - 1)]
    window._levels = [levels[0][1:], *levels[1:]]
    return window


@pytest.mark.parametrize(("width", "ngram", "guesses"), [(1, 2, 1), (4, 2, 2), (1, 4, 1), (3, 3, 2), (5, 4, 3), (7, 5, 7)])
def test_the_drafts_tree_is_the_papers_mask(width: int, ngram: int, guesses: int) -> None:
    """Which tokens each node sees, and its position, by the rules of Fu et al., Figure 5 and its code."""
    drafter = LookaheadDrafter(Setup(None, target=SimpleNamespace(context_limit=1000)), width=width, ngram=ngram, guesses=guesses)
    context = Context([5, 6, 7])
    drafter.propose(context, LengthPolicy(), 100)
    drafter._window = filled(width, ngram)
    for guess in range(guesses):
        drafter._pool.add(7, [10 * (guess + 1) + place for place in range(ngram - 1)])
    draft = drafter.propose(context, LengthPolicy(), 100)
    one = ForwardPass(context, TreeNodes(list(draft.tokens), list(draft.parents)), 2, 3 + len(draft.tokens), None)
    base, _, bits = ancestry(one)
    assert base == 2
    tokens = [7, *draft.tokens]
    assert len(tokens) == (ngram - 1) * (width + guesses)
    for row, (token, position) in enumerate(zip(tokens, positions(one), strict=True)):
        seen = {other for column, other in enumerate(tokens) if bits[row] >> column & 1}
        if token >= 1000:
            level, column = divmod(token - 1000, 100)
            first = [1000 + before for before in range(1, column + 1)]
            assert seen == {7, *first, *(1000 + 100 * above + column for above in range(1, level + 1))}
            assert position == 2 + column + level
        elif token != 7:
            place = token % 10
            assert seen == {7, *range(token - place, token + 1)}
            assert position == 3 + place
    own = range(1001, 1000 + width) if ngram == 2 else [1000 + 100 * level for level in range(1, ngram - 1)]
    assert set(draft.candidates.tokens) == {token for token in tokens[1:] if token < 1000} | set(own)
    assert draft.candidates.parents == draft.parents[: draft.judged]


def test_a_window_is_filled_level_by_level_then_moves_down_a_level_in_each_pass() -> None:
    pool, window = NgramPool(4, 5), LookaheadWindow(3, 4, (), Random(0))
    window.start([1, 2])
    shapes = []
    for step in range(1, 5):
        tree = Tree()
        window.add_to(tree, -1, 100)
        shapes.append([len(level) for level in window._levels])
        before = [list(level) for level in window._levels]
        window.update([100 * step + column for column in range(len(window.tips))], 9, pool)
    assert shapes == [[4], [3, 4], [2, 3, 3], [2, 3, 3]]
    assert window._levels == [before[1][1:], before[2], [400, 401, 402]]
    assert pool.phrases(9)[0] == (before[1][0], before[2][0], 400)
    assert (before[1][2], before[2][2], 402) in pool.phrases(before[0][1])


def test_tokens_that_end_an_output_do_not_enter_the_window_but_the_pool() -> None:
    pool, window = NgramPool(2, 5), LookaheadWindow(3, 2, {0}, Random(0))
    window.start([1, 2])
    window.add_to(Tree(), -1, 100)
    last = list(window._levels[0])
    window.update([0, 0, 0], 9, pool)
    assert set(window._levels[0]) <= {1, 2}
    assert pool.phrases(9) == [(0,)]
    assert pool.phrases(last[0]) == [(0,)]


def test_the_window_ends_at_the_context_limit() -> None:
    for room in range(12):
        window, tree = filled(5, 4), Tree()
        window.add_to(tree, -1, room)
        depths: list[int] = []
        for parent in tree.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        assert max(depths, default=0) == (min(room, 6) if room >= 2 else 0)
        assert len(window.tips) == max(0, min(room - 1, 5))
        window.update([1] * len(window.tips), 7, NgramPool(4, 5))
        window.add_to(tree, -1, room - 1)  # a smaller window can be updated too, or is empty
        _ = window.next_tokens


def test_the_pool_keeps_the_newest_phrases() -> None:
    pool = NgramPool(3, 2)
    for phrase in [(1, 2), (3, 4), (1, 2), (5, 6)]:
        pool.add(9, phrase)
    assert pool.phrases(9) == [(5, 6), (1, 2)], "(1, 2) was made again, so (3, 4) was the oldest"
    assert pool.phrases(9, 1) == [(5, 6)]
    pool.add(9, (7,))
    assert pool.phrases(9) == [(5, 6), (1, 2)], "a phrase of another length"
    pool.replace(9, (5, 6), (5, 7))
    assert pool.phrases(9) == [(5, 7), (1, 2)]
    assert pool.phrases(8) == []


def test_the_pool_reads_each_ngram_of_a_context_once() -> None:
    pool, context = NgramPool(3, 5), Context([1, 2, 3, 1, 2])
    pool.read(context)
    assert (pool.phrases(1), pool.phrases(2), pool.phrases(3)) == ([(2, 3)], [(3, 1)], [(1, 2)])
    pool.add(1, (8, 8))
    context.extend([4])
    pool.read(context)
    assert pool.phrases(1) == [(2, 4), (8, 8), (2, 3)], "(2, 3) was not added again"
    pool.read(Context([1]))
    assert pool.phrases(1) == []


def test_only_candidates_are_judged_counted_and_written(tmp_path: Path) -> None:
    """The window's nodes take part in the target's pass, and appear nowhere else but as their number."""
    target = TableRunner(1)
    passes: list[int] = []
    run = scripted_run("lookahead", {"window": 4, "ngram": 4}, target, None, GREEDY)
    logits = run.target.logits
    judged: list[tuple[int, int]] = []
    verify = run.verifier.verify

    def counted(context: Context, draft: Any = (), parents: Any = None) -> ModelOutput:
        passes.append(1 + len(draft))
        return logits(context, draft, parents)

    def judge(draft: Draft, output: ModelOutput) -> Verdict:
        judged.append((len(draft.tokens), len(output.logits)))
        return verify(draft, output)

    run.target.logits, run.verifier.verify = counted, judge  # type: ignore[method-assign]
    rounds = list(run.rounds())
    assert ids_of(rounds) == ids_of(scripted_run("ar", {}, TableRunner(1), None, GREEDY).rounds())
    assert [round_.pass_tokens for round_ in rounds[1:]] == passes[1:]
    assert all(rows == candidates + 1 for candidates, rows in judged)
    assert sum(round_.unjudged for round_ in rounds) > 50
    assert all(len(round_.statuses) == len(round_.draft.tokens) for round_ in rounds)
    summary = Figures("lookahead", rounds)
    assert summary.drafted == sum(candidates for candidates, _ in judged)
    assert summary.accepted > 0

    lines = [start_line("lookahead"), *(round_line(round_, str) for round_ in rounds)]
    assert [line.get("unjudged", 0) for line in lines[1:]] == [round_.unjudged for round_ in rounds]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, summary_line(lines[1:])]))
    (read,) = read_trace(path)
    for traced, round_ in zip(read.rounds, rounds, strict=True):
        assert traced.round.pass_tokens == round_.pass_tokens
        assert traced.round.statuses == round_.statuses
    lines[2]["unjudged"] = -1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(Exception, match="unjudged"):
        list(read_trace(path))


@pytest.mark.parametrize("name", ["lookahead", "ouroboros"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_outputs_up_to_the_context_limit(pair_of: Callable[..., Pair], name: str, family: str) -> None:
    """The last positions belong to the output: window and phrases leave them free. Also with other limits."""
    pair = pair_of(family, "near")
    ids = (prompt(1) * 20)[: CONTEXT - 12]
    settings: dict[str, object] = {"k": 4, "branches": 2} if name == "ouroboros" else {"guesses": 3}
    sampling = SamplingParams(max_new_tokens=11, ignore_eos=True)
    given = {"window": 9, "ngram": 4, **settings}
    found = pair.generate(ids, name, sampling, **given).token_ids
    assert found == pair.generate(ids, "ar", sampling).token_ids
    assert len(found) == 11
    for length in (1, 2, 3):
        assert (
            pair.generate(ids, name, SamplingParams(max_new_tokens=length, ignore_eos=True), **given).token_ids == found[:length]
        )


class Scripted:
    """Logits whose likeliest token after each path is what `said` maps its last token to; 0 without an entry."""

    def __init__(self, said: dict[int, int]) -> None:
        self._said = said

    def __call__(self, context: Context, draft: Draft) -> ModelOutput:
        rows = [self._said.get(token, 0) for token in (context.ids[-1], *draft.tokens)]
        return ModelOutput(torch.nn.functional.one_hot(torch.tensor(rows), 64).float())


class CountingRunner(TableRunner):
    """A draft model that says the next larger number."""

    vocab_size = num_embeddings = 64

    def __init__(self) -> None:
        self.passes = 0

    def row(self, ids: Any) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor((ids[-1] + 1) % 64), 64).float()

    def logits(self, *arguments: Any, **options: Any) -> ModelOutput:
        self.passes += 1
        return super().logits(*arguments, **options)


def ouroboros(branches: int = 2) -> tuple[OuroborosDrafter, CountingRunner]:
    runner = CountingRunner()
    setup = Setup(runner, vocab_size=64, target=SimpleNamespace(context_limit=1000))  # type: ignore[arg-type]
    return OuroborosDrafter(setup, width=3, ngram=3, branches=branches), runner


def test_ouroboros_drafts_several_tokens_in_a_pass_of_the_draft_model() -> None:
    drafter, runner = ouroboros()
    context = Context([1, 2, 3, 4, 5, 6, 7, 1])
    draft = drafter.propose(context, Fixed(5), 100)
    assert list(draft.tokens[:5]) == [2, 3, 4, 5, 6]
    assert runner.passes == 2, "2 3 and 5 6 are phrases of the context, and each pass adds a token of its own"
    assert list(draft.tokens[5:]) == [7, 1], "another phrase of it, after the chain"
    assert list(draft.parents[5:]) == [4, 5]
    assert drafter.propose(context, Fixed(5), 3).levels == 3


def test_ouroboros_learns_from_the_target() -> None:
    drafter, _ = ouroboros()
    context = Context([20, 1])
    drafter._pool.read(context)
    drafter._pool.add(6, (40, 41))
    drafter._pool.add(6, (50, 51))
    draft = drafter.propose(context, Fixed(5), 100)
    assert list(draft.tokens) == [2, 3, 4, 5, 6, *draft.tokens[5:]]
    # the target rejects 2, and says after 3: 4, after 4: 5, after 5: 6, but after 6: 60; and 61 after the phrases' first tokens
    said = {1: 30, 2: 3, 3: 4, 4: 9, 5: 6, 6: 60, 40: 61, 50: 62}
    tried = [phrase for phrase, _ in drafter._tried]
    drafter.learn(draft, Scripted(said)(context, draft), Verdict((), 30, "correction"))
    pool = drafter._pool
    assert pool.phrases(2)[0] == (3, 4)
    assert pool.phrases(3)[0] == (4, 9), "only the last token differs from the chain's"
    assert (9, 6) not in pool.phrases(4), "the target would not say 6 after 9"
    assert (6, 60) in pool.phrases(5)
    assert tried == [(50, 51), (40, 41)]
    assert pool.phrases(6)[:2] == [(60, 62), (60, 61)], "in the order in which they were tried"
    assert not set(tried) & set(pool.phrases(6))


def test_ouroboros_learns_nothing_from_a_nan_after_rejected_tokens() -> None:
    """As in float16: the logits overflow only after a token that is not accepted."""
    drafter, _ = ouroboros()
    context = Context([20, 1])
    drafter._pool.read(context)
    draft = drafter.propose(context, Fixed(5), 100)
    output = Scripted({1: 30, 3: 4, 4: 5, 5: 6})(context, draft)
    output.logits[5] = torch.nan  # after 6
    drafter.learn(draft, output, Verdict((), 30, "correction"))
    assert (5, 6) in drafter._pool.phrases(4)
    assert not any(-1 in phrase for token in range(64) for phrase in drafter._pool.phrases(token))
