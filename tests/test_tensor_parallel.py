"""A model split over ranks computes what the whole model computes: every family, without processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from native_models import CASES, make, save, variant
from thread_ranks import run_on, thread_ranks

from specgen.base.errors import SpecgenError
from specgen.base.types import Context
from specgen.engine.forward_pass import ForwardPass, TreeNodes
from specgen.engine.native.families import read_architecture, read_config
from specgen.engine.native.loading import load_native
from specgen.engine.spread.messages import Operation, pass_numbers, read_pass, receive, send
from specgen.engine.spread.sharded_model import ShardedModel, load_shard
from specgen.engine.spread.shards import Shard

CPU = torch.device("cpu")
IDS = [5, 17, 3, 80, 44, 95, 0, 61, 12, 33, 33, 7]
DEFAULT = {"llama-0", "llama-1", "phi3-0", "gemma3_text-0", "olmo2-0", "olmo2-1", "starcoder2-0", "stablelm-1", "cohere-0"}


def split(folder: Path, size: int) -> list[ShardedModel]:
    architecture = read_architecture(read_config(folder, "the model"))
    return run_on(thread_ranks(size), lambda own: load_shard(folder, "the model", architecture, torch.float32, CPU, own))


def logits_of(models: list[ShardedModel], ids: list[int]) -> torch.Tensor:
    ranks: Any = [model._ranks for model in models]
    found: torch.Tensor = run_on(ranks, lambda own: models[own.rank].reference_logits(ids))[0]
    return found


def check(family: str, index: int, size: int, folder: Path) -> list[ShardedModel]:
    save(make(variant(family, index)), folder)
    architecture = read_architecture(read_config(folder, "the model"))
    whole = load_native(folder, "the model", architecture, torch.float32, CPU)
    models = split(folder, size)
    torch.testing.assert_close(logits_of(models, IDS), whole.reference_logits(IDS), rtol=2e-4, atol=2e-4)
    assert models[0].num_parameters == whole.num_parameters
    return models


_MARKED = [case if case.id in DEFAULT else pytest.param(*case.values, id=case.id, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize(("family", "index"), _MARKED)
def test_two_shards_compute_the_whole_models_logits(family: str, index: int, tmp_path: Path) -> None:
    models = check(family, index, 2, tmp_path)
    whole = models[0].shard.architecture
    sums = models[0]._ranks.sums  # type: ignore[attr-defined]
    per_layer = 2 + (whole.qk_norm == "all")
    assert sums == 1 + per_layer * len(whole.layers), "one for the embedding, one after each block"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "index"), CASES)
def test_more_shards_than_key_value_heads_compute_the_whole_models_logits(family: str, index: int, tmp_path: Path) -> None:
    """Four, where each key-value head is on one, two or four of them; six where there are six heads."""
    check(family, index, 6 if variant(family, index)["num_attention_heads"] == 6 else 4, tmp_path)


def architecture(**changes: Any) -> Any:
    return read_architecture(variant("llama", **{"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 4, **changes}))


def test_every_head_neuron_and_token_has_its_rank() -> None:
    for size in (2, 3, 6, 12):
        shards = [Shard.of(architecture(), rank, size) for rank in range(size)]
        for part, total in (("heads", 12), ("neurons", 24), ("stored_tokens", 96)):
            assert [each for shard in shards for each in getattr(shard, part)] == list(range(total))
        assert {shard.copies for shard in shards} == {max(1, size // 3)}
        assert all(head // 4 in shard.kv_heads for shard in shards for head in shard.heads)


@pytest.mark.parametrize(("size", "changes", "hint"), [(4, {}, "per-node 3"), (24, {}, "per-node 12"), (5, {}, "per-node 3")])
def test_what_cannot_be_split_is_refused_with_a_number_that_can(size: int, changes: dict[str, Any], hint: str) -> None:
    with pytest.raises(SpecgenError, match=f"12 heads on 3 key-value heads.*{size} ranks.*{hint}"):
        Shard.of(architecture(**changes), 0, size)


@pytest.mark.parametrize("count", [0, 3, 254, 255, 4000])
def test_messages_arrive_whole(count: int) -> None:
    numbers = list(range(7, 7 + count))

    def work(own: Any) -> Any:
        return send(own, Operation.EMBED, numbers) if own.rank == 0 else receive(own)

    assert run_on(thread_ranks(2), work) == [None, (Operation.EMBED, numbers)]


class _Cache:
    length, capacity = 3, 64


@pytest.mark.parametrize("first", [0, 3, 4, 5])
@pytest.mark.parametrize("parents", [range(-1, 2), [-1, -1, 1]])
def test_a_pass_arrives_whole(first: int, parents: Any) -> None:
    """`first` is in the context (4 tokens), at its end, or among the draft's nodes."""
    own = ForwardPass(Context([8, 6, 7, 5]), TreeNodes([30, 9, 2], parents), first, 7, _Cache(), True)
    cache: Any = _Cache()
    theirs, kept = read_pass(pass_numbers(own, 2, 99), cache)
    assert (theirs.ids, theirs.is_chain, theirs.draft, len(theirs.context)) == (own.ids, own.is_chain, own.draft, 4)
    assert (theirs.first, theirs.last, theirs.long_rope, kept, cache.length, cache.capacity) == (first, 7, True, 2, 3, 99)
