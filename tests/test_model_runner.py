"""Model runners: calls in any order give the logits of forward passes without a cache."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from families import BACKENDS, make_bloom, make_model, model_of
from hypothesis import given, settings
from hypothesis import strategies as st
from runner_checks import BUFFERS, RUN_BY, TOLERANCE, CountedLayers, InterruptAt, check, random_path, random_tree

from specgen.base.errors import SpecgenError
from specgen.base.types import Context
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.inputs import InputMaker
from specgen.engine.native.kv_buffer import KVBuffer

both_backends = pytest.mark.parametrize("backend", BACKENDS)
native_often = pytest.mark.parametrize("backend", ["native", pytest.param("transformers", marks=pytest.mark.slow)])


@pytest.mark.parametrize(("family", "backend"), RUN_BY)
def test_chains_trees_and_commits_in_any_order_give_the_reference_logits(family: str, backend: str) -> None:
    module = make_model(family)
    runner = ModelRunner(model_of(module, backend))
    rng = random.Random(family)
    context = Context([1, 5, 6, 7])
    for step in range(8):
        if step == 5:  # another sequence that shares its beginning with the cached one
            context = Context([*context.ids[:6], 9, 9])
        tokens, parents = random_tree(rng, rng.randrange(0, 7))
        if step % 3 == 0:
            parents = list(range(-1, len(tokens) - 1))
        check(module, runner.logits(context, tokens, parents).logits, context, tokens, parents)
        context.extend([*(tokens[node] for node in random_path(rng, parents)), rng.randrange(3, 40)])


@both_backends
@settings(max_examples=8, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_any_sequence_of_calls_on_one_runner(rng: random.Random, backend: str) -> None:
    runner = ModelRunner(MODELS[backend])
    contexts = [Context([1, 4, 5]), Context([1, 4, 9, 9])]
    for _ in range(6):
        context = rng.choice(contexts)
        tokens, parents = random_tree(rng, rng.randrange(0, 6))
        check(MODULE, runner.logits(context, tokens, parents).logits, context, tokens, parents)
        context.extend([*(tokens[node] for node in random_path(rng, parents)), rng.randrange(3, 40)])


MODULE = make_model("llama", num_hidden_layers=2)
MODELS = {backend: model_of(MODULE, backend) for backend in BACKENDS}


@both_backends
def test_a_chain_that_grows_runs_each_token_once(backend: str) -> None:
    module = make_model("llama")
    model = model_of(module, backend)
    counted = CountedLayers(model).tokens
    runner = ModelRunner(model)
    context, chain = Context([1, 5, 6, 7]), []
    for token in (8, 9, 10, 11):
        logits = runner.logits(context, chain, start=len(chain)).logits
        assert logits.shape[0] == 1
        chain.append(token)
    assert counted["2"] == 4 + 3
    context.extend([8, 9, 30])  # two accepted, then a correction
    runner.logits(context)
    assert counted["2"] == 4 + 3 + 1


@both_backends
def test_a_tree_grows_level_by_level_and_its_path_is_kept(backend: str) -> None:
    module = make_model("llama")
    model = model_of(module, backend)
    counted = CountedLayers(model).tokens
    runner = ModelRunner(model)
    context = Context([1, 5, 6])
    runner.logits(context)
    first, both = [7, 8], [7, 8, 9, 10, 11]
    logits = runner.logits(context, first, [-1, -1], start=1).logits
    check(module, logits, context, first, [-1, -1], start=1)
    counted.clear()  # what `check` ran
    parents = [-1, -1, 1, 1, 0]
    logits = runner.logits(context, both, parents, start=3).logits
    assert counted["2"] == 3
    check(module, logits, context, both, parents, start=3)
    context.extend([8, 10, 12])  # the second branch: its cache entries are gathered, only the last token is new
    counted.clear()
    logits = runner.logits(context).logits
    assert counted["2"] == 1
    check(module, logits, context, [], [])


@both_backends
def test_the_same_call_twice_runs_only_what_its_logits_need(backend: str) -> None:
    module = make_model("llama")
    model = model_of(module, backend)
    counted = CountedLayers(model).tokens
    runner = ModelRunner(model)
    context = Context([1, 5, 6, 7])
    first = runner.logits(context, [8, 9]).logits.clone()
    counted.clear()
    assert torch.allclose(runner.logits(context, [8, 9]).logits, first, atol=TOLERANCE)
    assert counted["2"] == 3


@both_backends
def test_another_draft_after_the_same_context(backend: str) -> None:
    """The cached tokens of the draft before are dropped from the first difference on, in tokens or in parents."""
    module = make_model("llama")
    runner = ModelRunner(model_of(module, backend))
    context, chain = Context([1, 5, 6, 7]), [-1, 0, 1]
    runner.logits(context, [8, 9, 10])
    for tokens, parents, start in [
        ([8, 3, 10], chain, 3),
        ([4, 3, 10], chain, 2),
        ([4], chain[:1], 1),
        ([4, 3, 10], [-1, -1, 1], 3),
        ([4, 3, 10], [-1, -1, 0], 3),
    ]:
        check(module, runner.logits(context, tokens, parents, start=start).logits, context, tokens, parents, start)


@both_backends
def test_an_interrupted_gather_leaves_the_runner_usable(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_model("llama")
    runner = ModelRunner(model_of(module, backend))
    context = Context([1, 5, 6, 7])
    runner.logits(context, [8, 9, 10], [-1, -1, 1])
    context.extend([9, 10, 20])
    gather = runner.cache.gather

    def interrupted(*arguments: Any) -> None:
        gather(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if backend == "native":  # all layers at once
            patch.setattr(runner.cache, "gather", interrupted)
        else:
            patch.setattr(runner.cache.layers[1], "gather", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            runner.logits(context)
    check(module, runner.logits(context).logits, context, [], [])


def scripted_calls(runner: ModelRunner, context: Context) -> None:
    """Draft a chain token by token, commit a part of it, draft a tree, commit its second branch, switch to another context."""
    runner.logits(context, [8])
    runner.logits(context, [8, 9], start=1)
    context.extend([8, 30])
    runner.logits(context, [7, 9, 4], [-1, -1, 1])
    context.extend([9, 4, 12])
    runner.logits(context, [5, 6])
    runner.logits(Context([*context.ids[:5], 3, 3]))


@native_often
def test_an_interruption_at_any_line_leaves_the_runner_usable(backend: str) -> None:
    line, finished = 0, False
    while not finished:
        line += 1 if line < 20 else (7 if backend == "transformers" else 29)  # native code has more lines
        runner, context = ModelRunner(MODELS[backend]), Context([1, 5, 6, 7])
        runner.logits(context)
        with InterruptAt(line):
            try:
                scripted_calls(runner, context)
                finished = True
            except KeyboardInterrupt:
                pass
        for ids in (context.ids, context.ids[:5], [*context.ids[:4], 8, 9, 9]):
            again = context if ids is context.ids else Context(ids)
            check(MODULE, runner.logits(again, [11, 13]).logits, again, [11, 13], [-1, 0])
    assert line > 100


@native_often
def test_an_interruption_while_buffers_grow_leaves_the_runner_usable(backend: str) -> None:
    """Of the KV cache, the masks and the rotary embeddings; the last two belong to the model."""
    module = make_model("llama", num_hidden_layers=2)
    native = model_of(module, "native")
    line, finished = 0, False
    while not finished:
        line += 1
        model: Any = native if backend == "native" else model_of(module, backend)
        if backend == "native":
            model.inputs = InputMaker(model.architecture, model.dtype, model.layer_devices)
        runner, context = ModelRunner(model), Context([1, 5, 6])
        runner.logits(context, [7, 8])
        context.extend([3 + token % 40 for token in range(90)])
        with InterruptAt(line, BUFFERS):
            try:
                runner.logits(context)
                runner.logits(context, [11, 13], start=1)
                finished = True
            except KeyboardInterrupt:
                pass
        for again in (Context([1, 5, 6]), context):  # the shorter one first: it needs no longer buffers
            check(module, runner.logits(again, [11, 13]).logits, again, [11, 13], [-1, 0])
    assert line > 30


@both_backends
def test_long_prompts_are_run_in_chunks(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgen.engine.cached_prefix.PREFILL_CHUNK", 5)
    module = make_model("gemma2")
    runner = ModelRunner(model_of(module, backend))
    context = Context([1, *range(3, 27)])
    check(module, runner.logits(context, [8, 9]).logits, context, [8, 9], [-1, 0])


@both_backends
def test_buffers_grow_and_keep_their_entries(backend: str) -> None:
    module = make_model("llama")
    runner = ModelRunner(model_of(module, backend))
    context = Context([1, 5])
    for token in range(80):  # past the first capacity
        runner.logits(context)
        context.extend([3 + token % 30])
    check(module, runner.logits(context).logits, context, [], [])


def buffers(runner: ModelRunner) -> list[int]:
    """The addresses of the KV cache's buffers."""
    if isinstance(runner.cache, KVBuffer):
        return [part.data_ptr() for part in runner.cache.parts]
    return [layer.keys.data_ptr() for layer in runner.cache.layers]  # type: ignore[attr-defined]


@both_backends
def test_reserved_buffers_are_made_once_and_never_copied(backend: str) -> None:
    module = make_model("llama")
    runner = ModelRunner(model_of(module, backend))
    runner.reserve(100)
    context = Context([1, 5])
    runner.logits(context)
    before = buffers(runner)
    for token in range(80):
        runner.logits(context, [7, 8, 9])
        context.extend([7, 3 + token % 3])
        if len(context) > 90:
            break
    assert buffers(runner) == before


def test_alibi_models_run_chains_and_refuse_trees() -> None:
    module = make_bloom()
    runner = ModelRunner(model_of(module, "transformers"))
    context = Context([1, 5, 6])
    check(module, runner.logits(context, [7, 8]).logits, context, [7, 8], [-1, 0])
    context.extend([7, 9])
    check(module, runner.logits(context, [4]).logits, context, [4], [-1])
    with pytest.raises(SpecgenError, match="ALiBi"):
        runner.logits(context, [7, 8], [-1, -1])
