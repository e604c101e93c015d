"""Draft trees whose levels are chosen on the device, in captured passes, are those that the host would choose."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from graph_checks import GREEDY, POLICIES, compare_drafters, draft_setup, nothing_falls_back, runners_of  # noqa: F401
from runner_checks import every
from static_checks import HostReads, random_tokens

from specgen.base.errors import RunError
from specgen.base.types import Context
from specgen.decoding.device_tree import LevelChooser, LevelsOnDevice
from specgen.methods.svip import SVIP
from specgen.decoding.policy import Fixed
from specgen.decoding.tree import TopKTreeDrafter
from specgen.engine.native.static_pass import StaticPass

_SHAPES: list[tuple[int, int | None]] = [(2, None), (4, 10), (3, None), (16, 30)]  # width, nodes
_CASES = [(shape, policy) for policy in ("fixed", "margins", "long", "random") for shape in _SHAPES]


@pytest.mark.parametrize("case", every(7, _CASES))
def test_levels_give_the_drafters_trees_and_signals(case: tuple[tuple[int, int | None], str]) -> None:
    """Over rejections, ends of sequence, a bucket's end (512 entries) and trees with too many nodes for one pass's bits."""
    (width, nodes), policy = case
    for family in ("gemma3_text",) if width > 2 else ("phi3", "llama"):
        eager, captured = runners_of(family, "cpu", torch.float32)
        kind = partial(TopKTreeDrafter, width=width, depth=8 if nodes else None, nodes=nodes)
        options: dict[str, Any] = {"prompt": 490, "eos": range(4, 96, 3 if width == 2 else 7), "kind": kind}
        drafts = compare_drafters(eager, captured, GREEDY, POLICIES[policy], rounds=4, **options)
        assert len(captured._forward._self_feeding) > 0
        assert any(not draft.is_chain for draft in drafts)


def test_a_tree_ends_where_no_node_can_be_continued() -> None:
    eager, captured = runners_of("llama", "cpu", torch.float32)
    kind = partial(TopKTreeDrafter, width=2, depth=8, nodes=None)
    drafts = compare_drafters(eager, captured, GREEDY, lambda: Fixed(5), rounds=8, eos=(30, 65), kind=kind)
    assert {draft.stop_reason for draft in drafts} == {"eos"}
    assert len({draft.levels for draft in drafts}) > 1


@pytest.mark.parametrize(("name", "reads"), [("fixed", 1), ("svip", 6)])
def test_the_host_reads_once_a_tree_or_where_the_policy_decides_once_a_level(
    name: str, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, captured = runners_of("llama", "cpu", torch.float32)
    drafter = TopKTreeDrafter(draft_setup(captured, GREEDY), width=3, depth=6)
    context = Context(random_tokens(random.Random(7), 30))
    policy = Fixed(6) if name == "fixed" else SVIP(10.0, 0.15, 6)
    for _ in range(2):  # captures
        drafter.propose(context, policy, 30)
        context.extend([3])
    write, loads = StaticPass._write, list[object]()
    monkeypatch.setattr(StaticPass, "_write", lambda self, numbers: loads.append(write(self, numbers)))
    with HostReads() as host:
        draft = drafter.propose(context, policy, 30)
    assert (len(draft.tokens), draft.levels) == (18, 6)
    assert host.count == reads
    assert len(loads) == 2  # the pass over the context's last token, and the first level: the others get nothing from the host


def test_accepted_nodes_are_not_run_again() -> None:
    _, captured = runners_of("llama", "cpu", torch.float32)
    drafter = TopKTreeDrafter(draft_setup(captured, GREEDY), width=3, depth=4)
    context = Context(random_tokens(random.Random(7), 30))
    draft = drafter.propose(context, Fixed(4), 30)
    leaf = len(draft.tokens) - 1
    path = [leaf]
    while draft.parents[path[0]] >= 0:
        path.insert(0, draft.parents[path[0]])
    context.extend([*(draft.tokens[node] for node in path), 9])
    captured._cached.switch_to(context)
    assert captured._cached.committed == 30 + len(path) - 1  # the last level has not been run


def test_a_nan_in_the_drafts_logits_is_an_error_and_no_token() -> None:
    _, captured = runners_of("llama", "cpu", torch.float32)
    drafter, context = TopKTreeDrafter(draft_setup(captured, GREEDY), width=3, depth=4), Context([3, 4, 5])
    drafter.propose(context, Fixed(4), 30)
    captured._forward._eager.model.parts.norm.fill_(float("nan"))
    context.extend([3])
    with pytest.raises(RunError, match="NaN"):
        drafter.propose(context, Fixed(4), 30)


def test_impossible_and_missing_tokens_are_no_candidates() -> None:
    """With fewer tokens than the width, and where a node that ends the output has the only logits that are no NaN."""
    rule = LevelsOnDevice(4, True, 3, frozenset({2}), frozenset({"entropy"}))
    chooser = rule.chooser(3, torch.device("cpu"))
    assert isinstance(chooser, LevelChooser)
    chooser.begin()
    assert chooser(torch.tensor([[1.0, -torch.inf, 2.0]])).tolist() == [2, 0, 1, 0]
    nan = torch.full((3,), torch.nan)
    rows = torch.stack((nan, torch.tensor([1.0, 2.0, 0.0]), nan, nan))  # only token 0, the second one, is continued
    assert chooser(rows).tolist()[:3] == [1, 0, 2]
    assert chooser.parents is not None
    assert chooser.parents.tolist()[:3] == [1, 1, 1]
    likely = chooser.table[:2, 24:36]
    assert likely.isfinite().sum(1).tolist() == [2, 3]
