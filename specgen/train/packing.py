"""Sequence packing: a training sequence holds several texts, without padding, and tokens attend only within their own text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, repeat
from random import Random

import torch

IGNORED = -100  # a label that does not contribute to the loss: cross_entropy's ignore_index


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A training batch of sequences that hold several texts each. All fields are integer tensors [batch, training_length].

    `ids` are the token ids. `positions` start at 0 in each text. `segments` number the texts of a sequence from 0. `labels` are
    the next tokens, IGNORED at the end of a text. `teacher` stands for the target's prediction after each token, and is IGNORED
    where the prediction is not known. To train an exit layer it is the target's most probable token; to distil a draft it is a
    row in the table of the target's top-k probabilities.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor
    labels: torch.Tensor
    teacher: torch.Tensor

    def part(self, sequences: slice, device: torch.device) -> PackedBatch:
        """Returns a batch of only the given sequences, copied to `device`."""
        tensors = (getattr(self, name)[sequences] for name in self.__slots__)
        if device.type == "cuda":  # only copies from pinned memory are asynchronous
            tensors = (tensor.pin_memory() for tensor in tensors)
        return PackedBatch(*(tensor.to(device, non_blocking=True) for tensor in tensors))

    def attention_mask(self) -> torch.Tensor:
        """Returns a mask [batch, training_length, training_length], True where a token (row) may attend to another one (column).

        A token attends to itself and to earlier tokens of its own text.
        """
        same = self.segments[:, :, None] == self.segments[:, None, :]
        return same & torch.ones(same.shape[1:], dtype=torch.bool, device=same.device).tril()


SampleText = Callable[[Random, int], tuple[list[int], list[int]]]
"""A function that draws a text of at most a given number of tokens; returns its ids and their `teacher` values (PackedBatch)."""


def pack(samplers: list[SampleText], training_length: int, rng: Random) -> PackedBatch:
    """Returns a batch with one sequence per sampler. Each sampler fills its sequence of `training_length` tokens with texts."""
    sequences = [_sequence(sample, training_length, rng) for sample in samplers]
    return PackedBatch(*torch.tensor(sequences).permute(2, 0, 1).contiguous())


def _sequence(sample: SampleText, training_length: int, rng: Random) -> list[tuple[int, ...]]:
    """Returns the values of PackedBatch's fields for each token of one sequence, in the order of the fields."""
    tokens: list[tuple[int, ...]] = []
    for segment in count():
        left = training_length - len(tokens)
        if not left:
            break
        text, teacher = sample(rng, left + 1)  # one token more: the label of the last one
        tokens += zip(text[:left], count(), repeat(segment), [*text[1:], IGNORED], teacher, strict=False)
    return tokens


def single(ids: torch.Tensor) -> PackedBatch:
    """Returns a batch of one sequence that holds one text, the token ids `ids` [n]. The target's predictions are not known."""
    unknown = torch.full_like(ids, IGNORED)
    labels = torch.cat((ids[1:], unknown[:1]))
    columns = ids, torch.arange(len(ids)), torch.zeros_like(ids), labels, unknown
    return PackedBatch(*(column[None] for column in columns))
