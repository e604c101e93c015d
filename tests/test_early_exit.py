"""Early exit: two runners on one model, whose first layers run once for every token."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from families import BACKENDS, exit_layers_of, make_bloom, make_model, model_of
from runner_checks import LAYERED, CountedLayers, InterruptAt, check, four_layers, quick, random_path, random_tree
from specgen.engine.exit_parts import Predictor

from specgen.base.errors import SpecgenError
from specgen.base.types import Context
from specgen.engine.forward_pass import ForwardPass, ModelOutput
from specgen.engine.layer_skipping import LayerSkippingRunner, SkippedLayers
from specgen.engine.model_runner import ModelRunner
from specgen.engine.parts.early_exit import EarlyExit

both_backends = pytest.mark.parametrize("backend", BACKENDS)


def early_exit(module: Any, backend: str, depth: int = 1, predictor: Predictor | None = None) -> EarlyExit:
    """Early exit with an untrained exit layer: a copy of the target's last layer."""
    model = model_of(module, backend)
    return EarlyExit(model, exit_layers_of(model, module), depth, predictor)


def exit_model(module: Any, depth: int) -> Any:
    """A model that computes what an untrained exit does: the target's first `depth` layers, then its last one."""
    layers = module.model.layers
    lists = {name: getattr(module.config, name, None) for name in ("layer_types", "no_rope_layers")}
    changes = {name: [*entries[:depth], entries[-1]] for name, entries in lists.items() if entries}
    short = make_model(module.config.model_type, num_hidden_layers=depth + 1, **changes)
    state = {name: weight for name, weight in module.state_dict().items() if "layers." not in name}
    for position, layer in enumerate([*layers[:depth], layers[-1]]):
        state |= {f"model.layers.{position}.{name}": weight for name, weight in layer.state_dict().items()}
    short.load_state_dict(state)
    return short


@pytest.mark.parametrize(("family", "backend", "depth"), quick((*case, 1 + at // 2 % 2) for at, case in enumerate(LAYERED)))
def test_both_runners_give_the_reference_logits(family: str, backend: str, depth: int) -> None:
    """For chains, trees, drafts that grow, commits and other contexts in any order."""
    module = make_model(family, **four_layers(family))
    drafts = exit_model(module, depth)
    both = early_exit(module, backend, depth)
    rng = random.Random(f"{family} {depth}")
    context = Context([1, 5, 6, 7])
    for step in range(8):
        if step == 5:
            context = Context([*context.ids[:6], 9, 9])
        tokens, parents = random_tree(rng, rng.randrange(0, 7))
        if step % 3 == 0:
            parents = list(range(-1, len(tokens) - 1))
        grown = range(len(tokens) + 1) if step % 2 and parents == list(range(-1, len(tokens) - 1)) else ()
        for size in grown:
            logits = both.draft.logits(context, tokens[:size], parents[:size], start=size).logits
            check(drafts, logits, context, tokens[:size], parents[:size], size)
        check(drafts, both.draft.logits(context, tokens, parents).logits, context, tokens, parents)
        check(module, both.target.logits(context, tokens, parents).logits, context, tokens, parents)
        context.extend([*(tokens[node] for node in random_path(rng, parents)), rng.randrange(3, 40)])


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox", "bloom", "granite"])
def test_families_without_llamas_structure_are_refused(family: str) -> None:
    """By transformers: the native decoder runs Granite's layers one by one."""
    module = make_bloom() if family == "bloom" else make_model(family)
    model = model_of(module, "transformers")
    with pytest.raises(SpecgenError, match=f"early exit needs a model built as Llama is, and {family} is not"):
        EarlyExit(model, exit_layers_of(model_of(make_model("llama"), "native"), make_model("llama")), 1)
    with pytest.raises(SpecgenError, match=f"layer skipping needs a model built as Llama is, and {family} is not"):
        LayerSkippingRunner(ModelRunner(model), model, SkippedLayers.parse("1", 2))


@both_backends
@pytest.mark.parametrize("depth", [0, 3, 4])
def test_an_exit_without_layers_before_or_after_it_is_refused(backend: str, depth: int) -> None:
    with pytest.raises(SpecgenError, match=f"after layer {depth} of 3"):
        early_exit(make_model("llama"), backend, depth)


def counted_exit(module: Any, backend: str, depth: int) -> tuple[EarlyExit, Counter[str]]:
    """Early exit, and the number of tokens that each of its layers has been run on."""
    model = model_of(module, backend)
    layers = exit_layers_of(model, module)
    counted = CountedLayers(model, layers).tokens
    both = EarlyExit(model, layers, depth)
    counted.clear()  # what the check of the model's structure ran
    return both, counted


@both_backends
def test_each_layer_runs_as_few_tokens_as_possible(backend: str) -> None:
    """With drafts accepted partly, fully or not at all, the target's layers run each committed and drafted token once, and the
    exit layer runs the last drafted token only if it is committed."""
    both, counted = counted_exit(make_model("llama", num_hidden_layers=4), backend, 2)
    rng, context = random.Random(3), Context([1, 5, 6, 7])
    both.target.logits(context)
    context.extend([8])
    first = 4
    for accepted in (0, 2, 4, 1, 4, 4, 0, 3):
        draft = [rng.randrange(3, 40) for _ in range(4)]
        for size in range(4):
            both.draft.logits(context, draft[:size], start=size)
        both.target.logits(context, draft)
        first += 1 + 4  # the correction or bonus token, and the drafted ones
        context.extend([*draft[:accepted], 50 + accepted])
    assert counted["0"] == counted["1"] == first
    assert counted["2"] == counted["3"] == first, "verification runs each token once in the layers after N"
    # the exit: the prompt, and per round the correction or bonus token and the drafted ones; the last of these only if accepted
    assert counted["exit 0"] == 4 + 8 * (1 + 3) + [0, 2, 4, 1, 4, 4, 0].count(4)


@both_backends
def test_a_tree_grown_by_levels_runs_each_node_once_in_the_first_layers(backend: str) -> None:
    both, counted = counted_exit(make_model("llama", num_hidden_layers=4), backend, 2)
    context = Context([1, 5, 6])
    both.target.logits(context)
    context.extend([4])
    nodes, parents = [7, 8, 9, 10, 11, 12], [-1, -1, 1, 1, 2, 3]
    both.draft.logits(context)
    both.draft.logits(context, nodes[:2], parents[:2], start=1)
    both.draft.logits(context, nodes[:4], parents[:4], start=3)
    both.target.logits(context, nodes, parents)
    assert counted == {"0": 10, "1": 10, "2": 10, "3": 10, "exit 0": 8}
    context.extend([8, 10, 20])  # the second branch of the second branch: gathered in every cache
    both.draft.logits(context)
    both.target.logits(context)
    assert counted == {"0": 11, "1": 11, "2": 11, "3": 11, "exit 0": 9}


def scripted_calls(both: EarlyExit, context: Context) -> None:
    """Draft token by token, commit a part of it, draft a tree, commit its second branch, switch to another context."""
    both.draft.logits(context, [8], start=1)
    both.draft.logits(context, [8, 9], start=2)
    both.target.logits(context, [8, 9, 10])
    context.extend([8, 30])
    both.draft.logits(context, [7, 9], [-1, -1])
    both.target.logits(context, [7, 9, 4], [-1, -1, 1])
    context.extend([9, 4, 12])
    both.draft.logits(context, [5, 6])
    both.target.logits(Context([*context.ids[:5], 3, 3]))


@pytest.mark.parametrize("backend", ["native", pytest.param("transformers", marks=pytest.mark.slow)])
def test_an_interruption_at_any_line_leaves_both_usable(backend: str) -> None:
    module = make_model("llama")
    drafts, model = exit_model(module, 1), model_of(module, backend)
    layer = exit_layers_of(model, module)
    line, finished = 0, False
    while not finished:
        line += 1 if line < 20 else (29 if backend == "transformers" else 67)  # native code has more lines
        both, context = EarlyExit(model, layer, 1, None), Context([1, 5, 6, 7])
        both.target.logits(context)
        with InterruptAt(line):
            try:
                scripted_calls(both, context)
                finished = True
            except KeyboardInterrupt:
                pass
        for again in (context, Context([*context.ids[:4], 8, 9, 9])):
            check(drafts, both.draft.logits(again, [11, 13]).logits, again, [11, 13], [-1, 0])
            check(module, both.target.logits(again, [11, 13]).logits, again, [11, 13], [-1, 0])
    assert line > 200


@both_backends
def test_long_prompts_are_run_in_chunks(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgen.engine.cached_prefix.PREFILL_CHUNK", 5)
    module = make_model("gemma2")
    both, counted = counted_exit(module, backend, 1)
    context = Context([1, *range(3, 27)])
    logits = both.target.logits(context, [8, 9]).logits
    draft_logits = both.draft.logits(context, [8], start=1).logits
    assert counted == {"0": 27, "1": 27, "2": 27, "exit 0": 26}
    check(module, logits, context, [8, 9], [-1, 0])
    check(exit_model(module, 1), draft_logits, context, [8], [-1], start=1)


@both_backends
def test_the_hidden_state_that_predicted_the_last_token_is_found(backend: str) -> None:
    """Cali-TS's predictor needs the target's hidden state after its norm, at whichever node of a draft."""
    module = make_model("llama")
    both = early_exit(module, backend)
    context = Context([1, 5, 6, 7])
    assert both.target.last_hidden_state(context) is None
    both.target.logits(context)
    context.extend([9])

    def hidden(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            hidden_states: torch.Tensor = module.model(torch.tensor([ids]), use_cache=False).last_hidden_state
        return hidden_states[0, -1]

    for tokens, parents, path in (
        ([8, 9, 10], [-1, 0, 1], [8, 9, 10]),
        ([8, 9, 10], [-1, 0, 1], [8]),
        ([8, 9, 10], [-1, 0, 1], []),
        ([8, 9, 10, 11], [-1, -1, 1, 1], [9, 11]),
    ):
        found = both.target.last_hidden_state(context)
        assert found is not None
        assert torch.allclose(found, hidden(context.ids[:-1]), atol=1e-4)
        both.target.logits(context, tokens, parents)
        context.extend([*path, 30])
    assert both.target.last_hidden_state(Context(context.ids)) is None, "unknown for another run's context"


@both_backends
def test_the_acceptance_predictor_computes_the_papers_formula(backend: str) -> None:
    torch.manual_seed(0)
    width, positions = 32, Predictor.POSITIONS
    maps, weights = torch.randn(positions, width, width) / width, torch.randn(2 * width) / 4  # W_i and w
    predictor = Predictor(width).requires_grad_(False)
    predictor.target_weights.copy_(torch.einsum("d,ide->ie", weights[:width], maps))
    predictor.draft_weights.copy_(weights[width:])
    both = early_exit(make_model("llama"), backend, predictor=predictor)
    context = Context([1, 5, 6, 7])
    hidden_states = both.target.logits(context).hidden_states
    assert hidden_states is not None
    target_hidden = hidden_states[0].clone()
    context.extend([9])
    assert both.acceptance_predictor is not None
    both.acceptance_predictor.begin(context)
    drafted = both.draft.logits(context, [8]).hidden_states
    assert drafted is not None
    for position in (1, 2, 10, 13):
        index = min(position, positions) - 1
        expected = torch.sigmoid(weights @ torch.cat((maps[index] @ target_hidden, drafted[1])))
        assert torch.allclose(both.acceptance_predictor.score(drafted[1], position), expected, atol=1e-5)
        logit = predictor.logits(predictor.offsets(target_hidden), drafted[1:], torch.tensor([position]))
        assert torch.allclose(logit.sigmoid()[0], expected, atol=1e-5), "training's form"


def test_hidden_states_are_kept_while_other_contexts_are_run() -> None:
    """Passes may reuse the memory of their outputs, as static passes on a GPU do."""
    model = model_of(make_model("llama"), "native")
    inner, buffer = model.forward(), torch.zeros(8, model.shape.hidden_size)

    def forward(forward_pass: ForwardPass, rows: int) -> ModelOutput:
        output = inner(forward_pass, rows)
        assert output.hidden_states is not None
        return output._replace(hidden_states=buffer[:rows].copy_(output.hidden_states))

    runner, contexts = ModelRunner(model, forward=forward), [Context([1, 5, 6, 7]), Context([1, 8, 3])]
    states = []
    for context in contexts:
        hidden = runner.logits(context, [4]).hidden_states
        assert hidden is not None
        states.append(hidden.clone())
    contexts[0].extend([9])
    contexts[1].extend([4, 11])
    runner.clear_cache()
    runner.logits(Context([2, 2, 2, 2]))
    for context, hidden, row in zip(contexts, states, (0, 1), strict=True):
        found = runner.last_hidden_state(context)
        assert found is not None
        assert torch.equal(found, hidden[row])
    contexts[1].extend([12, 13])
    assert runner.last_hidden_state(contexts[1]) is None, "no call predicted this token"
