"""Sequence packing: several texts in one sequence, without padding, and without attention between texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, repeat
from random import Random

import torch

IGNORED = -100  # a label that does not contribute to the loss: cross_entropy's ignore_index


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Integer tensors, each [batch, training_length].

    `positions` start at 0 in each text; `segments` number the texts of a sequence; `labels` are the next tokens, IGNORED at a
    text's end. `teacher` refers to the target's prediction after each token (its top-1 token for an exit layer, an index into
    the table of top-k probabilities for a distilled draft), IGNORED where the prediction is not known.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor
    labels: torch.Tensor
    teacher: torch.Tensor

    def part(self, sequences: slice, device: torch.device) -> PackedBatch:
        """Some of the sequences, copied to `device`."""
        tensors = (getattr(self, name)[sequences] for name in self.__slots__)
        if device.type == "cuda":  # only copies from pinned memory are asynchronous
            tensors = (tensor.pin_memory() for tensor in tensors)
        return PackedBatch(*(tensor.to(device, non_blocking=True) for tensor in tensors))

    def attention_mask(self) -> torch.Tensor:
        """True where a token attends to another [batch, training_length, training_length]: causal, within a segment."""
        same = self.segments[:, :, None] == self.segments[:, None, :]
        return same & torch.ones(same.shape[1:], dtype=torch.bool, device=same.device).tril()


SampleText = Callable[[Random, int], tuple[list[int], list[int]]]
"""Returns the ids and the teacher references of a text of at most so many tokens."""


def pack(samplers: list[SampleText], training_length: int, rng: Random) -> PackedBatch:
    """One sequence of `training_length` tokens for each of `samplers`."""
    sequences = [_sequence(sample, training_length, rng) for sample in samplers]
    return PackedBatch(*torch.tensor(sequences).permute(2, 0, 1).contiguous())


def _sequence(sample: SampleText, training_length: int, rng: Random) -> list[tuple[int, ...]]:
    """The fields of PackedBatch for each token."""
    tokens: list[tuple[int, ...]] = []
    for segment in count():
        left = training_length - len(tokens)
        if not left:
            break
        text, teacher = sample(rng, left + 1)  # one token more: the label of the last one
        tokens += zip(text[:left], count(), repeat(segment), [*text[1:], IGNORED], teacher, strict=False)
    return tokens
