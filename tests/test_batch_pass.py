"""Passes over several sequences at once, on both backends: padding, windows, caches that lose sequences, freed weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from families import BACKENDS, make_model, model_of, save
from runner_checks import RUN_BY, quick
from training_helpers import opened

from specgen.engine.batch_pass import BatchPass, text_pass
from specgen.engine.model import Model
from specgen.train.texts import continuations

LENGTHS = (20, 13, 7)  # tokens; the sliding windows of the tests' models have 12
LENGTH = max(LENGTHS)


def padded(ids: torch.Tensor, lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions [batch, n] of left-padded sequences, and which tokens see which [batch, n, n]."""
    columns = torch.arange(ids.shape[1])
    padding = torch.tensor([ids.shape[1] - length for length in lengths])[:, None]
    causal = columns[:, None] >= columns
    return (columns - padding).clamp_min(0), (columns >= padding)[:, None, :] & causal


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(5))


def passed(model: Model, ids: torch.Tensor, lengths: tuple[int, ...], steps: list[int]) -> list[torch.Tensor]:
    """The logits [batch, n, vocabulary] of cached passes over so many tokens each. Before the last, the second sequence goes."""
    (at, visible), cache, found = padded(ids, lengths), model.batch_cache(len(ids)), []
    for index, new in enumerate(steps):
        if index == len(steps) - 1:
            cache.keep_sequences([0, 2])
            ids, at, visible = ids[[0, 2]], at[[0, 2]], visible[[0, 2]]
        first, last = cache.length, cache.length + new
        batch = BatchPass(ids[:, first:last], at[:, first:last], visible[:, first:last, :last], at[:, :last], cache)
        found.append(model.batch_logits(batch))
        cache.length = last
    return found


@pytest.mark.parametrize(("family", "backend"), quick(RUN_BY))
@torch.no_grad()
def test_logits_are_those_of_each_sequence_alone(family: str, backend: str) -> None:
    module = make_model(family)
    model = model_of(module, backend)
    ids = random_ids(len(LENGTHS), LENGTH)
    at, visible = padded(ids, LENGTHS)
    whole = model.batch_logits(BatchPass(ids, at, visible, at))
    last = model.batch_logits(BatchPass(ids, at, visible, at), logits_to_keep=2)
    torch.testing.assert_close(last, whole[:, -2:], atol=2e-5, rtol=1e-4)
    cached = passed(model, ids, LENGTHS, [14, 3, 1, 2])
    for row, length in enumerate(LENGTHS):
        expected = module(ids[row : row + 1, LENGTH - length :], use_cache=False).logits[0]
        torch.testing.assert_close(whole[row, -length:], expected, atol=2e-5, rtol=1e-4)
        beginning = torch.cat([part[row] for part in cached[:-1]])
        torch.testing.assert_close(beginning[-(length - 2) :], expected[:-2], atol=2e-5, rtol=1e-4)
        if row != 1:
            torch.testing.assert_close(cached[-1][row // 2], expected[-2:], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2"])
@torch.no_grad()
def test_hidden_states_after_some_layers_are_the_same_on_both_backends(family: str) -> None:
    module = make_model(family)
    native, other = (model_of(module, backend) for backend in BACKENDS)
    batch = text_pass(random_ids(30))
    for layers, with_head in ((1, False), (2, False), (3, True)):
        found, expected = (model.batch_layers(batch, layers, with_head=with_head) for model in (native, other))
        for mine, theirs in zip(found[:2], expected[:2], strict=True):  # logits and hidden states
            assert mine is not None
            torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)
    whole = native.batch_logits(batch)
    torch.testing.assert_close(whole, native.batch_layers(batch, 3, with_head=True).logits)


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_freed_weights_leave_the_first_layers(tied: bool) -> None:
    batch = text_pass(random_ids(9))
    for backend in BACKENDS:
        model: Any = model_of(make_model("llama", tie_word_embeddings=tied), backend)
        expected = model.batch_layers(batch, 1).hidden_states
        layers = model.layers if backend == "native" else model.module.model.layers
        head = model.parts.head if backend == "native" else model.module.lm_head
        kept, freed = ref(layers[0]), [*map(ref, layers[1:]), ref(head)]
        del layers, head
        model.free_weights(1)
        torch.testing.assert_close(model.batch_layers(batch, 1).hidden_states, expected, rtol=0, atol=0)
        assert kept() is not None
        assert [weight() for weight in freed] == [None] * 3
        model.free_weights()
        left = [model.parts.embedding] if backend == "native" else list(model.module.parameters())
        assert all(weight.device.type == "meta" or not weight.numel() for weight in left)


def test_both_backends_generate_the_same_texts(models_folder: Path) -> None:
    """Greedily, with prompts of several lengths, and texts that end at different times and leave the batch."""
    for family in ("llama", "gemma2"):
        folder = save(make_model(family), models_folder / "batch" / family)
        prompts = [random_ids(length).tolist() for length in (3, 9, 5, 7, 4, 6)]
        made = [continuations(opened(folder, backend), prompts, 60, greedy=True) for backend in BACKENDS]
        assert made[0] == made[1]
        assert len({len(text) for text in made[0]}) > 1, "the test is to have texts of several lengths"
