"""Medusa's tree of candidates: the paths of highest value, lossless drafts, and their shape."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from enumeration import PROMPT, ROUNDING, Paths, SmallRunner, exact, states, total_variation
from runner_checks import path_to

from specgen.base.types import Context, SamplingParams
from specgen.decoding.drafting import Setup
from specgen.decoding.policy import Fixed
from specgen.engine.forward_pass import ModelOutput
from specgen.methods.medusa_tree import MedusaTreeDrafter, candidate_tree


@pytest.mark.parametrize("seed", range(6))
def test_the_tree_has_the_paths_of_highest_value(seed: int) -> None:
    """By comparison with all paths; also with ranks that are right equally often, or never, or always."""
    rng = random.Random(seed)
    choices = (0.0, 0.25, 0.5, 1.0) if seed % 2 else None
    accuracies = [[rng.choice(choices) if choices else rng.random() for _ in range(4)] for _ in range(3)]
    everything = [path for depth in (1, 2, 3) for path in product(range(4), repeat=depth)]

    def value(path: Sequence[int]) -> float:
        return math.prod(accuracies[head][rank] for head, rank in enumerate(path))

    best = sorted(everything, key=lambda path: (-value(path), len(path), path))
    for nodes in (1, 5, 20, 84, 100):
        tree = candidate_tree(accuracies, nodes)
        assert sorted(tree) == sorted(best[:nodes])
        assert tree == sorted(tree, key=len), "level by level"
        assert all(path[:-1] in {(), *tree} for path in tree)


class HeadTable(SmallRunner):
    """Heads whose logits depend on the context's last two tokens, and not on drafted tokens."""

    longest_draft = 3
    rank_accuracies = ((0.5, 0.3, 0.1), (0.5, 0.4, 0.1), (0.5, 0.5))

    def __init__(self, seed: int, size: int, *, zero: bool = False) -> None:
        super().__init__(seed, size, zero=zero)
        self._tables = [SmallRunner(seed + head, size, zero=zero) for head in range(self.longest_draft)]

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        parents = range(-1, len(draft) - 1) if parents is None else parents
        levels = [0]
        for parent in parents:
            levels.append(1 + levels[parent + 1])
        return ModelOutput(torch.stack([self._tables[level].row(context.ids) for level in levels[start:]]))


@pytest.mark.parametrize(
    ("settings", "limit", "sizes", "warp", "eos", "zero"),
    [
        ({"nodes": 0}, 5, (2, 2), {}, (), False),
        ({"nodes": 0, "k": 2}, 4, (3, 3), {"top_p": 0.8, "temperature": 1.3}, (), False),
        ({"nodes": 0, "policy": "svip", "threshold": 0.25}, 5, (2, 2), {}, (), False),
        ({"nodes": 7}, 4, (3, 3), {}, (), False),
        ({"nodes": 20}, 4, (3, 3), {"top_k": 2}, (2,), True),
        ({"nodes": 6, "policy": "confidence", "threshold": 0.5}, 4, (3, 3), {"top_p": 0.9}, (0,), False),
    ],
)
def test_sampling_is_lossless(
    settings: dict[str, Any],
    limit: int,
    sizes: tuple[int, int],
    warp: dict[str, Any],
    eos: tuple[int, ...],
    zero: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By enumerating all random choices, with trees and with chains drawn from the heads."""
    target, draft = SmallRunner(0, sizes[0], zero=zero), HeadTable(100, sizes[1], zero=zero)
    sampling = SamplingParams(**{"max_new_tokens": limit, "temperature": 1.0} | warp)
    with monkeypatch.context() as patch:
        found = Paths(patch).of_rounds(lambda: states("medusa", settings, target, draft, sampling, eos))
    assert total_variation(found, exact(target, sampling, limit, eos)) < ROUNDING


def test_drafts_have_the_shape_that_the_accuracies_ask_for() -> None:
    draft = HeadTable(100, 3)
    setup = Setup(draft, SamplingParams(), frozenset(), 3, record=True)
    proposed = MedusaTreeDrafter(setup, nodes=7).propose(Context(PROMPT), Fixed(4), 9)
    ranks = [draft._tables[level].row(PROMPT).argsort(descending=True).tolist() for level in range(3)]
    paths = candidate_tree(HeadTable.rank_accuracies, 7)
    assert list(proposed.tokens) == [ranks[len(path) - 1][path[-1]] for path in paths]
    assert [path_to(list(proposed.tokens), list(proposed.parents), node) for node in range(7)] == [
        [ranks[level][rank] for level, rank in enumerate(path)] for path in paths
    ]
    rows = torch.stack([draft._tables[len(path) - 1].row(PROMPT) for path in paths])
    assert torch.equal(proposed.logits, rows)
    assert list(proposed.top_probs) == pytest.approx(rows.softmax(-1).amax(-1).tolist())
    assert proposed.stop_reason == "depth 3"
    assert MedusaTreeDrafter(setup, nodes=7).propose(Context(PROMPT), Fixed(1), 9).levels == 1
    assert not MedusaTreeDrafter(setup, nodes=7).propose(Context(PROMPT), Fixed(4), 0).tokens


def test_nothing_follows_the_end_of_the_output_or_an_impossible_token() -> None:
    """A draft may hold a token that ends the output, but no children of it, and no token with the probability 0."""
    draft = HeadTable(100, 3, zero=True)
    rows = [draft._tables[level].row(PROMPT) for level in range(3)]
    end = int(rows[0].argmax())
    proposed = MedusaTreeDrafter(Setup(draft, SamplingParams(), frozenset({end}), 3), nodes=30).propose(
        Context(PROMPT), Fixed(4), 9
    )
    assert end in proposed.tokens
    assert all(proposed.tokens[parent] != end for parent in proposed.parents if parent >= 0)
    levels = [len(path_to(list(proposed.tokens), list(proposed.parents), node)) - 1 for node in range(len(proposed.tokens))]
    assert all(rows[level][token] > -math.inf for level, token in zip(levels, proposed.tokens, strict=True))
    only = MedusaTreeDrafter(Setup(draft, SamplingParams(), frozenset(range(3)), 3), nodes=30)
    assert (ended := only.propose(Context(PROMPT), Fixed(4), 9)).stop_reason == "eos"
    assert ended.levels == 1
