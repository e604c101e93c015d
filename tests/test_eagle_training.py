"""The training of EAGLE heads: its rows are those of drafts, and its losses those of the papers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from families import LETTERS, make_model, make_tokenizer, save
from specgen.engine.parts.eagle_runner import EagleRunner, make_runners
from specgen.train.eagle_objective import EagleObjective
from specgen.train.frozen_target import FrozenTarget
from specgen.train.generated_text import GeneratedText
from specgen.train.head_objective import RowLabels
from specgen.train.head_training import HeadTraining, predictions
from specgen.train.training_loop import TrainingBatches
from training_helpers import TEXTS, TINY, corpus_of, opened, packed

from specgen.base.types import Context
from specgen.engine.model_runner import ModelRunner
from specgen.train import eagle_objective
from specgen.train.corpus import Part

CASES = [("llama", "native"), ("qwen3", "transformers"), ("gemma2", "native")]


def target_of(folder: Path, family: str, backend: str = "native", **changes: Any) -> FrozenTarget:
    return FrozenTarget(opened(Path(save(make_model(family, **changes), folder, make_tokenizer(LETTERS))), backend))


def randomised(objective: EagleObjective) -> EagleObjective:
    """Adds small random numbers to all weights. Larger ones would multiply rounding errors at each step of a draft."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in objective.module.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.04)
    return objective


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize(("family", "backend"), CASES)
def test_the_rows_of_training_are_those_of_drafts(tmp_path: Path, family: str, backend: str, version: Any) -> None:
    """Row i of step j: after the text's first i + 2 tokens, and j more of its tokens as a draft."""
    frozen = target_of(tmp_path, family, backend, **({"num_hidden_layers": 8} if family == "llama" else {}))
    objective = EagleObjective(frozen, [], 0, version)
    if family != "llama":
        objective.taps = (0, 1, 2) if version == 3 else ()
    randomised(objective)
    batch = packed(TEXTS, 14)
    with torch.no_grad():
        (outputs, sources, depths), _ = predictions(objective, frozen, batch, None)
        logits = objective.logits(outputs, depths)
    model = frozen.model
    runner = make_runners(objective.weights([]), model, ModelRunner(model), lambda: None).draft
    assert isinstance(runner, EagleRunner)
    expected, start = set(), 0
    for text in TEXTS:
        text = text[: 14 - start]
        expected |= {(start + i, d) for d in range(objective.depths) for i in range(1 + d, len(text) - 1)}
        start += len(text)
    assert {*zip(sources.tolist(), depths.tolist(), strict=True)} == expected
    assert len(sources) == len(expected)
    ids, segments = batch.ids[0].tolist(), batch.segments[0].tolist()
    for row, (source, depth) in enumerate(zip(sources.tolist(), depths.tolist(), strict=True)):
        begin, end = segments.index(segments[source]), source + 1
        drafted = runner.logits(Context(ids[begin : end - depth]), ids[end - depth : end], start=depth)
        assert drafted.hidden_states is not None
        torch.testing.assert_close(outputs[row], drafted.hidden_states[0], atol=4e-3, rtol=1e-2)
        torch.testing.assert_close(logits[row], drafted.logits[0], atol=4e-3, rtol=1e-2)


def test_the_losses_over_a_reduced_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The divergence from the target's distribution over the head's tokens; none where its likeliest token is not among them."""
    monkeypatch.setattr(eagle_objective, "_LARGEST_VOCABULARY", 8)
    text = torch.tensor([1, 5, 5, 9, 9, 9, 60])
    texts = [GeneratedText(text, text, None, 1, True, Part.TRAIN)]
    frozen = target_of(tmp_path, "llama", num_hidden_layers=8)
    objective = randomised(EagleObjective(frozen, texts, 0))
    ids = [0, 1, 2, 3, 4, 5, 9, 60]  # the tokens of the text, and the lowest others
    weights = objective.weights([])
    assert weights.vocabulary is not None
    assert weights.vocabulary.tolist() == ids
    outputs, target_logits = torch.randn(4, frozen.width), 3 * torch.randn(4, frozen.vocabulary)
    target_logits[:3, 9] = 9.0  # the likeliest but in the last row
    target_logits[3, 70] = 20.0
    log_probs, top = target_logits.log_softmax(-1).sort(descending=True)  # all tokens are known
    depths = torch.tensor([0, 1, 2, 0])
    with torch.no_grad():
        logits = objective.logits(outputs, depths)
        losses = objective.losses(outputs, logits, RowLabels(depths, depths, top, log_probs, outputs))
    assert logits.isfinite().nonzero()[:, 1].view(4, -1).tolist() == [ids] * 4
    p, q = (each[:, ids].log_softmax(-1) for each in (target_logits, logits))
    expected = (p.exp() * (p - q)).sum(-1) * torch.tensor([1, 0.8, 0.64, 0])
    torch.testing.assert_close(losses, expected, atol=1e-4, rtol=1e-4)


def test_eagle_1_imitates_features_with_noise(tmp_path: Path) -> None:
    frozen = target_of(tmp_path, "llama")
    objective = EagleObjective(frozen, [], 0)
    assert objective.version == 1  # of three layers
    batch = packed(TEXTS, 14)
    states = frozen.states(batch, (), ())
    with torch.no_grad():
        plain = objective.predict(batch, states, None)
        noisy, same, other = (objective.predict(batch, states, Random(seed)) for seed in (0, 0, 1))
    count = len(noisy.sources)
    assert torch.equal(noisy.sources, plain.sources[:count])
    assert plain.depths[count] == 1  # it learns from the first drafted token, and is measured for more
    assert torch.equal(noisy.outputs, same.outputs)
    assert not torch.equal(noisy.outputs, other.outputs)
    assert 0 < (noisy.outputs - plain.outputs[:count]).abs().mean() < 0.5
    hidden, top = noisy.outputs + 0.5, torch.zeros(count, 1, dtype=torch.long)
    hidden[0] += 2.5  # farther than 1: linear
    logits = torch.randn(count, frozen.vocabulary)
    losses = objective.losses(noisy.outputs, logits, RowLabels(noisy.depths, noisy.sources, top, top.float(), hidden))
    distances = torch.full((count,), 0.125)
    distances[0] = 2.5
    expected = distances - 0.1 * logits.log_softmax(-1)[:, 0]
    torch.testing.assert_close(losses, expected, atol=1e-4, rtol=1e-4)


def test_training_makes_the_loss_smaller(tmp_path: Path, corpus: Path) -> None:
    frozen = target_of(tmp_path, "llama", num_hidden_layers=8)
    batches = TrainingBatches(corpus_of(corpus, frozen.loaded), [], replace(TINY, steps=12, learning_rate=3e-3))
    training = HeadTraining(EagleObjective(frozen, [], 0), frozen, batches)
    losses = [training.advance()[0] for _ in range(12)]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
