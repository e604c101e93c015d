"""A model split over ranks computes what the whole model computes: every family, without
processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from native_models import CASES, make, save, variant
from thread_ranks import run_on

from specgen.base.errors import SpecgenError
from specgen.base.types import Context
from specgen.engine.loaded_model import load_weights
from specgen.engine.model_files import ModelSource, describe
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.config_reading import read_architecture
from specgen.engine.precision import Precision
from specgen.engine.spread.shards import Shard, load_on

CPU = torch.device("cpu")
IDS = [5, 17, 3, 80, 44, 95, 0, 61, 12, 33, 33, 7]
DEFAULT = {"llama-0", "llama-1", "phi3-0", "gemma3_text-0", "olmo2-0", "olmo2-1"}


def check(family: str, index: int, size: int, folder: Path) -> None:
    """Passes without a cache, and those of a runner: a chain, a tree, other contexts, and accepted
    nodes of the tree."""
    save(make(variant(family, index)), folder)
    files = describe(folder, ModelSource(str(folder)))
    whole = load_weights(files, Precision(torch.float32), [CPU])

    def passes(model: Any) -> list[torch.Tensor]:
        runner = ModelRunner(model)
        context = Context(IDS[:5])
        found = [model.reference_logits(IDS)]
        found.append(runner.logits(context, IDS[5:8]).logits)
        found.append(runner.logits(context, [9, 8, 7, 6], [-1, 0, 0, 2]).logits)
        context.extend([9, 7, 6, 11])
        found.append(runner.logits(context, [3], start=1).logits)
        features = model.forward(taps=[0, model.shape.num_layers])
        hidden = ModelRunner(model, forward=features).logits(Context(IDS)).features
        assert hidden is not None
        return [
            *found,
            hidden,
            model.embeddings(torch.tensor(IDS)),
            model.head_logits(hidden[:, -model.shape.hidden_size :]),
        ]

    def work(own: Any) -> Any:
        if own.rank:
            return own.follow()
        model = load_on(own, files, torch.float32, CPU)
        before = own.sums
        layers = len(model.architecture.layers)
        model.reference_logits(IDS)
        sums = own.sums - before
        assert sums == 1 + (2 + (model.architecture.qk_norm == "all")) * layers, (
            "the embedding's, and one after each block"
        )
        found = passes(model)
        model.reference_logits(IDS[:1])
        assert [*own.objects] == [0, 1], "caches that nobody has any more are dropped"
        own.share(None)
        return found

    with torch.inference_mode():
        expected = passes(whole)
    for ours, theirs in zip(run_on(size, work)[0], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


_MARKED = [
    case if case.id in DEFAULT else pytest.param(*case.values, id=case.id, marks=pytest.mark.slow)
    for case in CASES
]


@pytest.mark.parametrize(("family", "index"), _MARKED)
def test_two_ranks_compute_the_whole_models_logits(family: str, index: int, tmp_path: Path) -> None:
    check(family, index, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "index"), CASES)
def test_more_ranks_than_key_value_heads_compute_the_whole_models_logits(
    family: str, index: int, tmp_path: Path
) -> None:
    """Four, where each key-value head is on one, two or four of them; six where there are six
    heads."""
    check(family, index, 6 if variant(family, index)["num_attention_heads"] == 6 else 4, tmp_path)


def architecture(**changes: Any) -> Any:
    return read_architecture(
        variant(
            "llama",
            **{"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 4, **changes},
        )
    )


def test_every_head_neuron_and_token_has_its_rank() -> None:
    for size in (2, 3, 6, 12):
        shards = [Shard.of(architecture(), rank, size) for rank in range(size)]
        for part, total in (("heads", 12), ("neurons", 24), ("stored_tokens", 96)):
            assert [each for shard in shards for each in getattr(shard, part)] == list(range(total))
        assert {shard.copies for shard in shards} == {max(1, size // 3)}
        assert all(head // 4 in shard.kv_heads for shard in shards for head in shard.heads)


@pytest.mark.parametrize(
    ("size", "hint"), [(4, "per-node 3"), (24, "per-node 12"), (5, "per-node 3")]
)
def test_what_cannot_be_split_is_refused_with_a_number_that_can(size: int, hint: str) -> None:
    with pytest.raises(SpecgenError, match=f"12 heads on 3 key-value heads.*{size} ranks.*{hint}"):
        Shard.of(architecture(), 0, size)


def test_a_part_that_one_rank_cannot_load_is_an_error_on_rank_0_and_the_ranks_stay_in_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(make(variant("llama", 0)), tmp_path)
    files = describe(tmp_path, ModelSource("m"))

    def fail(_: Any, group: Any, *given: Any) -> None:
        if group.rank:
            raise MemoryError

    def work(own: Any) -> Any:
        if own.rank:
            return own.follow()
        with monkeypatch.context() as patch:
            patch.setattr("specgen.engine.spread.shards.load_shard", fail)
            with pytest.raises(SpecgenError, match="m cannot be loaded: process 1: out of memory"):
                load_on(own, files, torch.float32, CPU)
        logits = load_on(own, files, torch.float32, CPU).reference_logits(IDS)
        own.share(None)
        return logits

    assert run_on(2, work)[0].shape == (len(IDS), 96)
