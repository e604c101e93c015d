"""The messages by which rank 0 tells the other ranks what to run: an operation and integers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch

from specgen.engine.forward_pass import ForwardPass, TreeNodes, chain_parents
from specgen.engine.spread.ranks import Ranks

_SLOTS = 256  # integers in the first broadcast: 2 KiB, which take no longer than 8 bytes


class Operation(IntEnum):
    """What the other ranks have to run. The numbers that follow are described at the functions that send them."""

    END = 0
    LOAD = 1
    FUNCTION = 2
    CACHE = 3
    DROP = 4
    PASS = 5
    GATHER = 6
    HEAD = 7
    EMBED = 8
    REFERENCE = 9


def send(ranks: Ranks, operation: Operation, numbers: Sequence[int]) -> None:
    """Sends a message from rank 0 to all others, in one broadcast or two."""
    first = [int(operation), len(numbers), *numbers[: _SLOTS - 2]]
    ranks.broadcast(torch.tensor(first + [0] * (_SLOTS - len(first))))
    if len(numbers) > _SLOTS - 2:
        ranks.broadcast(torch.tensor(numbers[_SLOTS - 2 :]))


def receive(ranks: Ranks) -> tuple[Operation, list[int]]:
    """Waits for the next message."""
    first = torch.empty(_SLOTS, dtype=torch.int64)
    ranks.broadcast(first)
    operation, count, *numbers = first.tolist()
    if count > len(numbers):
        rest = torch.empty(count - len(numbers), dtype=torch.int64)
        ranks.broadcast(rest)
        numbers += rest.tolist()
    return Operation(operation), numbers[:count]


def text_numbers(value: Any) -> list[int]:
    """Returns a JSON value as integers."""
    return list(json.dumps(value).encode())


def from_text_numbers(numbers: Sequence[int]) -> Any:
    return json.loads(bytes(numbers))


def pass_numbers(forward_pass: ForwardPass, logits_to_keep: int, capacity: int) -> list[int]:
    """Returns a forward pass as integers: what followers have to know about it, besides its cache. `capacity` is the cache's."""
    context, draft, first, last, cache, long_rope = forward_pass
    length = len(context)
    ids = context.ids[first : min(last, length)]
    head = [cache.length, capacity, first, last, long_rope, logits_to_keep, length, forward_pass.is_chain, len(ids)]
    parents = () if forward_pass.is_chain else draft.parents
    return [*map(int, head), len(draft.tokens), *ids, *draft.tokens, *parents]


class _ContextPart:
    """A context of `length` tokens of which those from index `first` on are known."""

    def __init__(self, length: int, first: int, ids: list[int]) -> None:
        self._length, self._first, self._ids = length, first, ids
        self.ids = self

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> list[int]:
        return self._ids[part.start - self._first : part.stop - self._first]


def read_pass(numbers: Sequence[int], cache: Any) -> tuple[ForwardPass, int]:
    """Returns the forward pass that `pass_numbers` described, on the follower's `cache`, and how many logits to keep."""
    length, capacity, first, last, long_rope, kept, context_length, is_chain, count, drafted = numbers[:10]
    ids, tokens = list(numbers[10 : 10 + count]), list(numbers[10 + count : 10 + count + drafted])
    parents = chain_parents(drafted) if is_chain else list(numbers[10 + count + drafted :])
    cache.length, cache.capacity = length, capacity
    context: Any = _ContextPart(context_length, first, ids)
    return ForwardPass(context, TreeNodes(tokens, parents), first, last, cache, bool(long_rope)), kept
