"""The training of Medusa heads: what they predict in training is what they draft."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from families import LETTERS, make_model, make_tokenizer, save
from specgen.engine.parts.medusa_runner import make_runners
from specgen.train.frozen_target import FrozenTarget
from specgen.train.head_objective import RowLabels
from specgen.train.head_training import HeadTraining, predictions
from specgen.train.medusa_objective import HEADS, MedusaObjective
from specgen.train.training_loop import TrainingBatches
from training_helpers import TINY, corpus_of, opened

from specgen.base.types import Context
from specgen.engine.model_runner import ModelRunner
from specgen.train.packing import IGNORED, PackedBatch, pack

TEXTS = [[5, 9, 7, 3, 11, 8, 6, 30], [4, 8], [30, 31, 32, 33, 34, 35, 36]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save(make_model("gemma2"), tmp_path_factory.mktemp("medusa") / "target", make_tokenizer(LETTERS)))


def packed() -> PackedBatch:
    waiting = iter(TEXTS)

    def sample(rng: Random, max_tokens: int) -> tuple[list[int], list[int]]:
        text = list(next(waiting)[:max_tokens])
        return text, [IGNORED] * len(text)

    return pack([sample], sum(map(len, TEXTS)), Random(0))


def random_objective(target: FrozenTarget) -> MedusaObjective:
    objective = MedusaObjective(target, [], 0)
    torch.manual_seed(0)
    for weight in objective.module.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return objective


@pytest.mark.parametrize(("backend", "own_share"), [("native", 0.0), ("native", 100.0), ("transformers", 100.0)])
def test_the_rows_of_training_are_those_of_drafts(
    folder: Path, backend: str, own_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each token that has as many before it, and the labels are what the target predicts there."""
    monkeypatch.setattr("specgen.train.medusa_objective.OWN_SHARE", own_share)
    target = opened(folder, backend)
    frozen = FrozenTarget(target)
    objective, batch = random_objective(frozen), packed()
    predicted, (depths, next_tokens, top_k_ids, *_) = predictions(objective, frozen, batch, None)
    logits = objective.logits(predicted.outputs, depths).detach()
    order = torch.arange(len(logits)).flip(0)
    assert torch.allclose(objective.logits(predicted.outputs[order], depths[order]), logits[order], atol=1e-5)
    weights = objective.weights(())
    assert (weights.lm_heads is None) == (own_share == 0)
    _, draft = make_runners(weights, target.model, ModelRunner(target.model), lambda: None)
    rows = {}
    for row, (source, depth) in enumerate(zip(predicted.sources.tolist(), depths.tolist(), strict=True)):
        rows[source, depth] = logits[row], next_tokens[row], top_k_ids[row, 0]
    first, found = 0, 0
    for text in TEXTS:
        for length in range(2, len(text)):
            for depth in range(min(HEADS, len(text) - length)):
                row, label, likeliest = rows[first + length - 1 + depth, depth]
                assert torch.allclose(row, draft.logits(Context(text[:length]), [3] * depth, start=depth).logits[0], atol=2e-4)
                assert label == text[length + depth]
                assert likeliest == target.model.reference_logits(text[: length + depth])[-1].argmax()
                found += 1
        first += len(text)
    assert found == len(rows) == len(predicted.outputs)


def test_heads_learn_and_begin_as_the_targets_own_prediction(folder: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Untrained, each head repeats the target's prediction of the next token. Training lowers the loss of all heads."""
    monkeypatch.setattr("specgen.train.medusa_objective.OWN_SHARE", 100.0)
    target = opened(folder)
    frozen = FrozenTarget(target)
    batches = TrainingBatches(corpus_of(corpus, target), [], TINY)
    objective = MedusaObjective(frozen, [], 0)
    batch = packed()
    hidden = frozen.states(batch, (), ()).hidden.flatten(0, 1)
    predicted, _ = predictions(objective, frozen, batch, None)
    assert torch.equal(predicted.outputs, hidden[predicted.sources - predicted.depths - 1])
    assert predicted.depths.bincount().tolist() == [11, 9, 7, 5]

    def losses() -> list[float]:
        predicted, (depths, *others) = predictions(objective, frozen, batches.batch(0), None)
        each = objective.losses(predicted.outputs, objective.logits(predicted.outputs, depths), RowLabels(depths, *others))
        return [each[depths == depth].mean().item() for depth in range(HEADS)]

    before, training = losses(), HeadTraining(objective, frozen, batches)
    for _ in range(TINY.steps or 0):
        training.advance()
    assert all(after < 0.99 * first for after, first in zip(losses(), before, strict=True))
    weights = objective.weights([[0.5, 0.2]] * HEADS)
    assert weights.lm_heads is not None
    assert not torch.equal(weights.lm_heads[0], weights.lm_heads[1])
    assert weights.rank_accuracies == [[0.5, 0.2]] * HEADS
