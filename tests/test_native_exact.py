"""Exact mode of the native decoder: a token's logits have the same bits, whichever tokens are run in the same pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from random import Random

import pytest
import torch
from native_models import load, make, save, variant
from runner_checks import every

from specgen.base.types import Context
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.native_model import NativeModel

# Grouped heads or not, windows, NoPE, norms of queries and keys, capped scores, both kinds of norm, weights of odd sizes.
CASES: list[tuple[str, int, dict[str, int]]] = [
    ("llama", 0, {"head_dim": 16}),
    ("qwen3", 1, {}),
    ("gemma2", 0, {"head_dim": 8}),
    ("stablelm", 2, {}),
]
MORE_CASES: list[tuple[str, int, dict[str, int]]] = [
    ("llama", 3, {"num_attention_heads": 14, "hidden_size": 112}),
    ("mistral", 0, {}),
    ("gemma3_text", 2, {}),
    ("olmo2", 1, {}),
    ("smollm3", 2, {}),
]
IDS = [Random(3).randrange(3, 96) for _ in range(44)]
TYPES = [  # and whether weights are packed
    (torch.float32, False),
    (torch.float32, True),
    (torch.bfloat16, False),
    (torch.bfloat16, True),
    (torch.float16, False),
]


def run(native: NativeModel, ids: Sequence[int], sizes: Sequence[int], prompt: int = 3) -> torch.Tensor:
    """The logits after each token of `ids` from the prompt's last on, with drafts of these sizes, each after a rejected one."""
    runner, context, wrong = ModelRunner(native), Context(ids[:prompt]), Random(str(sizes))
    found, size_of = [], cycle(sizes)
    while len(context) < len(ids):
        draft = list(ids[len(context) : len(context) + next(size_of)])
        runner.logits(context, [*draft[: wrong.randrange(3)], *(wrong.randrange(3, 96) for _ in range(wrong.randrange(4)))])
        found.append(runner.logits(context, draft).logits[: len(draft)].clone())
        context.extend(draft)
    return torch.cat(found)


def check_bits(
    folder: Path, ids: Sequence[int], all_sizes: Sequence[Sequence[int]], types: Sequence[tuple[torch.dtype, bool]]
) -> None:
    """Compares drafts of all these sizes with the first, for each dtype, with weights packed or not."""
    for dtype, pack in types:
        native = load(folder, dtype, exact=True, pack=pack)
        first = run(native, ids, all_sizes[0])
        for sizes in all_sizes[1:]:
            found = run(native, ids, sizes)
            differing = (found != first).any(1).nonzero()[:, 0].tolist()
            assert not differing, (dtype, pack, sizes, differing[:5])


@pytest.mark.parametrize("case", every(2, CASES), ids=lambda case: case[0])
def test_logits_have_the_same_bits_for_drafts_of_any_length(tmp_path: Path, case: tuple[str, int, dict[str, int]]) -> None:
    family, index, changes = case
    save(make(variant(family, index, **changes)), tmp_path)
    check_bits(tmp_path, IDS, ([1], [2], [3], [5], [12], [33, 8], [41]), TYPES[:4] if family == "llama" else TYPES[:4:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "index"), [("llama", 3), ("gemma2", 2)])
def test_a_draft_that_ends_in_another_block_of_keys_changes_no_bits(
    tmp_path: Path, family: str, index: int, dtype: torch.dtype
) -> None:
    """Also if the prompt is in the same pass: then the whole prompt is run with one more block of keys."""
    save(make(variant(family, index, max_position_embeddings=1024)), tmp_path)
    native = load(tmp_path, dtype, exact=True)
    ids = [Random(1).randrange(3, 96) for _ in range(524)]
    runner, context, one_by_one = ModelRunner(native), Context(ids[:508]), []
    for token in [*ids[508:], 0]:
        one_by_one.append(runner.logits(context).logits)
        context.extend([token])
    together = ModelRunner(native).logits(Context(ids[:508]), ids[508:]).logits
    assert torch.equal(together, torch.cat(one_by_one))


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("family", "index", "changes"), CASES + MORE_CASES)
def test_long_texts_have_the_same_bits_too(
    tmp_path: Path, family: str, index: int, changes: dict[str, int], threads: int
) -> None:
    larger = {"intermediate_size": 320, "max_position_embeddings": 2048}
    save(make(variant(family, index, **{**larger, **changes})), tmp_path)
    ids = [Random(1).randrange(3, 96) for _ in range(1100)]
    torch.set_num_threads(threads)
    try:
        check_bits(tmp_path, ids, ([1], [2], [3], [5], [6], [34], [131], [194], [509], [770], [1050], [1, 7, 30, 2, 300]), TYPES)
    finally:
        torch.set_num_threads(1)
