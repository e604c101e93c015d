"""Model runners: the logits of transformers, each token run once, buffers that grow. Calls in any order: see `test_runners`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import BACKENDS, make_bloom, make_model, model_of
from runner_checks import BUFFERS, RUN_BY, TOLERANCE, CountedLayers, InterruptAt, check

from specgen.base.errors import SpecgenError
from specgen.base.types import Context
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.inputs import InputMaker
from specgen.engine.native.kv_buffer import KVBuffer

both_backends = pytest.mark.parametrize("backend", BACKENDS)
native_often = pytest.mark.parametrize("backend", ["native", pytest.param("transformers", marks=pytest.mark.slow)])


@pytest.mark.parametrize(("family", "backend"), RUN_BY)
def test_a_tree_its_path_and_a_chain_give_transformers_logits(family: str, backend: str) -> None:
    module = make_model(family)
    runner, context, tokens, parents = (
        ModelRunner(model_of(module, backend)),
        Context([1, 5, 6, 7]),
        [8, 9, 10, 11],
        [-1, -1, 1, 0],
    )
    check(module, runner.logits(context, tokens, parents).logits, context, tokens, parents)
    context.extend([9, 10, 12, *range(20, 34)])  # beyond the window of those that have one
    check(module, runner.logits(context, tokens).logits, context, tokens, [-1, 0, 1, 2])


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
