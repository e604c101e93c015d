"""Heads on captured passes draft what they draft on eager ones, read by the host as rarely as the policy allows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from eagle_heads import random_head
from graph_checks import (  # noqa: F401
    GREEDY,
    POLICIES,
    SAMPLED,
    assert_close,
    compare_drafters,
    draft_setup,
    graphs_on,
    nothing_falls_back,
)
from scripted_models import scripted_run
from static_checks import HostReads, random_calls, random_model, random_tokens

from specgen.decoding.drafters import ModelDrafter
from specgen.decoding.policies import Fixed
from specgen.decoding.tree_drafter import TopKTreeDrafter
from specgen.engine.heads import eagle_runner
from specgen.engine.heads.eagle_runner import EagleRunner
from specgen.engine.heads.head_runners import HeadRunners
from specgen.engine.heads.weights import EagleWeights
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.static_forward import use_static_passes
from specgen.engine.native.static_pass import StaticPass
from specgen.types import Context, SamplingParams

_HEADS: dict[str, dict[str, Any]] = {
    "1": {"version": 1, "biases": True, "layers": 2},
    "3": {"version": 3, "vocabulary": [*range(3, 60), 77], "qk_norm": True, "norm_before_residual": True},
}


def eagle_head(name: str) -> EagleWeights:
    """A random head of width 64, whose predictions do not amplify rounding errors from token to token."""
    head = random_head(width=64, **_HEADS[name])
    small = {key: tensor / 2 if "_proj" in key or key == "fc.weight" else tensor for key, tensor in head.tensors.items()}
    return replace(head, tensors=small)


def both(head: EagleWeights, counts: Counter[str] | None = None, **changes: Any) -> list[HeadRunners]:
    """Runners that run eagerly, and such that replay captured passes."""
    made = []
    for is_captured in (False, True):
        model = random_model("llama", **changes)
        if is_captured:
            use_static_passes(model, new_graphs=graphs_on("cpu", counts))
        made.append(eagle_runner.make_runners(head, model, ModelRunner(model), lambda: None))
    return made


@pytest.mark.parametrize("name", [pytest.param("1", marks=pytest.mark.slow), "3"])
def test_captured_eagle_passes_give_the_eager_logits(name: str) -> None:
    """With rollbacks, trees that grow by several levels, a bucket's end (512) and growth of the cache."""
    counts: Counter[str] = Counter()
    eager, captured = both(eagle_head(name), counts)
    for context, tokens, parents, start in random_calls(random.Random(1), 500, 6):
        expected = eager.draft.logits(context, tokens, parents, start=start)
        found = captured.draft.logits(context, tokens, parents, start=start)
        possible = expected.logits.isfinite()
        assert torch.equal(possible, found.logits.isfinite())
        assert_close(found.logits[possible], expected.logits[possible], 1e-4)
        assert expected.hidden_states is not None
        assert found.hidden_states is not None
        assert_close(found.hidden_states, expected.hidden_states, 1e-4)
    assert counts["captures"] < counts["replays"]


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        pytest.param(name, sampling, marks=() if (name == "3") == (sampling is GREEDY) else pytest.mark.slow)
        for name in _HEADS
        for sampling in (GREEDY, SAMPLED)
    ],
)
def test_eagle_chains_and_trees_are_those_of_eager_passes(name: str, sampling: SamplingParams) -> None:
    eager, captured = both(eagle_head(name))
    options: dict[str, Any] = {"rounds": 2, "tolerance": 1e-4, "prompt": 500, "eos": range(4, 96, 9)}
    kinds: Sequence[Any] = [ModelDrafter]
    if sampling is GREEDY:
        kinds = [ModelDrafter, partial(TopKTreeDrafter, width=4, depth=10, nodes=10), partial(TopKTreeDrafter, width=8, depth=9)]
    for kind in kinds:
        for policy in ("fixed", "margins"):
            compare_drafters(eager.draft, captured.draft, sampling, POLICIES[policy], kind=kind, **options)
    assert isinstance(captured.draft, EagleRunner)
    assert captured.draft.chooses_on_device()


@pytest.mark.parametrize(("kind", "policy", "reads"), [("chain", "fixed", 1), ("tree", "fixed", 1), ("tree", "margins", 5)])
def test_the_host_reads_an_eagle_draft_once_or_where_the_policy_decides_once_a_level(
    kind: str, policy: str, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, captured = both(eagle_head("3"))
    setup, context = draft_setup(captured.draft, GREEDY), Context(random_tokens(random.Random(7), 30))
    drafter = ModelDrafter(setup) if kind == "chain" else TopKTreeDrafter(setup, width=4, depth=5, nodes=10)
    for _ in range(3):  # the first times, they are captured
        captured.target.logits(context)
        context.extend([3])
        write, loads = StaticPass._write, list[object]()
        with HostReads() as host, monkeypatch.context() as patch:
            patch.setattr(StaticPass, "_write", lambda self, numbers, to=loads, write=write: to.append(write(self, numbers)))
            drafter.propose(context, Fixed(5) if policy == "fixed" else POLICIES["margins"](), 30)
    assert host.count == reads
    assert len(loads) == 2  # the pair of the context's last token, and the first token or level


@pytest.mark.parametrize(
    ("temperature", "version", "settings"),
    [
        (0.0, 3, {"width": 7, "depth": 2, "nodes": 12}),
        pytest.param(1.3, 3, {"width": 5, "depth": 3}, marks=pytest.mark.slow),
        (1.3, 1, {"width": 1, "k": 4}),
        pytest.param(1.3, 1, {"width": 1, "policy": "svip"}, marks=pytest.mark.slow),
    ],
)
def test_whole_runs_with_captured_heads_are_those_with_eager_ones(
    temperature: float, version: Any, settings: dict[str, object]
) -> None:
    size = 7  # tokens of a vocabulary in which random heads are often right
    sampling, rounds = SamplingParams(temperature=temperature, max_new_tokens=16), []
    for made in both(random_head(version, 64, size), vocab_size=size):
        run = scripted_run("eagle", settings, made.target, made.draft, sampling, prompt=[1, 5, 4, 2, 3, 6])
        rounds.append([(list(each.draft.tokens), each.verdict.path, each.verdict.token) for each in run.rounds()])
    assert rounds[0] == rounds[1]
    assert any(path for _, path, _ in rounds[0])
