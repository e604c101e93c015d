"""What early exit asks, runs and gives: the predictor's and the policy's questions, layer runs in real runs, the distribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from families import exit_of, make_model, save
from runner_checks import CountedLayers, uncached
from scripted_models import PROMPT, VOCAB, TableRunner
from statistics_checks import SIGNIFICANCE, output_distribution, p_value

import specgen
from specgen import factory, methods
from specgen.decoding import logits_ops
from specgen.decoding.drafters import DraftSetup, ModelDrafter
from specgen.decoding.policies import DraftedToken, Signals
from specgen.decoding.run import Clock
from specgen.decoding.tree_drafter import TopKTreeDrafter
from specgen.engine.early_exit import EarlyExit
from specgen.engine.model_runner import ModelOutput
from specgen.pair import Pair
from specgen.types import Context, Draft, SamplingParams

DEPTH = 4
TOKENS = 3
PREDICTED = "predicted_acceptance"


class TracedSession(TableRunner):
    """Its hidden rows spell the drafted tokens that they stand behind."""

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        paths: list[list[int]] = [[]]
        for node, token in enumerate(draft):
            paths.append([*paths[node if parents is None else parents[node] + 1], token])
        hidden = torch.tensor([spelled(path) for path in paths[start:]])
        return ModelOutput(super().logits(context, draft, parents, start=start).logits, hidden)


def spelled(path: Sequence[int]) -> list[float]:
    return [float(token) for token in [*path, *[-1] * (DEPTH - len(path))]]


class RecordingPredictor:
    def __init__(self) -> None:
        self.contexts: list[list[int]] = []
        self.asked: list[tuple[list[float], int]] = []

    def begin(self, context: Context) -> None:
        self.contexts.append(list(context.ids))

    def score(self, draft_row: torch.Tensor, position: int) -> torch.Tensor:
        self.asked.append((draft_row.tolist(), position))
        return torch.tensor(0.1 * position)


class RecordingPolicy:
    reason = "deep enough"

    def __init__(self, signals: Signals) -> None:
        self.signals = signals
        self.steps: list[DraftedToken] = []

    def keep_drafting(self, step: DraftedToken) -> bool:
        self.steps.append(step)
        return step.position < DEPTH

    def observe(self, drafted: int, accepted: int) -> None:
        pass

    def state(self) -> None:
        return None


def entropy(row: torch.Tensor) -> float:
    return float(torch.distributions.Categorical(logits=row).entropy())


def log_prob(runner: TableRunner, path: Sequence[int]) -> float:
    """Of the path's last token, behind the prompt and the tokens before."""
    return float(runner.row([*PROMPT, *path[:-1]]).log_softmax(dim=-1)[path[-1]])


def told(steps: Sequence[DraftedToken]) -> list[tuple[int, float, float, float]]:
    return [(step.position, step["entropy"], step["prob"], step["predicted_acceptance"]) for step in steps]


@pytest.mark.parametrize("signals", [{PREDICTED}, {PREDICTED, "entropy"}, {PREDICTED, "entropy", "prob"}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chain_asks_about_each_token_by_the_row_it_came_from(signals: set[str], temperature: float) -> None:
    runner, predictor, policy = TracedSession(3), RecordingPredictor(), RecordingPolicy(frozenset(signals))
    sampling = SamplingParams(temperature=temperature)
    drafter = ModelDrafter(DraftSetup(runner, sampling, frozenset(), VOCAB, 5, acceptance_predictor=predictor))
    draft = drafter.propose(Context(PROMPT), policy, 9)
    tokens = draft.tokens
    assert len(tokens) == DEPTH
    assert predictor.contexts == [PROMPT]
    assert predictor.asked == [(spelled(tokens[:position]), position + 1) for position in range(DEPTH)]
    entropies = [entropy(runner.row([*PROMPT, *tokens[:position]])) for position in range(DEPTH)]
    assert draft.entropies == pytest.approx(entropies, abs=1e-5)
    assert [step.position for step in policy.steps] == [1, 2, 3, 4]
    assert [step[PREDICTED] for step in policy.steps] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    if "entropy" in signals:
        assert [step["entropy"] for step in policy.steps] == pytest.approx(entropies, abs=1e-5)
    if "prob" in signals:
        probs = [math.exp(log_prob(runner, tokens[: position + 1])) for position in range(DEPTH)]
        assert [step["prob"] for step in policy.steps] == pytest.approx(probs, abs=1e-5)


def likeliest_tree(runner: TableRunner, width: int) -> tuple[list[list[int]], list[list[int]]]:
    """By brute force: the paths of all nodes, and of each level's likeliest."""
    frontier: list[tuple[float, list[int]]] = [(0.0, [])]
    nodes, best = [], []
    for _ in range(DEPTH):
        longer = [
            (value + log_prob(runner, [*path, token]), [*path, token]) for value, path in frontier for token in range(VOCAB)
        ]
        frontier = sorted(longer, reverse=True)[:width]
        nodes += [path for _, path in frontier]
        best.append(frontier[0][1])
    return nodes, best


def paths_of(draft: Draft) -> list[list[int]]:
    paths: list[list[int]] = [[]]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append([*paths[parent + 1], token])
    return paths[1:]


def test_a_tree_asks_about_each_levels_likeliest_node_by_the_row_it_came_from() -> None:
    from_the_second = 0
    for seed in range(12):
        runner, predictor = TracedSession(seed, scale=1.0), RecordingPredictor()
        policy = RecordingPolicy(frozenset({PREDICTED, "entropy", "prob"}))
        drafter = TopKTreeDrafter(DraftSetup(runner, vocab_size=VOCAB, acceptance_predictor=predictor), width=2)
        draft = drafter.propose(Context(PROMPT), policy, 9)
        nodes, best = likeliest_tree(runner, 2)
        assert paths_of(draft) == nodes
        assert predictor.contexts == [PROMPT]
        assert predictor.asked == [(spelled(path[:-1]), position) for position, path in enumerate(best, 1)]
        expected = [
            (position, entropy(runner.row([*PROMPT, *path[:-1]])), math.exp(log_prob(runner, path)), 0.1 * position)
            for position, path in enumerate(best, 1)
        ]
        for found, wanted in zip(told(policy.steps), expected, strict=True):
            assert found == pytest.approx(wanted, abs=1e-5)
        from_the_second += any(before != path[:-1] for before, path in pairwise(best))
    assert from_the_second, "no level's likeliest node stood behind another than the level before's: nothing was to be mistaken"


@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("eesd-fixed", {"k": 3}),
        ("eesd-beta", {}),
        ("eesd-cali", {}),
        ("eesd-tree", {"width": 2, "depth": 3, "theta0": 1.0}),
    ],
)
def test_whole_runs_run_each_token_once(tmp_path: Path, after: int, name: str, settings: dict[str, object]) -> None:
    """The prompt, each round's own token but the last one's, and what was drafted: each once in each of the target's layers."""
    target = specgen.load(save(make_model("llama", num_hidden_layers=4), tmp_path), device="cpu", dtype="float32").target
    exit_layer = exit_of(target.model, after)
    pair = Pair(target, None, exit_layer=exit_layer)
    pair.early_exit(methods.find(name))  # it checks the split by running the layers
    counted = CountedLayers(target.model, exit_layer.layer)
    ids = [1, 5, 6, 7, 8, 9]
    for sampling in (SamplingParams(24, ignore_eos=True, seed=1), SamplingParams(24, 1.0, ignore_eos=True, seed=1)):
        pair.forget()
        counted.tokens.clear()
        rounds = pair.generate(ids, name, sampling, **settings).rounds
        drafted = sum(len(round_.draft.tokens) for round_ in rounds)
        assert drafted > 8
        least = len(ids) + len(rounds) - 1 + drafted
        assert [counted.tokens[str(layer)] for layer in range(4)] == [least] * 4
        assert counted.tokens["exit 0"] < least


def real_counts(name: str, settings: dict[str, object], runs: int) -> float:
    """The chi-square's p-value of a real split model with an untrained exit, on a few tokens."""
    model = make_model("llama", vocab_size=VOCAB, num_hidden_layers=2, initializer_range=0.4)
    sampling = SamplingParams(max_new_tokens=TOKENS, temperature=1.0, top_k=4)
    made = exit_of(model, 1)
    both = EarlyExit(model, made.layer, 1, made.predictor, context_limits=(64, None))
    method = methods.find(name)

    def run(seed: int) -> tuple[int, ...]:
        components = factory.Components(
            both.target, both.draft, sampling, frozenset(), VOCAB, seed, acceptance_predictor=both.acceptance_predictor
        )
        chosen = methods.resolve(method, settings, has_predictor=True)
        decoding = factory.make_run(method, chosen, components, Context(PROMPT), TOKENS, None, Clock(None))
        return tuple(token for round_ in decoding.rounds() for token in round_.token_ids)

    def next_probs(tokens: tuple[int, ...]) -> list[float]:
        probs: list[float] = logits_ops.warp(uncached(model, [*PROMPT, *tokens]), sampling).tolist()
        return probs

    return p_value(Counter(run(seed) for seed in range(runs)), output_distribution(next_probs, TOKENS))


def test_a_real_exit_samples_from_the_target() -> None:
    assert real_counts("eesd-cali", {"sigma_model": 0.5}, 250) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("eesd-cali", {"sigma_model": 0.5}),
        ("eesd-beta", {}),
        ("eesd-fixed", {"k": 2}),
        ("eesd-tree", {"width": 3, "depth": 2, "theta0": 1.0}),
    ],
)
def test_a_real_exit_samples_from_the_target_with_many_runs(name: str, settings: dict[str, object]) -> None:
    assert real_counts(name, settings, 6000) > SIGNIFICANCE
