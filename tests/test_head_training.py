"""Training of heads: batches of the target's states, the loop with an objective, its saved state, and the command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from families import BACKENDS, LETTERS, make_model, make_tokenizer, save
from torch import nn
from training_helpers import TINY, corpus_of, opened

from specgen.engine.heads.weights import HeadWeights, MedusaWeights
from specgen.training.frozen_target import FrozenTarget, TargetStates
from specgen.training.generated_text import GeneratedText
from specgen.training.head_objective import Objective, Predictions, reachable
from specgen.training.head_training import HeadTraining, predictions
from specgen.training.packing import IGNORED, PackedBatch, pack
from specgen.training.training_loop import TrainingBatches


class LinearHeads(Objective):
    """The simplest heads: one square matrix for each drafted token, on the target's last hidden state."""

    kind = "medusa"
    depths = 2

    def __init__(self, target: FrozenTarget, texts: Sequence[GeneratedText], seed: int) -> None:
        super().__init__(target, texts, seed)
        self.module = nn.Linear(target.width, 2 * target.width, bias=False, device=target.device)
        with torch.no_grad():
            self.module.weight.copy_(torch.eye(target.width).repeat(2, 1))

    def predict(self, batch: PackedBatch, states: TargetStates, rng: Random | None) -> Predictions:
        heads = self.module(states.hidden).flatten(0, 1).unflatten(-1, (2, -1))
        rows = []
        for depth in range(2):
            first, source = reachable(batch, 1 + depth)
            rows.append((heads[first, depth], source, torch.full_like(source, depth)))
        return Predictions(*map(torch.cat, zip(*rows, strict=True)))

    def weights(self, ranks: Sequence[Sequence[float]]) -> HeadWeights:
        return MedusaWeights([[(weight, weight.new_zeros(len(weight)))] for weight in self.module.weight.chunk(2)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save(make_model("llama"), tmp_path_factory.mktemp("heads") / "target", make_tokenizer(LETTERS)))


TEXTS = [[5, 9, 7, 3, 11], [4, 8], [30, 31, 32, 33, 34, 35, 36]]


def packed(texts: Sequence[Sequence[int]], length: int) -> PackedBatch:
    waiting = iter(texts)

    def sample(rng: Random, max_tokens: int) -> tuple[list[int], list[int]]:
        text = list(next(waiting)[:max_tokens])
        return text, [IGNORED] * len(text)

    return pack([sample], length, Random(0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_packed_texts_states_and_labels_are_those_of_the_text_alone(folder: Path, backend: str) -> None:
    frozen = FrozenTarget(opened(folder, backend))
    batch = packed(TEXTS, 14)
    layers = frozen.num_layers
    states = frozen.states(batch, [0, 2], [layers - 1])
    outputs, labels = predictions(LinearHeads(frozen, [], 0), frozen, batch, None)
    depths, next_tokens, top_k_ids, log_probs, hidden = labels
    torch.testing.assert_close(states.features[..., : frozen.width], frozen.embeddings(batch.ids))
    start = row = 0
    logits_of = {}
    for text in TEXTS:
        alone = frozen.states(packed([text], len(text)), [0, 2], [layers - 1])
        span = slice(start, start + len(text))
        torch.testing.assert_close(states.features[:, span], alone.features, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(states.hidden[:, span], alone.hidden, atol=1e-5, rtol=1e-4)
        for ours, theirs in zip(states.keys_values[0], alone.keys_values[0], strict=True):
            assert ours.shape[:1] + ours.shape[2:3] == (1, 14)
            torch.testing.assert_close(ours[:, :, span], theirs, atol=1e-5, rtol=1e-4)
        reference = frozen.model.reference_logits(text).clone()
        torch.testing.assert_close(frozen.logits(alone.hidden[0]), reference, atol=1e-4, rtol=1e-4)
        logits_of |= {start + index: (reference[index], text[index + 1 :][:1]) for index in range(len(text))}
        start += len(text)
    expected = [(source, depth) for depth in (0, 1) for source in range(1 + depth, 13) if source in (1, 2, 3, 8, 9, 10, 11, 12)]
    expected = [pair for pair in expected if pair not in ((1, 1), (8, 1))]
    assert depths.tolist() == [depth for _, depth in expected]
    for row, (source, _) in enumerate(expected):
        logits, following = logits_of[source]
        assert [next_tokens[row]] == following
        assert top_k_ids[row, 0] == logits.argmax()
        torch.testing.assert_close(log_probs[row], logits.log_softmax(-1)[top_k_ids[row]], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(hidden[row], states.hidden[0, source])
    assert len(outputs) == len(expected)


def test_training_reaches_the_weights_that_gradients_of_the_whole_loss_give(
    folder: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step's gradients, in pieces of 5 predicted tokens and a sequence at a time, are those of all logits at once."""
    target = opened(folder)
    frozen = FrozenTarget(target)
    batches = TrainingBatches(corpus_of(corpus, target), [], TINY)
    batch = batches.batch(0)
    whole = LinearHeads(frozen, [], 0)
    outputs, labels = predictions(whole, frozen, batch, None)
    training = HeadTraining(whole, frozen, batches)
    (training.losses(outputs, *labels)[0] / (batch.labels != IGNORED).sum()).backward()
    expected = whole.module.weight.grad
    monkeypatch.setattr("specgen.training.head_training._CPU_ROWS", 5)
    monkeypatch.setattr("specgen.training.training_loop.MAX_LOGITS", target.model.vocab_size)
    objective = LinearHeads(frozen, [], 0)
    training, found = HeadTraining(objective, frozen, batches), []
    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", lambda _, __: found.append(objective.module.weight.grad.clone()))
    training.advance()
    torch.testing.assert_close(found[0], expected, atol=1e-6, rtol=1e-4)
