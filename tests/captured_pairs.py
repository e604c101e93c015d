"""Pairs of models that run on the CPU as they would on one GPU: in captured passes, and PEARL with a stream for the draft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from graph_checks import graphs_on
from specgen.engine.native.static_forward import use_static_passes

import specgen
from specgen.engine.native import loading
from specgen.engine.native.native_model import NativeModel
from specgen.pair.pair import Pair
from specgen.workers.stream_worker import StreamWorker


class NoStreams:
    """Implements `Streams` where there are none: work is done when it is queued."""

    crosses, is_queued = False, True

    def drafting(self) -> AbstractContextManager[object]:
        return nullcontext()

    def draft_waits(self) -> None:
        pass

    def current_waits(self) -> None:
        pass

    def hand_over(self, tensor: torch.Tensor) -> None:
        pass


@contextmanager
def captured_pair(counts: Counter[str], *names: str, **options: Any) -> Iterator[Pair]:
    """Loads a pair; no names: the bundled one. `counts` counts the captures and the replays."""
    load_native = loading.load_native

    def load(*args: Any, **named: Any) -> NativeModel:
        model = load_native(*args, **named)
        use_static_passes(model, new_graphs=graphs_on("cpu", counts))
        return model

    loaded, no_process = (
        patch("specgen.engine.model_loading.load_native", load),
        patch("specgen.pair.loading._needs_process", _no),
    )
    with loaded, no_process, specgen.load(*names, device="cpu", **options) as pair:
        draft = pair.runners[1]
        if draft is not None:
            pair._thread_worker = StreamWorker(draft, NoStreams())
        yield pair


def _no(*_: object, **__: object) -> bool:
    return False
