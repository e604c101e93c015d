"""A key-value cache that is written at a position: rolling back is setting a number, and a step copies nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class KVCacheLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
    """One layer's keys and values in a buffer [1, heads, capacity, head size]; what `update` returns are views of it."""

    is_sliding = False  # a sliding window lives in the mask: the rows stay, so that a rollback finds them

    def __init__(self, cache: KVCache) -> None:
        super().__init__()
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self._cache = cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, heads, n, head size] behind the cache's length; return all rows up to there."""
        start = self._cache.length
        end = start + key_states.shape[-2]
        if self.keys is None or self.values is None or end > self.keys.shape[-2]:
            self.keys, self.values = self._grown(self.keys, key_states, end), self._grown(self.values, value_states, end)
            self.is_initialized = True
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grown(self, old: torch.Tensor | None, like: torch.Tensor, needed: int) -> torch.Tensor:
        """A larger buffer with what is kept of the old one. Twice as large, unless more was reserved: so growth stays cheap."""
        capacity = max(needed, self._cache.capacity, 0 if old is None else 2 * old.shape[-2])
        new = like.new_empty(*like.shape[:2], capacity, like.shape[-1])
        if old is not None:
            new[:, :, : self._cache.length] = old[:, :, : self._cache.length]
        return new

    def gather(self, source: torch.Tensor, start: int) -> None:
        """Move the rows at the slots `source` to `start`, `start + 1`, ..."""
        if self.keys is None or self.values is None:
            return
        end = start + source.shape[0]
        self.keys[:, :, start:end] = self.keys.index_select(2, source)
        self.values[:, :, start:end] = self.values.index_select(2, source)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare: the first `update` allocates."""

    def get_seq_length(self) -> int:
        return self._cache.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.length + query_length, 0

    def get_max_length(self) -> int:
        return -1


class HiddenStateBuffer:
    """Hidden rows [1, slots, width], written and gathered as a layer's keys are."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._buffer: torch.Tensor | None = None

    def write(self, rows: torch.Tensor) -> None:
        """Write [1, n, width] behind the cache's length."""
        start = self._cache.length
        end = start + rows.shape[1]
        if self._buffer is None or end > self._buffer.shape[1]:
            old = self._buffer
            capacity = max(end, self._cache.capacity, 0 if old is None else 2 * old.shape[1])
            self._buffer = rows.new_empty(1, capacity, rows.shape[2])
            if old is not None:
                self._buffer[:, :start] = old[:, :start]
        self._buffer[:, start:end] = rows

    def rows(self, first: int, last: int) -> torch.Tensor:
        """[1, last - first, width], a view."""
        assert self._buffer is not None
        return self._buffer[:, first:last]

    def gather(self, source: torch.Tensor, start: int) -> None:
        """Move the rows at the slots `source` to `start`, `start + 1`, ..."""
        if self._buffer is not None:
            self._buffer[:, start : start + source.shape[0]] = self._buffer.index_select(1, source)


class KVCache(Cache):  # type: ignore[misc]
    """The layers' buffers, and the one length that they share.

    `length` is set by the session before a pass, and no layer ever moves it: a pass that is interrupted half-way has written
    behind the length, where nothing is trusted.
    """

    def __init__(self, layers: int) -> None:
        self.length = 0
        self.capacity = 64
        super().__init__(layers=[KVCacheLayer(self) for _ in range(layers)])

    def gather(self, slots: Sequence[int], start: int, device: torch.device) -> None:
        """Make the rows at `slots` (ascending, each at or behind its new place) contiguous from `start` on."""
        source = torch.tensor(slots, device=device)
        for layer in self.layers:
            layer.gather(source, start)


def bytes_per_token(config: Any, size: int) -> int:
    """What a token's keys and values take in all layers of a model with this text config, in numbers of `size` bytes."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * head_size * size)
