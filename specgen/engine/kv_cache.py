"""Pre-allocated KV cache; rolling back sets a length, and appending copies nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer


class KVCacheLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """One layer's keys and values, each in a buffer [batch, heads, capacity, head size]; `update` returns views of them.

    The mask implements sliding windows: entries before the window stay, for rollback.
    """

    keys: Any
    values: Any

    def __init__(self, cache: KVCache) -> None:
        super().__init__()
        self._cache = cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [batch, heads, n, head size] at the cache's length; return all entries up to the end of the written ones."""
        self.keys = _write(self.keys, key_states, self._cache)
        self.values = _write(self.values, value_states, self._cache)
        self.is_initialized = True
        end = self._cache.length + key_states.shape[-2]
        return self.keys[:, :, :end], self.values[:, :, :end]

    def gather(self, source: torch.Tensor, start: int) -> None:
        """Move the entries at the indices `source` to `start`, `start + 1`, ..."""
        for buffer in (self.keys, self.values):
            if buffer is not None:
                buffer[..., start : start + source.shape[0], :] = buffer.index_select(-2, source)

    def get_seq_length(self) -> int:
        return self._cache.length


class KVCache(Cache):  # type: ignore[misc]
    """The layers' buffers and their common length, in tokens.

    The model runner sets `length` before a forward pass, and no layer changes it: an interrupted forward pass has written only
    after the length, where no entry is ever read.
    """

    def __init__(self, layers: int) -> None:
        self.length = 0
        self.capacity = 64
        super().__init__(layers=[KVCacheLayer(self) for _ in range(layers)])

    def gather(self, indices: Sequence[int], start: int, device: torch.device) -> None:
        """Move the entries at `indices` (ascending, none below its new index) to `start`, `start + 1`, ... in every layer."""
        source = torch.tensor(indices, device=device)
        for layer in self.layers:
            layer.gather(source, start)


def _write(buffer: torch.Tensor | None, states: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """Write [..., n, size] into a buffer [..., capacity, size] at the cache's length. Returns the buffer, or a larger one."""
    start, end = cache.length, cache.length + states.shape[-2]
    if buffer is None or end > buffer.shape[-2]:
        old = buffer
        capacity = max(end, cache.capacity, 0 if old is None else 2 * old.shape[-2])  # doubled: few copies as it grows
        buffer = states.new_empty(*states.shape[:-2], capacity, states.shape[-1])
        if old is not None:
            buffer[..., :start, :] = old[..., :start, :]
    buffer[..., start:end, :] = states
    return buffer


def bytes_per_token(config: Any, bytes_per_number: int) -> int:
    """Memory of one token's keys and values in all layers of a model with this text config."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * head_size * bytes_per_number)
