"""Ranks that are threads of one process, for tests of sharded models without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch


class ThreadRanks:
    """Implements `tensor_parallel.ranks.Ranks` for one of several threads that share `shared`."""

    def __init__(self, rank: int, size: int, shared: tuple[threading.Barrier, dict[int, torch.Tensor]]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._tensors = shared
        self.sums = 0

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._tensors[self.rank] = tensor.clone()
        self._barrier.wait(30)
        found = [self._tensors[rank] for rank in range(self.size)]
        self._barrier.wait(30)
        return found

    def sum(self, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()
        self.sums += 1
        tensor.copy_(torch.stack(self._exchange(tensor)).sum(0))

    def gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor] | None:
        found = self._exchange(tensor)
        return found if self.rank == 0 else None

    def broadcast(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self._exchange(tensor)[0])


def thread_ranks(size: int) -> list[ThreadRanks]:
    shared = threading.Barrier(size), dict[int, torch.Tensor]()
    return [ThreadRanks(rank, size, shared) for rank in range(size)]


def run_on(ranks: Sequence[ThreadRanks], work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Calls `work` for each rank in a thread of its own. Returns the results by rank; raises the first error of a rank."""
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def run(own: ThreadRanks) -> None:
        try:
            with torch.inference_mode():
                results[own.rank] = work(own)
        except BaseException as error:  # noqa: BLE001  raised again below
            errors[own.rank] = error
            own._barrier.abort()

    threads = [threading.Thread(target=run, args=(own,)) for own in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors.values(), key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [results[own.rank] for own in ranks]
