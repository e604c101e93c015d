"""Measures forward passes, and chooses the number of CPU threads by it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch

from specgen.base.measuring import timed
from specgen.base.types import Context
from specgen.engine.devices import synchronizer
from specgen.engine.model_runner import ModelRunner
from specgen.engine.text.translated_runner import TranslatedRunner

_MAX_SECONDS = 2.0  # work that takes longer is not timed repeatedly
_MIN_THREAD_SPEEDUP = 1.2  # more threads are used only if they are this many times as fast


def time_passes(runner: ModelRunner | TranslatedRunner, widths: Sequence[int], context_length: int) -> dict[int, float]:
    """Returns the median seconds of a forward pass over w tokens, for each w in `widths`.

    The w tokens are the last token of a context of `context_length` tokens, whose other tokens are cached, and w - 1 drafted
    tokens.
    """
    synchronize = synchronizer(runner.device) or (lambda: None)
    context = Context([1] * context_length)
    runner.reserve(context_length + max(widths))
    runner.logits(context)

    def run(width: int) -> None:
        runner.logits(context, [1] * (width - 1))
        synchronize()

    samples = timed({width: partial(run, width) for width in widths}, 2, 6.0, before=synchronize)
    runner.clear_cache()
    return {width: median(taken) for width, taken in samples.items()}


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """The number of CPU threads, and why it was chosen. `seconds` has the measured time for each number that was tried."""

    threads: int
    reason: str
    seconds: Mapping[int, float] = field(default_factory=dict)


def pick_threads(work: Callable[[], object]) -> ThreadChoice:
    """Sets torch's number of CPU threads to the smallest with which `work` is nearly as fast as with the fastest number.

    `work` is a round of decoding with the loaded models. Tries one thread, half of them and all. A small model gains little from
    a second thread, and on a busy machine threads wait for each other at every matrix product, which was measured to be twenty
    times slower. Changes nothing if the user has set `OMP_NUM_THREADS`, or if `work` takes more than `_MAX_SECONDS`, as with a
    large model.
    """
    all_threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ:
        return ThreadChoice(all_threads, "OMP_NUM_THREADS is set")
    if all_threads == 1:
        return ThreadChoice(1, "torch has one")

    def run(threads: int) -> None:
        torch.set_num_threads(threads)
        work()

    if timed({all_threads: partial(run, all_threads)}, 0, 0.0, fewest=1)[all_threads][0] > _MAX_SECONDS:
        return ThreadChoice(all_threads, "the models are large")
    candidates = sorted({1, all_threads // 2, all_threads})
    samples = timed({threads: partial(run, threads) for threads in candidates}, 0, _MAX_SECONDS, fewest=1, most=4)
    best = {threads: min(taken) for threads, taken in samples.items()}
    if max(best.values()) > _MAX_SECONDS:
        torch.set_num_threads(all_threads)
        return ThreadChoice(all_threads, "the models are large")
    chosen = next(threads for threads in candidates if best[threads] <= _MIN_THREAD_SPEEDUP * min(best.values()))
    torch.set_num_threads(chosen)
    return ThreadChoice(chosen, "the fewest of those that are nearly the fastest", best)
