"""Runners of trained parts: their rows by definition, whatever was drafted, accepted or interrupted before; lossless runs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from eagle_heads import drafted, features_of, logits_of, random_head
from families import BACKENDS, EOS, VOCAB, exit_layers_of, make_model, model_of, random_predictor
from glide_models import GlideReference
from runner_checks import (
    LAYERED,
    check,
    four_layers,
    path_to,
    quick,
    random_path,
    random_tree,
    uncached,
)

from specgen.base.types import Context
from specgen.engine.forward_pass import ForwardPass, ModelOutput
from specgen.engine.logits_processors import GenerationConfig, PenaltyProcessor
from specgen.engine.model import Model
from specgen.engine.model_runner import ModelRunner
from specgen.engine.parts import eagle, glide, medusa, own_layers
from specgen.engine.parts.own_layers import ExitWeights, Predictor
from specgen.engine.parts.part import EagleWeights, MedusaWeights, PartRunners

REDUCED = [*range(3, 40), 41, 77]
MEDUSA_HEADS = 3


@cache
def target(family: str, backend: str = "native", **changes: Any) -> tuple[Any, Model]:
    module = make_model(family, **changes)
    return module, model_of(module, backend)


class Part:
    """A trained part with random weights on a target. `row` is its definition: a row of logits [vocabulary] after a context and
    a drafted path, without any cache. `deepest` is the longest path that it can be asked for."""

    deepest = 9
    module: Any
    model: Model
    made: PartRunners

    def row(self, ids: list[int], path: list[int]) -> torch.Tensor:
        raise NotImplementedError

    def check(self, context: Context, draft: Sequence[int] = (), parents: Any = None, start: int = 0) -> None:
        """Asserts that the logits from index `start` on are those of the definition."""
        tokens, parents = list(draft), list(range(-1, len(draft) - 1)) if parents is None else list(parents)
        logits = self.made.draft.logits(context, tokens, parents, start=start).logits
        assert logits.shape == (len(tokens) + 1 - start, VOCAB)
        for index in range(start, len(tokens) + 1):
            expected = self.row(context.ids, path_to(tokens, parents, index - 1))
            torch.testing.assert_close(logits[index - start], expected, atol=5e-3, rtol=1e-2)


class Eagle(Part):
    def __init__(self, penalties: Any = lambda: None, family: str = "llama", backend: str = "native", **head: Any) -> None:
        self.module, self.model = target(family, backend)
        self.head: EagleWeights = random_head(**head)
        self.made = eagle.make_runners(self.head, self.model, ModelRunner(self.model), penalties)

    def row(self, ids: list[int], path: list[int]) -> torch.Tensor:
        table = self.head.tensors.get("embed_tokens.weight")
        embed = lambda tokens: self.model.embeddings(torch.tensor(tokens)) if table is None else table[tokens]  # noqa: E731
        with torch.no_grad():
            hidden = drafted(self.head, embed, features_of(self.module, self.head, ids), ids, path)[-1:]
            return logits_of(self.head, self.model, hidden)[0]


class Glide(Part):
    def __init__(
        self, penalties: Any = lambda: None, family: str = "llama", backend: str = "native", changes: Any = None, **head: Any
    ) -> None:
        self.reference = GlideReference(make_model(family, **(changes or {})), **head)
        self.module, self.model = self.reference.target, model_of(self.reference.target, backend)
        self.made = glide.make_runners(self.reference.weights, self.model, ModelRunner(self.model), penalties)

    def row(self, ids: list[int], path: list[int]) -> torch.Tensor:
        return self.reference.drafted(ids, path)[-1]


class Medusa(Part):
    deepest = MEDUSA_HEADS - 1

    def __init__(self, penalties: Any = lambda: None, family: str = "llama", backend: str = "native", **head: Any) -> None:
        self.module, self.model = target(family, backend)
        self.head = random_heads(**head)
        self.made = medusa.make_runners(self.head, self.model, ModelRunner(self.model, penalties()), penalties)

    @torch.no_grad()
    def row(self, ids: list[int], path: list[int]) -> torch.Tensor:
        state = before_head(self.module, ids[:-1])
        for matrix, bias in self.head.blocks[len(path)]:
            state = state + torch.nn.functional.silu(matrix @ state + bias)
        if self.head.lm_heads is None:
            row = self.module.lm_head(state)
            cap = getattr(self.module.config, "final_logit_softcapping", None)
            return row if cap is None else cap * torch.tanh(row / cap)
        row = self.head.lm_heads[len(path)] @ state
        if self.head.vocabulary is None:
            return row
        return torch.full((VOCAB,), -torch.inf).index_copy(0, self.head.vocabulary, row)


class Exit(Part):
    def __init__(self, penalties: Any = lambda: None, family: str = "llama", backend: str = "native", depth: int = 1) -> None:
        self.module = make_model(family, **four_layers(family))
        self.model = model_of(self.module, backend)
        self.drafts = exit_model(self.module, depth)
        weights = ExitWeights(exit_layers_of(self.model, self.module), depth, random_predictor(32))
        self.made = own_layers.make_runners(weights, self.model, None, penalties)

    def row(self, ids: list[int], path: list[int]) -> torch.Tensor:
        return uncached(self.drafts, [*ids, *path])


@torch.no_grad()
def before_head(module: Any, ids: Sequence[int]) -> torch.Tensor:
    states: torch.Tensor = module.model(torch.tensor([list(ids)]), use_cache=False).last_hidden_state
    return states[0, -1]


def random_heads(blocks: int = 1, own: bool = False, vocabulary: Sequence[int] | None = None, seed: int = 0) -> MedusaWeights:
    """Medusa heads with random weights for a model of the families."""
    generator = torch.Generator().manual_seed(seed)

    def random_block() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(32, 32, generator=generator) / 4, torch.randn(32, generator=generator)

    rows = VOCAB if vocabulary is None else len(vocabulary)
    heads = [torch.randn(rows, 32, generator=generator) / 2 for _ in range(MEDUSA_HEADS)] if own else None
    ids = None if vocabulary is None else torch.tensor(vocabulary)
    return MedusaWeights([[random_block() for _ in range(blocks)] for _ in range(MEDUSA_HEADS)], heads, ids)


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


KEYS = {  # what differs in the target's keys, which GliDe reads: grouped heads, norms, partial rotation, none
    "llama": {},
    "qwen3": {},
    "phi3": {"partial_rotary_factor": 0.5},
    "gemma2": {},
    "gemma3_text": {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "gemma": {},
    "mistral": {},
}


def parts() -> Iterator[Any]:
    """The kinds of parts with their variants."""
    yield from (pytest.param(Eagle, head, id=f"eagle {name}") for name, head in EAGLES.items())
    for number, (family, changes) in enumerate(KEYS.items()):
        layers = 2 if family in ("llama", "gemma3_text") else 1
        options = {"family": family, "changes": changes, "layers": layers, "shared": bool(number % 2)}
        yield pytest.param(Glide, options, id=f"glide {family}")
    yield pytest.param(Glide, {"layers": 2, "shared": True, "backend": "transformers"}, id="glide transformers")
    for options in (
        {},
        {"family": "gemma2", "blocks": 2},
        {"backend": "transformers", "own": True},
        {"family": "gemma2", "backend": "transformers"},
        {"family": "qwen3", "own": True, "blocks": 2, "vocabulary": [2, 5, 6, 7, 30, 31, 95]},
    ):
        yield pytest.param(Medusa, options, id=f"medusa {options}")
    for number, case in enumerate(quick(LAYERED)):
        family, backend = case.values
        options = {"family": family, "backend": backend, "depth": 1 + number // 2 % 2}
        yield pytest.param(Exit, options, id=f"exit {family} {backend}", marks=case.marks)


EAGLES: dict[str, dict[str, Any]] = {
    "1": {"version": 1},
    "1 biases, 2 layers": {"version": 1, "biases": True, "layers": 2, "own_embedding": VOCAB},
    "3": {"version": 3},
    "3 reduced": {"version": 3, "vocabulary": REDUCED},
    "3 qwen": {"version": 3, "vocabulary": REDUCED, "qk_norm": True, "norm_before_residual": True, "layers": 2},
    "3 transformers": {"version": 3, "vocabulary": REDUCED, "backend": "transformers"},
}
ONE_EACH = [(Eagle, EAGLES["3 reduced"]), (Glide, {"layers": 2}), (Medusa, {}), (Exit, {})]


@pytest.mark.parametrize(("kind", "options"), list(parts()))
def test_rows_are_those_of_the_definition(kind: type[Part], options: dict[str, Any]) -> None:
    """Of chains, trees and growing drafts, after any mixture of acceptances, new contexts, repeated calls and target passes."""
    part, rng = kind(**options), random.Random(str(options))
    contexts = [Context([1, *(rng.randrange(3, 40) for _ in range(size))]) for size in (2, 6)]
    for _ in range(8):
        which = rng.randrange(2)
        context = contexts[which]
        if rng.random() < 0.25:
            context = contexts[which] = Context([*context.ids[: rng.randrange(2, len(context) + 1)], rng.randrange(3, 40)])
        draft, parents = random_tree(rng, rng.randrange(1, 7))
        if rng.random() < 0.4:
            parents = list(range(-1, len(draft) - 1))
        while max(len(path_to(draft, parents, node)) for node in range(-1, len(draft))) > part.deepest:
            draft, parents = draft[:-1], parents[:-1]
        for start in sorted({0, rng.randrange(len(draft) + 1), len(draft)}):  # what was run before is not run again
            part.check(context, draft, parents, start)
        if rng.random() < 0.7:  # otherwise the target lacks tokens at the draft's next call
            check(part.module, part.made.target.logits(context, draft, parents).logits, context, draft, parents)
        context.extend([*(draft[node] for node in random_path(rng, parents)), rng.randrange(3, 40)])


@pytest.mark.parametrize(("kind", "options"), ONE_EACH)
def test_penalties_change_the_rows_by_the_path(kind: type[Part], options: dict[str, Any]) -> None:
    config = GenerationConfig(repetition_penalty=1.7, no_repeat_ngram_size=2)

    def penalties() -> PenaltyProcessor:
        return PenaltyProcessor(config, frozenset({EOS}), VOCAB, torch.device("cpu"))

    part, context, tokens, parents = kind(penalties, **options), Context([1, 5, 6, 7]), [11, 8, 6], [-1, 0, -1]
    part.made.target.logits(context)
    context.extend([9])
    output = part.made.draft.logits(context, tokens, parents)
    own = torch.stack([part.row(context.ids, path_to(tokens, parents, node)) for node in range(-1, 3)])
    torch.testing.assert_close(output.unpenalised, own, atol=5e-4, rtol=1e-3)
    torch.testing.assert_close(output.logits, penalties()(own, context, tokens, parents, 0), atol=1e-3, rtol=1e-3)
    assert not torch.allclose(output.logits[1], output.logits[3], atol=0.01), "they follow different tokens"


# EAGLE


def test_an_eagle_head_runs_a_pass_for_each_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one of a round also runs the accepted tokens again, with true features."""
    monkeypatch.setattr("specgen.engine.model_runner.PREFILL_CHUNK", 5)
    part = Eagle(version=1)
    run, passes = part.made.draft._run_pairs, []

    def counting(forward_pass: Any, *arguments: Any) -> Any:
        passes.append((forward_pass.first, forward_pass.last))
        return run(forward_pass, *arguments)

    monkeypatch.setattr(part.made.draft, "_run_pairs", counting)
    context = Context([1, *range(3, 15)])  # 13 tokens, 12 pairs: a long prompt is run in chunks
    part.check(context)
    assert passes == [(0, 5), (5, 10), (10, 12)]
    passes.clear()
    part.check(context, [20, 21], [-1, -1], start=1)
    part.check(context, [20, 21, 22, 23, 24], [-1, -1, 0, 1, 1], start=3)
    assert passes == [(12, 14), (14, 17)]
    passes.clear()
    context.extend([21, 24, 30])  # two of them were drafted
    part.check(context)
    part.check(context, [5, 6, 7], start=1)  # more than a level at once
    assert passes == [(12, 15), (15, 16), (16, 17), (17, 18)]
    passes.clear()
    part.check(Context([*context.ids[:9], 33]))  # 9 equal tokens are 8 equal pairs
    assert passes == [(8, 9)]


def test_eagle_contexts_of_one_token_and_with_another_first_token() -> None:
    part = Eagle(**EAGLES["3 reduced"])
    for ids in ([5], [5, 5], [5], [6, 5], [6, 5, 7, 9], [8, 5, 7, 9]):
        context = Context(ids)
        logits = part.made.draft.logits(context, [7, 8], [-1, -1]).logits
        assert logits.isfinite().sum(1).tolist() == [len(REDUCED)] * 3
        if len(ids) > 1:
            part.check(context, [7, 8])
    context = Context([5])
    part.made.draft.logits(context, [7])
    context.extend([7])
    part.check(context, [9], start=1)


# GliDe and Medusa


def counted_pass(run: Any, counts: list[int], forward_pass: ForwardPass, kept: int) -> ModelOutput:
    counts.append(forward_pass.last - forward_pass.first)
    return run(forward_pass, kept)


def test_glide_contexts_of_one_token_chunks_and_accepted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted tokens are run again only with several layers."""
    for layers, after in ((1, 1), (2, 3)):
        part = Glide(layers=layers)
        draft, counts = part.made.draft, list[int]()
        run = draft._forward
        with monkeypatch.context() as patch:
            patch.setattr(draft, "_forward", partial(counted_pass, run, counts))
            context = Context([1, 5, 6, 7])
            for chain in ([], [8], [8, 9]):
                draft.logits(context, chain, start=len(chain))
            context.extend([8, 9, 30])  # both accepted, and the target's own token
            draft.logits(context)
        assert counts == [4, 1, 1, after]
    monkeypatch.setattr("specgen.engine.model_runner.PREFILL_CHUNK", 5)
    part = Glide(layers=2)
    for ids in ([1], [1, *range(3, 27)], [1, 3]):
        part.check(Context(ids), [8, 9])


def test_medusa_heads_run_once_for_each_context_and_the_target_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    part, calls = Medusa(), list[int]()
    original = medusa.MedusaRunner._of_all_heads
    monkeypatch.setattr(medusa.MedusaRunner, "_of_all_heads", lambda self, hidden: calls.append(1) or original(self, hidden))
    context = Context([1, 5, 6])
    part.made.target.logits(context)
    context.extend([7])
    monkeypatch.setattr(part.made.target, "_forward", None)
    for size in range(MEDUSA_HEADS):
        part.made.draft.logits(context, [3] * size, start=size)
    assert len(calls) == 1


# early exit


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_hidden_state_that_predicted_the_last_token_is_found(backend: str) -> None:
    """The predictor needs the target's hidden state after its norm, at whichever node of a draft."""
    part, context = Exit(backend=backend), Context([1, 5, 6, 7])
    found_by = part.made.target
    assert found_by.last_hidden_state(context) is None
    found_by.logits(context)
    context.extend([9])
    chain = [8, 9, 10], [-1, 0, 1]
    for (tokens, parents), path in ((chain, [8, 9, 10]), (chain, [8]), (chain, []), (([8, 9, 10, 11], [-1, -1, 1, 1]), [9, 11])):
        found = found_by.last_hidden_state(context)
        torch.testing.assert_close(found, before_head(part.module, context.ids[:-1]), atol=1e-4, rtol=1e-4)
        found_by.logits(context, tokens, parents)
        context.extend([*path, 30])
    assert found_by.last_hidden_state(Context(context.ids)) is None, "unknown for another run's context"


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_acceptance_predictor_computes_the_papers_formula(backend: str) -> None:
    torch.manual_seed(0)
    width, positions = 32, Predictor.POSITIONS
    maps, weights = torch.randn(positions, width, width) / width, torch.randn(2 * width) / 4  # W_i and w
    predictor = Predictor(width).requires_grad_(False)
    predictor.target_weights.copy_(torch.einsum("d,ide->ie", weights[:width], maps))
    predictor.draft_weights.copy_(weights[width:])
    module, model = target("llama", backend)
    both = own_layers.make_runners(ExitWeights(exit_layers_of(model, module), 1, predictor), model, None, lambda: None)
    context = Context([1, 5, 6, 7])
    target_hidden = both.target.logits(context).hidden_states[0].clone()  # type: ignore[index]
    context.extend([9])
    assert both.predictor is not None
    both.predictor.begin(context)
    states_ = both.draft.logits(context, [8]).hidden_states
    for position in (1, 2, 10, 13):
        index = min(position, positions) - 1
        expected = torch.sigmoid(weights @ torch.cat((maps[index] @ target_hidden, states_[1])))
        torch.testing.assert_close(both.predictor.score(states_[1], position), expected, atol=1e-5, rtol=0)
        logit = predictor.logits(predictor.offsets(target_hidden), states_[1:], torch.tensor([position]))
        torch.testing.assert_close(logit.sigmoid()[0], expected, atol=1e-5, rtol=0)  # training's form
