"""The distributions and logits of drafts, in memory that a worker process shares with the target's process."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from mmap import mmap

import torch

from specgen.decoding.components import Components
from specgen.types import Draft


class SharedDrafts:
    """One run's part of the memory: `probs` for sampling and `logits` for recording, float32 [2, window, vocabulary] each.

    There are two slots, 0 and 1: one draft is being verified while the next is being made. `size` is in bytes, 0 for a run
    that needs neither.
    """

    def __init__(self, components: Components, window: int) -> None:
        needed = {"probs": not components.sampling.greedy, "logits": components.record}
        self._fields = [name for name, is_needed in needed.items() if is_needed]
        self._shape = (len(self._fields), 2, window, components.vocab_size)
        self.size = 4 * prod(self._shape)

    def map(self, memory: int, offset: int) -> None:
        """Use `size` bytes, from `offset` on, of the memory with this descriptor, which must be large enough already."""
        mapped = mmap(memory, offset + self.size)
        self._tensor = torch.frombuffer(mapped, dtype=torch.float32, offset=offset, count=prod(self._shape)).view(self._shape)

    def write(self, slot: int, draft: Draft) -> None:
        """Padded with zeros and -inf: a draft model may have fewer tokens than the target."""
        for name, memory in zip(self._fields, self._tensor[:, slot, : len(draft.tokens)], strict=True):
            values = getattr(draft, name)
            memory[:, : values.shape[-1]].copy_(values)
            memory[:, values.shape[-1] :] = 0.0 if name == "probs" else -torch.inf

    def read(self, slot: int, draft: Draft) -> Draft:
        """The draft with the tensors in the slot, which are valid until the draft after the next one begins."""
        return replace(draft, **dict(zip(self._fields, self._tensor[:, slot, : len(draft.tokens)], strict=True)))
