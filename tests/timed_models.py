"""A target and a drafter whose passes take known times, for tests of what is computed from measured times."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from specgen.base.types import Context, Draft
from specgen.decoding.policy import LengthPolicy
from specgen.engine.model_runner import ModelOutput


class SlowTarget:
    """A pass takes a base time plus a time per token, on a simulated clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, base: float, token: float) -> None:
        self.base, self.token, self.now = base, token, 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def logits(self, context: Context, draft: Sequence[int] = ()) -> ModelOutput:
        self.now += self.base + self.token * (len(draft) + 1)
        return ModelOutput(torch.zeros(len(draft) + 1, 4))


class SlowDrafter:
    """Reports a fixed time per token without waiting."""

    policy = LengthPolicy()

    def __init__(self, token: float) -> None:
        self.token, self.seconds, self.closed = token, 0.0, False

    def prefill(self, context: Context) -> None: ...

    def start(self, context: Context, pending: Sequence[int], limit: int) -> None:
        self._limit = limit

    def finish(self) -> Draft:
        self.seconds = self._limit * self.token
        return Draft([0] * self._limit, range(-1, self._limit - 1))

    def close(self) -> None:
        self.closed = True
