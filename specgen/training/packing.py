"""Sequence packing: several texts in one sequence, without padding, and without attention between texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

    def sequences(self, start: int, stop: int) -> PackedBatch:
        return PackedBatch(*(getattr(self, name)[start:stop] for name in self.__slots__))

    def to(self, device: torch.device) -> PackedBatch:
        tensors = (getattr(self, name) for name in self.__slots__)
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
    return PackedBatch(*(torch.tensor(column) for column in zip(*sequences, strict=True)))


def _sequence(sample: SampleText, training_length: int, rng: Random) -> tuple[list[int], ...]:
    ids: list[int] = []
    positions: list[int] = []
    segments: list[int] = []
    labels: list[int] = []
    teacher: list[int] = []
    segment = 0
    while len(ids) < training_length:
        left = training_length - len(ids)
        text, references = sample(rng, left + 1)  # one token more: the label of the last one
        size = min(len(text), left)
        ids += text[:size]
        positions += range(size)
        segments += [segment] * size
        labels += [*text[1 : size + 1], *([IGNORED] if len(text) == size else [])]
        teacher += references[:size]
        segment += 1
    return ids, positions, segments, labels, teacher
