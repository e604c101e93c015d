"""What a native model on several devices needs in place of the parts of one on a single device: layers, inputs, KV cache.

Each layer's weights, its part of the KV cache, the masks and the rotations are on the layer's device. The hidden states move to
the next device where its layers begin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache as memoised

import torch

from specgen.engine.batch_pass import BatchPass
from specgen.engine.devices import move
from specgen.engine.forward_pass import ForwardPass
from specgen.engine.native.inputs import InputMaker
from specgen.engine.native.kv_buffer import KVBuffer
from specgen.engine.native.layer import NativeLayer, PassInputs
from specgen.engine.native.residual import Residual


class PlacedLayer:
    """A layer that moves the residual stream to its device before it runs. Called as a `NativeLayer`."""

    def __init__(self, layer: NativeLayer, device: torch.device) -> None:
        self.device = device
        self._layer = layer

    def __call__(self, residual: Residual, inputs: PassInputs, *, attention: bool = True, mlp: bool = True) -> None:
        residual.move_to(self.device)
        self._layer(residual, inputs.on(self.device), attention=attention, mlp=mlp)


class PlacedKVCache:
    """The KV cache of layers on several devices: a `KVBuffer` on each of them, for the layers there.

    `device` is the model's, on which entries are read from outside. For the rest see `KVBuffer`.
    """

    def __init__(self, parts: Sequence[KVBuffer], device: torch.device) -> None:
        self._parts = {part.data.device: part for part in parts}
        self._device = device
        self.length, self.capacity = 0, parts[0].capacity

    @property
    def length(self) -> int:
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        self._length = length
        for part in self._parts.values():
            part.length = length

    @property
    def capacity(self) -> int:
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        self._capacity = capacity
        for part in self._parts.values():
            part.capacity = capacity

    def on(self, device: torch.device) -> KVBuffer:
        """Returns the cache of the layers on this device."""
        return self._parts[device]

    @property
    def last_device(self) -> torch.device:
        """The device of the last layers that this cache is for."""
        return list(self._parts)[-1]

    def keys_and_values(self, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a layer's first `count` keys and values, on the model's device; see `forward_pass.ReadableCache`."""
        part = next(part for part in self._parts.values() if part.first_layer <= layer < part.first_layer + len(part.data))
        keys, values = part.keys_and_values(layer, count)
        return move(keys, self._device), move(values, self._device)

    def gather(self, indices: Sequence[int], start: int) -> None:
        """Moves the entries at `indices` to `start`, `start + 1`, ... in every layer; see `forward_pass.Cache`."""
        for part in self._parts.values():
            part.gather(indices, start)

    def keep_sequences(self, kept: Sequence[int]) -> None:
        """Drops all sequences but those with the indices `kept`; see `batch_pass.BatchCache`."""
        for part in self._parts.values():
            part.keep_sequences(kept)


class PlacedInputs:
    """Makes the inputs of forward passes through layers on several devices, on each device when its first layer runs.

    Called as an `InputMaker`; `makers` has that of each device, `device` is the model's.
    """

    def __init__(self, makers: Mapping[torch.device, InputMaker], device: torch.device) -> None:
        self._makers, self._device = makers, device

    def __call__(self, forward_pass: ForwardPass) -> PassInputs:
        """Returns the inputs of a pass whose cache is a `PlacedKVCache`, or a `KVBuffer` if its layers are on one device."""
        cache = forward_pass.cache
        if isinstance(cache, PlacedKVCache):
            device = cache.last_device
            return _placed(lambda on: self._makers[on](forward_pass._replace(cache=cache.on(on))), device)
        return _placed(lambda on: self._makers[on](forward_pass), cache.data.device)

    def without_cache(self, count: int, *, long_rope: bool = False) -> PassInputs:
        """Returns the inputs of a pass over `count` tokens from position 0 on, without a KV cache."""
        return _placed(lambda on: self._makers[on].without_cache(count, long_rope=long_rope), self._device)

    def batched(self, batch: BatchPass) -> PassInputs:
        """Returns the inputs of a pass over several sequences, whose cache, if there is one, is a `PlacedKVCache` for as many."""

        def on_device(device: torch.device) -> PassInputs:
            ids, positions, visible, key_positions = (move(tensor, device) for tensor in batch[:4])
            cache = None if batch.cache is None else batch.cache.on(device)
            return self._makers[device].batched(BatchPass(ids, positions, visible, key_positions, cache))

        return _placed(on_device, self._device)


def _placed(make: Callable[[torch.device], PassInputs], device: torch.device) -> PassInputs:
    """Returns the inputs on `device`, made by `make`, which also makes those on the other devices when they are needed."""
    made = memoised(make)
    return made(device)._replace(placed=made)
