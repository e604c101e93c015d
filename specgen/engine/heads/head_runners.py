"""A target that keeps what a head reads, and the head that drafts from it: two runners that belong together."""

from __future__ import annotations

from typing import NamedTuple

from specgen.engine.model_runner import DraftRunner, ModelRunner


class HeadRunners(NamedTuple):
    """`target` verifies and keeps the hidden states (or keys and values) that `draft` reads. `draft` is the head's runner."""

    target: ModelRunner
    draft: DraftRunner
