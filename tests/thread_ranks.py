"""Ranks that are threads of one process, for tests of sharded models without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specgen.engine.spread.ranks import Group


class ThreadRanks(Group):
    """A rank that is one of `size` threads. They exchange messages through `shared`, the same
    objects in all of them.

    `sums` counts the calls of `sum`.
    """

    def __init__(
        self, rank: int, size: int, shared: tuple[threading.Barrier, dict[int, Any]]
    ) -> None:
        super().__init__(rank, size, rank)
        self._barrier, self._given = shared
        self.sums = 0

    def all(self, message: Any) -> list[Any]:
        self._given[self.rank] = message.clone() if isinstance(message, torch.Tensor) else message
        self._barrier.wait(30)
        found = [self._given[rank] for rank in range(self.size)]
        self._barrier.wait(30)
        return found

    def share(self, message: Any = None) -> Any:
        return self.all(message)[0]

    def sum(self, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()
        self.sums += 1
        tensor.copy_(torch.stack(self.all(tensor)).sum(0))

    def gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor] | None:
        found = self.all(tensor)
        return found if self.rank == 0 else None


def run_on(size: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Calls `work` for each of `size` ranks in a thread of its own. Returns the results by rank;
    raises the first error."""
    shared = threading.Barrier(size), dict[int, Any]()
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(own: ThreadRanks) -> None:
        try:
            with torch.inference_mode():
                results[own.rank] = work(own)
        except BaseException as error:  # noqa: BLE001  raised again below
            errors.append(error)
            own._barrier.abort()

    threads = [
        threading.Thread(target=run, args=(ThreadRanks(rank, size, shared),))
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [results[rank] for rank in range(size)]
