"""Medusa's tree of candidates: the paths of highest value, lossless drafts, and their shape."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from runner_checks import path_to

from specgen.base.types import Context, SamplingParams
from specgen.decoding.drafting import Setup
from specgen.decoding.marginal_tree import MarginalTreeDrafter, candidate_tree
from specgen.decoding.policy_base import Fixed
from specgen.engine.forward_pass import ModelOutput, depths
from specgen.engine.model_runner import DraftTraits
from specgen.testing.enumeration import PROMPT, ROUNDING, Case, SmallRunner, distance


@pytest.mark.parametrize("seed", range(6))
def test_the_tree_has_the_paths_of_highest_value(seed: int) -> None:
    """By comparison with all paths; also with ranks that are right equally often, or never, or
    always."""
    rng = random.Random(seed)
    choices = (0.0, 0.25, 0.5, 1.0) if seed % 2 else None
    accuracies = [
        [rng.choice(choices) if choices else rng.random() for _ in range(4)] for _ in range(3)
    ]
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

    rank_accuracies = ((0.5, 0.3, 0.1), (0.5, 0.4, 0.1), (0.5, 0.5))
    traits = DraftTraits(longest_draft=3, rank_accuracies=rank_accuracies)

    def __init__(self, seed: int, size: int, *, zero: bool = False) -> None:
        super().__init__(seed, size, zero=zero)
        self._tables = [SmallRunner(seed + head, size, zero=zero) for head in range(3)]

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Any = None, *, start: int = 0
    ) -> ModelOutput:
        levels = [
            0,
            *(
                1 + depth
                for depth in depths(range(-1, len(draft) - 1) if parents is None else parents)
            ),
        ]
        return ModelOutput(
            torch.stack([self._tables[level].row(context.ids) for level in levels[start:]])
        )


CASES = [
    Case("medusa", {"nodes": 0}, 5),
    Case("medusa", {"nodes": 0, "k": 2}, 4, (3, 3), {"top_p": 0.8, "temperature": 1.3}),
    Case("medusa", {"nodes": 0, "policy": "svip", "threshold": 0.25}, 5),
    Case("medusa", {"nodes": 7}, 4, (3, 3)),
    Case("medusa", {"nodes": 20}, 4, (3, 3), {"top_k": 2}, (2,), zero=True),
    Case(
        "medusa",
        {"nodes": 6, "policy": "confidence", "threshold": 0.5},
        4,
        (3, 3),
        {"top_p": 0.9},
        (0,),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sampling_is_lossless(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """By enumerating all random choices, with trees and with chains drawn from the heads."""
    assert distance(case, HeadTable(100, case.sizes[1], zero=case.zero)) < ROUNDING


def drafted(
    draft: HeadTable,
    nodes: int,
    limit: int = 9,
    *,
    length: int = 4,
    ends: frozenset[int] = frozenset(),
) -> Any:
    """A proposed draft, and the path of tokens to each of its nodes."""
    drafter = MarginalTreeDrafter(
        Setup(draft, SamplingParams(), ends, 3, record=True), nodes=nodes, is_fixed=True
    )
    made = drafter.propose(Context(PROMPT), Fixed(length), limit)
    tokens = list(made.tokens)
    parents = list(made.parents)
    return made, [path_to(tokens, parents, node) for node in range(len(tokens))]


def test_drafts_have_the_shape_that_the_accuracies_ask_for() -> None:
    draft = HeadTable(100, 3)
    rows = [table.row(PROMPT) for table in draft._tables]
    ranks = [row.argsort(descending=True).tolist() for row in rows]
    wanted = candidate_tree(HeadTable.rank_accuracies, 7)
    made, paths = drafted(draft, 7)
    assert paths == [[ranks[level][rank] for level, rank in enumerate(path)] for path in wanted]
    expected = torch.stack([rows[len(path) - 1] for path in wanted])
    assert torch.equal(made.logits, expected)
    assert list(made.top_probs) == pytest.approx(expected.softmax(-1).amax(-1).tolist())
    assert made.stop_reason == "depth 3"
    for length in (1, 2):
        _, paths = drafted(draft, 7, length=length)
        wanted = candidate_tree(HeadTable.rank_accuracies[:length], 7)
        assert paths == [[ranks[level][rank] for level, rank in enumerate(path)] for path in wanted]
    assert not drafted(draft, 7, 0)[1]


def test_nothing_follows_the_end_of_the_output_or_an_impossible_token() -> None:
    """A draft may hold a token that ends the output, but no children of it, and no token with the
    probability 0."""
    draft = HeadTable(100, 3, zero=True)
    rows = [table.row(PROMPT) for table in draft._tables]
    end = int(rows[0].argmax())
    _, paths = drafted(draft, 30, ends=frozenset({end}))
    assert [end] in paths
    assert not any(end in path[:-1] for path in paths)
    assert all(rows[len(path) - 1][path[-1]] > -math.inf for path in paths)
    ended, _ = drafted(draft, 30, ends=frozenset(range(3)))
    assert (ended.stop_reason, ended.levels) == ("eos", 1)
