"""Runners of trained parts: rows by definition, penalties, what is not run again. `test_runners.py`
calls them in any order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import BACKENDS, EOS, IS_OLD_TRANSFORMERS, VOCAB
from part_references import Part
from runner_checks import LAYERED, check, path_to, quick, random_path, random_tree

from specgen.base.types import Context
from specgen.engine.forward_pass import ForwardPass, ModelOutput
from specgen.engine.kernels.branches import PassProgram
from specgen.engine.kernels.library import kernels
from specgen.engine.kernels.operators import Kernels
from specgen.engine.model_runner import ModelRunner
from specgen.engine.parts import block, eagle, own_layers, published_heads
from specgen.engine.parts.medusa import MedusaRunner
from specgen.engine.parts.own_layers import Predictor
from specgen.engine.parts.part import HeldRows
from specgen.engine.penalties import GenerationConfig, PenaltyProcessor

# what differs in the target's keys, which GliDe reads: groups, norms, partial rotation, none
KEYS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "phi3": {"partial_rotary_factor": 0.5},
    "gemma2": {},
    "gemma3_text": {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
    "smollm3": {"no_rope_layers": [1, 1, 0]},
}


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an EAGLE head feeds back is measured on a short text."""
    monkeypatch.setattr(published_heads, "TRIAL_TEXT", eagle.TRIAL_TEXT[:60])


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("eagle1", {}),
    ("eagle1", {"qkv_bias": True, "head_layers": 2, "own_embedding": True}),
    ("eagle3", {"draft_vocab": VOCAB}),
    ("eagle3", {"family": "gemma2"}),
    ("eagle3-speculators", {"qk_norm": True}),
    ("eagle3", {"backend": "transformers"}),
    ("eagle3.1", {}),
    ("eagle3.1-speculators", {"window": 3}),
    ("eagle3.1-speculators", {"window": 3, "qk_norm": True}),
    ("eagle3.1-speculators", {"fc_norm": True, "backend": "transformers"}),
    ("mtp-deepseek", {"layers": 1}),
    ("mtp-deepseek", {"layers": 2, "family": "gemma2"}),
    ("mtp-deepseek", {"layers": 3, "family": "qwen3", "backend": "transformers"}),
    ("mtp-deepseek", {"layers": 2, "family": "glm4_moe"}),
    ("mtp-qwen", {"layers": 1, "family": "olmo2"}),
    ("mtp-qwen", {"layers": 1, "family": "olmoe", "backend": "transformers"}),
    *(
        ("mtp-qwen", {"layers": 1, "family": family, "backend": "transformers"})
        for family in ("qwen3_5_text", "qwen3_next")
    ),
    ("mtp-qwen", {"layers": 1, "family": "qwen3_5_text"}),
    ("mtp-mimo", {"layers": 1, "family": "qwen2"}),
    ("mtp-mimo-v2", {"layers": 3, "family": "gemma3_text"}),
    ("eagle1", {"family": "granite", "backend": "transformers"}),
    ("medusa-v2", {}),
    ("medusa-v2", {"family": "gemma2", "medusa_layers": 2}),
    ("medusa-v0.1", {"backend": "transformers"}),
    ("medusa-v2", {"family": "gemma2", "backend": "transformers"}),
    ("medusa-vllm", {"family": "qwen3", "medusa_layers": 2}),
    ("glide", {"head_layers": 2, "tables": False, "backend": "transformers"}),
    ("glide", {"family": "lfm2", "backend": "native"}),  # its last layer has no keys
    *([] if IS_OLD_TRANSFORMERS else [("glide", {"family": "lfm2", "backend": "transformers"})]),
    ("block-zlab", {"head_layers": 2, "qk_norm": True}),
    ("block-deepspec", {"head_layers": 2, "qk_norm": True}),
    ("block-deepspec", {"family": "gemma2", "backend": "transformers"}),
    ("block-zlab", {"family": "gemma2", "scales": (3.0, 0.5, 2.0)}),
    ("block-zlab", {"family": "granite"}),
    ("block-specforge", {"qkv_bias": True}),
    ("block-speculators", {"qk_norm": True}),
    ("block-dflash2", {"head_layers": 2, "causal": False}),
    ("block-dflash2", {"block_rows": 8, "window": 3, "causal": False}),
    ("block-dflash2", {"head_layers": 2, "causal": True, "scales": (3.0, 0.4, 2.0)}),
    ("block-dflash2", {"family": "gemma2", "taps": 3, "scales": (1.0, 0.196, 20.0)}),
    ("block-dflash2", {"is_flat": True, "block_rows": 8, "backend": "transformers"}),
    ("block-dflash2", {"is_flat": True, "causal": False, "scales": (1.0, 0.196, 20.0)}),
    ("block-dflash2-speculators", {}),
    ("exit", {"joined": True, "depth": 2}),
    ("exit", {"joined": True, "depth": 1, "family": "qwen3", "backend": "transformers"}),
]


def variants() -> Iterator[Any]:
    """Layouts, and options of `Part`."""
    known = [
        (layout, options)
        for layout, options in VARIANTS
        if not (IS_OLD_TRANSFORMERS and layout.startswith("mtp"))
    ]
    yield from (
        pytest.param(layout, options, id=f"{layout} {options}") for layout, options in known
    )
    for number, (family, changes) in enumerate(KEYS.items()):
        layers = 2 if family in ("llama", "gemma3_text") else 1
        options = {
            "family": family,
            "changes": changes,
            "head_layers": layers,
            "tables": bool(number % 2),
        }
        yield pytest.param("glide", options, id=f"glide {family}")
    for number, case in enumerate(quick(LAYERED)):
        family, backend = case.values
        options = {"family": family, "backend": backend, "depth": 1 + number // 2 % 2}
        yield pytest.param("exit", options, id=f"exit {family} {backend}", marks=case.marks)


def check_rows(
    part: Part, context: Context, draft: list[int], parents: list[int] | None = None, start: int = 0
) -> None:
    """Asserts that the logits from index `start` on are those of the definition."""
    parents = list(range(-1, len(draft) - 1)) if parents is None else parents
    logits = part.made.draft.logits(context, draft, parents, start=start).logits
    assert logits.shape == (len(draft) + 1 - start, VOCAB)
    for index in range(start, len(draft) + 1):
        expected = part.row(context.ids, path_to(draft, parents, index - 1))
        torch.testing.assert_close(logits[index - start], expected, atol=5e-3, rtol=1e-2)


@pytest.mark.parametrize(("layout", "options"), list(variants()))
def test_rows_are_those_of_the_definition(layout: str, options: dict[str, Any]) -> None:
    """Of chains, trees and growing drafts, after acceptances, new contexts and calls that the
    target lacks tokens for."""
    part = Part(layout, **options)
    rng = random.Random(str(options))
    context = Context([1, *(rng.randrange(3, 40) for _ in range(6))])
    deepest = (part.made.draft.traits.longest_draft or 9) - 1
    for number in range(6):
        if number == 4:
            context = Context([*context.ids[:5], rng.randrange(3, 40)])
        draft, parents = random_tree(rng, rng.randrange(1, 7))
        if number % 2:
            parents = list(range(-1, len(draft) - 1))
        while max(len(path_to(draft, parents, node)) for node in range(-1, len(draft))) > deepest:
            draft = draft[:-1]
            parents = parents[:-1]
        # what was run before is not run again
        for start in sorted({0, rng.randrange(len(draft) + 1), len(draft)}):
            check_rows(part, context, draft, parents, start)
        if number != 2:
            check(
                part.module,
                part.made.target.logits(context, draft, parents).logits,
                context,
                draft,
                parents,
            )
        context.extend([*(draft[node] for node in random_path(rng, parents)), rng.randrange(3, 40)])


@pytest.mark.parametrize("joined", [False, True])
def test_an_exit_may_draft_anew_after_the_same_context(joined: bool) -> None:
    """The states of an earlier draft's tokens are not those of a later one's."""
    part = Part("exit", depth=1, joined=joined, backend="transformers")
    context = Context([1, 5, 9, 30, 12])
    for draft in ([11, 8, 6], [22, 31, 7], [22, 4]):
        check_rows(part, context, draft)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("eagle3", {}),
        ("glide", {"head_layers": 2}),
        ("medusa-v2", {}),
        ("exit", {"depth": 1}),
        ("exit", {"depth": 1, "joined": True}),
        ("block-deepspec", {}),
    ],
)
def test_penalties_change_the_rows_by_the_path(layout: str, options: dict[str, Any]) -> None:
    config = GenerationConfig(repetition_penalty=1.7, no_repeat_ngram_size=2)

    def penalties() -> PenaltyProcessor:
        return PenaltyProcessor(config, frozenset({EOS}), VOCAB, torch.device("cpu"))

    part = Part(layout, penalties=penalties, **options)
    context = Context([1, 5, 6, 7])
    tokens = [11, 8, 6]
    parents = [-1, 0, -1]
    part.made.target.logits(context)
    context.extend([9])
    output = part.made.draft.logits(context, tokens, parents)
    own = torch.stack(
        [part.row(context.ids, path_to(tokens, parents, node)) for node in range(-1, 3)]
    )
    torch.testing.assert_close(output.unpenalised, own, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(
        output.logits, penalties()(own, context, tokens, parents, 0), atol=4e-3, rtol=1e-3
    )
    assert not torch.allclose(output.logits[1], output.logits[3], atol=0.01), (
        "they follow different tokens"
    )


def counted(
    runner: Any, name: str, passes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notes the first and the last token of each pass of a method that runs one."""

    def run(original: Any, forward_pass: ForwardPass, *arguments: Any) -> ModelOutput:
        passes.append((forward_pass.first, forward_pass.last))
        output: ModelOutput = original(forward_pass, *arguments)
        return output

    monkeypatch.setattr(runner, name, partial(run, getattr(runner, name)))


def test_an_eagle_head_runs_a_pass_for_each_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one of a round also runs the accepted tokens again, with true features."""
    monkeypatch.setattr("specgen.engine.cached_prefix.PREFILL_CHUNK", 5)
    part = Part("eagle1")
    passes = list[tuple[int, int]]()
    counted(part.made.draft, "_run_pairs", passes, monkeypatch)
    context = Context([1, *range(3, 15)])  # 13 tokens, 12 pairs: a long prompt is run in chunks
    part.made.draft.logits(context)
    part.made.draft.logits(context, [20, 21], [-1, -1], start=1)
    part.made.draft.logits(context, [20, 21, 22, 23, 24], [-1, -1, 0, 1, 1], start=3)
    assert passes == [(0, 5), (5, 10), (10, 12), (12, 14), (14, 17)]
    passes.clear()
    context.extend([21, 24, 30])  # two of them were drafted
    part.made.draft.logits(context)
    part.made.draft.logits(context, [5, 6, 7], start=1)  # more than a level at once
    part.made.draft.logits(Context([*context.ids[:9], 33]))  # 9 equal tokens are 8 equal pairs
    assert passes == [(12, 15), (15, 16), (16, 17), (17, 18), (8, 9)]


@pytest.mark.parametrize("is_normed", [True, False])
def test_what_an_eagle_head_feeds_back_is_measured_where_its_file_may_mean_either(
    is_normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's likeliest tokens are those of the head itself, which feeds back one of both."""
    part = Part("eagle3.1", norm_output=True)
    ids = part.weights.trial_ids
    assert len(ids) > 40
    own = replace(part.weights, norm_output=is_normed, trial_ids=())
    head = eagle.EagleRunner(own, part.model, None, None)
    rows = torch.zeros(len(ids), VOCAB)
    for start in range(4, len(ids) - 4, 4):
        rows[start : start + 4] = head.logits(
            Context(ids[:start]), ids[start : start + 4], start=1
        ).logits
    scripted = SimpleNamespace(logits=lambda *_: ModelOutput(rows))
    monkeypatch.setattr(eagle, "ModelRunner", lambda _: scripted)
    made = eagle.make_runners(part.weights, part.model, ModelRunner(part.model), lambda: None).draft
    part.weights = own
    part.made = part.made._replace(draft=made)
    check_rows(part, Context([1, 5, 6, 7]), [8, 9, 10])


def test_eagle_contexts_of_one_token_and_with_another_first_token() -> None:
    part = Part("eagle3")
    for ids in ([5], [5, 5], [5], [6, 5], [6, 5, 7, 9], [8, 5, 7, 9]):
        context = Context(ids)
        logits = part.made.draft.logits(context, [7, 8], [-1, -1]).logits
        assert logits.isfinite().sum(1).tolist() == [len(part.weights.vocabulary)] * 3
        if len(ids) > 1:
            check_rows(part, context, [7, 8])
    context = Context([5])
    part.made.draft.logits(context, [7])
    context.extend([7])
    check_rows(part, context, [9], start=1)


def test_glide_contexts_of_one_token_chunks_and_accepted_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Accepted tokens are run again only with several layers."""
    for layers, first in ((1, 6), (2, 4)):
        part = Part("glide", head_layers=layers)
        passes = list[tuple[int, int]]()
        counted(part.made.draft, "_forward", passes, monkeypatch)
        context = Context([1, 5, 6, 7])
        for chain in ([], [8], [8, 9]):
            part.made.draft.logits(context, chain, start=len(chain))
        context.extend([8, 9, 30])  # both accepted, and the target's own token
        part.made.draft.logits(context)
        assert passes == [(0, 4), (4, 5), (5, 6), (first, 7)]
    monkeypatch.setattr("specgen.engine.cached_prefix.PREFILL_CHUNK", 5)
    part = Part("glide", head_layers=2)
    for ids in ([1], [1, *range(3, 27)], [1, 3]):
        check_rows(part, Context(ids), [8, 9])


def test_medusa_heads_run_once_for_each_context_and_the_target_not_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = Part("medusa-v2")
    calls = list[int]()
    original = MedusaRunner._of_all_heads
    monkeypatch.setattr(
        MedusaRunner,
        "_of_all_heads",
        lambda self, hidden: calls.append(1) or original(self, hidden),
    )
    context = Context([1, 5, 6])
    part.made.target.logits(context)
    context.extend([7])
    monkeypatch.setattr(part.made.target, "_forward", None)
    for size in range(part.made.draft.longest_draft):
        part.made.draft.logits(context, [3] * size, start=size)
    assert len(calls) == 1


@pytest.mark.skipif(kernels() is None, reason="there are no kernels here")
@pytest.mark.parametrize("joined", [False, True])
def test_an_exit_and_its_target_take_one_call_for_a_pass(
    joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of the target's first layers and of what follows them run one after the other:
    of growing chains, trees, after acceptances, and with another context. First layers run a token
    once."""

    def run(part: Part) -> tuple[list[torch.Tensor], list[tuple[int, int, int]]]:
        (draft, target) = (part.made.draft, part.made.target)
        found: list[torch.Tensor] = []

        def logits(runner: Any, *arguments: Any, start: int = 0) -> None:
            found.append(runner.logits(*arguments, start=start).logits.clone())

        context = Context([1, 5, 6, 7, 8])
        target.logits(context)
        calls.clear()
        for tokens in ([9, 10, 11], [12, 13], [14, 15, 16, 17]):
            logits(target, context)
            for length in range(len(tokens) + 1):
                logits(draft, context, tokens[:length], start=length)
            logits(target, context, tokens)
            context.extend([*tokens[:2], 20])
        of_chains = [*calls]
        tree = [9, 10, 11, 12], [-1, 0, -1, 2]
        logits(draft, context, *tree)
        logits(target, context, [*tree[0], 13, 14], [*tree[1], 2, 3])
        context.extend([11, 12, 3])
        logits(draft, context)
        logits(target, context)
        logits(draft, Context([1, 5, 9]), [4])
        context.extend([4, 2, 3])
        logits(target, context)
        logits(draft, context, [13])
        return found, of_chains

    # of each call the segments, the rows, and how many of these do not run the first segment
    calls: list[tuple[int, int, int]] = []
    run_pass = Kernels.run_pass

    def counted(own: Kernels, program: PassProgram, *arguments: Any) -> Any:
        result = run_pass(own, program, *arguments)
        calls.append((len(program.segments), program.data.rows, program.data.known))
        return result

    monkeypatch.setattr(Kernels, "run_pass", counted)
    options: dict[str, Any] = {"backend": "native", "depth": 1, "joined": joined}
    at_once, of_chains = run(Part("exit", **options))
    accepted = (2, 3, 3) if joined else (2, 1, 1)  # a joined exit runs accepted tokens again
    assert of_chains == [
        *((2, 1, 1), (2, 5, 5), (2, 1, 0), (2, 1, 0), (2, 1, 0), (2, 4, 4)),
        *((2, 1, 0), accepted, (2, 1, 0), (2, 1, 0), (2, 3, 3)),
        *((2, 1, 0), accepted, (2, 1, 0), (2, 1, 0), (2, 1, 0), (2, 1, 0), (2, 5, 5)),
    ]
    for made in ("of_exit", "of_target"):
        monkeypatch.setattr(own_layers.ShortPass, made, lambda *_: None)
    in_parts, _ = run(Part("exit", **options))
    for found, expected in zip(at_once, in_parts, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_acceptance_predictor_computes_the_papers_formula(backend: str) -> None:
    part = Part("exit", backend=backend, depth=1)
    (width, positions) = (32, Predictor.POSITIONS)
    # W_i and w
    maps = torch.randn(positions, width, width) / width
    weights = torch.randn(2 * width) / 4
    predictor = part.made.predictor.predictor
    context = Context([1, 5, 6, 7])
    predictor.bias.zero_()
    predictor.target_weights.copy_(torch.einsum("d,ide->ie", weights[:width], maps))
    predictor.draft_weights.copy_(weights[width:])
    before = part.made.target.logits(context).hidden_states[0].clone()  # type: ignore[index]
    context.extend([9])
    part.made.predictor.begin(context)
    states = part.made.draft.logits(context, [8]).hidden_states
    for position in (1, 2, 10, 13):
        expected = torch.sigmoid(
            weights @ torch.cat((maps[min(position, positions) - 1] @ before, states[1]))
        )
        score = part.made.predictor.score(states[1], position)
        assert score == pytest.approx(float(expected), abs=1e-5)
        logit = predictor.logits(predictor.offsets(before), states[1:], torch.tensor([position]))
        # training's form
        torch.testing.assert_close(logit.sigmoid()[0], expected, atol=1e-5, rtol=0)


def test_held_rows_are_the_last_ones_of_each_token() -> None:
    held = HeldRows()
    assert held.joined() is None
    held.add(3, torch.tensor([[3.0], [4.0], [5.0], [6.0]]))
    held.add(5, torch.tensor([[5.5], [6.5], [7.5]]))  # in place of those of rejected tokens
    held.add(7, torch.tensor([[7.0]]))
    first, rows = held.joined() or (0, torch.empty(0))
    assert first == 3
    assert rows.flatten().tolist() == [3.0, 4.0, 5.5, 6.5, 7.0]
    held.add(4, torch.tensor([[4.5]]))
    _, rows = held.joined() or (0, torch.empty(0))
    assert rows.flatten().tolist() == [3.0, 4.5]


@pytest.mark.skipif(kernels() is None, reason="needs the kernels")
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("block-deepspec", {"head_layers": 2, "qk_norm": True}),
        ("block-zlab", {"family": "gemma2", "scales": (3.0, 0.5, 2.0)}),
    ],
)
def test_a_block_takes_one_call_of_the_kernels(
    kind: str, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives the rows of separate calls."""
    rows: list[int] = []
    run_pass = Kernels.run_pass

    def counted(own: Kernels, program: PassProgram, *arguments: Any) -> Any:
        rows.append(arguments[-1])
        return run_pass(own, program, *arguments)

    def run(part: Part) -> tuple[torch.Tensor, list[int]]:
        context = Context([1, 5, 6, 7])
        part.made.target.logits(context)
        rows.clear()
        return part.made.draft.logits(context, [3, 4]).logits, list(rows)

    options: dict[str, Any] = {"backend": "native", **sizes}
    monkeypatch.setattr(Kernels, "run_pass", counted)
    at_once, calls = run(Part(kind, **options))
    assert len(calls) == 1
    monkeypatch.setattr(block.BlockPass, "_short_pass", lambda *_: None)
    in_parts, calls = run(Part(kind, **options))
    assert not calls
    torch.testing.assert_close(at_once, in_parts, atol=1e-5, rtol=1e-5)
