"""Makes the inputs of a native forward pass: rotations, masks, and what is written to and read from the KV cache."""

from __future__ import annotations

import torch

from specgen.engine.batch_pass import BatchPass
from specgen.engine.forward_pass import ForwardPass
from specgen.engine.native.ancestry import ancestry
from specgen.engine.native.attention import CAUSAL, KEY_BLOCK, WIDE, has_causal_kernel
from specgen.engine.native.description import Architecture, LayerKind
from specgen.engine.native.kernels.torch_kernels import TORCH
from specgen.engine.native.kv_buffer import KVBuffer
from specgen.engine.native.layer import KindInputs, PassInputs
from specgen.engine.native.masks import ChainMasks, TreeMasks, additive, aligned, visible_to_chain
from specgen.engine.native.rotary import RotaryTable

# Padding with which a token's logits do not depend on the tokens that are run with it. Products of fewer than 4 rows round
# differently, and so do the last 1 to 3 query rows of an attention, which processes them in blocks, and of a
# product whose rows two threads share: so multiples of 4.
EXACT_ROWS = 4


def layer_kinds(architecture: Architecture) -> list[LayerKind]:
    """Returns the different kinds of layers of a model, in the order of `PassInputs.kinds`."""
    return list(dict.fromkeys(architecture.layers))


class InputMaker:
    """Makes the inputs of all forward passes of one model.

    `min_rows` is the least number of tokens per pass. `exact`: pads passes so that the same bits result whatever their width is.
    `kernels` are those of static passes. `kinds` are the kinds of layers, `tables` the rotations by name, `group` the number of
    query heads per key-value head.
    `has_causal_kernel`: the device has a fused attention in which each token of a chain sees the keys up to its own, without a
    mask, and in which several query heads read one key-value head.
    """

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, device: torch.device, *, min_rows: int = 1, exact: bool = False
    ) -> None:
        self.kinds, self.kernels = layer_kinds(architecture), TORCH
        self._dtype, self._device, self._rotary = dtype, device, architecture.rotary
        self._min_rows, self._exact = min_rows, exact
        self.group = architecture.num_heads // architecture.num_kv_heads
        rounded = None if architecture.rotary_in_float32 else dtype
        self.tables = {key: RotaryTable(rotary, device, rounded) for key, rotary in architecture.rotary.items()}
        fits = architecture.score_cap is None and not exact
        self.has_causal_kernel = fits and has_causal_kernel(device, dtype, architecture.head_size, self.group)
        windows = {kind.window for kind in self.kinds}
        self._chain_masks = {window: ChainMasks(self.group, window, dtype, device) for window in windows}

    def __call__(self, forward_pass: ForwardPass) -> PassInputs:
        """Returns the inputs of a pass of a `ModelRunner`, whose KV cache is a `KVBuffer`."""
        first, last = forward_pass.first, forward_pass.last
        cache: KVBuffer = forward_pass.cache
        count = last - first
        rows = self.padded(count)
        is_chain = forward_pass.is_chain
        attended = rows if self._exact and is_chain else count
        kinds = []
        tree = None if is_chain else TreeMasks(ancestry(forward_pass), self.group, self._dtype, self._device)
        for kind in self.kinds:
            rotation = self._rotation(kind, first, rows, tree, forward_pass.long_rope)
            start, end = self._keys(kind.window, first, first + attended if self._exact else last, is_chain)
            entries = cache.entries(first, last, start, end)
            mask = self._chain_mask(kind.window, first, attended, start, end) if tree is None else aligned(tree(kind.window))
            kinds.append(KindInputs(rotation, mask, entries))
        return PassInputs(rows, attended, count, kinds, None, cache.first_layer, self._exact and is_chain)

    def padded(self, count: int) -> int:
        """Returns the number of rows that a product for `count` tokens has, padding included."""
        rows = count if count >= self._min_rows else self._min_rows
        return -(-rows // EXACT_ROWS) * EXACT_ROWS if self._exact else rows

    def without_cache(self, count: int, *, long_rope: bool = False) -> PassInputs:
        """Returns the inputs of a pass over `count` tokens from position 0 on, without a KV cache."""
        kinds = [
            KindInputs(self._rotation(kind, 0, count, None, long_rope), self._chain_mask(kind.window, 0, count, 0, count), None)
            for kind in self.kinds
        ]
        return PassInputs(count, count, count, kinds)

    def batched(self, batch: BatchPass) -> PassInputs:
        """Returns the inputs of a pass over several sequences, whose cache, if there is one, is a `KVBuffer` for as many."""
        sequences, tokens = batch.ids.shape
        keys, at, cache = batch.key_positions.shape[1], batch.positions.flatten(), batch.cache
        first = keys - tokens
        entries = None if cache is None else cache.entries(first, keys, 0, keys)
        windows = {kind.window for kind in self.kinds}
        masks = {window: additive(batch.within(window), self._dtype)[:, None] for window in windows}
        last = int(batch.key_positions.max()) + 1  # found once for all tables: a GPU has to be waited for
        kinds = []
        for kind in self.kinds:
            rotation = None
            if kind.rotary is not None:
                is_long = last > (self._rotary[kind.rotary].long_boundary or last)
                rotation = self.tables[kind.rotary].gather(at, is_long, last)[:, None]
            kinds.append(KindInputs(rotation, masks[kind.window], entries))
        return PassInputs(tokens, tokens, tokens, kinds, sequences, 0 if cache is None else cache.first_layer)

    def _keys(self, window: int | None, first: int, last: int, is_chain: bool) -> tuple[int, int]:
        """Returns the range of cache entries that attention reads."""
        if not is_chain:
            return 0, last
        if self._exact:
            return 0, -(-last // KEY_BLOCK) * KEY_BLOCK
        return (0 if window is None else max(0, first + 1 - window)), last

    def _rotation(self, kind: LayerKind, first: int, rows: int, tree: TreeMasks | None, long_rope: bool) -> torch.Tensor | None:
        if kind.rotary is None:
            return None
        table = self.tables[kind.rotary]
        if tree is None:
            return table.rows(first, first + rows, long=long_rope)[:, None]
        padded = torch.nn.functional.pad(tree.positions, (0, rows - tree.positions.shape[0]))
        return table.gather(padded, long=long_rope, end=first + rows)[:, None]

    def _chain_mask(self, window: int | None, first: int, rows: int, start: int, end: int) -> torch.Tensor | None:
        last = first + rows
        if rows == 1 and end == last:  # one token sees all keys: those that its window excludes are not read
            return None
        if self.has_causal_kernel and (window is None or last <= window):
            return CAUSAL
        if rows >= WIDE:
            return aligned(additive(visible_to_chain(first, rows, start, end, window, self._device), self._dtype))
        return aligned(self._chain_masks[window](first, rows, start, end))
