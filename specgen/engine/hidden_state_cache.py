"""A KV cache that also keeps a hidden state of each token, and rolls both back together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specgen.engine.devices import upload
from specgen.engine.forward_pass import Cache


class CacheWithHiddenStates:
    """A KV cache that also keeps each token's hidden state. Implements `forward_pass.Cache`."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self._hidden: torch.Tensor | None = None  # [capacity, width]

    @property
    def length(self) -> int:
        return self.cache.length

    @length.setter
    def length(self, length: int) -> None:
        self.cache.length = length

    @property
    def capacity(self) -> int:
        return self.cache.capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        self.cache.capacity = capacity

    def gather(self, indices: Sequence[int], start: int) -> None:
        self.cache.gather(indices, start)
        if self._hidden is not None:
            source = upload(torch.tensor(indices), self._hidden.device)
            self._hidden[start : start + len(indices)] = self._hidden.index_select(0, source)

    def write_hidden(self, first: int, hidden: torch.Tensor) -> None:
        """Keeps the hidden states [n, width] of the tokens `first`, `first` + 1, ..."""
        end = first + hidden.shape[0]
        if self._hidden is None or end > self._hidden.shape[0]:
            old = self._hidden
            larger = hidden.new_zeros(max(end, self.capacity, 0 if old is None else 2 * old.shape[0]), hidden.shape[1])
            if old is not None:
                larger[:first] = old[:first]
            self._hidden = larger
        self._hidden[first:end] = hidden

    def hidden(self, first: int, last: int) -> torch.Tensor:
        """Returns the hidden states [`last` - `first`, width] of the tokens `first` to `last` - 1."""
        assert self._hidden is not None
        return self._hidden[first:last]
