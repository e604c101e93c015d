"""The training of EAGLE heads: its rows are those of drafts, and a trained head drafts as it was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import LETTERS, make_model, make_tokenizer, save
from test_head_training import TEXTS, packed
from training_helpers import opened

from specgen.engine.heads.eagle_runner import EagleRunner, make_runners
from specgen.engine.model_runner import ModelRunner
from specgen.training.eagle_objective import EagleObjective
from specgen.training.frozen_target import FrozenTarget
from specgen.training.head_training import predictions
from specgen.types import Context

CASES = [("llama", "native"), ("qwen3", "transformers"), ("gemma2", "native")]


def target_of(folder: Path, family: str, backend: str = "native", **changes: Any) -> FrozenTarget:
    return FrozenTarget(opened(Path(save(make_model(family, **changes), folder, make_tokenizer(LETTERS))), backend))


def randomised(objective: EagleObjective) -> EagleObjective:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in objective.module.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
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
        torch.testing.assert_close(outputs[row], drafted.hidden_states[0], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(logits[row], drafted.logits[0], atol=1e-3, rtol=1e-3)
