"""What the stages of `measure_gpu.py` share: the device, the sizes, models, graphs, and the figures found so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Self

import gpu_models
import torch
from gpu_models import Sizes, capture_memory, milliseconds, tokens

from specgen.engine.native.cuda_graphs import Graphs
from specgen.engine.native.native_model import NativeModel

DRAFT_LENGTH = 5


class Figures(dict[str, Any]):
    """The figures of a stage by name. `report` gets them after each change: a stage that is ended leaves those that it had."""

    def __init__(self, report: Callable[[Mapping[str, Any]], None] = lambda _: None) -> None:
        super().__init__()
        self._report = report

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._report(self)

    def __ior__(self, other: Any) -> Self:
        super().update(other)
        self._report(self)
        return self


class Bench:
    """The device and what is measured on it. Models are made when they are first needed."""

    def __init__(self, device: torch.device, sizes: Sizes, report: Callable[[Mapping[str, Any]], None] = lambda _: None) -> None:
        self.device, self.sizes, self.figures = device, sizes, Figures(report)
        self._graphs: dict[str, Graphs] = {}

    @cached_property
    def target(self) -> NativeModel:
        return gpu_models.native_model(self.sizes.target, self.device, self.sizes.dtype)

    @cached_property
    def draft(self) -> NativeModel:
        return gpu_models.native_model(self.sizes.draft, self.device, self.sizes.dtype, seed=1)

    def model(self, name: str) -> NativeModel:
        return self.target if name == "target" else self.draft

    def prompt(self, length: int = 100) -> list[int]:
        return tokens(length, self.sizes.target)

    def capture(self, name: str, work: Callable[[], None]) -> Callable[[], None]:
        """Captures work of the model `name`. What it changes is changed: inputs have to be valid, and be set again."""
        if name not in self._graphs:
            self._graphs[name] = gpu_models.new_graphs(self.device)
        return self._graphs[name].capture(work)

    def capture_costs(self, name: str, work: Callable[[], None]) -> tuple[Callable[[], None], float, float]:
        """Returns the replay, and what the capture took: milliseconds, and megabytes that stay in use."""
        return capture_memory(self.device, lambda: self.capture(name, work))

    def time(self, work: Callable[[], object], repeats: int | None = None) -> float:
        """Returns the milliseconds of one call, the device's work included."""
        return round(milliseconds(work, self.device, repeats or self.sizes.repeats), 4)

    def copy_bandwidth(self) -> float:
        """Returns the bytes per second that a copy on the device reads and writes together."""
        source = torch.zeros(self.sizes.copied_bytes // 2, dtype=torch.uint8, device=self.device)
        other = torch.empty_like(source)
        return 2 * source.nbytes / (milliseconds(lambda: other.copy_(source), self.device, self.sizes.repeats) / 1000)
