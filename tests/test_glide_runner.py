"""GliDe's runner: its rows are those of a plain reference on the target's own keys and values, after any sequence of calls."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from enumeration import PROMPT, ROUNDING, Paths, states, total_variation
from families import EOS, VOCAB, make_model, model_of, plain, prompt
from glide_models import GlideReference
from runner_checks import TRACED, InterruptAt, path_to, random_path, random_tree, uncached
from scripted_models import ids_of, scripted_run
from specgen.engine.parts.glide_runner import GlideRunner, make_runners
from statistics_checks import output_distribution

from specgen.base.errors import SpecgenError
from specgen.base.settings import parse_pairs
from specgen.base.types import Context, SamplingParams
from specgen.engine.generation_config import GenerationConfig
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model_runner import ModelRunner


def runners(reference: GlideReference, backend: str = "native") -> tuple[ModelRunner, GlideRunner]:
    model = model_of(reference.target, backend)
    target = ModelRunner(model)
    return target, GlideRunner(reference.weights, model, target)


def check(reference: GlideReference, logits: torch.Tensor, context: Context, tokens: list[int], parents: Any, start: int) -> None:
    """Assert that the logits from index `start` on are those of the reference, each path by itself."""
    assert logits.shape[0] == len(tokens) + 1 - start
    for index in range(start, len(tokens) + 1):
        expected = reference.drafted(context.ids, path_to(tokens, parents, index - 1))[-1]
        torch.testing.assert_close(logits[index - start], expected, atol=2e-4, rtol=1e-4)


FAMILIES = {  # what differs in the target's keys: grouped heads, norms, partial rotation, none
    "llama": {},
    "qwen3": {},
    "phi3": {"partial_rotary_factor": 0.5},
    "gemma2": {},
    "gemma3_text": {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "gemma": {},
    "mistral": {},
}


@pytest.mark.parametrize(
    ("family", "shared"),
    [
        pytest.param(family, shared, marks=() if shared == bool(index % 2) else pytest.mark.slow)
        for index, family in enumerate(FAMILIES)
        for shared in (False, True)
    ],
)
def test_chains_and_trees_in_any_order_give_the_rows_of_the_reference(family: str, shared: bool) -> None:
    layers = 2 if family in ("llama", "gemma3_text") else 1
    reference = GlideReference(make_model(family, **FAMILIES[family]), layers=layers, shared=shared)
    target, draft = runners(reference)
    rng = random.Random(family)
    context = Context([1, 5, 6, 7])
    for step in range(6):
        if step == 3:  # another sequence that shares its beginning with the cached one
            context = Context([*context.ids[:3], 9, 9])
        tokens, parents = random_tree(rng, rng.randrange(0, 6))
        if step % 3 == 0:
            parents = list(range(-1, len(tokens) - 1))
        start = rng.randrange(len(tokens) + 1) if step % 2 else 0
        check(reference, draft.logits(context, tokens, parents, start=start).logits, context, tokens, parents, start)
        if rng.random() < 0.7:  # otherwise the target lacks tokens at the draft's next call
            target.logits(context, tokens, parents)
        context.extend([*(tokens[node] for node in random_path(rng, parents)), rng.randrange(3, 40)])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("family", ["llama", "smollm3", "gemma2"])
def test_targets_of_the_other_backend(family: str, shared: bool) -> None:
    reference = GlideReference(make_model(family, **FAMILIES[family]), shared=shared)
    draft = runners(reference, "transformers")[1]
    for ids in ([1], [1, 5, 6, 7]):  # first while the target's cache is empty
        context, tokens, parents = Context(ids), [4, 5, 6, 9], [-1, -1, 0, 1]
        check(reference, draft.logits(context, tokens, parents).logits, context, tokens, parents, 0)


def test_a_context_of_one_token_and_prompts_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgen.engine.cached_prefix.PREFILL_CHUNK", 5)
    reference = GlideReference(make_model("llama"), layers=2)
    draft = runners(reference)[1]
    for ids in ([1], [1, *range(3, 27)], [1, 3]):
        context = Context(ids)
        check(reference, draft.logits(context, [8, 9]).logits, context, [8, 9], [-1, 0], 0)


@pytest.mark.parametrize(("layers", "after"), [(1, 1), (2, 3)])
def test_accepted_tokens_are_run_again_only_with_several_layers(layers: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = GlideReference(make_model("llama"), layers=layers)
    draft = runners(reference)[1]
    counts, run = [], draft._forward
    monkeypatch.setattr(draft, "_forward", lambda one, kept: counts.append(one.last - one.first) or run(one, kept))
    context = Context([1, 5, 6, 7])
    for chain in ([], [8], [8, 9]):
        draft.logits(context, chain, start=len(chain))
    context.extend([8, 9, 30])  # both accepted, and the target's own token
    draft.logits(context)
    assert counts == [4, 1, 1, after]


@pytest.mark.parametrize("step", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interruption_at_any_line_leaves_it_usable(step: int) -> None:
    files = (*TRACED, "engine/parts/glide_runner.py", "engine/parts/glide_layers.py")
    reference = GlideReference(make_model("llama", num_hidden_layers=2), layers=2)
    model, weights = model_of(reference.target, "native"), reference.weights
    finished, line = False, 0
    while not finished:
        line += step
        target = ModelRunner(model)
        draft, context = GlideRunner(weights, model, target), Context([1, 5, 6])
        with InterruptAt(line, files):
            try:
                draft.logits(context, [8])
                draft.logits(context, [8, 9], start=1)
                target.logits(context, [8, 9])
                context.extend([8, 30])
                draft.logits(context, [9, 10], [-1, -1])
                finished = True
            except KeyboardInterrupt:
                pass
        for again in (context, Context([1, 5, 7, 9])):
            check(reference, draft.logits(again, [11], start=1).logits, again, [11], [-1], 1)
    assert line > 300


def test_penalties_change_its_logits_as_a_draft_models() -> None:
    reference = GlideReference(make_model("llama"))
    model = model_of(reference.target, "native")
    penalties = PenaltyProcessor(GenerationConfig(repetition_penalty=1.5), {EOS}, VOCAB, model.device)
    context, draft = Context([1, 5, 6, 7]), [8, 9]
    made = make_runners(reference.weights, model, ModelRunner(model), lambda: penalties).draft
    output, plain_logits = made.logits(context, draft), runners(reference)[1].logits(context, draft).logits
    assert output.unpenalised is not None
    torch.testing.assert_close(output.unpenalised, plain_logits)
    ours = PenaltyProcessor(GenerationConfig(repetition_penalty=1.5), {EOS}, VOCAB, model.device)
    torch.testing.assert_close(output.logits, ours(plain_logits, context, draft, [-1, 0], 0))


METHODS = ["sd:k=4", "svip:max_draft=5", "sd:k=3:width=2", "specinfer:k=3:drafts=2"]
OFTEN = ("smollm3", "gemma2", "gemma")
UNRELATED = [
    pytest.param(family, METHODS[index % len(METHODS)], False, marks=() if family in OFTEN else pytest.mark.slow)
    for index, family in enumerate(FAMILIES)
]


@pytest.mark.parametrize(("family", "method", "near"), [*UNRELATED, *(("llama", method, True) for method in METHODS)])
def test_greedy_runs_give_the_targets_own_tokens(family: str, method: str, near: bool) -> None:
    module = make_model(family, **({"num_hidden_layers": 1} if near else FAMILIES[family]))
    target, draft = runners(GlideReference(module, shared=True, near=near))
    name, *settings = method.split(":")
    accepted = 0
    for seed in (1, 2):  # the second run starts with the caches of the first
        sampling = SamplingParams(max_new_tokens=14)
        run = scripted_run(name, parse_pairs(settings), target, draft, sampling, eos=[EOS], prompt=prompt(seed))
        rounds = list(run.rounds())
        assert ids_of(rounds) == plain(module, prompt(seed), 14)
        accepted += len(ids_of(rounds)) - len(rounds)
    assert accepted >= 8 or not near


@pytest.mark.parametrize("method", ["sd:k=2", "sd:k=2:width=2", pytest.param("specinfer:k=2:drafts=2", marks=pytest.mark.slow)])
def test_sampled_runs_have_the_targets_distribution(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By enumeration of all random paths, with a real target and draft model."""
    tiny = {"vocab_size": 2, "num_hidden_layers": 1, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    reference = GlideReference(make_model("llama", **tiny), shared=True)
    target, draft = runners(reference)
    name, *settings = method.split(":")
    sampling = SamplingParams(max_new_tokens=4, temperature=1.0)
    found = Paths(monkeypatch).of_rounds(lambda: states(name, parse_pairs(settings), target, draft, sampling))

    def probabilities(tokens: tuple[int, ...]) -> list[float]:
        return uncached(reference.target, [*PROMPT, *tokens]).softmax(-1).tolist()

    assert total_variation(found, output_distribution(probabilities, 4)) < ROUNDING


LONG_ROPE = {"rope_type": "longrope", "short_factor": [1, 1], "long_factor": [2, 3], "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_remap": True}, "use_remap"),
        ({"model_type": "gemma"}, "not of gemma"),
        ({"hidden_size": 16}, "layers.0"),
        ({"num_hidden_layers": 4}, "4 layers"),
        ({"attention_bias": True}, "q_proj.bias"),
        ({"rope_scaling": LONG_ROPE, "rope_parameters": None}, "LongRoPE"),
    ],
)
def test_heads_that_do_not_fit_are_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    reference = GlideReference(make_model("llama"))
    weights = replace(reference.weights, config={**reference.weights.config, **change})
    with pytest.raises(SpecgenError, match=message) as caught:
        GlideRunner(weights, model := model_of(reference.target, "native"), ModelRunner(model))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_targets_that_do_not_fit_are_refused_in_one_line(backend: str) -> None:
    reference = GlideReference(make_model("llama"), shared=True)
    other = make_model("llama", hidden_size=64) if backend == "native" else make_model("gpt2")
    model = model_of(other, backend)
    with pytest.raises(SpecgenError, match=r"hidden size|gpt2") as caught:
        make_runners(reference.weights, model, ModelRunner(model), lambda: None)
    assert "\n" not in str(caught.value)
