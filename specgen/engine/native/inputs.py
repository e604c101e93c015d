"""The inputs of a native forward pass: rotations, masks, and what is written to and read from the
KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, overload

import torch
from torch.nn.functional import pad

from specgen.base.errors import SpecgenError
from specgen.engine.devices import move
from specgen.engine.forward_pass import BatchPass, ForwardPass
from specgen.engine.kernels.branches import KindTable
from specgen.engine.kernels.operators import SeenSlots, kernels_for
from specgen.engine.native.architecture import Architecture, LayerKind
from specgen.engine.native.attend import CAUSAL, KEY_BLOCK, WIDE, has_causal_kernel
from specgen.engine.native.attention_mask import (
    AttentionMask,
    ChainSlots,
    ancestry,
    chain_mask,
    pass_mask,
    tree_slots,
)
from specgen.engine.native.kv_buffer import KVBuffer, LayerEntries
from specgen.engine.native.recurrent_states import RecurrentStates, Steps
from specgen.engine.native.rotary import RotaryTable

# Padding with which a token's logits do not depend on the tokens that are run with it. Products of
# fewer than 4 rows round differently, and so do the last 1 to 3 query rows of an attention, which
# processes them in blocks, and of a product whose rows two threads share: so multiples of 4.
EXACT_ROWS = 4


class KindInputs(NamedTuple):
    """What the layers of one kind (sliding window, rotary frequencies, device) need in one forward
    pass.

    `rotation` [batch * rows, 1, R/2] holds complex numbers for the R rotated elements of a head
    (None: no rotary embedding), `mask` is as for `attention.attend` or `attend_batch`, and
    `entries` are those of each layer in the KV cache (None: no cache). `seen` are the slots of the
    cache that each row sees, for our own kernels, which take no mask; None: torch computes.
    """

    rotation: torch.Tensor | None
    mask: torch.Tensor | None
    entries: Sequence[LayerEntries] | None
    seen: SeenSlots | None = None


class ChainTable(NamedTuple):
    """The inputs of the first `rows` tokens of any chain, for the kernels."""

    rows: int
    table: KindTable


class CachePlace(NamedTuple):
    """The cache whose entries from `slot` on a pass writes, and its `kinds` for the kernels."""

    cache: KVBuffer
    slot: int
    kinds: KindTable


class ChainKinds(Sequence[KindInputs]):
    """The inputs of each kind of layer in a pass over a chain, made when they are read: kernels
    that run whole layers read none."""

    def __init__(
        self, maker: InputMaker, first: int, last: int, cache: KVBuffer, *, is_long: bool
    ) -> None:
        self._maker = maker
        self._pass = first, last, cache, is_long

    def __len__(self) -> int:
        return len(self._maker.kinds)

    @overload
    def __getitem__(self, kind: int) -> KindInputs: ...

    @overload
    def __getitem__(self, kind: slice) -> Sequence[KindInputs]: ...

    def __getitem__(self, kind: int | slice) -> KindInputs | Sequence[KindInputs]:
        if isinstance(kind, slice):
            return [self[index] for index in range(*kind.indices(len(self)))]
        first, last, cache, is_long = self._pass
        rotation, seen = self._maker.of_chain_rows(kind, first, last, is_long=is_long)
        return KindInputs(rotation, None, cache.entries_when_read(first, last), seen)


class PassInputs(NamedTuple):
    """The inputs of one forward pass over `rows` tokens, padding included, of one sequence, or of
    each of `batch` sequences.

    `kinds` has the inputs for each kind of layer. `written` is the number of tokens whose keys and
    values the cache keeps; the others are padding. `first_layer` is the index of the cache's first
    layer. `fused`: attention always takes the same kernel, so that results do not depend on the
    number of tokens. `slots` [rows] are the cache indices that a static pass writes to; its
    `entries` are the whole buffer. None: each layer's `entries` say where to write. `steps` and
    `states` are for recurrent layers; None: there are none. `per_layer` [rows, layers, size] has
    the tokens' embeddings for each layer, where there are any. `place` is for kernels that run
    whole layers; None: each part of a layer is called by itself.
    """

    rows: int
    written: int
    kinds: Sequence[KindInputs]
    batch: int | None = None
    first_layer: int = 0
    fused: bool = False
    slots: torch.Tensor | None = None
    steps: Steps | None = None
    states: RecurrentStates | None = None
    per_layer: torch.Tensor | None = None
    place: CachePlace | None = None

    @property
    def recurrent_inputs(self) -> tuple[Steps, RecurrentStates]:
        """The order of the tokens and the layers' records. Raises SpecgenError for several
        sequences, which have neither."""
        if self.steps is None or self.states is None:
            raise SpecgenError(
                "a model with recurrent layers runs one text at a time",
                "Take another target to train with",
            )
        return self.steps, self.states


def layer_kinds(
    architecture: Architecture, devices: Sequence[torch.device]
) -> tuple[list[tuple[LayerKind, torch.device]], list[int]]:
    """Returns the distinct pairs of a kind of attention and a device, and for each layer the index
    of its pair.

    `devices` are those of the layers. Each kind is also paired with the last device, on which exit
    layers are.
    """
    attention = next(
        kind for kind in (*architecture.layers, LayerKind()) if kind.mixer == "attention"
    )
    attentions = []
    for kind in architecture.layers:
        read = kind if kind.mixer == "attention" else attention  # other mixers read no masks
        attentions.append(replace(read, mlp="dense", inner=None, owner=None))
    of_layers = list(zip(attentions, devices, strict=True))
    kinds = list(dict.fromkeys([*of_layers, *((kind, devices[-1]) for kind in attentions)]))
    return kinds, [kinds.index(pair) for pair in of_layers]


class InputMaker:
    """Makes the inputs of all forward passes of one model.

    `devices` are those of the layers; `kinds` are the pairs that `layer_kinds` returns. `exact`:
    pads passes so that a token's results have the same bits however many tokens a pass has.
    `tables` has the rotations for each of `kinds`, `groups` the number of query heads per key-value
    head.
    """

    def __init__(
        self,
        architecture: Architecture,
        dtype: torch.dtype,
        devices: Sequence[torch.device],
        *,
        exact: bool = False,
    ) -> None:
        self.kinds, _ = layer_kinds(architecture, devices)
        self.groups = [
            architecture.num_heads // (kind.kv_heads or architecture.num_kv_heads)
            for kind, _ in self.kinds
        ]
        self._dtype = dtype
        self._has_kernels = all(kernels_for(on, dtype) is not None for _, on in self.kinds)
        self._exact = exact
        self._is_recurrent = any(kind.mixer != "attention" for kind in architecture.layers)
        rounded = None if architecture.rotary_in_float32 else dtype
        named = {(kind.rotary, on) for kind, on in self.kinds if kind.rotary is not None}
        made = {
            (name, on): RotaryTable(architecture.rotary[name], on, rounded) for name, on in named
        }
        self.tables = [
            None if kind.rotary is None else made[kind.rotary, on] for kind, on in self.kinds
        ]
        self._chain_slots = [ChainSlots(kind.window, causal=kind.causal) for kind, _ in self.kinds]
        self._is_causal = all(kind.causal for kind, _ in self.kinds)
        # without and with LongRoPE's frequencies for long runs
        self._chain_tables: dict[bool, ChainTable] = {}
        fits = architecture.score_cap is None and not architecture.sinks and not self._exact
        largest = max(kind.head_size or architecture.head_size for kind, _ in self.kinds)
        self._has_causal = fits and all(
            has_causal_kernel(on, dtype, largest) for _, on in self.kinds
        )

    def __call__(self, forward_pass: ForwardPass) -> PassInputs:
        """Returns the inputs of a forward pass of a `ModelRunner`. The pass's cache is a
        `KVBuffer`."""
        cache = forward_pass.cache
        first = forward_pass.first
        last = forward_pass.last
        assert isinstance(cache, KVBuffer)
        inputs = self._of_pass(forward_pass, cache, first, last)
        return (
            self.with_steps(inputs, forward_pass, cache.recurrent) if self._is_recurrent else inputs
        )

    def with_steps(
        self, inputs: PassInputs, forward_pass: ForwardPass, states: RecurrentStates
    ) -> PassInputs:
        """Returns the inputs with those of recurrent layers."""
        return inputs._replace(steps=Steps(forward_pass, self.kinds[0][1]), states=states)

    def _of_pass(
        self, forward_pass: ForwardPass, cache: KVBuffer, first: int, last: int
    ) -> PassInputs:
        if forward_pass.is_chain:
            return self.of_chain(first, last, cache, forward_pass.long_rope, exact=self._exact)
        if self._has_kernels:
            return self._of_tree(forward_pass, cache)
        rows = last - first
        made = []
        attention_masks = {device: pass_mask(forward_pass, device) for _, device in self.kinds}
        entries = cache.entries(first, last, 0, last)
        for (kind, device), table, group in zip(self.kinds, self.tables, self.groups, strict=True):
            attention_mask = attention_masks[device]
            rotation = None
            if table is not None:
                rotation = table.gather(attention_mask.positions, forward_pass.long_rope, last)[
                    :, None
                ]
            mask = attention_mask.additive(kind.window, self._dtype, group if rows < WIDE else 1)
            made.append(KindInputs(rotation, mask, entries))
        return PassInputs(rows, rows, made, None, cache.first_layer)

    def _of_tree(self, forward_pass: ForwardPass, cache: KVBuffer) -> PassInputs:
        """Returns the inputs of a pass over a draft tree for our own kernels."""
        first = forward_pass.first
        last = forward_pass.last
        tree = ancestry(forward_pass)
        own_depths = tree.depths[len(tree.depths) - len(tree.bits) :]
        at = torch.tensor(own_depths) + tree.base
        entries = cache.entries_when_read(first, last)
        seen = {
            window: tree_slots(tree, window)
            for window in dict.fromkeys(kind.window for kind, _ in self.kinds)
        }
        made = []
        for (kind, _), table in zip(self.kinds, self.tables, strict=True):
            rotation = None
            if table is not None:
                rotation = table.gather(at, forward_pass.long_rope, last)[:, None]
            made.append(KindInputs(rotation, None, entries, seen[kind.window]))
        rows = last - first
        place = CachePlace(cache, first, KindTable.of(made))
        return PassInputs(rows, rows, made, None, cache.first_layer, place=place)

    def of_chain(
        self, first: int, last: int, cache: KVBuffer | None, long_rope: bool, *, exact: bool = False
    ) -> PassInputs:
        """Returns the inputs of a pass over the tokens `first` to `last` - 1 of a chain; without a
        cache they see only each other."""
        rows = last - first
        end = last
        made = []
        if exact:
            rows = self.padded(rows)
            end = -(-(first + rows) // KEY_BLOCK) * KEY_BLOCK
        if self._has_kernels and cache is not None:
            return self._of_chain_for_kernels(first, last, cache, long_rope)
        for (kind, device), table, group in zip(self.kinds, self.tables, self.groups, strict=True):
            rotation = (
                None if table is None else table.rows(first, first + rows, long=long_rope)[:, None]
            )
            start = (
                0
                if kind.window is None or exact or cache is None
                else max(0, first + 1 - kind.window)
            )
            sees_all = rows == 1 or not (
                kind.causal or (kind.window is not None and last > kind.window)
            )
            if sees_all:  # a token alone sees all keys: those that its window excludes are not read
                mask = None
            elif self._has_causal and (kind.window is None or last <= kind.window):
                mask = CAUSAL
            else:
                attention_mask = chain_mask(first, rows, start, end, device)
                if not kind.causal and kind.window is not None:
                    attention_mask = attention_mask.both_ways(kind.window)
                mask = attention_mask.additive(
                    kind.window, self._dtype, group if rows < WIDE else 1
                )
            entries = None if cache is None else cache.entries(first, last, start, end)
            made.append(KindInputs(rotation, mask, entries))
        first_layer = 0 if cache is None else cache.first_layer
        return PassInputs(rows, last - first, made, None, first_layer, exact)

    def _of_chain_for_kernels(
        self, first: int, last: int, cache: KVBuffer, long_rope: bool
    ) -> PassInputs:
        """Returns the inputs of a pass over a chain for our own kernels, which pad nothing."""
        cache.make_room(last)
        kinds = ChainKinds(self, first, last, cache, is_long=long_rope)
        if self._is_causal:
            made = self._chain_tables.get(long_rope)
            if made is None or last > made.rows:
                made = self._make_chain_table(last, is_long=long_rope)
            table = KindTable(made.table.addresses, made.table.kinds, first)
            of_pass: Sequence[KindInputs] = kinds
        else:  # what a row sees depends on the pass
            of_pass = list(kinds)
            table = KindTable.of(of_pass)
        rows = last - first
        place = CachePlace(cache, first, table)
        return PassInputs(rows, rows, of_pass, None, cache.first_layer, place=place)

    def of_chain_rows(
        self, kind: int, first: int, last: int, *, is_long: bool
    ) -> tuple[torch.Tensor | None, SeenSlots]:
        """Returns, for a kind of layer, the rotations [n, 1, R/2] of the n tokens `first` to `last`
        - 1 of a chain (None: no rotary embedding), and the slots that they see."""
        table = self.tables[kind]
        rotation = None if table is None else table.rows(first, last, long=is_long)[:, None]
        return rotation, self._chain_slots[kind].rows(first, last)

    def _make_chain_table(self, length: int, *, is_long: bool) -> ChainTable:
        """Makes the table of chains for at least `length` tokens: making one for each pass takes
        ten times as long."""
        before = self._chain_tables.get(is_long)
        rows = max(length, 256 if before is None else 2 * before.rows)
        kinds: list[KindInputs] = []
        for kind in range(len(self.kinds)):
            rotation, seen = self.of_chain_rows(kind, 0, rows, is_long=is_long)
            kinds.append(KindInputs(rotation, None, (), seen))
        made = ChainTable(rows, KindTable.of(kinds))
        self._chain_tables[is_long] = made
        return made

    def padded(self, count: int) -> int:
        """Returns the number of rows, padding included, with which `count` tokens are run; `count`
        itself unless the model is exact."""
        return -(-count // EXACT_ROWS) * EXACT_ROWS if self._exact else count

    def with_padding(self, hidden: torch.Tensor, rows: int) -> torch.Tensor:
        """Returns hidden states [n, width] padded with zeros to [`rows`, width]; the same tensor if
        it has this size already."""
        return hidden if hidden.shape[0] == rows else pad(hidden, (0, 0, 0, rows - hidden.shape[0]))

    def batched(self, batch: BatchPass) -> PassInputs:
        """Returns the inputs of a pass over several sequences. If the pass has a cache, it is a
        `KVBuffer` for as many sequences."""
        sequences, tokens = batch.ids.shape
        keys = batch.key_positions.shape[1]
        cache = batch.cache
        entries = None if cache is None else cache.entries(keys - tokens, keys, 0, keys)
        # found once for all tables: a GPU has to be waited for
        last = int(batch.key_positions.max()) + 1
        given = ~batch.visible, batch.positions, batch.key_positions
        attention_masks = {
            on: AttentionMask(*(move(part, on) for part in given))
            for on in {device for _, device in self.kinds}
        }
        masks = {
            (kind.window, on): attention_masks[on].additive(kind.window, self._dtype)[:, None]
            for kind, on in self.kinds
        }
        made = []
        for (kind, device), table in zip(self.kinds, self.tables, strict=True):
            rotation = None
            if table is not None:
                is_long = last > (table.long_boundary or last)
                rotation = table.gather(attention_masks[device].positions.flatten(), is_long, last)[
                    :, None
                ]
            made.append(KindInputs(rotation, masks[kind.window, device], entries))
        return PassInputs(
            tokens, tokens, made, sequences, 0 if cache is None else cache.first_layer
        )
