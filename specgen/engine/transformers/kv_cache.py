"""The KV cache of a model that transformers' own code runs: one buffer a layer, whose valid length
the runner sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from specgen.engine.devices import move, release, upload
from specgen.engine.native.recurrent_states import RecurrentStates
from specgen.engine.transformers.recurrent_layers import ConvInput, StateInput


class KVCacheLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """One layer's keys and values, each in a buffer [batch, heads, capacity, head size] with one
    entry per token.

    Layers with a sliding window keep all entries too, so that a rollback is possible; the attention
    mask hides the old ones.
    """

    keys: Any
    values: Any

    def __init__(self, cache: KVCache) -> None:
        super().__init__()
        self._cache = cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the keys and values [batch, heads, n, head size] of n tokens after the first
        `length` entries of the cache.

        Returns views of all keys and of all values, from the first entry to the last one written.
        """
        start = self._cache.length
        end = self._cache.length + key_states.shape[-2]
        if self.keys is None or end > self.keys.shape[-2]:
            self.keys, self.values = (
                self._larger(*pair, end)
                for pair in ((self.keys, key_states), (self.values, value_states))
            )
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.is_initialized = True
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _larger(self, old: torch.Tensor | None, states: torch.Tensor, needed: int) -> torch.Tensor:
        """Returns a buffer for `states` with room for `needed` and `capacity` tokens, and twice the
        old one's; it holds the old one's valid entries."""
        # doubled: few copies as it grows
        capacity = max(needed, self._cache.capacity, 0 if old is None else 2 * old.shape[-2])
        buffer = states.new_empty(*states.shape[:-2], capacity, states.shape[-1])
        if old is not None:
            buffer[:, :, : self._cache.length] = old[:, :, : self._cache.length]
            release(old)
        return buffer

    def get_seq_length(self) -> int:
        return self._cache.length


class KVCache(Cache):  # type: ignore[misc]
    """The KV cache of all layers, with one entry per token. Implements `forward_pass.Cache`.

    `length` is set by the runner before each forward pass, and no layer changes it. So an
    interrupted forward pass has written only entries after the first `length`, which are never read
    before they are written again.
    """

    def __init__(self, layers: int, device: torch.device) -> None:
        self.length = 0
        self.capacity = 64
        self._device = device
        self.recurrent = RecurrentStates()
        self.steps: Any = None  # the `Steps` of the pass that is run
        super().__init__(layers=[KVCacheLayer(self) for _ in range(layers)])

    def keys_and_values(self, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        entries = self.layers[layer]
        keys, values = (
            move(part[:, :, :count].flatten(0, 1), self._device)
            for part in (entries.keys, entries.values)
        )
        return keys, values

    def restorable(self, length: int) -> int:
        return self.recurrent.restorable(length)

    def gather(self, indices: Sequence[int], start: int) -> None:
        self.recurrent.gather(indices, start)
        source = torch.tensor(indices)
        for buffer in self._buffers():
            moved = buffer.index_select(-2, upload(source, buffer.device))
            buffer[:, :, start : start + len(indices)] = moved

    def keep_sequences(self, kept: Sequence[int]) -> None:
        for layer in self.layers:
            if layer.keys is None:
                continue
            index = torch.tensor(kept, device=layer.keys.device)
            layer.keys = layer.keys[index]
            layer.values = layer.values[index]

    def _buffers(self) -> list[torch.Tensor]:
        return [
            buffer
            for layer in self.layers
            for buffer in (layer.keys, layer.values)
            if buffer is not None
        ]

    # what recurrent layers call, see `recurrent_layers`

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Says that there are no inputs: those in the records are used where new ones are
        written."""

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> ConvInput:
        return ConvInput(self.steps, self.recurrent.convs[layer_idx, state_idx], conv_states)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> StateInput:
        return StateInput(self.steps, self.recurrent.states[layer_idx, state_idx])

    def update_recurrent_state(self, *_: Any, **__: Any) -> None:
        """Does nothing: the records have been written."""


class GrowingCache(KVCache):
    """The cache of a model with a state that cannot be rolled back: what the model itself keeps of
    its first `end` tokens.

    After a rejected draft the text is run again from its beginning. `kept` are the arguments of the
    model's `forward` that continue it. `end` is -1 while they are changed.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(0, device)
        self.end = 0
        self.kept: dict[str, Any] = {}

    def restorable(self, length: int) -> int:
        return length if length == self.end else 0
