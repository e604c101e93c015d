"""Distributions to sample from, in as few numbers as they need: with top-k on a GPU, only those of the tokens that are left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specgen.base.types import SamplingParams
from specgen.decoding import logits_ops


class Distributions(NamedTuple):
    """Distributions over the vocabulary after temperature, top-k and top-p: `probs` [rows, n] of the tokens `tokens` [rows, n].

    The ids ascend in each row, and all other tokens have probability 0. `tokens` None: the n tokens are the whole vocabulary.
    """

    probs: torch.Tensor
    tokens: torch.Tensor | None = None

    @classmethod
    def of(cls, logits: torch.Tensor, sampling: SamplingParams, *, in_few: bool | None = None) -> Distributions:
        """Computes the distributions to sample from, see `logits_ops.warp`, from logits [rows, vocabulary].

        `in_few`: of the few tokens that top-k leaves; None: if the logits are on a GPU and so few are left.
        """
        if logits_ops.keeps_few(logits, sampling) if in_few is None else in_few:
            return cls(*logits_ops.warp_top(logits, sampling))
        return cls(logits_ops.warp(logits, sampling))

    @classmethod
    def joined(cls, parts: Sequence[Distributions]) -> Distributions:
        """Returns a copy of the rows of some distributions, one after the other. Either all or none have `tokens`."""
        tokens = [part.tokens for part in parts if part.tokens is not None]
        return cls(torch.cat([part.probs for part in parts]), torch.cat(tokens) if tokens else None)

    def first(self, rows: int) -> Distributions:
        """Returns the first rows, as views."""
        return Distributions(self.probs[:rows], None if self.tokens is None else self.tokens[:rows])

    def write(self, row: torch.Tensor, other: Distributions) -> None:
        """Overwrites the row with the number `row` [1] with the only row of `other`."""
        self.probs.index_copy_(0, row, other.probs)
        if self.tokens is not None and other.tokens is not None:
            self.tokens.index_copy_(0, row, other.tokens)

    def at(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the probability of `tokens` [m], of one token in each of the first m rows; NaN in a row that holds a NaN."""
        probs = self.probs[: len(tokens)]
        if self.tokens is None:
            return probs.gather(1, tokens[:, None])[:, 0]
        return (probs * (self.tokens[: len(tokens)] == tokens[:, None])).sum(dim=-1)

    def ids(self, columns: torch.Tensor) -> torch.Tensor:
        """Returns the ids of the tokens in these columns [rows] of `probs`, one for each row; -1 for column -1."""
        if self.tokens is None:
            return columns
        found = self.tokens.gather(1, columns.clamp_min(0)[:, None])[:, 0]
        return found.masked_fill_(columns < 0, -1)

    def row(self, number: torch.Tensor) -> Distributions:
        """Returns the row with this number, a tensor [1]."""
        tokens = None if self.tokens is None else self.tokens.index_select(0, number)
        return Distributions(self.probs.index_select(0, number), tokens)

    def take(self, probs: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Returns for the tokens of this single row [1, n] their probabilities in row `row` [1] of `probs` [rows, vocabulary]."""
        if self.tokens is None:
            return probs.index_select(0, row)
        return torch.take(probs, self.tokens + row * probs.shape[1])

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Draws a token from each row: [rows]. See `logits_ops.draw`."""
        return logits_ops.draw(self.probs, generator, self.tokens)

    def dense(self, vocab_size: int) -> torch.Tensor:
        """Returns the probabilities of all tokens [rows, vocabulary]."""
        if self.tokens is None:
            return self.probs
        return self.probs.new_zeros(len(self.probs), vocab_size).scatter_(-1, self.tokens, self.probs)
