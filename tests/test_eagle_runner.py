"""EAGLE heads as draft models: their logits by definition, whatever was drafted, accepted or interrupted before."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from eagle_heads import drafted, features_of, logits_of, random_head
from families import VOCAB, make_model, model_of
from runner_checks import InterruptAt, path_to, random_path, random_tree
from specgen.engine.parts.eagle_runner import EagleRunner, make_runners
from static_checks import HostReads

from specgen.base.errors import SpecgenError
from specgen.base.types import Context
from specgen.engine.generation_config import GenerationConfig
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model import Model
from specgen.engine.model_runner import ModelRunner
from specgen.engine.parts.weights import EagleWeights

REDUCED = [*range(3, 40), 41, 77]
HEADS: dict[str, dict[str, Any]] = {
    "1": {"version": 1},
    "1 biases, 2 layers": {"version": 1, "biases": True, "layers": 2, "own_embedding": VOCAB},
    "3": {"version": 3},
    "3 reduced": {"version": 3, "vocabulary": REDUCED},
    "3 qwen": {"version": 3, "vocabulary": REDUCED, "qk_norm": True, "norm_before_residual": True, "layers": 2},
}


@cache
def target(family: str, backend: str) -> tuple[Any, Model]:
    module = make_model(family)
    return module, model_of(module, backend)


class Checked:
    """A head's runner on a target, whose logits are compared with the definition's."""

    def __init__(self, head: EagleWeights, family: str = "llama", backend: str = "native") -> None:
        self.module, self.model = target(family, backend)
        self.head = head
        self.target, self.runner = make_runners(head, self.model, ModelRunner(self.model), lambda: None)
        assert isinstance(self.runner, EagleRunner)

    def embed(self, ids: list[int]) -> torch.Tensor:
        table = self.head.tensors.get("embed_tokens.weight")
        return self.model.embeddings(torch.tensor(ids)) if table is None else table[ids]

    def check(self, context: Context, draft: list[int], parents: list[int] | None = None, start: int = 0) -> None:
        """Assert that the logits and predicted features from index `start` on are those of the definition."""
        output = self.runner.logits(context, draft, parents, start=start)
        assert output.hidden_states is not None
        assert output.logits.shape == (len(draft) + 1 - start, self.model.vocab_size)
        features = features_of(self.module, self.head, context.ids)
        links = list(range(-1, len(draft) - 1)) if parents is None else parents
        for index in range(start, len(draft) + 1):
            path = path_to(draft, links, index - 1)
            with torch.no_grad():
                hidden = drafted(self.head, self.embed, features, context.ids, path)[-1:]
                logits = logits_of(self.head, self.model, hidden)
            torch.testing.assert_close(output.hidden_states[index - start], hidden[0], atol=5e-4, rtol=1e-3)
            torch.testing.assert_close(output.logits[index - start], logits[0], atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize("name", HEADS)
def test_logits_are_those_of_the_definition(name: str) -> None:
    """Rows of chains and of all paths of trees, after any mixture of acceptances, new contexts and repeated calls."""
    rng = random.Random(name)
    checked = Checked(random_head(**HEADS[name]))
    contexts = [Context([1, *(rng.randrange(3, 40) for _ in range(size))]) for size in (1, 6)]
    for _ in range(8):
        context = rng.choice(contexts)
        if rng.random() < 0.2:
            context = Context([*context.ids[: rng.randrange(2, len(context) + 1)], rng.randrange(3, 40)])
            contexts[rng.randrange(2)] = context
        draft, parents = random_tree(rng, rng.randrange(1, 7))
        if rng.random() < 0.4:
            parents = list(range(-1, len(draft) - 1))
        for start in sorted({0, rng.randrange(len(draft) + 1), len(draft)}):  # what was run before is not run again
            checked.check(context, draft, parents, start)
        path = random_path(rng, parents)
        context.extend([*(draft[node] for node in path), rng.randrange(3, 40)])


def scripted_calls(checked: Checked, context: Context) -> None:
    """Draft a chain token by token, commit a part of it, draft a tree level by level, commit a branch, take another context."""
    runner = checked.runner
    runner.logits(context)
    runner.logits(context, [8], start=1)
    runner.logits(context, [8, 9], start=2)
    context.extend([8, 30])
    runner.logits(context, [7, 9], [-1, -1])
    runner.logits(context, [7, 9, 4, 5], [-1, -1, 1, 1], start=3)
    context.extend([9, 4, 12])
    runner.logits(Context([*context.ids[:5], 3, 3]), [5, 6])
    runner.logits(context, [5])


@pytest.mark.parametrize(
    ("name", "step"), [("3 reduced", 37), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("3 reduced", "1"))]
)
def test_an_interruption_at_any_line_leaves_the_runner_usable(name: str, step: int) -> None:
    files = ("heads/eagle_runner.py", "heads/feature_runner.py", "engine/cached_prefix.py", "engine/model_runner.py")
    line, finished = 0, False
    while not finished:
        line += 1 if line < 10 else step
        checked, context = Checked(random_head(**HEADS[name])), Context([1, 5, 6, 7])
        with InterruptAt(line, files):
            try:
                scripted_calls(checked, context)
                finished = True
            except KeyboardInterrupt:
                pass
        before = {4: 4, 6: 4, 9: 6}[len(context)]  # the number of tokens before the context grew, to which row 0 may belong
        for ids in (context.ids[:before], context.ids, [*context.ids[:3], 8, 9]):
            again = context if ids is context.ids else Context(ids)
            checked.check(again, [11, 13, 13], [-1, 0, -1], start=2)
    assert line > 300


def test_a_predicted_feature_that_an_interrupted_pass_wrote_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    checked, context = Checked(random_head(**HEADS["1"])), Context([1, 5, 6, 7])
    runner = checked.runner
    assert isinstance(runner, EagleRunner)
    runner.logits(context)
    context.extend([8, 9])
    keep = runner._keep_rows

    def interrupted(*arguments: Any) -> None:
        keep(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_keep_rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner.logits(context)
    checked.check(Context([1, 5, 6, 7]), [11], start=1)


@pytest.mark.parametrize("name", ["1", "3"])
def test_what_is_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass for each level of a draft. The first one of a round also runs the accepted tokens again, with true features."""
    monkeypatch.setattr("specgen.engine.cached_prefix.PREFILL_CHUNK", 5)
    checked = Checked(random_head(**HEADS[name]))
    assert isinstance(checked.runner, EagleRunner)
    run, passes = checked.runner._forward, []

    def counting(forward_pass: Any, logits_to_keep: int) -> Any:
        passes.append((forward_pass.first, forward_pass.last))
        return run(forward_pass, logits_to_keep)

    monkeypatch.setattr(checked.runner, "_forward", counting)
    context = Context([1, *range(3, 15)])  # 13 tokens, 12 pairs: a long prompt is run in chunks
    checked.check(context, [])
    assert passes == [(0, 5), (5, 10), (10, 12)]
    passes.clear()
    checked.check(context, [20, 21], [-1, -1], start=1)
    checked.check(context, [20, 21, 22, 23, 24], [-1, -1, 0, 1, 1], start=3)
    assert passes == [(12, 14), (14, 17)]
    passes.clear()
    context.extend([21, 24, 30])  # two of them were drafted
    checked.check(context, [])
    checked.check(context, [5, 6, 7], start=1)  # more than a level at once
    assert passes == [(12, 15), (15, 16), (16, 17), (17, 18)]
    passes.clear()
    checked.check(Context([*context.ids[:9], 33]), [])  # 9 equal tokens are 8 equal pairs
    assert passes == [(8, 9)]


@pytest.mark.parametrize("name", ["1", "3 reduced"])
def test_no_call_waits_for_the_device(name: str) -> None:
    checked, context = Checked(random_head(**HEADS[name])), Context([1, *range(3, 9)])
    checked.runner.logits(context)
    context.extend([8, 9])
    with HostReads() as reads:
        checked.runner.logits(context)
        checked.runner.logits(context, [5, 6, 5, 7], [-1, -1, 0, 1], start=1)
        checked.runner.logits(Context([1, 3, 4, 9]), [8])
    assert reads.count == 0


def test_contexts_of_one_token_and_with_another_first_token() -> None:
    checked = Checked(random_head(**HEADS["3 reduced"]))
    for ids in ([5], [5, 5], [5], [6, 5], [6, 5, 7, 9], [8, 5, 7, 9]):
        context = Context(ids)
        output = checked.runner.logits(context, [7, 8], [-1, -1])
        assert output.logits.shape == (3, VOCAB)
        assert output.logits.isfinite().sum(1).tolist() == [len(REDUCED)] * 3
        if len(ids) > 1:
            checked.check(context, [7, 8])
    context = Context([5])
    checked.runner.logits(context, [7])
    context.extend([7])
    checked.check(context, [9], start=1)


def test_penalties_change_the_logits_but_not_the_features() -> None:
    _, model = target("llama", "native")
    config = GenerationConfig(repetition_penalty=1.5)
    head = random_head(**HEADS["3 reduced"])
    plain_runner = make_runners(head, model, ModelRunner(model), lambda: None).draft
    penalised = make_runners(
        head, model, ModelRunner(model), lambda: PenaltyProcessor(config, frozenset(), VOCAB, model.device)
    ).draft
    context = Context([1, 5, 6, 7])
    before, after = (runner.logits(context, [8, 9], start=1) for runner in (plain_runner, penalised))
    assert after.hidden_states is not None
    assert before.hidden_states is not None
    assert torch.equal(before.hidden_states, after.hidden_states)
    assert after.unpenalised is not None
    assert torch.equal(after.unpenalised, before.logits)
    changed = (after.logits != before.logits).any(0).nonzero()[:, 0].tolist()
    assert changed == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 48}, "fc.weight .* is 48 x 96, but has to be 48 x 80"),
        ({"version": 3, "width": 48}, "is 48 x 144, but has to be 48 x 96"),
        ({"version": 3, "vocabulary": 95}, "has 95 tokens, but the model 96"),
        ({"version": 3, "vocabulary": [4, 96]}, "tokens beyond the model's 96"),
        ({"version": 3, "taps": (0, 2, 4)}, "reads 0, 2, 4, but the model has layers 0 to 3"),
        ({"version": 3, "lacks": "layers.0.hidden_norm.weight"}, "has no layers.0.hidden_norm.weight"),
        ({"config": {"model_type": "gemma2"}}, "layers of the kind 'gemma2'"),
        ({"config": {"new_field": 1}}, "does not support new_field"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    _, model = target("llama", "native")
    lacks, taps, config = (change.pop(name, None) for name in ("lacks", "taps", "config"))
    head = random_head(**{"version": 1, **change})
    tensors = {name: tensor for name, tensor in head.tensors.items() if name != lacks}
    head = replace(head, tensors=tensors, config={**head.config, **(config or {})}, feature_layers=taps or head.feature_layers)
    with pytest.raises(SpecgenError, match=message):
        make_runners(head, model, ModelRunner(model), lambda: None)
