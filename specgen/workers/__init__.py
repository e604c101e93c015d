"""A draft model at work beside the target: in a process of its own, or in a thread with a stream of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from specgen.decoding.parallel import ParallelDrafter
    from specgen.factory import Components
    from specgen.methods import Settings


class DraftWorker(Protocol):
    """Keeps what drafts for a pair."""

    @property
    def kind(self) -> str:
        """`process` or `thread`."""
        ...

    @property
    def threads(self) -> int | None:
        """How many of the processor's threads are left to the target, None where they need not be divided."""
        ...

    def ready(self) -> object:
        """Wait until it can draft. Raises what kept it from that."""
        ...

    def drafter(self, settings: Settings, parts: Components, window: int) -> ParallelDrafter:
        """The drafts of one run, each of at most `window` tokens."""
        ...

    def forget(self) -> None:
        """Drop the cache's contents."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...
