"""Passes the probabilities and logits of drafts from a worker process to the target's process, in shared memory."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from mmap import mmap

import torch

from specgen.decoding.components import Components
from specgen.types import Draft


class SharedDrafts:
    """One run's part of the shared memory: `probs` if it samples and `logits` if it records, float32 [2, window, vocabulary].

    There are two slots, 0 and 1, because one draft is verified while the next is made. `window` is the largest number of tokens
    in a draft. `size` is in bytes; 0 for a run that needs neither tensor.
    """

    def __init__(self, components: Components, window: int) -> None:
        needed = {"probs": not components.sampling.greedy, "logits": components.record}
        self._fields = [name for name, is_needed in needed.items() if is_needed]
        self._shape = (len(self._fields), 2, window, components.vocab_size)
        self.size = 4 * prod(self._shape)

    def map(self, memory: int, offset: int) -> None:
        """Maps `size` bytes from `offset` on of the file descriptor `memory`. The file must be large enough already."""
        mapped = mmap(memory, offset + self.size)
        self._tensor = torch.frombuffer(mapped, dtype=torch.float32, offset=offset, count=prod(self._shape)).view(self._shape)

    def write(self, slot: int, draft: Draft) -> None:
        """Writes the draft's tensors to a slot. Pads a smaller draft vocabulary: `probs` with zeros, `logits` with -inf."""
        for name, memory in zip(self._fields, self._tensor[:, slot, : len(draft.tokens)], strict=True):
            values = getattr(draft, name)
            memory[:, : values.shape[-1]].copy_(values)
            memory[:, values.shape[-1] :] = 0.0 if name == "probs" else -torch.inf

    def read(self, slot: int, draft: Draft) -> Draft:
        """Returns the draft with the tensors of the slot. They stay valid until the second next draft starts."""
        return replace(draft, **dict(zip(self._fields, self._tensor[:, slot, : len(draft.tokens)], strict=True)))
