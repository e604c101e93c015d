"""Passes over several sequences at once, on both backends: padding, windows, caches that lose
sequences, freed weights."""

from __future__ import annotations

from typing import Any
from weakref import ref

import pytest
import torch
from families import BACKENDS, make_model, model_of
from runner_checks import RUN_BY, quick

from specgen.engine.forward_pass import BatchPass, text_pass
from specgen.engine.model import Model

LENGTHS = (20, 13, 7)  # tokens; the sliding windows of the tests' models have 12
LENGTH = max(LENGTHS)


def padded(ids: torch.Tensor, lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions [batch, n] of left-padded sequences, and which tokens see which [batch, n,
    n]."""
    columns = torch.arange(ids.shape[1])
    padding = torch.tensor([ids.shape[1] - length for length in lengths])[:, None]
    causal = columns[:, None] >= columns
    return (columns - padding).clamp_min(0), (columns >= padding)[:, None, :] & causal


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(5))


def passed(
    model: Model, ids: torch.Tensor, lengths: tuple[int, ...], steps: list[int]
) -> list[torch.Tensor]:
    """The logits [batch, n, vocabulary] of cached passes over so many tokens each. Before the last,
    the second sequence goes."""
    (at, visible), cache, found = padded(ids, lengths), model.batch_cache(len(ids)), []
    for index, new in enumerate(steps):
        if index == len(steps) - 1:
            cache.keep_sequences([0, 2])
            ids = ids[[0, 2]]
            at = at[[0, 2]]
            visible = visible[[0, 2]]
        first = cache.length
        last = cache.length + new
        batch = BatchPass(
            ids[:, first:last],
            at[:, first:last],
            visible[:, first:last, :last],
            at[:, :last],
            cache,
        )
        found.append(model.batch(batch).logits)
        cache.length = last
    return found


@pytest.mark.parametrize(("family", "backend"), quick(RUN_BY))
@torch.no_grad()
def test_logits_are_those_of_each_sequence_alone(family: str, backend: str) -> None:
    module = make_model(family)
    model = model_of(module, backend)
    ids = random_ids(len(LENGTHS), LENGTH)
    at, visible = padded(ids, LENGTHS)
    whole = model.batch(BatchPass(ids, at, visible, at)).logits
    last = model.batch(BatchPass(ids, at, visible, at), logits_to_keep=2).logits
    close(last, whole[:, -2:])
    cached = passed(model, ids, LENGTHS, [14, 3, 1, 2])
    for row, length in enumerate(LENGTHS):
        expected = module(ids[row : row + 1, LENGTH - length :], use_cache=False).logits[0]
        close(whole[row, -length:], expected)
        beginning = torch.cat([part[row] for part in cached[:-1]])
        close(beginning[-(length - 2) :], expected[:-2])
        if row != 1:
            close(cached[-1][row // 2], expected[-2:])


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2"])
@torch.no_grad()
def test_hidden_states_are_the_same_on_both_backends_also_without_the_later_layers(
    family: str,
) -> None:
    module = make_model(family)
    batch = text_pass(random_ids(30))
    native, other = (model_of(module, backend) for backend in BACKENDS)
    expected, found = (model.batch(batch, taps=[0, 2, 3]) for model in (native, other))
    close(found.logits, expected.logits)
    close(native.batch(batch).logits, expected.logits)
    close(found.features, expected.features)
    states = native.batch(batch, 1, with_head=False).hidden_states
    close(other.batch(batch, 1, with_head=False).hidden_states, states)
    for model in (native, other):
        layers: Any = model.layers if model is native else module.model.layers  # type: ignore[attr-defined]
        kept = ref(layers[0])
        freed = [ref(layer) for layer in layers[1:]]
        del layers
        model.free_weights(1)
        close(model.batch(batch, 1, with_head=False).hidden_states, states)
        assert kept() is not None
        assert [weight() for weight in freed] == [None] * 2
        model.free_weights()
    assert not any(weight.numel() for weight in module.parameters())


def close(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
