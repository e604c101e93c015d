"""The inputs of a native forward pass: rotations, masks, and what is written to and read from the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from specgen.engine.devices import move, upload
from specgen.engine.forward_pass import BatchPass, ForwardPass
from specgen.engine.native.architecture import Architecture, LayerKind
from specgen.engine.native.attention import CAUSAL, KEY_BLOCK, WIDE, Sight, has_causal_kernel, sight_of_chain
from specgen.engine.native.kv_buffer import KVBuffer, LayerEntries
from specgen.engine.native.rotary import RotaryTable

# Padding with which a token's logits do not depend on the tokens that are run with it. Products of fewer than 4 rows round
# differently, and so do the last 1 to 3 query rows of an attention, which processes them in blocks, and of a
# product whose rows two threads share: so multiples of 4.
EXACT_ROWS = 4


class KindInputs(NamedTuple):
    """What the layers of one kind (sliding window, rotary frequencies, device) need in one forward pass.

    `rotation` [batch * rows, 1, R/2] holds complex numbers (None: no rotary embedding), `mask` is as for `attention.attend` or
    `attend_batch`, and `entries` are those of each layer in the KV cache (None: no cache).
    """

    rotation: torch.Tensor | None
    mask: torch.Tensor | None
    entries: Sequence[LayerEntries] | None


class PassInputs(NamedTuple):
    """The inputs of one forward pass over `rows` tokens, padding included, of one sequence, or of each of `batch` sequences.

    `kinds` has the inputs for each kind of layer. `attended` is the number of tokens that attention is computed for, `written`
    the number whose keys and values the cache keeps; the rest are padding. `first_layer` is the index of the cache's first layer.
    `fused`: attention always takes the same kernel, so that results do not depend on the number of tokens. `slots` [rows] are
    the cache indices that a static pass writes to, into entries that are the whole buffer; None: the entries are those written.
    """

    rows: int
    attended: int
    written: int
    kinds: Sequence[KindInputs]
    batch: int | None = None
    first_layer: int = 0
    fused: bool = False
    slots: torch.Tensor | None = None


class Ancestry(NamedTuple):
    """Which tokens those of a forward pass see. A token is known by its cache index.

    Each token of the pass sees all tokens before `base`. Bit j of `bits[i]` is 1 if the pass's i-th token sees token `base` + j:
    an ancestor or itself. `depths` are the positions of the tokens from `base` on, up to the pass's last one, minus `base`.
    """

    base: int
    depths: Sequence[int]
    bits: Sequence[int]


def ancestry(forward_pass: ForwardPass) -> Ancestry:
    context, draft, first, last = forward_pass[:4]
    base = first if forward_pass.is_chain else min(first, len(context))
    chain = last - base if forward_pass.is_chain else min(last, len(context)) - base
    depths, committed = list(range(chain)), (1 << chain) - 1
    bits = [(2 << index) - 1 for index in range(chain)]
    for parent in draft.parents[: last - base - chain]:
        own = 1 << len(bits)
        depths.append(chain if parent < 0 else depths[chain + parent] + 1)
        bits.append((committed if parent < 0 else bits[chain + parent]) | own)
    return Ancestry(base, depths, bits[first - base :])


def sight_of_tree(base: int, depths: Sequence[int], bits: Sequence[int], device: torch.device) -> Sight:
    """Returns what the tokens of a pass see of all keys up to the last one's, with few small copies to a GPU."""
    rows, size, length = len(bits), len(depths), -(-len(depths) // 8)
    from_base = upload(torch.tensor(depths), device) + base
    packed = bytearray(b"".join(row.to_bytes(length, "little") for row in bits))
    as_bytes = upload(torch.frombuffer(packed, dtype=torch.uint8), device).view(rows, length, 1)
    seen = (as_bytes >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
    hidden = torch.zeros(rows, base + size, dtype=torch.bool, device=device)
    hidden[:, base:] = (seen == 0).view(rows, length * 8)[:, :size]
    return Sight(hidden, from_base[size - rows :], torch.cat((torch.arange(base, device=device), from_base)))


def layer_kinds(
    architecture: Architecture, devices: Sequence[torch.device]
) -> tuple[list[tuple[LayerKind, torch.device]], list[int]]:
    """Returns the different pairs of a layer's kind and its device, and the index of each layer's; `devices` are the layers'.

    All kinds are also paired with the last device, on which exit layers are.
    """
    of_layers = list(zip(architecture.layers, devices, strict=True))
    kinds = list(dict.fromkeys([*of_layers, *((kind, devices[-1]) for kind in architecture.layers)]))
    return kinds, [kinds.index(pair) for pair in of_layers]


class InputMaker:
    """Makes the inputs of all forward passes of one model.

    `devices` are those of the layers; `kinds`: see `layer_kinds`. `min_rows` is the least number of tokens per pass. `exact`:
    pads passes so that the same bits result whatever their width is. `tables` are the rotations of each kind, `group` the number
    of query heads per key-value head.
    """

    def __init__(
        self,
        architecture: Architecture,
        dtype: torch.dtype,
        devices: Sequence[torch.device],
        *,
        min_rows: int = 1,
        exact: bool = False,
    ) -> None:
        self.kinds, _ = layer_kinds(architecture, devices)
        self.group = architecture.num_heads // architecture.num_kv_heads
        self._dtype, self._min_rows, self._exact = dtype, max(min_rows, EXACT_ROWS if exact else 1), exact
        rounded = None if architecture.rotary_in_float32 else dtype
        named = {(kind.rotary, on) for kind, on in self.kinds if kind.rotary is not None}
        made = {(name, on): RotaryTable(architecture.rotary[name], on, rounded) for name, on in named}
        self.tables = [None if kind.rotary is None else made[kind.rotary, on] for kind, on in self.kinds]
        fits = architecture.score_cap is None and not exact
        self._has_causal = [fits and has_causal_kernel(on, dtype, architecture.head_size) for _, on in self.kinds]

    def __call__(self, forward_pass: ForwardPass) -> PassInputs:
        """Returns the inputs of a pass of a `ModelRunner`, whose KV cache is a `KVBuffer`."""
        cache = forward_pass.cache
        assert isinstance(cache, KVBuffer)
        if not forward_pass.is_chain:
            return self._of_tree(forward_pass, cache)
        return self._of_chain(forward_pass.first, forward_pass.last, cache, forward_pass.long_rope, is_exact=self._exact)

    def without_cache(self, count: int, *, long_rope: bool = False) -> PassInputs:
        """Returns the inputs of a pass over `count` tokens from position 0 on, without a KV cache."""
        return self._of_chain(0, count, None, long_rope)

    def _of_chain(self, first: int, last: int, cache: KVBuffer | None, long_rope: bool, *, is_exact: bool = False) -> PassInputs:
        count = last - first
        rows = count if cache is None else self.padded(count)
        attended = rows if is_exact else count
        made = []
        for number, (kind, device) in enumerate(self.kinds):
            start = 0 if kind.window is None or is_exact or cache is None else max(0, first + 1 - kind.window)
            end = -(-(first + attended) // KEY_BLOCK) * KEY_BLOCK if is_exact else last
            table = self.tables[number]
            rotation = None if table is None else table.rows(first, first + rows, long=long_rope)[:, None]
            entries = None if cache is None else cache.entries(first, last, start, end)
            made.append(KindInputs(rotation, self._chain_mask(number, kind, device, first, attended, start, end), entries))
        return PassInputs(rows, attended, count, made, None, 0 if cache is None else cache.first_layer, is_exact)

    def _of_tree(self, forward_pass: ForwardPass, cache: KVBuffer) -> PassInputs:
        """Returns the inputs of a pass over nodes of a draft tree, and committed tokens before them."""
        first, last = forward_pass.first, forward_pass.last
        count, rows = last - first, self.padded(last - first)
        seen, group = ancestry(forward_pass), self.group if count < WIDE else 1
        sights = {device: sight_of_tree(*seen, device) for _, device in self.kinds}
        entries = cache.entries(first, last, 0, last)
        made = []
        for (kind, device), table in zip(self.kinds, self.tables, strict=True):
            sight, rotation = sights[device], None
            if table is not None:
                at = sight.positions if rows == count else pad(sight.positions, (0, rows - count))
                rotation = table.gather(at, long=forward_pass.long_rope, end=first + rows)[:, None]
            made.append(KindInputs(rotation, sight.mask(kind.window, self._dtype, group), entries))
        return PassInputs(rows, count, count, made, None, cache.first_layer)

    def padded(self, count: int) -> int:
        """Returns the number of rows that a product for `count` tokens has, padding included."""
        rows = max(count, self._min_rows)
        return -(-rows // EXACT_ROWS) * EXACT_ROWS if self._exact else rows

    def first_row(self, begin: int, rows: int) -> int:
        """Returns the first of a pass's `rows` rows that the LM head has to run, to get the logits of those from `begin` on."""
        return max(0, rows - self.padded(rows - begin))

    def with_padding(self, hidden: torch.Tensor, rows: int) -> torch.Tensor:
        """Returns hidden states [n, width] with zeros after them, [`rows`, width]; the same tensor if there is nothing to add."""
        return hidden if hidden.shape[0] == rows else pad(hidden, (0, 0, 0, rows - hidden.shape[0]))

    def batched(self, batch: BatchPass) -> PassInputs:
        """Returns the inputs of a pass over several sequences, whose cache, if there is one, is a `KVBuffer` for as many."""
        sequences, tokens = batch.ids.shape
        keys, cache = batch.key_positions.shape[1], batch.cache
        entries = None if cache is None else cache.entries(keys - tokens, keys, 0, keys)
        last = int(batch.key_positions.max()) + 1  # found once for all tables: a GPU has to be waited for
        sights = {
            device: Sight(*(move(part, device) for part in (~batch.visible, batch.positions, batch.key_positions)))
            for device in dict.fromkeys(device for _, device in self.kinds)
        }
        masks = {(kind.window, on): sights[on].mask(kind.window, self._dtype)[:, None] for kind, on in self.kinds}
        made = []
        for (kind, device), table in zip(self.kinds, self.tables, strict=True):
            rotation = None
            if table is not None:
                is_long = last > (table.long_boundary or last)
                rotation = table.gather(sights[device].positions.flatten(), is_long, last)[:, None]
            made.append(KindInputs(rotation, masks[kind.window, device], entries))
        return PassInputs(tokens, tokens, tokens, made, sequences, 0 if cache is None else cache.first_layer)

    def _chain_mask(
        self, number: int, kind: LayerKind, device: torch.device, first: int, rows: int, start: int, end: int
    ) -> torch.Tensor | None:
        last = first + rows
        if rows == 1 and end == last:  # one token sees all keys: those that its window excludes are not read
            return None
        if self._has_causal[number] and (kind.window is None or last <= kind.window):
            return CAUSAL
        group = self.group if rows < WIDE else 1
        return sight_of_chain(first, rows, start, end, device).mask(kind.window, self._dtype, group)
