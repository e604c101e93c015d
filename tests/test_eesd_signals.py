"""Early exit in real runs: the signals that the policy gets, how often each layer runs, and the distribution of the output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from families import exit_layers_of, make_model, model_of, random_predictor, save, with_exit
from runner_checks import CountedLayers, every, uncached
from scripted_models import PROMPT, VOCAB, TableRunner
from statistics_checks import LENGTH, SIGNIFICANCE, TOKENS, first_tokens, output_distribution, p_value

import specgen
from specgen import methods
from specgen.base.types import Context, Draft, SamplingParams
from specgen.decoding import logits_ops
from specgen.decoding.drafting import ModelDrafter, Setup
from specgen.decoding.policy import DraftedToken, LengthPolicy, Signals
from specgen.decoding.run import Clock
from specgen.decoding.tree import TopKTreeDrafter
from specgen.engine.model_runner import ModelOutput
from specgen.engine.parts.exit_layers import ExitAcceptancePredictor, make_runners
from specgen.engine.parts.weights import ExitWeights
from specgen.methods.runs import make_run
from specgen.pair.pair import Pair

DEPTH = 4
PREDICTED = "predicted_acceptance"
METHODS: list[tuple[str, dict[str, object]]] = [
    ("eesd-fixed", {"k": 3}),
    ("eesd-beta", {"alpha": 3}),
    ("eesd-cali", {"sigma_model": 0.5, "theta0": 0.9}),
    ("eesd-tree", {"width": 3, "depth": 3, "theta0": 1.0}),
]


class PathRunner(TableRunner):
    """A table runner whose hidden states are the drafted tokens up to their position, padded with -1."""

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        paths: list[list[int]] = [[]]
        for node, token in enumerate(draft):
            paths.append([*paths[node if parents is None else parents[node] + 1], token])
        hidden = torch.tensor([padded(path) for path in paths[start:]])
        return ModelOutput(super().logits(context, draft, parents, start=start).logits, hidden)


def padded(path: Sequence[int]) -> list[float]:
    return [float(token) for token in [*path, *[-1] * (DEPTH - len(path))]]


class RecordingPredictor:
    def __init__(self) -> None:
        self.contexts: list[list[int]] = []
        self.scored: list[tuple[list[float], int]] = []

    def begin(self, context: Context) -> None:
        self.contexts.append(list(context.ids))

    def score(self, draft_hidden: torch.Tensor, position: int) -> torch.Tensor:
        self.scored.append((draft_hidden.tolist(), position))
        return torch.tensor(0.1 * position)


class RecordingPolicy(LengthPolicy):
    reason = "deep enough"

    def __init__(self, signals: Signals) -> None:
        self.signals = signals
        self.steps: list[DraftedToken] = []

    def keep_drafting(self, step: DraftedToken) -> bool:
        self.steps.append(step)
        return step.position < DEPTH


def log_probs(runner: TableRunner, path: Sequence[int]) -> torch.Tensor:
    """The log-probabilities [VOCAB] from which the path's last token was drafted."""
    return runner.row([*PROMPT, *path[:-1]]).log_softmax(dim=-1)


def check_signals(
    runner: TableRunner, predictor: RecordingPredictor, policy: RecordingPolicy, paths: Sequence[Sequence[int]]
) -> None:
    """Assert that the policy got the signals of each path's last token, from the logits and hidden state that predicted it."""
    assert predictor.contexts == [PROMPT]
    assert predictor.scored == [(padded(path[:-1]), position) for position, path in enumerate(paths, 1)]
    for position, (step, path) in enumerate(zip(policy.steps, paths, strict=True), 1):
        logs = log_probs(runner, path)
        probs = logs.exp()
        expected = {PREDICTED: 0.1 * position, "entropy": -float((probs * logs).sum()), "prob": float(probs[path[-1]])}
        assert step.position == position
        assert {name: step[name] for name in policy.signals} == pytest.approx(
            {name: expected[name] for name in policy.signals}, abs=1e-5
        )


@pytest.mark.parametrize("signals", [{PREDICTED}, {PREDICTED, "entropy"}, {PREDICTED, "entropy", "prob"}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_signals_of_a_chain(signals: set[str], temperature: float) -> None:
    runner, predictor, policy = PathRunner(3), RecordingPredictor(), RecordingPolicy(frozenset(signals))
    sampling = SamplingParams(temperature=temperature)
    drafter = ModelDrafter(Setup(runner, sampling, frozenset(), VOCAB, 5, acceptance_predictor=predictor))
    draft = drafter.propose(Context(PROMPT), policy, 9)
    paths = [draft.tokens[: length + 1] for length in range(DEPTH)]
    assert paths[-1] == draft.tokens
    check_signals(runner, predictor, policy, paths)
    entropies = [float(torch.distributions.Categorical(logits=log_probs(runner, path)).entropy()) for path in paths]
    assert draft.entropies == pytest.approx(entropies, abs=1e-5)


def likeliest_tree(runner: TableRunner, width: int) -> tuple[list[list[int]], list[list[int]]]:
    """By brute force: the paths of all nodes, and of each level's likeliest."""
    frontier: list[tuple[float, list[int]]] = [(0.0, [])]
    nodes, best = [], []
    for _ in range(DEPTH):
        paths = [(joint, [*path, token]) for joint, path in frontier for token in range(VOCAB)]
        longer = [(joint + float(log_probs(runner, path)[path[-1]]), path) for joint, path in paths]
        frontier = sorted(longer, reverse=True)[:width]
        nodes += [path for _, path in frontier]
        best.append(frontier[0][1])
    return nodes, best


def paths_of(draft: Draft) -> list[list[int]]:
    paths: list[list[int]] = [[]]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append([*paths[parent + 1], token])
    return paths[1:]


def test_signals_of_a_tree_are_those_of_each_levels_likeliest_node() -> None:
    other_branch = 0
    for seed in range(12):
        runner, predictor = PathRunner(seed, scale=1.0), RecordingPredictor()
        policy = RecordingPolicy(frozenset({PREDICTED, "entropy", "prob"}))
        drafter = TopKTreeDrafter(Setup(runner, vocab_size=VOCAB, acceptance_predictor=predictor), width=2)
        draft = drafter.propose(Context(PROMPT), policy, 9)
        nodes, best = likeliest_tree(runner, 2)
        assert paths_of(draft) == nodes
        check_signals(runner, predictor, policy, best)
        other_branch += any(before != path[:-1] for before, path in pairwise(best))
    assert other_branch, "some level's likeliest node is no child of the level before's"


@pytest.mark.parametrize("case", every(2, product(METHODS, [(1, "native"), (2, "native"), (2, "transformers")])), ids=str)
def test_whole_runs_run_each_token_once(tmp_path: Path, case: tuple[tuple[str, dict[str, object]], tuple[int, str]]) -> None:
    """The target's layers run the prompt, each correction or bonus token but the last, and each drafted token, each once."""
    (name, settings), (after, backend) = case
    folder = save(make_model("llama", num_hidden_layers=4), tmp_path)
    target = specgen.load(folder, device="cpu", dtype="float32", backend=backend).target
    pair = with_exit(Pair(target, None), after)
    weights = pair.parts.named["exit"].load()
    assert isinstance(weights, ExitWeights)
    counted = CountedLayers(target.model, weights.layers)
    pair.parts.runners(methods.find(name))  # runs the layers to check them, which is not counted
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


def p_value_of_runs(name: str, settings: dict[str, object], runs: int) -> float:
    """The chi-square's p-value of a model with an untrained exit, over the joint distribution of a few tokens."""
    module = make_model("llama", vocab_size=VOCAB, num_hidden_layers=2, initializer_range=0.4)
    model = model_of(module, "native")
    sampling = SamplingParams(max_new_tokens=LENGTH, temperature=1.0, top_k=4)
    weights = ExitWeights(exit_layers_of(model, module), 1, random_predictor(model.shape.hidden_size))
    both = make_runners(weights, model, None, lambda: None)
    method = methods.find(name)

    def run(seed: int) -> tuple[int, ...]:
        components = Setup(both.draft, sampling, frozenset(), VOCAB, seed, both.target, acceptance_predictor=both.predictor)
        chosen = methods.resolve(method, settings, has_predictor=True)
        return first_tokens(make_run(method, chosen, components, Context(PROMPT), LENGTH, None, Clock(None)))

    def next_probs(tokens: tuple[int, ...]) -> list[float]:
        probs: list[float] = logits_ops.warp(uncached(module, [*PROMPT, *tokens]), sampling).tolist()
        return probs

    return p_value(Counter(run(seed) for seed in range(runs)), output_distribution(next_probs, TOKENS))


def test_an_untrained_exit_samples_from_the_target() -> None:
    assert p_value_of_runs("eesd-cali", {"sigma_model": 0.5, "theta0": 0.9}, 250) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), METHODS)
def test_an_untrained_exit_samples_from_the_target_in_many_runs(name: str, settings: dict[str, object]) -> None:
    assert p_value_of_runs(name, settings, 6000) > SIGNIFICANCE


def scores_of(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A list that gets each score of the pair's acceptance predictor."""
    scores: list[float] = []
    score = ExitAcceptancePredictor.score

    def recorded(predictor: ExitAcceptancePredictor, hidden: torch.Tensor, position: int) -> torch.Tensor:
        scores.append(float(found := score(predictor, hidden, position)))
        return found

    monkeypatch.setattr(ExitAcceptancePredictor, "score", recorded)
    return scores


@pytest.mark.parametrize("name", ["eesd-cali", "eesd-tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_interleaved_runs_are_as_two_runs_one_after_the_other(
    tmp_path: Path, name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same output and the same scores, although each run's rounds take the KV caches from the other's."""
    folder = save(make_model("llama", num_hidden_layers=4), tmp_path)
    pair = Pair(specgen.load(folder, device="cpu", dtype="float32").target, None)
    with_exit(pair, 2)
    scores, sampling = scores_of(pair, monkeypatch), SamplingParams(24, temperature, seed=3, ignore_eos=True)
    prompts = [1, 5, 6, 7, 8, 9], [1, 5, 6, 11, 12]
    apart: list[tuple[list[int], list[float]]] = []
    for ids in prompts:
        apart.append((pair.generate(ids, name, sampling).token_ids, scores.copy()))
        scores.clear()
    runs = [pair.rounds(ids, name, sampling) for ids in prompts]
    found: list[tuple[list[int], list[float]]] = [([], []), ([], [])]
    while runs:
        for run, (tokens, own) in zip([*runs], found, strict=False):
            round_ = next(run, None)
            tokens += [] if round_ is None else round_.token_ids
            own += scores
            scores.clear()
            if round_ is None:
                runs.clear()
    shortest = min(len(own) for _, own in found)
    assert shortest > 12
    for (tokens, own), (expected, expected_scores) in zip(found, apart, strict=True):
        assert tokens == expected[: len(tokens)]
        assert own == pytest.approx(expected_scores[: len(own)], abs=1e-5)
