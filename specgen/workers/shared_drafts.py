"""Passes the probabilities and logits of drafts from a worker process to the target's process, in shared memory."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from mmap import mmap
from typing import Any

import torch

from specgen.base.types import Draft
from specgen.decoding import logits_ops
from specgen.decoding.components import Components
from specgen.engine.devices import download, upload

_PACKED = -1.0  # no probability


class SharedDrafts:
    """One run's part of the shared memory: `probs` if it samples and `logits` if it records, float32 [2, window, vocabulary].

    There are two slots, 0 and 1, because one draft is verified while the next is made. `window` is the largest number of tokens
    in a draft. `size` is in bytes; 0 for a run that needs neither tensor.

    With top-k, an accelerator's `probs` are passed as the few that are not 0, if they are few: a row then begins with these
    probabilities and as many token ids, and `_PACKED` follows.
    """

    def __init__(self, components: Components, window: int) -> None:
        needed = {"probs": not components.sampling.greedy, "logits": components.record}
        self._fields = [name for name, is_needed in needed.items() if is_needed]
        self._shape = (len(self._fields), 2, window, components.vocab_size)
        self.size = 4 * prod(self._shape)
        self._kept = logits_ops.packed_width(components.sampling, components.vocab_size)  # probabilities in a packed row

    def map(self, memory: int, offset: int) -> None:
        """Maps `size` bytes from `offset` on of the file descriptor `memory`. The file must be large enough already."""
        mapped = mmap(memory, offset + self.size)
        self._tensor = torch.frombuffer(mapped, dtype=torch.float32, offset=offset, count=prod(self._shape)).view(self._shape)

    def write(self, slot: int, draft: Draft) -> None:
        """Writes the draft's tensors to a slot. Pads a smaller draft vocabulary: `probs` with zeros, `logits` with -inf."""
        for name, memory in zip(self._fields, self._tensor[:, slot, : len(draft.tokens)], strict=True):
            values = getattr(draft, name)
            if name == "probs" and self._kept and not values.is_cpu and self._pack(memory, values):
                continue
            memory[:, : values.shape[-1]].copy_(download(values))
            memory[:, values.shape[-1] :] = 0.0 if name == "probs" else -torch.inf

    def read(self, slot: int, draft: Draft, device: torch.device) -> Draft:
        """Returns the draft with the tensors of the slot, on `device`. They stay valid until the second next draft starts."""
        found: dict[str, Any] = {}
        for name, memory in zip(self._fields, self._tensor[:, slot, : len(draft.tokens)], strict=True):
            kept = self._kept
            if name == "probs" and kept and memory[0, 2 * kept] == _PACKED:
                found[name] = logits_ops.unpack(upload(memory[:, : 2 * kept], device), memory.shape[1])
            else:
                found[name] = upload(memory, device)
        return replace(draft, **found)

    def _pack(self, memory: torch.Tensor, probs: torch.Tensor) -> bool:
        """Writes the probabilities that are not 0, with their token ids. Returns False if there are too many."""
        values, tokens = probs.topk(self._kept + 1)
        packed = download(torch.cat((values[:, :-1], tokens[:, :-1].float(), values[:, -1:]), dim=-1))  # ids exact up to 2^24
        if packed[:, -1].any():
            return False
        memory[:, : packed.shape[1]] = packed
        memory[:, packed.shape[1] - 1] = _PACKED
        return True
