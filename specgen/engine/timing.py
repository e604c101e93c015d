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
_TIME_LIMIT = 6.0  # seconds for all passes, once each width was timed a few times


def time_passes(runner: ModelRunner, widths: Sequence[int], context_length: int) -> dict[int, float]:
    """Median seconds of a forward pass by its number of tokens, after a cached context of `context_length` tokens.

    A pass over `width` tokens runs the context's last token and width - 1 draft tokens. The widths take turns, so that a slower
    phase of the machine affects all of them. Raises SpecgenError as the runner does.
    """
    from specgen.engine.devices import synchronizer

    wait = synchronizer(runner.device) or (lambda: None)
    context = Context([1] * context_length)
    runner.reserve(context_length + max(widths))
    runner.logits(context)
    samples: dict[int, list[float]] = {width: [] for width in widths}
    deadline = time.perf_counter() + _TIME_LIMIT
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
