"""The kernels of static passes, as a set of functions that can be exchanged, and what they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specgen.engine.native.description import Activation, LayerKind, QKNorm
from specgen.engine.native.kv_buffer import LayerEntries
from specgen.engine.native.masks import additive

SPAN = 63  # tokens from `Ancestry.base` on that a pass can refer to: the bits of an int64 without its sign


class PassNumbers(NamedTuple):
    """The integers of a static pass, int64 on the device; see `ancestry`.

    `base` [1] is the index in the KV cache of the first token that `bits` and `depths` are about: all tokens see those before
    it. `first` [1] is the index of the pass's first token. Bit i of `bits` [width] says whether a token sees the one at `base` +
    i. `depths` [`SPAN` + 1] are the positions of the tokens from `base` on, minus `base`.
    """

    base: torch.Tensor
    first: torch.Tensor
    bits: torch.Tensor
    depths: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What the kernels have to know of one layer's attention.

    `index` is the layer's, `kind` the index of its kind. `qk_weight` [heads + kv heads, head size] is the weight of the RMSNorm
    of query and key heads that `KernelSet.store` applies, None if it applies none, and `eps` the number added in this norm.
    """

    index: int
    kind: int
    heads: int
    kv_heads: int
    size: int
    score_cap: float | None
    qk_weight: torch.Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The functions that a static pass calls between its matrix products.

    `store(heads, spec, inputs)` gets all heads [width, heads + 2 kv heads, head size]: queries, keys, values. It applies the norm
    of query and key heads if `norms` names it, and the rotary embedding, writes keys and values to the cache, and returns the
    queries [width, heads, head size]. It may change `heads`. `attend(query, spec, inputs)` returns the attention's output [width,
    heads * head size]. `gate(inner, activation)` returns activation(gate) * up [width, size], which are side by side in `inner`
    [width, 2 size].

    `finds_keys`: `attend` reads from the device how many entries of the cache are in use, so its time does not depend on the
    cache's capacity.
    """

    store: Callable[[torch.Tensor, AttentionSpec, StaticInputs], torch.Tensor]
    attend: Callable[[torch.Tensor, AttentionSpec, StaticInputs], torch.Tensor]
    gate: Callable[[torch.Tensor, Activation], torch.Tensor]
    norms: frozenset[QKNorm] = frozenset()
    finds_keys: bool = False


class StaticInputs:
    """What the layers need of one run of a static pass. It is computed on the device when a kernel asks for it first.

    `rotations` are the rotations of the positions 0, 1, ... by name, complex [bucket, R / 2]. `entries` have the whole buffer of
    each layer, and its first `bucket` keys and values. `first_layer` is the index of the first of them. `group` is the number of
    query heads per key-value head.
    """

    def __init__(
        self,
        kernels: KernelSet,
        numbers: PassNumbers,
        kinds: Sequence[LayerKind],
        rotations: Mapping[str, torch.Tensor],
        entries: Sequence[LayerEntries],
        group: int,
        first_layer: int,
        indices: torch.Tensor,
    ) -> None:
        self.kernels, self.numbers, self.kinds, self.rotations = kernels, numbers, kinds, rotations
        self._entries, self._group, self._first_layer, self._indices = entries, group, first_layer, indices
        self._places: tuple[torch.Tensor, torch.Tensor] | None = None
        self._near: tuple[torch.Tensor, torch.Tensor] | None = None
        self._rotated: dict[str, torch.Tensor] = {}
        self._masks: dict[int | None, torch.Tensor] = {}

    def attention(self, heads: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Returns a layer's attention [width, heads * head size] for all its heads [width, heads + 2 kv heads, head size]."""
        return self.kernels.attend(self.kernels.store(heads, spec, self), spec, self)

    def entries(self, spec: AttentionSpec) -> LayerEntries:
        """Returns a layer's part of the KV cache."""
        return self._entries[spec.index - self._first_layer]

    def window(self, spec: AttentionSpec) -> int | None:
        """Returns a layer's sliding window; None if it excludes nothing in this bucket."""
        window = self.kinds[spec.kind].window
        return None if window is None or window >= self._indices.shape[0] else window

    def slots(self) -> torch.Tensor:
        """Returns the cache indices [width] of the pass's tokens."""
        return self.slots_and_positions()[0]

    def rotation(self, spec: AttentionSpec) -> torch.Tensor | None:
        """Returns the rotations [width, 1, R / 2] of the pass's tokens; None for a layer without rotary embedding."""
        name = self.kinds[spec.kind].rotary
        if name is not None and name not in self._rotated:
            self._rotated[name] = self.rotations[name].index_select(0, self.slots_and_positions()[1])[:, None]
        return None if name is None else self._rotated[name]

    def mask(self, spec: AttentionSpec, dtype: torch.dtype) -> torch.Tensor:
        """Returns a layer's additive mask [width * group, bucket]; see `masks`."""
        window = self.window(spec)
        if window not in self._masks:
            visible, of_keys = self._visible()
            if window is not None:
                _, positions = self.slots_and_positions()
                visible = visible & (positions[:, None] - of_keys < window)
            mask = additive(visible, dtype)
            if self._group > 1:
                mask = mask[:, None].expand(-1, self._group, -1).reshape(-1, mask.shape[1])
            self._masks[window] = mask
        return self._masks[window]

    @property
    def bucket(self) -> int:
        """The number of cache entries that attention reads."""
        return self._indices.shape[0]

    def slots_and_positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the cache indices and the positions of the pass's tokens, each [width]."""
        if self._places is None:
            base, first, bits, depths = self.numbers
            slots = self._indices[: bits.shape[0]] + first
            self._places = slots, depths.index_select(0, slots - base) + base
        return self._places

    def _visible(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns which keys [width, bucket] the tokens see without a window, and the keys' positions [bucket]."""
        if self._near is None:
            base, _, bits, depths = self.numbers
            offsets = self._indices - base
            before, bit = offsets < 0, offsets.clamp(0, SPAN)  # no token has bit SPAN
            visible = ((bits[:, None] >> bit) & 1).bool().logical_or_(before)
            self._near = visible, torch.where(before, offsets, depths.index_select(0, bit)) + base
        return self._near
