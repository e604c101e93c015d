"""`--context N`: at most N tokens of prompt and output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from families import CONTEXT, VOCAB, make_model, save
from pair_helpers import draft_here, runners
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import specgen
from specgen.base.types import LARGEST, Context, SamplingParams
from specgen.engine import cached_prefix
from specgen.engine.forward_pass import NO_NODES
from specgen.pair.pair import Pair

LIMIT = 24
SAMPLING = SamplingParams(max_new_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def limited(pair_of: Callable[..., Pair]) -> Iterator[Pair]:
    folders = [
        str(model.folder)
        for model in (pair_of("llama", "near").target, pair_of("llama", "near").draft)
        if model
    ]
    with specgen.load(*folders, device="cpu", dtype="float32", context=LIMIT) as pair:
        draft_here(pair)
        yield pair


@pytest.mark.parametrize("method", ["ar", "sd", "pearl", "lookahead", "lookup", "specinfer"])
def test_output_ends_at_the_context_limit(
    limited: Pair, pair_of: Callable[..., Pair], method: str
) -> None:
    sampling = SamplingParams(max_new_tokens=LIMIT - 9, ignore_eos=True)
    expected = (
        pair_of("llama", "near").generate([1, 5, 6, 7, 8, 9, 5, 6, 7], "ar", sampling).token_ids
    )
    result = limited.generate([1, 5, 6, 7, 8, 9, 5, 6, 7], method, SAMPLING)
    assert result.token_ids == expected
    assert result.summary["finish_reason"] == "length"


def test_caches_are_reserved_for_the_limit_alone(limited: Pair) -> None:
    target, draft = runners(limited)
    assert draft is not None
    target.cache.capacity = draft.cache.capacity = 0
    request = limited.request([1, 5, 6], "sd", SAMPLING)
    limited.run(request)
    assert target.cache.capacity == draft.cache.capacity == LIMIT
    assert (limited.target.context_limit, target.context_limit, draft.context_limit) == (
        LIMIT,
        LIMIT,
        CONTEXT,
    )


def test_a_prompt_beyond_the_limit_is_refused(limited: Pair) -> None:
    with pytest.raises(
        specgen.SpecgenError, match=r"24 tokens and 100 new ones are 100 over (--context )?24"
    ):
        limited.run(limited.request([5] * LIMIT, "ar", SAMPLING))
    with pytest.raises(
        specgen.SpecgenError,
        match=r"conversation is too long: 24 tokens fill the context of 24\. .*/reset",
    ):
        limited.request([5] * LIMIT, "ar", max_new_tokens=LARGEST)


class Allocations(TorchDispatchMode):
    """Records the bytes of each tensor that an operation makes, views left out, and the most rows
    of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.logits = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {
            storage_of(part)
            for part in tree_leaves((args, kwargs))
            if isinstance(part, torch.Tensor)
        }
        made = function(*args, **(kwargs or {}))
        new = [
            part
            for part in tree_leaves(made)
            if isinstance(part, torch.Tensor) and storage_of(part) not in given
        ]
        self.sizes += [part.untyped_storage().nbytes() for part in new]
        self.logits = max(
            [self.logits, *(part.numel() // VOCAB for part in new if part.shape[-1:] == (VOCAB,))]
        )
        return made


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("backend", "capacity", "buffers"), [("native", 448, 1), ("transformers", 425, 6)]
)
def test_a_prompt_takes_its_cache_and_one_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, capacity: int, buffers: int
) -> None:
    """Both caches are allocated once, and nothing else grows with the prompt but the masks of one
    chunk."""
    monkeypatch.setattr(cached_prefix, "PREFILL_CHUNK", 70)
    folder = save(
        make_model("llama", max_position_embeddings=512, intermediate_size=40), tmp_path / "long"
    )
    length = 421
    allocations = Allocations()
    with specgen.load(folder, folder, device="cpu", dtype="float32", backend=backend) as pair:
        runners(pair)
        cache = pair.target.model.shape.kv_bytes_per_token(4) * capacity // buffers
        sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)
        run = pair.run(
            pair.request([5 + number % 7 for number in range(length)], "sd", sampling, k=3)
        )
        with allocations:
            assert len([*run.rounds()]) > 1
    others = [size for size in allocations.sizes if size != cache]
    assert len(allocations.sizes) - len(others) == 2 * buffers
    assert allocations.logits == 3, "of a prompt only the last token's"
    # of the buffer that holds the masks of short passes, made for twice the length; a chunk's mask
    # has fewer
    rows = 64 * 2
    assert max(others) <= rows * 4 * 512


def test_masks_of_long_prompts_are_bounded() -> None:
    cached: Any = cached_prefix.CachedPrefix(Mock(length=0), None)
    sizes = []
    at = 0
    for each in cached.missing_passes(Context([1] * 150_000), NO_NODES, 150_000):
        assert each.first == at
        at = each.last
        sizes.append(each.last - each.first)
        assert sizes[-1] <= 256 or sizes[-1] * each.last <= 1024 << 15
    assert at == 150_000
    assert sizes[:31] == [1024] * 31
    assert min(sizes[:-1]) == 256
