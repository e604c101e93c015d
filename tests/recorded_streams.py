"""Streams for a `StreamWorker` without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class RecordedStreams:
    """Streams that note what is called, in order, and which stream is the current one."""

    crosses = False

    def __init__(self, *, is_queued: bool = True) -> None:
        self.events: list[str] = []
        self.is_queued = is_queued
        self.is_drafting = False

    @contextmanager
    def drafting(self) -> Iterator[None]:
        self.is_drafting = True
        yield
        self.is_drafting = False

    def draft_waits(self) -> None:
        self.events.append("draft waits")

    def current_waits(self) -> None:
        self.events.append("current waits")

    def hand_over(self, tensor: torch.Tensor) -> torch.Tensor:
        assert not self.is_drafting, "the current stream is the target's"
        self.events.append("hand over")
        return tensor
