"""Pretended accelerators on the CPU, on which no operator may mix devices: several devices without a GPU.

Within `fake_devices()`, a tensor on `fake(0)` or `fake(1)` is a wrapper that says it is on this device and holds a CPU tensor.
Every operator on wrappers runs on the CPU, after a check that all its tensors are on one device. As on a GPU, only copies
(`to`, `copy_`) may connect two devices, and a CPU scalar (a tensor without dimensions) may take part in any operator. Unlike on a
GPU, nothing runs asynchronously.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_TYPE = "privateuseone"
_CPU = torch.device("cpu")
_GENERATOR = torch.Generator
_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
COPIES: Counter[tuple[str, str]] = Counter()  # copies between devices, by their names (from, to), since the last `fake_devices()`


class MixedDevicesError(RuntimeError):
    """An operator had tensors on several devices."""


def fake(index: int) -> torch.device:
    """The pretended device with this number."""
    return torch.device(_TYPE, index)


class FakeDeviceTensor(torch.Tensor):
    """A tensor that says it is on a pretended device; `inner` is the CPU tensor that holds its numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> FakeDeviceTensor:
        made: FakeDeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
            requires_grad=inner.requires_grad,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})

    def data_ptr(self) -> int:
        """By which accelerate knows weights that are used twice."""
        return self.inner.data_ptr()

    def __repr__(self, **_: Any) -> str:
        return f"{self.device} {self.inner!r}"


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    devices = {leaf.device for leaf in leaves if leaf.dim() or isinstance(leaf, FakeDeviceTensor)}
    target = kwargs.get("device")
    if function in _COPIES:
        device = args[0].device if target is None else torch.device(target)
        source = args[1].device if function is torch.ops.aten.copy_.default else args[0].device
        if source != device:
            COPIES[str(source), str(device)] += 1
    elif len(devices) > 1:
        raise MixedDevicesError(f"{function} mixes {', '.join(sorted(map(str, devices)))}")
    elif target is not None:
        device = torch.device(target)
    else:
        device = next(iter(devices), _CPU)
    if target is not None:
        kwargs = {**kwargs, "device": _CPU}
    kwargs.pop("pin_memory", None)
    inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
    result = function(*inner_args, **inner_kwargs)
    if function._schema.is_mutable and not function._schema.name.endswith("_out"):
        aliased = [arg for arg in args if isinstance(arg, FakeDeviceTensor)]
        if aliased and result is aliased[0].inner:
            return aliased[0]
    if "out" in kwargs:
        return kwargs["out"]
    return tree_map(lambda value: _outer(value, device), result)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, FakeDeviceTensor) else value


def _outer(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor) or device.type != _TYPE:
        return value
    return FakeDeviceTensor(value, device)


class _Factories(TorchDispatchMode):
    """Makes tensors of factory functions on pretended devices, and checks operators on ordinary tensors too."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


class _FromData(TorchFunctionMode):
    """Makes `torch.tensor(data, device=...)` in two steps, because dispatch modes do not see it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor) and (device := kwargs.pop("device", None)) is not None:
            return function(*args, **kwargs).to(device)
        if function is torch.Tensor.tolist:  # refused for subclasses of tensors
            return args[0].cpu().tolist()
        return function(*args, **kwargs)


@cache
def _register() -> None:
    """Gives torch what it wants to know of a device type before its name can be used: a device guard that does nothing."""
    _setup_privateuseone_for_python_backend()
    getattr(torch, _TYPE).get_amp_supported_dtype = lambda: [torch.bfloat16]


@contextmanager
def fake_devices() -> Iterator[Counter[tuple[str, str]]]:
    """Lets tensors be made on pretended devices. Yields the number of copies between devices, by their names (from, to)."""
    _register()
    COPIES.clear()
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "inference_mode", _without_gradients))
        stack.enter_context(patch.object(torch, "Generator", _Generator))
        stack.enter_context(_FromData())
        stack.enter_context(_Factories())
        yield COPIES


class _Generator(torch.Generator):
    """In place of a generator of random numbers on a pretended device: one on the CPU, where the operators run."""

    def __new__(cls, device: Any = _CPU) -> torch.Generator:  # type: ignore[misc]
        device = torch.device(device)
        return _GENERATOR(_CPU if device.type == _TYPE else device)


def _without_gradients(mode: bool = True) -> AbstractContextManager[Any]:
    """In place of inference mode, in which views of wrappers cannot be made."""
    return torch.no_grad() if mode else nullcontext()
