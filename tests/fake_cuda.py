"""Pretended CUDA devices on the CPU, which run the program's CUDA branches and find what goes wrong only on a GPU.

Within `fake_cuda()`, tensors can be made on `cuda:0` and so on, and `torch.cuda` has streams, events and graphs. All work is done
at once on the CPU, but an error is raised for what a GPU may do in another order: see `race_detector`, `fake_gpus` (what captures
refuse, memory that is freed too early) and `fake_cuda_tensors` (operators that mix devices, copies).
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors
import torch
from fake_cuda_tensors import Functions, Generator, Operators
from fake_gpus import Event, Gpus, Stream
from fake_graphs import CaptureContext, Graph

GIB = 1 << 30
_CUDA, _META = 1, 14  # torch's numbers of device types
_safe_open = safetensors.safe_open


@cache
def _register() -> None:
    """Gives torch's CPU build a device guard for CUDA that does nothing: that of the meta device."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 20).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[_CUDA] = guards[_META]


@contextmanager
def fake_cuda(count: int = 1, memory: int = 64 * GIB) -> Iterator[Gpus]:
    """Lets tensors be made on `count` pretended GPUs with so many bytes of memory each."""
    _register()
    gpus = Gpus(count, memory)
    with ExitStack() as stack:
        for name, value in _replacements(gpus).items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        inference = _InferenceMode(gpus)
        stack.enter_context(patch.object(torch, "inference_mode", inference))
        stack.enter_context(patch.object(torch, "is_inference_mode_enabled", lambda: gpus.is_inference))
        stack.enter_context(patch.object(torch, "Generator", Generator))
        for module in [
            module for name, module in sys.modules.items() if name.split(".")[0] in ("specgen", "safetensors", "transformers")
        ]:
            if vars(module).get("safe_open") is _safe_open:
                stack.enter_context(patch.object(module, "safe_open", SafeOpen))
        stack.enter_context(patch.object(threading.Thread, "run", _in_modes(threading.Thread.run)))
        stack.enter_context(Functions())
        stack.enter_context(Operators())
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # a CPU tensor cannot become a wrapper
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, False)
        yield gpus
        gpus.check()
    gpus.is_closed = True


def _in_modes(run: Any) -> Any:
    """Modes hold for one thread: this lets others begin with them."""

    def run_in_modes(thread: threading.Thread) -> None:
        with Functions(), Operators():
            run(thread)

    return run_in_modes


def _replacements(gpus: Gpus) -> dict[str, Any]:
    def set_device(device: Any) -> None:
        gpus.local.index = gpus.device(device).index

    def set_sync_mode(mode: Any) -> None:
        gpus.sync_mode = mode

    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: gpus.count,
        "current_device": lambda: gpus.device(None).index,
        "set_device": set_device,
        "device": gpus.on_device,
        "Stream": Stream,
        "Event": Event,
        "stream": gpus.using,
        "current_stream": lambda device=None: gpus.current(device),
        "default_stream": lambda device=None: gpus.defaults[gpus.device(device).index],
        "synchronize": lambda device=None: gpus.synchronize(
            [stream for stream in gpus.streams if stream.device == gpus.device(device)], "torch.cuda.synchronize"
        ),
        "mem_get_info": lambda device=None: (gpus.memory - gpus.used[gpus.device(device).index], gpus.memory),
        "memory_allocated": lambda device=None: gpus.used[gpus.device(device).index],
        "memory_reserved": lambda device=None: gpus.used[gpus.device(device).index],
        "max_memory_allocated": lambda device=None: gpus.used[gpus.device(device).index],
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "get_device_name": gpus.name,
        "get_device_properties": gpus.properties,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda **_: True,
        "CUDAGraph": Graph,
        "graph": CaptureContext,
        "graph_pool_handle": object,
        "is_current_stream_capturing": lambda: gpus.capture is not None,
        "set_sync_debug_mode": set_sync_mode,
        "get_sync_debug_mode": lambda: gpus.sync_mode,
        "_sleep": lambda cycles: None,
    }


class _InferenceMode:
    """In place of `torch.inference_mode`: wrappers cannot be made in torch's. Notes where it is on."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus

    def __call__(self, mode: bool = True) -> AbstractContextManager[Any]:
        return self._set(mode)

    @contextmanager
    def _set(self, mode: bool) -> Iterator[None]:
        before = self._gpus.is_inference
        self._gpus.local.inference = mode
        try:
            with torch.set_grad_enabled(not mode and torch.is_grad_enabled()):
                yield
        finally:
            self._gpus.local.inference = before


class SafeOpen:
    """In place of `safetensors.safe_open`, which puts tensors on a GPU itself."""

    def __init__(self, path: Any, framework: str, device: Any = "cpu", **options: Any) -> None:
        self._file, self._device = _safe_open(path, framework, **options), torch.device(device)

    def __enter__(self) -> SafeOpen:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name).to(self._device)

    def get_slice(self, name: str) -> Any:
        return _Slice(self._file.get_slice(name), self._device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Slice:
    def __init__(self, slice_: Any, device: torch.device) -> None:
        self._slice, self._device = slice_, device

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._slice[index].to(self._device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slice, name)


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    """Two pretended GPUs."""
    with fake_cuda(2) as found:
        yield found
