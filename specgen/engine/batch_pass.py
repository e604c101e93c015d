"""The input of one forward pass over several sequences at once, as training does it, in the form that all backends share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch


class BatchCache(Protocol):
    """A KV cache for several sequences, with one entry per token of each. The first `length` entries are valid.

    Forward passes write after the first `length` entries and leave `length` as it is. Buffers that are allocated later have room
    for at least `capacity` tokens per sequence.
    """

    length: int
    capacity: int

    def keep_sequences(self, kept: Sequence[int]) -> None:
        """Drops all sequences but those with the indices `kept`, which must be ascending."""
        ...

    def keys_and_values(self, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and the values of a layer's first `count` entries; see `forward_pass.ReadableCache`."""
        ...


class BatchPass(NamedTuple):
    """One forward pass over n tokens of each of several sequences.

    `ids` and `positions` are [batch, n]. `visible` [batch, n, keys] is true where a token may see a key; the model applies its
    sliding windows itself, by `key_positions` [batch, keys], the positions of the keys' tokens. The keys are those in `cache`,
    followed by those of the n tokens; without a cache (None) they are those of the n tokens alone.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    visible: torch.Tensor
    key_positions: torch.Tensor
    cache: Any = None


def text_pass(ids: torch.Tensor) -> BatchPass:
    """Returns the pass over one text from its beginning, without a cache. `ids` [n] are the text's token ids."""
    positions = torch.arange(len(ids), device=ids.device)[None]
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool, device=ids.device).tril()
    return BatchPass(ids[None], positions, causal[None], positions)
