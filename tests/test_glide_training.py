"""Training of GliDe: its rows are those that the runner drafts with the same weights, from the target's last layer on."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from families import BACKENDS, LETTERS, make_model, make_tokenizer, save
from specgen.engine.parts.glide_runner import GlideRunner
from specgen.train.frozen_target import FrozenTarget
from specgen.train.glide_objective import GlideObjective
from specgen.train.head_training import HeadTraining, predictions
from specgen.train.training_loop import TrainingBatches
from training_helpers import TINY, corpus_of, opened, packed

from specgen.base.types import Context
from specgen.engine.forward_pass import LayerPart
from specgen.engine.model_loading import LoadedModel
from specgen.engine.model_runner import ModelRunner

TEXTS = [[5, 9, 7, 3, 11, 30, 31], [4, 8], [32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42]]


class BlocksOf(Random):
    """A source of random numbers that draws blocks of one size."""

    def __new__(cls, size: int) -> BlocksOf:
        return super().__new__(cls)

    def __init__(self, size: int) -> None:
        super().__init__(0)
        self._size = size

    def randint(self, a: int, b: int) -> int:
        assert a <= self._size <= b
        return self._size


def target_of(family: str, folder: Path, backend: str = "native", **changes: Any) -> LoadedModel:
    return opened(Path(save(make_model(family, **changes), folder / family, make_tokenizer(LETTERS))), backend)


def randomised(objective: GlideObjective) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in objective.module.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)


@pytest.mark.parametrize(
    ("family", "backend"), [*(("llama", backend) for backend in BACKENDS), ("qwen3", "native"), ("gemma2", "native")]
)
def test_a_row_of_a_block_is_that_of_a_draft_after_the_blocks_first_token(family: str, backend: str, tmp_path: Path) -> None:
    loaded = target_of(family, tmp_path, backend)
    frozen, size = FrozenTarget(loaded), 4
    objective = GlideObjective(frozen, [], 0)
    randomised(objective)
    runner = GlideRunner(objective.weights([]), loaded.model, ModelRunner(loaded.model))
    batch = packed(TEXTS, 20)
    rows = objective.predict(batch, frozen.states(batch, objective.taps, objective.kv_layers), BlocksOf(size))
    logits = objective.logits(rows.outputs, rows.depths)
    expected, start = [], 0
    for text in TEXTS:
        for at in range(size, len(text) - 1):
            depth = at % size
            expected.append((start + at, depth))
            drafted = runner.logits(Context(text[: at - depth + 1]), text[at - depth + 1 : at + 1]).logits[-1]
            torch.testing.assert_close(logits[len(expected) - 1], drafted, atol=1e-4, rtol=1e-4)
        start += len(text)
    assert list(zip(rows.sources.tolist(), rows.depths.tolist(), strict=True)) == expected


def often(*families: str, slow: tuple[str, ...]) -> Any:
    return pytest.mark.parametrize("family", [*families, *(pytest.param(one, marks=pytest.mark.slow) for one in slow)])


@often("qwen2", "qwen3", "phi3", "granite", "gemma", slow=("llama", "mistral", "smollm3"))
def test_it_begins_as_the_targets_last_layer_alone(family: str, tmp_path: Path) -> None:
    changes = {"no_rope_layers": [1, 1, 1]} if family == "smollm3" else {}
    loaded = target_of(family, tmp_path, **changes)
    objective = GlideObjective(FrozenTarget(loaded), [], 0)
    context, last = Context([1, 5, 9, 7, 30]), loaded.model.shape.num_layers - 1
    alone = loaded.model.layers_forward([LayerPart(last)])
    expected = ModelRunner(loaded.model, forward=alone, cache=loaded.model.new_cache(range(last, last + 1))).logits(
        context, [8, 6]
    )
    begun = GlideRunner(objective.weights([]), loaded.model, ModelRunner(loaded.model)).logits(context, [8, 6])
    torch.testing.assert_close(begun.logits, expected.logits, atol=1e-4, rtol=1e-4)
    assert not objective.module.get_submodule("layers.0.cross_attn.q_proj").weight.isclose(torch.tensor(0.0)).all()


@often("smollm3", "gemma3_text", slow=("olmo2", "gemma", "olmo2"))
def test_other_families_begin_at_random_and_all_weights_are_trained(family: str, corpus: Path, tmp_path: Path) -> None:
    frozen = FrozenTarget(target_of(family, tmp_path))
    objective = GlideObjective(frozen, [], 0)
    randomised(objective)
    batches = TrainingBatches(corpus_of(corpus, frozen.loaded), [], TINY)
    training = HeadTraining(objective, frozen, batches)
    rows, labels = predictions(objective, frozen, batches.batch(0), Random(0))
    training.losses(rows.outputs, *labels)[0].backward()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in objective.module.parameters())
