"""Texts side by side in rows of one length: a batch without padding, in which no text sees another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch

NOTHING = -100  # a label that counts for nothing, as torch has it


@dataclass(frozen=True, slots=True)
class Rows:
    """`ids`, `positions` (from 0 in each text), `texts` (which one of its row) and `labels` (the next token; NOTHING at a text's
    end), each [rows, window]. `best` is what the target itself would say there, NOTHING where that is not known."""

    ids: torch.Tensor
    positions: torch.Tensor
    texts: torch.Tensor
    labels: torch.Tensor
    best: torch.Tensor

    def part(self, start: int, stop: int) -> Rows:
        return Rows(*(getattr(self, name)[start:stop] for name in self.__slots__))

    def to(self, device: torch.device) -> Rows:
        moved = (getattr(self, name) for name in self.__slots__)
        if device.type == "cuda":  # only from pinned memory does a copy run beside the host
            moved = (tensor.pin_memory() for tensor in moved)
        return Rows(*(tensor.to(device, non_blocking=True) for tensor in moved))

    def visible(self) -> torch.Tensor:
        """Who may see whom [rows, window, window]: the same text, up to oneself."""
        same = self.texts[:, :, None] == self.texts[:, None, :]
        return same & torch.ones(same.shape[1:], dtype=torch.bool, device=same.device).tril()


Draw = Callable[[Random, int], tuple[list[int], list[int]]]


def pack(draws: list[Draw], window: int, rng: Random) -> Rows:
    """A row of `window` tokens for each of `draws`, which give texts (ids and the target's choices) of at most so many tokens."""
    rows = [_row(draw, window, rng) for draw in draws]
    return Rows(*(torch.tensor(column) for column in zip(*rows, strict=True)))


def _row(draw: Draw, window: int, rng: Random) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    ids: list[int] = []
    positions: list[int] = []
    texts: list[int] = []
    labels: list[int] = []
    best: list[int] = []
    number = 0
    while len(ids) < window:
        text, choices = draw(rng, window - len(ids) + 1)  # one more, to be the last one's label
        inside = min(len(text), window - len(ids))
        ids += text[:inside]
        positions += range(inside)
        texts += [number] * inside
        labels += [*text[1 : inside + 1], *([NOTHING] if len(text) == inside else [])]
        best += choices[:inside]
        number += 1
    return ids, positions, texts, labels, best
