"""The operations in which all processes that run a model together take part: torch.distributed's, with one kind of error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class LostRankError(Exception):
    """An operation failed because another rank has ended."""


class Ranks:
    """The `size` processes that run a model together, as seen by process number `rank`. `group` is torch.distributed's.

    All must call the same operations in the same order. These raise LostRankError if another process has ended.
    """

    def __init__(self, rank: int, size: int, group: Any = None) -> None:
        self.rank, self.size, self.group = rank, size, group

    def sum(self, tensor: Tensor) -> None:
        """Replaces a contiguous tensor by the sum of all ranks' tensors."""
        self._checked(dist.all_reduce, tensor)

    def gather(self, tensor: Tensor) -> Sequence[Tensor] | None:
        """Returns all ranks' tensors, which have the same shape, by rank; None on all ranks but the first."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else None
        self._checked(dist.gather, tensor, parts, dst=0)
        return parts

    def broadcast(self, tensor: Tensor) -> None:
        """Replaces a contiguous tensor by rank 0's."""
        self._checked(dist.broadcast, tensor, 0)

    def share(self, message: Any = None) -> Any:
        """Returns rank 0's message, a Python object."""
        messages = [message]
        self._checked(dist.broadcast_object_list, messages, 0)
        return messages[0]

    def all(self, message: Any) -> list[Any]:
        """Returns all ranks' messages by rank."""
        messages: list[Any] = [None] * self.size
        self._checked(dist.all_gather_object, messages, message)
        return messages

    def _checked(self, operation: Callable[..., object], *arguments: object, **options: object) -> None:
        try:
            operation(*arguments, group=self.group, **options)
        except (RuntimeError, ValueError) as error:  # gloo's own errors are plain RuntimeErrors
            raise LostRankError(str(error)) from error
