"""A target that keeps what a head reads, and the head that drafts from it: two runners that belong together."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from specgen.engine.model_runner import DraftRunner, ModelRunner


class HeadRunner(DraftRunner, Protocol):
    """Runs a head. What it reads of the target comes from the target's own runner."""

    def reserve(self, capacity: int) -> None:
        """Makes the next buffers large enough for `capacity` tokens, so that they need not grow during a run."""

    def clear_cache(self) -> None:
        """Drops all that was computed, so that the next call runs its whole context. For measurements."""


class HeadRunners(NamedTuple):
    """`target` verifies and keeps the hidden states (or keys and values) that `draft`, the head's runner, reads."""

    target: ModelRunner
    draft: HeadRunner

    def reserve(self, capacity: int) -> None:
        """Makes the buffers of both large enough for `capacity` tokens."""
        self.target.reserve(capacity)
        self.draft.reserve(capacity)

    def clear_cache(self) -> None:
        """Empties the caches of both."""
        self.target.clear_cache()
        self.draft.clear_cache()
