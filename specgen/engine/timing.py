"""Measures how long single forward passes take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from specgen.base.types import Context
from specgen.engine.devices import synchronizer
from specgen.engine.model_runner import ModelRunner
from specgen.engine.text.translated_runner import TranslatedRunner

_WARM_UP, _MAX_SAMPLES, _MIN_SAMPLES = 2, 15, 3
_MAX_SECONDS = 6.0  # measuring ends after this time, but not before each width has `_MIN_SAMPLES` samples


def time_passes(runner: ModelRunner | TranslatedRunner, widths: Sequence[int], context_length: int) -> dict[int, float]:
    """Returns the median seconds of a forward pass over w tokens, for each w in `widths`.

    The w tokens are the last token of a context of `context_length` tokens, whose other tokens are cached, and w - 1 drafted
    tokens. The widths are measured in turns, so that a machine that becomes slower affects all of them alike.
    """
    synchronize = synchronizer(runner.device) or (lambda: None)
    context = Context([1] * context_length)
    runner.reserve(context_length + max(widths))
    runner.logits(context)
    samples: dict[int, list[float]] = {width: [] for width in widths}
    deadline = time.perf_counter() + _MAX_SECONDS
    for turn in range(_WARM_UP + _MAX_SAMPLES):
        if turn >= _WARM_UP + _MIN_SAMPLES and time.perf_counter() > deadline:
            break
        for width in widths:
            synchronize()
            start = time.perf_counter()
            runner.logits(context, [1] * (width - 1))
            synchronize()
            samples[width].append(time.perf_counter() - start)
    runner.clear_cache()
    return {width: median(taken[_WARM_UP:]) for width, taken in samples.items()}
