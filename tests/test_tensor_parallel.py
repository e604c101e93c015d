"""A model split over ranks computes what the whole model computes: every family, without processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from native_models import CASES, make, save, variant
from thread_ranks import run_on, thread_ranks

from specgen.engine.native.architecture import read_architecture, read_config
from specgen.engine.native.loading import load_native
from specgen.engine.tensor_parallel.sharded_model import ShardedModel, load_shard
from specgen.errors import SpecgenError

CPU = torch.device("cpu")
IDS = [5, 17, 3, 80, 44, 95, 0, 61, 12, 33, 33, 7]


def split(folder: Path, size: int, dtype: torch.dtype = torch.float32) -> list[ShardedModel]:
    architecture = read_architecture(read_config(folder, "the model"))
    return run_on(thread_ranks(size), lambda own: load_shard(folder, "the model", architecture, dtype, CPU, own))


def sharded_logits(models: list[ShardedModel], ids: list[int]) -> torch.Tensor:
    return run_on([model._ranks for model in models], lambda own: models[own.rank].reference_logits(ids))[0]


@pytest.mark.parametrize(("family", "index"), CASES)
def test_shards_compute_the_whole_models_logits(family: str, index: int, tmp_path: Path) -> None:
    save(make(variant(family, index)), tmp_path)
    architecture = read_architecture(read_config(tmp_path, "the model"))
    whole = load_native(tmp_path, "the model", architecture, torch.float32, CPU).reference_logits(IDS)
    for size in (2, 4):
        try:
            models = split(tmp_path, size)
        except SpecgenError as error:
            assert size == 4 and (architecture.num_heads, architecture.num_kv_heads) == (6, 2), error
            continue
        torch.testing.assert_close(sharded_logits(models, IDS), whole, rtol=2e-4, atol=2e-4)
