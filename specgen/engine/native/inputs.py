"""Makes the inputs of a native forward pass: rotations, masks, and what is written to and read from the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specgen.engine.batch_pass import BatchPass
from specgen.engine.forward_pass import ForwardPass, positions
from specgen.engine.native.attention import WIDE
from specgen.engine.native.description import Architecture, LayerKind
from specgen.engine.native.kv_buffer import KVBuffer
from specgen.engine.native.layer import KindInputs, PassInputs
from specgen.engine.native.masks import ChainMasks, additive, visible_to_chain, visible_to_tree
from specgen.engine.native.rotary import RotaryTable

EXACT_ROWS, EXACT_KEYS = 4, 512  # padding with which a token's logits do not depend on the tokens that are run with it


def layer_kinds(architecture: Architecture) -> list[LayerKind]:
    """Returns the different kinds of layers of a model, in the order of `PassInputs.kinds`."""
    return list(dict.fromkeys(architecture.layers))


class InputMaker:
    """Makes the inputs of all forward passes of one model.

    `min_rows` is the least number of tokens per pass. `exact`: pads passes so that the same bits result whatever their width is.
    """

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, device: torch.device, *, min_rows: int = 1, exact: bool = False
    ) -> None:
        self._kinds = layer_kinds(architecture)
        self._dtype, self._device, self._rotary = dtype, device, architecture.rotary
        self._min_rows, self._exact = min_rows, exact
        self._group = architecture.num_heads // architecture.num_kv_heads
        rounded = None if architecture.rotary_in_float32 else dtype
        self._tables = {key: RotaryTable(rotary, device, rounded) for key, rotary in architecture.rotary.items()}
        windows = {kind.window for kind in self._kinds}
        self._chain_masks = {window: ChainMasks(self._group, window, dtype, device) for window in windows}

    def __call__(self, forward_pass: ForwardPass) -> PassInputs:
        """Returns the inputs of a pass of a `ModelRunner`, whose KV cache is a `KVBuffer`."""
        first, last = forward_pass.first, forward_pass.last
        cache: KVBuffer = forward_pass.cache
        count = last - first
        rows = count if count >= self._min_rows else self._min_rows
        is_chain = forward_pass.is_chain
        attended = rows if self._exact and is_chain else count
        kinds = []
        at = None if is_chain else positions(forward_pass)
        for kind in self._kinds:
            rotation = self._rotation(kind, first, rows, at, forward_pass.long_rope)
            start, end = self._keys(kind.window, first, first + attended if self._exact else last, is_chain)
            entries = cache.entries(first, last, start, end)
            if at is None:
                mask = self._chain_mask(kind.window, first, attended, start, end)
            else:
                mask = self._tree_mask(forward_pass, at, kind.window)
            kinds.append(KindInputs(rotation, mask, entries))
        return PassInputs(rows, attended, count, kinds, None, cache.first_layer, self._exact and is_chain)

    def without_cache(self, count: int, *, long_rope: bool = False) -> PassInputs:
        """Returns the inputs of a pass over `count` tokens from position 0 on, without a KV cache."""
        kinds = [
            KindInputs(self._rotation(kind, 0, count, None, long_rope), self._chain_mask(kind.window, 0, count, 0, count), None)
            for kind in self._kinds
        ]
        return PassInputs(count, count, count, kinds)

    def batched(self, batch: BatchPass) -> PassInputs:
        """Returns the inputs of a pass over several sequences, whose cache, if there is one, is a `KVBuffer` for as many."""
        sequences, tokens = batch.ids.shape
        keys, at, cache = batch.key_positions.shape[1], batch.positions.flatten(), batch.cache
        first = keys - tokens
        entries = None if cache is None else cache.entries(first, keys, 0, keys)
        windows = {kind.window for kind in self._kinds}
        masks = {window: additive(batch.within(window), self._dtype)[:, None] for window in windows}
        last = int(batch.key_positions.max()) + 1  # found once for all tables: a GPU has to be waited for
        kinds = []
        for kind in self._kinds:
            rotation = None
            if kind.rotary is not None:
                is_long = last > (self._rotary[kind.rotary].long_boundary or last)
                rotation = self._tables[kind.rotary].gather(at, is_long, last)[:, None]
            kinds.append(KindInputs(rotation, masks[kind.window], entries))
        return PassInputs(tokens, tokens, tokens, kinds, sequences, 0 if cache is None else cache.first_layer)

    def _keys(self, window: int | None, first: int, last: int, is_chain: bool) -> tuple[int, int]:
        """Returns the range of cache entries that attention reads."""
        if not is_chain:
            return 0, last
        if self._exact:
            return 0, -(-last // EXACT_KEYS) * EXACT_KEYS
        return (0 if window is None else max(0, first + 1 - window)), last

    def _rotation(self, kind: LayerKind, first: int, rows: int, at: Sequence[int] | None, long_rope: bool) -> torch.Tensor | None:
        if kind.rotary is None:
            return None
        table = self._tables[kind.rotary]
        if at is None:
            return table.rows(first, first + rows, long=long_rope)[:, None]
        padded = [*at, *[0] * (rows - len(at))]
        return table.gather(torch.tensor(padded, device=self._device), long=long_rope)[:, None]

    def _chain_mask(self, window: int | None, first: int, rows: int, start: int, end: int) -> torch.Tensor | None:
        if rows == 1 and end == first + 1:  # one token sees all keys: those that its window excludes are not read
            return None
        if rows >= WIDE:
            return additive(visible_to_chain(first, rows, start, end, window, self._device), self._dtype)
        return self._chain_masks[window](first, rows, start, end)

    def _tree_mask(self, forward_pass: ForwardPass, at: Sequence[int], window: int | None) -> torch.Tensor:
        committed, parents = len(forward_pass.context), forward_pass.draft.parents
        visible = visible_to_tree(committed, parents, at, forward_pass.first, forward_pass.last, window)
        mask = additive(visible.to(self._device), self._dtype)
        return mask if len(at) >= WIDE else mask.repeat_interleave(self._group, dim=0)
