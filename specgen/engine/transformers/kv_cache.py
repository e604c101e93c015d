"""A pre-allocated KV cache for transformers' models. Rolling back only sets a length; appending copies no earlier entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from specgen.engine.devices import move, release, upload


class KVCacheLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """One layer's keys and values, each in a buffer [batch, heads, capacity, head size] with one entry per token.

    Layers with a sliding window keep all entries too, so that a rollback is possible; the attention mask hides the old ones.
    """

    keys: Any
    values: Any

    def __init__(self, cache: KVCache) -> None:
        super().__init__()
        self._cache = cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the keys and values [batch, heads, n, head size] of n tokens after the first `length` entries of the cache.

        Returns views of all keys and of all values up to the end of the written ones.
        """
        self.keys = _write(self.keys, key_states, self._cache)
        self.values = _write(self.values, value_states, self._cache)
        self.is_initialized = True
        end = self._cache.length + key_states.shape[-2]
        return self.keys[:, :, :end], self.values[:, :, :end]

    def gather(self, source: torch.Tensor, start: int) -> None:
        """Moves the entries at the indices `source` [n] to the indices `start`, `start + 1`, ..."""
        for buffer in (self.keys, self.values):
            if buffer is not None:
                source = move(source, buffer.device)  # of one layer: others may be on other devices
                buffer[..., start : start + source.shape[0], :] = buffer.index_select(-2, source)

    def get_seq_length(self) -> int:
        return self._cache.length


class KVCache(Cache):  # type: ignore[misc]
    """The KV cache of all layers, with one entry per token. Each layer's first `length` entries are valid.

    A newly allocated buffer has room for at least `capacity` tokens. `length` is set before each forward pass, and no layer
    changes it. So an interrupted forward pass has written only entries after the first `length`, which are never read before they
    are written again.
    """

    def __init__(self, layers: int, device: torch.device) -> None:
        self.length, self._device = 0, device
        self.capacity = 64
        super().__init__(layers=[KVCacheLayer(self) for _ in range(layers)])

    def keys_and_values(self, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views of the keys and of the values of a layer's first `count` entries; see `forward_pass.ReadableCache`."""
        entries, device = self.layers[layer], self._device
        keys, values = (move(part[:, :, :count].flatten(0, 1), device) for part in (entries.keys, entries.values))
        return keys, values

    def gather(self, indices: Sequence[int], start: int) -> None:
        """Moves the entries at `indices` to `start`, `start + 1`, ... in every layer; see `forward_pass.Cache`."""
        device = next((layer.keys.device for layer in self.layers if layer.keys is not None), None)
        source = upload(torch.tensor(indices), device or torch.device("cpu"))
        for layer in self.layers:
            layer.gather(source, start)

    def keep_sequences(self, kept: Sequence[int]) -> None:
        """Drops all sequences but those with the indices `kept`; see `batch_pass.BatchCache`."""
        for layer in self.layers:
            index = torch.tensor(kept, device=layer.keys.device)
            layer.keys, layer.values = layer.keys[index], layer.values[index]


def _write(buffer: torch.Tensor | None, states: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """Writes `states` [..., n, size] into `buffer` [..., capacity, size] at the index `cache.length`, and returns the buffer.

    If `buffer` is None or too small, a larger one is allocated, filled and returned.
    """
    start, end = cache.length, cache.length + states.shape[-2]
    if buffer is None or end > buffer.shape[-2]:
        old = buffer
        capacity = max(end, cache.capacity, 0 if old is None else 2 * old.shape[-2])  # doubled: few copies as it grows
        buffer = states.new_empty(*states.shape[:-2], capacity, states.shape[-1])
        if old is not None:
            buffer[..., :start, :] = old[..., :start, :]
            release(old)
    buffer[..., start:end, :] = states
    return buffer
