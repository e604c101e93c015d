"""Medusa: the heads' rows, the tree of candidates, and lossless decoding with trees and chains."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from enumeration import PROMPT, ROUNDING, Paths, SmallRunner, exact, states, total_variation
from families import EOS, VOCAB, make_bloom, make_model, model_of, plain, prompt
from runner_checks import InterruptAt, path_to, quick, random_path, random_tree
from scripted_models import scripted_run
from specgen.engine.parts.medusa_runner import MedusaHeads, make_runners
from static_checks import HostReads

from specgen.base.errors import SpecgenError
from specgen.base.types import Context, SamplingParams
from specgen.decoding.drafting import Setup
from specgen.decoding.policy import Fixed, LengthPolicy
from specgen.engine.forward_pass import ModelOutput
from specgen.engine.generation_config import GenerationConfig
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model_runner import ModelRunner
from specgen.engine.parts.weights import MedusaWeights
from specgen.methods.medusa_tree import MedusaTreeDrafter, candidate_tree, default_rank_accuracies
from specgen.methods.svip import SVIP
from specgen.tune.simulated_runs import MemoisedRunner

WIDTH = 32  # of the families' hidden states
HEADS = 3


def random_heads(blocks: int = 1, own: bool = False, vocabulary: Sequence[int] | None = None, seed: int = 0) -> MedusaWeights:
    """Heads with random weights for a model of the families."""
    generator = torch.Generator().manual_seed(seed)

    def random_block() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(WIDTH, WIDTH, generator=generator) / 4, torch.randn(WIDTH, generator=generator)

    rows = VOCAB if vocabulary is None else len(vocabulary)
    heads = [torch.randn(rows, WIDTH, generator=generator) / 2 for _ in range(HEADS)] if own else None
    ids = None if vocabulary is None else torch.tensor(vocabulary)
    return MedusaWeights([[random_block() for _ in range(blocks)] for _ in range(HEADS)], heads, ids)


@torch.no_grad()
def expected_row(module: Any, weights: MedusaWeights, ids: Sequence[int], head: int) -> torch.Tensor:
    """A head's logits after the tokens `ids`, by the definition, from transformers' hidden state without a cache."""
    base = module.model(torch.tensor([list(ids[:-1])]), use_cache=False)
    state = base.last_hidden_state[0, -1]
    for matrix, bias in weights.blocks[head]:
        state = state + torch.nn.functional.silu(matrix @ state + bias)
    if weights.lm_heads is None:
        row = module.lm_head(state)
        cap = getattr(module.config, "final_logit_softcapping", None)
        return row if cap is None else cap * torch.tanh(row / cap)
    row = weights.lm_heads[head] @ state
    if weights.vocabulary is None:
        return row
    full = torch.full((VOCAB,), -torch.inf)
    full[weights.vocabulary] = row
    return full


def check_rows(module: Any, weights: MedusaWeights, runner: Any, context: Context, rng: random.Random) -> None:
    """Asserts that the rows after the context and after a random tree are those of the heads."""
    tokens, parents = random_tree(rng, rng.randrange(0, 5))
    depths = [len(path_to(tokens, parents, node)) for node in range(-1, len(tokens))]
    while max(depths) >= HEADS:
        tokens, parents, depths = tokens[:-1], parents[:-1], depths[:-1]
    start = rng.randrange(len(tokens) + 1)
    rows = runner.logits(context, tokens, parents, start=start).logits
    assert len(rows) == len(depths) - start
    for depth, row in zip(depths[start:], rows, strict=True):
        assert torch.allclose(row, expected_row(module, weights, context.ids, depth), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "backend", "options"),
    quick(
        [
            ("llama", "native", {}),
            ("gemma2", "native", {"blocks": 2}),
            ("llama", "transformers", {"own": True}),
            ("gemma2", "transformers", {}),
            ("qwen3", "native", {"own": True, "blocks": 2, "vocabulary": [2, 5, 6, 7, 30, 31, 95]}),
        ]
    ),
)
def test_rows_are_the_heads(family: str, backend: str, options: dict[str, Any]) -> None:
    """After commits of any path, in other contexts, and in one of which the target has run nothing."""
    module, weights = make_model(family), random_heads(**options)
    model = model_of(module, backend)
    target, draft = make_runners(weights, model, ModelRunner(model), lambda: None)
    rng, context = random.Random(0), Context([1, 5, 6, 7])
    for step in range(6):
        if step == 3:
            context = Context([*context.ids[:6], 9, 9])
        tokens, parents = random_tree(rng, 5)
        if step != 3:
            target.logits(context, tokens, parents)
            context.extend([*(tokens[node] for node in random_path(rng, parents)), rng.randrange(3, 40)])
        check_rows(module, weights, draft, context, rng)
        check_rows(module, weights, draft, context, rng)
    check_rows(module, weights, draft, Context([*context.ids[:-2], 8, 8]), rng)
    assert target.logits(context, [4, 5], [-1, 0]).logits.argmax(-1).tolist() == [
        int(module(torch.tensor([context.ids + path])).logits[0, -1].argmax()) for path in ([], [4], [4, 5])
    ]


def test_the_heads_run_once_for_each_context_and_the_target_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = model_of(make_model("llama"), "native"), []
    target, draft = make_runners(random_heads(), model, ModelRunner(model), lambda: None)
    original = MedusaHeads.__call__
    monkeypatch.setattr(MedusaHeads, "__call__", lambda self, hidden: calls.append(1) or original(self, hidden))
    context = Context([1, 5, 6])
    target.logits(context)
    context.extend([7])
    monkeypatch.setattr(target, "_forward", None)
    for size in range(HEADS):
        draft.logits(context, [3] * size, start=size)
    assert len(calls) == 1


def test_an_interruption_at_any_line_leaves_the_heads_usable() -> None:
    module, weights = make_model("llama"), random_heads()
    model = model_of(module, "native")
    line, finished = 0, False
    while not finished:
        line += 41
        target, draft = make_runners(weights, model, ModelRunner(model), lambda: None)
        context = Context([1, 5, 6, 7])
        target.logits(context)
        context.extend([9])
        with InterruptAt(line, ("engine/model_runner.py", "engine/cached_prefix.py", "heads/medusa_runner.py")):
            try:
                for token in (8, 9):
                    draft.logits(context, [token], start=1)
                    target.logits(context, [token, 11, 12], [-1, -1, 1])
                    context.extend([11, 12, 13])
                finished = True
            except KeyboardInterrupt:
                pass
        for again in (context, Context([*context.ids[:4], 8, 9, 9])):
            check_rows(module, weights, draft, again, random.Random(line))
    assert line > 100


def test_penalties_change_the_rows_by_the_path() -> None:
    module, weights = make_model("llama"), random_heads()
    model = model_of(module, "native")
    config = GenerationConfig(repetition_penalty=1.7, no_repeat_ngram_size=2)

    def penalties() -> PenaltyProcessor:
        return PenaltyProcessor(config, {EOS}, VOCAB, torch.device("cpu"))

    target, draft = make_runners(weights, model, ModelRunner(model, penalties()), penalties)
    context, tokens, parents = Context([1, 5, 6, 7]), [11, 8, 6], [-1, 0, -1]
    target.logits(context)
    context.extend([9])
    output = draft.logits(context, tokens, parents)
    own = torch.stack([expected_row(module, weights, context.ids, depth) for depth in (0, 1, 2, 1)])
    assert torch.allclose(output.unpenalised, own, atol=2e-4)
    assert torch.allclose(output.logits, penalties()(own, context, tokens, parents, 0), atol=2e-4)
    assert not torch.allclose(output.logits[1], output.logits[3], atol=0.01), "they follow different tokens"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (MedusaWeights([[(torch.zeros(8, 8), torch.zeros(8))]]), r"a block \[8, 8\] and a bias \[8\], and .* 32 numbers"),
        (MedusaWeights([random_heads().blocks[0], []]), r"have \[1, 0\] blocks"),
        (MedusaWeights([]), r"have \[\] blocks"),
        (MedusaWeights(random_heads().blocks, random_heads(own=True).lm_heads[:2]), "2 LM heads for 3 heads"),
        (MedusaWeights(random_heads().blocks, [torch.zeros(90, WIDTH)] * 3), r"an LM head \[90, 32\], .* \[96, 32\]"),
        (random_heads(own=True, vocabulary=[4, VOCAB]), "token ids up to 96, and the target has 96"),
        (MedusaWeights(random_heads().blocks, None, torch.tensor([3])), "vocabulary of their own, but no LM heads"),
    ],
)
def test_heads_of_another_model_are_refused(weights: MedusaWeights, message: str) -> None:
    model = model_of(make_model("llama"), "native")
    with pytest.raises(SpecgenError, match=message):
        make_runners(weights, model, ModelRunner(model), lambda: None)


def test_a_model_that_gives_no_hidden_states_is_refused() -> None:
    module = make_bloom()
    model = model_of(module, "transformers")
    with pytest.raises(SpecgenError, match="medusa needs a model built as Llama is, and bloom is not"):
        make_runners(random_heads(), model, ModelRunner(model), lambda: None)


@pytest.mark.parametrize("seed", range(6))
def test_the_tree_has_the_paths_of_highest_value(seed: int) -> None:
    """By comparison with all paths; also with ranks that are right equally often, or never, or always."""
    rng = random.Random(seed)
    choices = (0.0, 0.25, 0.5, 1.0) if seed % 2 else None
    accuracies = [[rng.choice(choices) if choices else rng.random() for _ in range(4)] for _ in range(3)]
    everything = [path for depth in (1, 2, 3) for path in product(range(4), repeat=depth)]

    def value(path: Sequence[int]) -> float:
        return math.prod(accuracies[head][rank] for head, rank in enumerate(path))

    best = sorted(everything, key=lambda path: (-value(path), len(path), path))
    for nodes in (1, 5, 20, 84, 100):
        tree = candidate_tree(accuracies, nodes)
        assert sorted(tree) == sorted(best[:nodes])
        assert tree == sorted(tree, key=len), "level by level"
        assert all(path[:-1] in {(), *tree} for path in tree)


def test_assumed_accuracies_are_those_of_the_papers() -> None:
    """Medusa 2.1.2: the first head is right in 60 % of cases, with 5 candidates in 80 %. EESD: 0.8 to 1 of 4 tokens accepted."""
    accuracies = default_rank_accuracies(4)
    assert accuracies[0][0] == pytest.approx(0.6)
    assert sum(accuracies[0][:5]) == pytest.approx(0.8, abs=0.01)
    assert 0.8 < sum(math.prod(accuracies[head][0] for head in range(depth)) for depth in range(1, 5)) < 1
    assert all(sum(ranks) < 1 for ranks in accuracies)


class HeadTable(SmallRunner):
    """Heads whose logits depend on the context's last two tokens, and not on drafted tokens."""

    longest_draft = 3
    rank_accuracies = ((0.5, 0.3, 0.1), (0.5, 0.4, 0.1), (0.5, 0.5))

    def __init__(self, seed: int, size: int, *, zero: bool = False) -> None:
        super().__init__(seed, size, zero=zero)
        self._tables = [SmallRunner(seed + head, size, zero=zero) for head in range(self.longest_draft)]

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        parents = range(-1, len(draft) - 1) if parents is None else parents
        levels = [0]
        for parent in parents:
            levels.append(1 + levels[parent + 1])
        return ModelOutput(torch.stack([self._tables[level].row(context.ids) for level in levels[start:]]))


@pytest.mark.parametrize(
    ("settings", "limit", "sizes", "warp", "eos", "zero"),
    [
        ({"nodes": 0}, 5, (2, 2), {}, (), False),
        ({"nodes": 0, "k": 2}, 4, (3, 3), {"top_p": 0.8, "temperature": 1.3}, (), False),
        ({"nodes": 0, "k": 9}, 5, (3, 2), {}, (2,), False),
        ({"nodes": 0, "policy": "svip", "threshold": 0.25}, 5, (2, 2), {}, (), False),
        ({"nodes": 4}, 5, (2, 2), {}, (), False),
        ({"nodes": 7}, 4, (3, 3), {}, (), False),
        ({"nodes": 20}, 4, (3, 3), {"top_k": 2}, (2,), True),
        ({"nodes": 6, "policy": "confidence", "threshold": 0.5}, 4, (3, 3), {"top_p": 0.9}, (0,), False),
    ],
)
def test_sampling_is_lossless(
    settings: dict[str, Any],
    limit: int,
    sizes: tuple[int, int],
    warp: dict[str, Any],
    eos: tuple[int, ...],
    zero: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By enumerating all random choices, with trees and with chains drawn from the heads."""
    target, draft = SmallRunner(0, sizes[0], zero=zero), HeadTable(100, sizes[1], zero=zero)
    sampling = SamplingParams(**{"max_new_tokens": limit, "temperature": 1.0} | warp)
    with monkeypatch.context() as patch:
        found = Paths(patch).of_rounds(lambda: states("medusa", settings, target, draft, sampling, eos))
    assert total_variation(found, exact(target, sampling, limit, eos)) < ROUNDING


def test_drafts_have_the_shape_that_the_accuracies_ask_for() -> None:
    draft = HeadTable(100, 3)
    setup = Setup(draft, SamplingParams(), frozenset(), 3, record=True)
    proposed = MedusaTreeDrafter(setup, nodes=7).propose(Context(PROMPT), Fixed(4), 9)
    ranks = [draft._tables[level].row(PROMPT).argsort(descending=True).tolist() for level in range(3)]
    paths = candidate_tree(HeadTable.rank_accuracies, 7)
    assert list(proposed.tokens) == [ranks[len(path) - 1][path[-1]] for path in paths]
    assert [path_to(list(proposed.tokens), list(proposed.parents), node) for node in range(7)] == [
        [ranks[level][rank] for level, rank in enumerate(path)] for path in paths
    ]
    rows = torch.stack([draft._tables[len(path) - 1].row(PROMPT) for path in paths])
    assert torch.equal(proposed.logits, rows)
    assert list(proposed.top_probs) == pytest.approx(rows.softmax(-1).amax(-1).tolist())
    assert proposed.stop_reason == "depth 3"
    assert MedusaTreeDrafter(setup, nodes=7).propose(Context(PROMPT), Fixed(1), 9).levels == 1
    assert not MedusaTreeDrafter(setup, nodes=7).propose(Context(PROMPT), Fixed(4), 0).tokens
    remembered: Any = MemoisedRunner(draft)
    assert (
        MedusaTreeDrafter(replace(setup, runner=remembered), nodes=7).propose(Context(PROMPT), Fixed(4), 9).tokens
        == proposed.tokens
    )


def test_nothing_follows_the_end_of_the_output_or_an_impossible_token() -> None:
    """A draft may hold a token that ends the output, but no children of it, and no token with the probability 0."""
    draft = HeadTable(100, 3, zero=True)
    rows = [draft._tables[level].row(PROMPT) for level in range(3)]
    end = int(rows[0].argmax())
    proposed = MedusaTreeDrafter(Setup(draft, SamplingParams(), frozenset({end}), 3), nodes=30).propose(
        Context(PROMPT), Fixed(4), 9
    )
    assert end in proposed.tokens
    assert all(proposed.tokens[parent] != end for parent in proposed.parents if parent >= 0)
    levels = [len(path_to(list(proposed.tokens), list(proposed.parents), node)) - 1 for node in range(len(proposed.tokens))]
    assert all(rows[level][token] > -math.inf for level, token in zip(levels, proposed.tokens, strict=True))
    only = MedusaTreeDrafter(Setup(draft, SamplingParams(), frozenset(range(3)), 3), nodes=30)
    assert (ended := only.propose(Context(PROMPT), Fixed(4), 9)).stop_reason == "eos"
    assert ended.levels == 1


@pytest.mark.parametrize("policy", [Fixed(3), SVIP(10.0, 0.15, 6)])
def test_the_host_reads_all_heads_at_once(policy: LengthPolicy) -> None:
    setup = Setup(HeadTable(1, 6), vocab_size=6)  # type: ignore[arg-type]
    with HostReads() as host:
        draft = MedusaTreeDrafter(setup, nodes=8).propose(Context([1, 2]), policy, 10)
    assert draft.levels == 3
    assert host.count == 1


def memorised_heads(module: Any, ids: Sequence[int]) -> MedusaWeights:
    """Heads that predict the tokens of `ids`, all but some: their LM heads solve linear equations."""
    weights, rng = random_heads(own=True), random.Random(0)
    states = torch.stack([_before_head(module, ids[: at + 1]) for at in range(len(ids) - 1)])
    solved = []
    for head in range(HEADS):
        (matrix, bias), used = weights.blocks[head][0], len(ids) - 2 - head
        inputs = (states + torch.nn.functional.silu(states @ matrix.T + bias))[:used]
        labels = [token if rng.random() < 0.8 else rng.randrange(3, 40) for token in ids[2 + head :]]
        wanted = 9 * torch.nn.functional.one_hot(torch.tensor(labels), VOCAB).float() + torch.rand(used, VOCAB)
        solved.append(torch.linalg.lstsq(inputs, wanted, driver="gelsd").solution.T.contiguous())
    return MedusaWeights(weights.blocks, solved)


@torch.no_grad()
def _before_head(module: Any, ids: Sequence[int]) -> torch.Tensor:
    states: torch.Tensor = module.model(torch.tensor([list(ids)]), use_cache=False).last_hidden_state
    return states[0, -1]


@pytest.mark.parametrize(
    ("family", "backend"),
    quick(
        [
            ("llama", "native"),
            ("gemma3_text", "native"),
            ("gemma", "native"),
            ("llama", "transformers"),
            ("mistral", "native"),
            ("qwen2", "transformers"),
        ]
    ),
)
def test_greedy_ids_are_the_targets_own(family: str, backend: str) -> None:
    module, start, count = make_model(family), prompt(3), 16
    own = plain(module, start, count)
    model = model_of(module, backend)
    target, draft = make_runners(memorised_heads(module, [*start, *own]), model, ModelRunner(model), lambda: None)
    sampling = SamplingParams(max_new_tokens=count)
    for settings in ({"nodes": 0}, {"nodes": 8}, {"nodes": 20, "policy": "svip", "threshold": 0.3}):
        rounds = list(scripted_run("medusa", settings, target, draft, sampling, eos=(EOS,), prompt=start).rounds())
        assert [token for round_ in rounds for token in round_.token_ids] == own, settings
        paths = [round_.verdict.path for round_ in rounds[1:]]
        assert max(map(len, paths)) > 1
        assert settings["nodes"] == 0 or any(path != tuple(range(len(path))) for path in paths), "a branch was accepted"
