"""EAGLE-2's dynamic tree: which tokens it drafts, compared with a list of all candidates; where drafts end."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_models import PROMPT, VOCAB, TableRunner
from static_checks import random_model

from specgen.base.types import Context, Draft
from specgen.decoding.drafting import Setup
from specgen.decoding.policy import Fixed, LengthPolicy
from specgen.decoding.tree import TopKTreeDrafter
from specgen.engine.model_runner import ModelOutput, ModelRunner
from specgen.methods.svip import SVIP

Path = tuple[int, ...]


class FewValues(TableRunner):
    """Logits of a few different values, so that many paths are equally likely; `dtype` is the model's."""

    def __init__(self, seed: int, values: int, scale: float, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randint(values, (VOCAB, VOCAB, VOCAB), generator=generator).to(dtype) * scale


def drafted(runner: TableRunner, width: int, nodes: int | None, policy: LengthPolicy, *, depth: int | None = 4) -> Draft:
    eos = frozenset({VOCAB - 1})
    setup = Setup(runner, eos_ids=eos, vocab_size=VOCAB)  # type: ignore[arg-type]
    return TopKTreeDrafter(setup, width=width, depth=depth, nodes=nodes).propose(Context(PROMPT), policy, 100)


def paths(draft: Draft) -> list[Path]:
    """The tokens from the context to each node."""
    found: list[Path] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def candidates(runner: TableRunner, width: int, levels: int) -> dict[Path, float]:
    """All tokens that may be drafted, in the order in which a level lists them, with the log-likelihood of each path."""
    found: dict[Path, float] = {}
    frontier: list[Path] = [()]
    for _ in range(levels):
        level = {}
        for before in frontier:
            values, tokens = runner.row([*PROMPT, *before]).float().log_softmax(-1).topk(width)
            for value, token in zip(values, tokens.tolist(), strict=True):
                level[*before, token] = float(torch.tensor(found.get(before, 0.0)) + value)
        found |= level
        best = sorted(level, key=lambda path: -level[path])[:width]
        frontier = [path for path in best if path[-1] != VOCAB - 1]
    return found


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    values=st.integers(1, 4),
    scale=st.sampled_from([0.3, 2.0]),  # with the larger one, some nodes are less likely than others of a later level
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    width=st.integers(2, VOCAB),
    levels=st.integers(1, 4),
    nodes=st.integers(1, 60),
)
def test_the_likeliest_of_all_candidates_are_drafted(
    seed: int, values: int, scale: float, dtype: torch.dtype, width: int, levels: int, nodes: int
) -> None:
    """Also among equally likely ones: the earlier level's first, so no node lacks its parent."""
    runner = FewValues(seed, values, scale, dtype)
    known = candidates(runner, width, levels)
    draft = drafted(runner, width, nodes, Fixed(levels))
    order = {path: number for number, path in enumerate(known)}
    by_level = defaultdict(list)
    for path in sorted(known, key=lambda path: (-known[path], len(path), order[path]))[:nodes]:
        by_level[len(path)].append(path)
    assert paths(draft) == [path for _, level in sorted(by_level.items()) for path in level]
    assert draft.probs is None
    rows = [runner.row([*PROMPT, *path[:-1]]).float().softmax(-1) for path in paths(draft)]
    assert draft.top_probs == pytest.approx([float(row.max()) for row in rows], abs=1e-4)


def test_without_nodes_each_level_has_the_widths_likeliest() -> None:
    runner = TableRunner(3)
    known = candidates(runner, 3, 4)
    levels = [[path for path in known if len(path) == level] for level in range(1, 5)]
    wanted = [path for level in levels for path in sorted(level, key=lambda path: -known[path])[:3]]
    assert paths(drafted(runner, 3, None, LengthPolicy())) == wanted


def test_an_impossible_token_is_no_candidate() -> None:
    runner = TableRunner(3)
    runner.table[..., 2:4] = -math.inf
    for nodes in (None, 200):
        draft = drafted(runner, VOCAB, nodes, Fixed(2))
        assert len(draft.tokens) > VOCAB - 2
        assert not {2, 3} & set(draft.tokens)


def test_where_a_draft_ends() -> None:
    runner = TableRunner(5)
    for every, levels in ((1, 1), (2, 2), (3, 3)):
        draft = drafted(runner, 3, 8, SVIP(0.01, 0.15, 40, every))
        assert (draft.levels, (draft.stop_reason or "")[:3]) == (levels, "√cH")
        assert len(draft.tokens) == (3 if levels == 1 else 8), "the rerank chooses from what there is"
    assert drafted(runner, 3, 8, SVIP(0.01, 0.15, 3, every=5)).stop_reason == "limit 3"
    assert drafted(runner, 3, 100, LengthPolicy()).stop_reason == "depth 4"
    assert drafted(runner, 3, 100, LengthPolicy()).levels == 4
    certain = TableRunner(5)
    certain.table[..., -1] = 100.0
    certain.table[..., :-1] = -math.inf
    ended = drafted(certain, 3, 8, LengthPolicy())
    assert (list(ended.tokens), ended.stop_reason) == ([VOCAB - 1], "eos")


def test_a_tree_of_few_nodes_is_no_deeper_than_they_reach() -> None:
    runner = TableRunner(5, scale=0.1)
    draft = drafted(runner, 4, 4, LengthPolicy())
    assert draft.levels == 1
    assert len(draft.with_predictions([0.5] * 4).predicted) == 1


class Counting(ModelRunner):
    """Records the tokens of each call: those that follow the first logits wanted."""

    def __init__(self) -> None:
        super().__init__(random_model("llama"))
        self.sizes: list[int] = []

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        self.sizes.append(len(draft) + 1 - start)
        return super().logits(context, draft, parents, start=start)


def test_the_draft_model_runs_the_width_at_each_level_and_finds_the_accepted_nodes_again() -> None:
    """Also after a path through a node that was not run, and with nodes in its cache that were not drafted."""
    runner, reference = Counting(), ModelRunner(random_model("llama"))
    setup = Setup(runner, vocab_size=96)
    drafter, context = TopKTreeDrafter(setup, width=3, nodes=9), Context([5, 9, 2, 11])
    for accepted in (-1, 0, 2):  # the last node, a first-level node, the likeliest continuation
        runner.sizes.clear()
        draft = drafter.propose(context, Fixed(4), 30)
        assert runner.sizes == [1, 3, 3, 3]
        found = paths(draft)
        for path, entropy in zip(found, draft.entropies, strict=True):
            row = reference.logits(Context([*context.ids, *path[:-1]])).logits[-1].log_softmax(-1)
            assert entropy == pytest.approx(float(-(row.exp() * row).sum()), abs=1e-4)
        context.extend([*found[accepted], 7])
        runner._cached.switch_to(context)
        assert runner._cached.committed >= len(context) - 2, "all tokens but the accepted leaf and the target's own"
