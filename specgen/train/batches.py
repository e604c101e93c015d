"""Training batches with sequence packing: a sequence holds several texts, without padding; tokens attend within their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from random import Random

import torch

from specgen.engine.forward_pass import BatchPass
from specgen.train.corpus import Part
from specgen.train.task import TrainingTask

IGNORED = -100  # a label that does not contribute to the loss: cross_entropy's ignore_index
SampleText = Callable[[Random, int], tuple[list[int], list[int]]]
"""A function that draws a text of at most a given number of tokens; returns its ids and their `teacher` values (PackedBatch)."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A training batch of sequences that hold several texts each. All fields are integer tensors [batch, window].

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

    def forward_pass(self) -> BatchPass:
        """Returns the pass over the batch without a cache. A token attends to itself and to earlier tokens of its own text."""
        same = self.segments[:, :, None] == self.segments[:, None, :]
        visible = same & torch.ones(same.shape[1:], dtype=torch.bool, device=same.device).tril()
        return BatchPass(self.ids, self.positions, visible, self.positions)


def pack(samplers: Sequence[SampleText], window: int, rng: Random) -> PackedBatch:
    """Returns a batch with one sequence per sampler. Each sampler fills its sequence of `window` tokens with texts."""
    sequences = []
    for sample in samplers:
        tokens: list[tuple[int, ...]] = []  # the values of the fields for each token
        for segment in count():
            if not (left := window - len(tokens)):
                break
            text, teacher = sample(rng, left + 1)  # one token more: the label of the last one
            tokens += zip(text[:left], count(), repeat(segment), [*text[1:], IGNORED], teacher, strict=False)
        sequences.append(tokens)
    return PackedBatch(*torch.tensor(sequences).permute(2, 0, 1).contiguous())


class TrainingBatches:
    """Makes the training batch of each step from corpus text and from texts for which the target's predictions are known.

    `taught` has these texts: pairs of token ids and of the values for PackedBatch.teacher, which stand for the predictions.
    `parts` are the parts of the corpus that are trained on. `window` is the number of tokens in a sequence (None: the recipe's).
    """

    def __init__(
        self,
        task: TrainingTask,
        taught: Sequence[tuple[list[int], list[int]]],
        parts: Collection[Part],
        window: int | None = None,
    ) -> None:
        self._corpus, self._taught, self._parts, recipe = task.corpus, taught, parts, task.recipe
        self.window, self._seed = window or recipe.window, recipe.seed
        share = 1.0 if task.corpus is None else recipe.self_text
        own = max(1, round(recipe.batch * share)) if taught else 0
        self._samplers: list[SampleText] = [self._sample_taught] * own
        self._samplers += [self._sample_corpus] * (recipe.batch - own)

    def batch(self, step: int) -> PackedBatch:
        return pack(self._samplers, self.window, Random(f"batch {self._seed} {step}"))

    def _sample_corpus(self, rng: Random, max_tokens: int) -> tuple[list[int], list[int]]:
        assert self._corpus is not None
        ids = self._corpus.sample(rng, max_tokens, parts=self._parts)
        return ids, [IGNORED] * len(ids)

    def _sample_taught(self, rng: Random, max_tokens: int) -> tuple[list[int], list[int]]:
        ids, teacher = self._taught[rng.randrange(len(self._taught))]
        return ids[:max_tokens], teacher[:max_tokens]
