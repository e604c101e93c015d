"""The native decoder's KV cache: buffers for all layers, written at a position. Rolling back only
sets a length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

import torch

from specgen.engine.devices import move, release, upload
from specgen.engine.kernels.branches import Places
from specgen.engine.native.recurrent_states import RecurrentStates

# tokens; GPU kernels want the rows of masks, which are as long, to begin at multiples of 16 bytes
_ALIGNMENT = 64


class LayerEntries(NamedTuple):
    """The views of one layer's KV cache for one forward pass over n tokens.

    `written` [2, kv heads, n, head size] is where the keys (index 0) and values (1) of the n tokens
    are written. `keys` and `values` [kv heads, m, head size] are what attention reads, the n tokens
    included.
    """

    written: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class EntriesWhenRead(Sequence[LayerEntries]):
    """The entries of each layer of a cache, made when they are read: kernels that run whole layers
    read none. See `KVBuffer.entries_when_read`."""

    def __init__(self, cache: KVBuffer, first: int, last: int) -> None:
        self._cache = cache
        self._bounds = first, last

    def __len__(self) -> int:
        return self._cache.num_layers

    @overload
    def __getitem__(self, layer: int) -> LayerEntries: ...

    @overload
    def __getitem__(self, layer: slice) -> Sequence[LayerEntries]: ...

    def __getitem__(self, layer: int | slice) -> LayerEntries | Sequence[LayerEntries]:
        if isinstance(layer, slice):
            return [self[index] for index in range(*layer.indices(len(self)))]
        return self._cache.entries_of(layer, *self._bounds)


class KVBuffer:
    """The KV cache of some layers of a model, in buffers of zeros.

    `devices` and `sizes` (number of key-value heads, head size) are those of each layer;
    `first_layer` is the index in the model of the first of them. `owners` has for each layer the
    index, counted from `first_layer`, of the layer whose entries it gets; None: all have their own.
    `buffers` has one buffer [layers, 2, kv heads, capacity, head size] for each device and size; a
    cache for several `sequences` has the key-value heads of all of them, one sequence after the
    other. `keys_and_values` returns entries on the device `reader`, by default the first layer's.
    `recurrent` has the records of recurrent layers.

    Layers with a sliding window keep all entries too, so that a rollback is possible. Entries after
    the first `length` are not used before they are written again: masks hide them, and they are
    finite, so they do not change what attention computes.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        sizes: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        *,
        first_layer: int = 0,
        sequences: int = 1,
        reader: torch.device | None = None,
        owners: Sequence[int] | None = None,
    ) -> None:
        self.length = 0
        self.capacity = 64
        self.first_layer = first_layer
        self._reader = reader or devices[0]
        self.recurrent = RecurrentStates()
        owners = range(len(devices)) if owners is None else owners
        of_parts: dict[tuple[torch.device, tuple[int, int]], list[int]] = {}
        for layer in dict.fromkeys(owners):
            of_parts.setdefault((devices[layer], sizes[layer]), []).append(layer)
        order = [layer for part in of_parts.values() for layer in part]
        self._slots = [order.index(owner) for owner in owners]
        self.num_layers = len(self._slots)
        self._is_in_order = self._slots == list(range(len(order)))
        self._kv_heads = [kv_heads for _, (kv_heads, _) in of_parts]
        self._places: tuple[list[torch.Tensor], Places] | None = None  # of these buffers
        self._room = 0  # tokens, in the buffers
        self.buffers = []
        for (device, (kv_heads, size)), layers in of_parts.items():
            self.buffers.append(
                torch.zeros(
                    len(layers), 2, sequences * kv_heads, 0, size, dtype=dtype, device=device
                )
            )

    def places(self) -> Places:
        """Returns where the keys and values of each layer are, until the buffers change."""
        if self._places is None or self._places[0] is not self.buffers:
            self._places = self.buffers, Places(self.buffers, self._slots)
        return self._places[1]

    def entries_when_read(self, first: int, last: int) -> EntriesWhenRead:
        """Returns what `entries(first, last, 0, last)` does; a layer's views are made when they are
        read."""
        self.make_room(last)
        return EntriesWhenRead(self, first, last)

    def make_room(self, needed: int) -> None:
        """Enlarges the buffers if they have no room for `needed` tokens."""
        if needed > self._room:
            self.enlarge(needed)

    def entries_of(self, layer: int, first: int, last: int) -> LayerEntries:
        """Returns the views of one layer, counted from `first_layer`, for a pass that writes
        entries `first` to `last` - 1 and reads the first `last`."""
        data = self._of_layer(layer)
        keys, values = data[:, :, :last].unbind(0)
        return LayerEntries(data[:, :, first:last], keys, values)

    def entries(self, first: int, last: int, start: int, end: int) -> list[LayerEntries]:
        """Returns, for each layer, the views for a pass that writes entries `first` to `last` - 1
        and reads `start` to `end` - 1.

        Enlarges the buffers if necessary.
        """
        self.make_room(max(last, end))
        made: list[LayerEntries] = []
        for data in self.buffers:
            keys, values = data[:, :, :, start:end].unbind(1)
            made += map(
                LayerEntries, data[:, :, :, first:last].unbind(0), keys.unbind(0), values.unbind(0)
            )
        return made if self._is_in_order else [made[slot] for slot in self._slots]

    def keys_and_values(self, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and the values of a layer's first `count` entries, each [kv heads,
        `count`, head size]; keys are rotated.

        They are on the device `reader` of this cache: views, or copies if the layer is on another
        device.
        """
        data = self._of_layer(layer - self.first_layer)
        keys, values = move(data[:, :, :count], self._reader).unbind(0)
        return keys, values

    def _of_layer(self, layer: int) -> torch.Tensor:
        """Returns the part of a buffer, [2, kv heads, capacity, head size], of a layer counted from
        `first_layer`."""
        slot = self._slots[layer]
        for data in self.buffers:
            if slot < data.shape[0]:
                break
            slot -= data.shape[0]
        return data[slot]

    def restorable(self, length: int) -> int:
        """Returns to which length the cache can be rolled back; see `forward_pass.Cache`."""
        return self.recurrent.restorable(length)

    def gather(self, indices: Sequence[int], start: int) -> None:
        """Moves the entries at `indices`, which are ascending, to `start`, `start + 1`, ... in
        every layer."""
        self.recurrent.gather(indices, start)
        count = len(indices)
        for data in self.buffers:
            moves = upload(torch.tensor([*indices, *range(start, start + count)]), data.device)
            data.index_copy_(3, moves[count:], data.index_select(3, moves[:count]))

    def keep_sequences(self, kept: Sequence[int]) -> None:
        """Drops all sequences but those with the indices `kept`, which are ascending."""
        parts = zip(self.buffers, self._kv_heads, strict=True)
        of_each = [data.view(*data.shape[:2], -1, heads, *data.shape[3:]) for data, heads in parts]
        self.buffers = [data[:, :, list(kept)].flatten(2, 3) for data in of_each]

    def enlarge(self, needed: int) -> None:
        """Copies the valid entries to new buffers with room for `needed` tokens, and at least for
        `capacity` and twice the old number.

        Static passes that were made for the old buffers become invalid.
        """
        # doubled: few copies as it grows
        capacity = max(needed, self.capacity, 2 * self._room)
        capacity = -(-capacity // _ALIGNMENT) * _ALIGNMENT
        grown = []
        # tensors made in inference mode could not be written outside it
        with torch.inference_mode(False), torch.no_grad():
            for old in self.buffers:
                larger = old.new_zeros(*old.shape[:3], capacity, old.shape[4])
                larger[:, :, :, : self.length] = old[:, :, :, : self.length]
                release(old)
                grown.append(larger)
        self.buffers = grown
        self._room = capacity
