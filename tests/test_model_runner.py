"""Model runners: calls in any order give the logits of forward passes without a cache."""

from __future__ import annotations

import random

import pytest
import torch
from families import FAMILIES, make_bloom, make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from runner_checks import TOLERANCE, CountedTokens, InterruptAt, check, random_path, random_tree

from specgen.engine.model_runner import ModelRunner
from specgen.errors import SpecgenError
from specgen.types import Context


@pytest.mark.parametrize("family", FAMILIES)
def test_chains_trees_and_commits_in_any_order_give_the_reference_logits(family: str) -> None:
    model = make_model(family)
    runner = ModelRunner(model)
    rng = random.Random(family)
    context = Context([1, 5, 6, 7])
    for step in range(14):
        if step == 8:  # another sequence that shares its beginning with the cached one
            context = Context([*context.ids[:6], 9, 9])
        tokens, parents = random_tree(rng, rng.randrange(0, 7))
        if step % 3 == 0:
            parents = list(range(-1, len(tokens) - 1))
        check(model, runner.logits(context, tokens, parents).logits, context, tokens, parents)
        context.extend([*(tokens[node] for node in random_path(rng, parents)), rng.randrange(3, 40)])


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
def test_any_sequence_of_calls_on_one_runner(rng: random.Random) -> None:
    model = MODEL
    runner = ModelRunner(model)
    contexts = [Context([1, 4, 5]), Context([1, 4, 9, 9])]
    for _ in range(6):
        context = rng.choice(contexts)
        tokens, parents = random_tree(rng, rng.randrange(0, 6))
        check(model, runner.logits(context, tokens, parents).logits, context, tokens, parents)
        context.extend([*(tokens[node] for node in random_path(rng, parents)), rng.randrange(3, 40)])


MODEL = make_model("llama", num_hidden_layers=2)


def test_a_chain_that_grows_runs_each_token_once() -> None:
    model = make_model("llama")
    counted = CountedTokens(model)
    runner = ModelRunner(model)
    context, chain = Context([1, 5, 6, 7]), []
    for token in (8, 9, 10, 11):
        logits = runner.logits(context, chain, start=len(chain)).logits
        assert logits.shape[0] == 1
        chain.append(token)
    assert counted.tokens == 4 + 3
    context.extend([8, 9, 30])  # two accepted, then a correction
    runner.logits(context)
    assert counted.tokens == 4 + 3 + 1


def test_a_tree_grows_level_by_level_and_its_path_is_kept() -> None:
    model = make_model("llama")
    counted = CountedTokens(model)
    runner = ModelRunner(model)
    context = Context([1, 5, 6])
    runner.logits(context)
    first, both = [7, 8], [7, 8, 9, 10, 11]
    logits = runner.logits(context, first, [-1, -1], start=1).logits
    check(model, logits, context, first, [-1, -1], start=1)
    counted.tokens = 0  # what `check` ran
    parents = [-1, -1, 1, 1, 0]
    logits = runner.logits(context, both, parents, start=3).logits
    assert counted.tokens == 3
    check(model, logits, context, both, parents, start=3)
    context.extend([8, 10, 12])  # the second branch: its cache entries are gathered, only the last token is new
    counted.tokens = 0
    logits = runner.logits(context).logits
    assert counted.tokens == 1
    check(model, logits, context, [], [])


def test_the_same_call_twice_runs_only_what_its_logits_need() -> None:
    model = make_model("llama")
    counted = CountedTokens(model)
    runner = ModelRunner(model)
    context = Context([1, 5, 6, 7])
    first = runner.logits(context, [8, 9]).logits.clone()
    counted.tokens = 0
    assert torch.allclose(runner.logits(context, [8, 9]).logits, first, atol=TOLERANCE)
    assert counted.tokens == 3


def test_an_interrupted_gather_leaves_the_runner_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    runner = ModelRunner(model)
    context = Context([1, 5, 6, 7])
    runner.logits(context, [8, 9, 10], [-1, -1, 1])
    context.extend([9, 10, 20])
    layer = runner.cache.layers[1]
    with monkeypatch.context() as patch:
        patch.setattr(layer, "gather", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            runner.logits(context)
    check(model, runner.logits(context).logits, context, [], [])


def scripted_calls(runner: ModelRunner, context: Context) -> None:
    """Draft a chain token by token, commit a part of it, draft a tree, commit its second branch, switch to another context."""
    runner.logits(context, [8])
    runner.logits(context, [8, 9], start=1)
    context.extend([8, 30])
    runner.logits(context, [7, 9, 4], [-1, -1, 1])
    context.extend([9, 4, 12])
    runner.logits(context, [5, 6])
    runner.logits(Context([*context.ids[:5], 3, 3]))


def test_an_interruption_at_any_line_leaves_the_runner_usable() -> None:
    line, finished = 0, False
    while not finished:
        line += 1 if line < 20 else 7
        runner, context = ModelRunner(MODEL), Context([1, 5, 6, 7])
        runner.logits(context)
        with InterruptAt(line):
            try:
                scripted_calls(runner, context)
                finished = True
            except KeyboardInterrupt:
                pass
        for ids in (context.ids, context.ids[:5], [*context.ids[:4], 8, 9, 9]):
            again = context if ids is context.ids else Context(ids)
            check(MODEL, runner.logits(again, [11, 13]).logits, again, [11, 13], [-1, 0])
    assert line > 100


def test_long_prompts_are_run_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgen.engine.cached_prefix.PREFILL_CHUNK", 5)
    model = make_model("gemma2")
    runner = ModelRunner(model)
    context = Context([1, *range(3, 27)])
    check(model, runner.logits(context, [8, 9]).logits, context, [8, 9], [-1, 0])


def test_buffers_grow_and_keep_their_entries() -> None:
    model = make_model("llama")
    runner = ModelRunner(model)
    context = Context([1, 5])
    for token in range(80):  # past the first capacity
        runner.logits(context)
        context.extend([3 + token % 30])
    check(model, runner.logits(context).logits, context, [], [])


def test_reserved_buffers_are_made_once_and_never_copied() -> None:
    model = make_model("llama")
    runner = ModelRunner(model)
    runner.reserve(100)
    context = Context([1, 5])
    runner.logits(context)
    buffers = [layer.keys.data_ptr() for layer in runner.cache.layers]
    for token in range(80):
        runner.logits(context, [7, 8, 9])
        context.extend([7, 3 + token % 3])
        if len(context) > 90:
            break
    assert [layer.keys.data_ptr() for layer in runner.cache.layers] == buffers


def test_alibi_models_run_chains_and_refuse_trees() -> None:
    model = make_bloom()
    runner = ModelRunner(model)
    context = Context([1, 5, 6])
    check(model, runner.logits(context, [7, 8]).logits, context, [7, 8], [-1, 0])
    context.extend([7, 9])
    check(model, runner.logits(context, [4]).logits, context, [4], [-1])
    with pytest.raises(SpecgenError, match="ALiBi"):
        runner.logits(context, [7, 8], [-1, -1])
