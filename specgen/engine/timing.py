"""Times the forward passes of one model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from specgen.types import Context

if TYPE_CHECKING:
    from specgen.engine.model_runner import ModelRunner

_WARM_UP, _MOST, _FEWEST = 2, 15, 3
_PATIENCE = 6.0  # seconds for all passes together, once each width has been timed a few times


def target_pass_seconds(runner: ModelRunner, widths: Sequence[int], context_length: int) -> dict[int, float]:
    """Median seconds of a pass over so many tokens at once, behind a cached context; the last of the context is one of them.

    A draft model's pass is the same thing with a width of 1. The widths are taken in turn, so that a drifting machine is fair to
    all. Raises SpecgenError as the session does.
    """
    from specgen.engine.devices import synchronizer

    wait = synchronizer(runner.device) or (lambda: None)
    context = Context([1] * context_length)
    runner.reserve(context_length + max(widths))
    runner.logits(context)
    samples: dict[int, list[float]] = {width: [] for width in widths}
    deadline = time.perf_counter() + _PATIENCE
    for turn in range(_WARM_UP + _MOST):
        if turn >= _WARM_UP + _FEWEST and time.perf_counter() > deadline:
            break
        for width in widths:
            wait()
            start = time.perf_counter()
            runner.logits(context, [1] * (width - 1))
            wait()
            samples[width].append(time.perf_counter() - start)
    runner.forget()
    return {width: median(taken[_WARM_UP:]) for width, taken in samples.items()}
