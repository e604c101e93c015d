"""Tensors on pretended GPUs: wrappers that hold CPU tensors, and what their operators do there."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from fake_gpus import Allocation, Gpus, Memory, Stream, poison, tensors_in
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

aten = torch.ops.aten
_COPIES = {aten._to_copy.default, aten.copy_.default}
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_ALSO_WAITING = {aten.multinomial.default, aten.equal.default}
_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten._int_mm.default}
_sdpa = torch.nn.functional.scaled_dot_product_attention
_GENERATOR = torch.Generator


class MixedDevicesError(RuntimeError):
    """An operator had tensors on several devices."""


class CudaTensor(torch.Tensor):
    """A tensor that says it is on a GPU; `inner` is the CPU tensor that holds its numbers."""

    inner: torch.Tensor
    memory: Allocation

    @staticmethod
    def __new__(cls, inner: torch.Tensor, memory: Allocation) -> CudaTensor:
        made: CudaTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=memory.device,
            requires_grad=inner.requires_grad,
        )
        made.inner, made.memory = inner, memory
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(Stream.gpus, function, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def record_stream(self, stream: Stream) -> None:
        self.memory.recorded.add(stream.actor)

    def __repr__(self, **_: Any) -> str:
        return f"{self.device} {self.inner!r}"


class Generator(_GENERATOR):
    """In place of `torch.Generator`: draws on the CPU, and knows the device that it was made for."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        made = super().__new__(cls, "cpu")
        device = torch.device(device)
        made.made_for = Stream.gpus.device(device) if device.type == "cuda" else device
        return made

    def __init__(self, device: Any = "cpu") -> None:
        super().__init__()

    @property
    def device(self) -> torch.device:
        return self.made_for


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, CudaTensor) else value


def outer(gpus: Gpus, value: Any, device: torch.device) -> Any:
    """Returns the wrapper of a CPU tensor that is part of what a GPU holds."""
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage()
    memory = gpus.allocations.get(storage._cdata)
    if memory is None:
        memory = gpus.allocations[storage._cdata] = Allocation(gpus, storage, device)
    return CudaTensor(value, memory)


@cache
def _written(function: Any) -> tuple[frozenset[int], frozenset[str]]:
    """Returns the indices and the names of the arguments that an operator writes."""
    found = [
        (index, arg.name) for index, arg in enumerate(function._schema.arguments) if arg.alias_info and arg.alias_info.is_write
    ]
    return frozenset(index for index, _ in found), frozenset(name for _, name in found)


def dispatch(gpus: Gpus, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operator, on a GPU if its tensors are there."""
    with gpus.lock:
        gpus.check()
        special = _SPECIAL.get(function)
        if special is not None:
            return special(gpus, *args, **kwargs)
        tensors = tensors_in((args, kwargs))
        devices = {tensor.device for tensor in tensors if isinstance(tensor, CudaTensor)}
        target = kwargs.get("device")
        target = None if target is None else torch.device(target)
        if target is not None and target.type == "cuda":
            target = gpus.device(target)
        if function in _COPIES:
            source, to = (args[0], target or args[0].device) if function is aten._to_copy.default else (args[1], args[0].device)
            if source.device != to:
                return _transfer(gpus, function, args, kwargs, source, to)
        elif len(devices) > 1:
            raise MixedDevicesError(f"{function} mixes {devices}")
        if not devices and (target is None or target.type != "cuda"):
            return _on_host(gpus, function, args, kwargs, tensors)
        if torch.Tag.inplace_view in function.tags:
            raise NotImplementedError(f"{function} on a pretended GPU")
        device = target or next(iter(devices))
        _check_others(gpus, function, args, tensors, device)
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        indices, names = _written(function)
        written = [args[index] for index in indices if index < len(args)] + [kwargs[name] for name in names if name in kwargs]
        return run(gpus, function, function, args, kwargs, device, tensors_in(written))


def run(
    gpus: Gpus,
    name: Any,
    work: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    device: torch.device,
    written: Sequence[torch.Tensor] = (),
) -> Any:
    """Runs `work` on the CPU tensors of a GPU's, and notes it as one launch on the current stream unless it makes views only."""
    tensors = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, CudaTensor)]
    if not gpus.is_inference and any(tensor.memory.is_inference for tensor in written):
        raise RuntimeError("Inplace update to inference tensor outside InferenceMode is not allowed")
    stream = gpus.current(device)
    changed: list[Memory] = [tensor.memory for tensor in written]
    if changed:  # before the numbers change, so that what an error leaves is as before
        gpus.launch(stream, str(name), [tensor.memory for tensor in tensors], changed, products=name in _PRODUCTS)
    shapes = [tensor.inner.shape for tensor in written]
    inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
    result = work(*inner_args, **inner_kwargs)
    assert shapes == [tensor.inner.shape for tensor in written], "a tensor was resized"
    by_inner = {id(tensor.inner): tensor for tensor in written}
    known = {tensor.memory.storage._cdata for tensor in tensors}
    new = [tensor for tensor in tensors_in(result) if tensor.untyped_storage()._cdata not in known]
    is_empty = getattr(name, "_schema", None) is not None and name._schema.name.startswith(("aten::empty", "aten::new_empty"))
    if is_empty:
        _ = [poison(tensor) for tensor in new]
    outputs = tree_map(lambda value: by_inner.get(id(value)) if id(value) in by_inner else outer(gpus, value, device), result)
    if new and not changed and not is_empty:
        fresh: list[Memory] = [tensor.memory for tensor in tensors_in(outputs) if tensor.memory.storage._cdata not in known]
        gpus.launch(stream, str(name), [tensor.memory for tensor in tensors], fresh, products=name in _PRODUCTS)
    if (new or changed) and not is_empty:
        if gpus.capture is not None:
            gpus.capture.calls.append((work, inner_args, inner_kwargs, () if changed else new))
        else:
            gpus.counts["launches"] += 1
    return outputs


def _check_others(gpus: Gpus, function: Any, args: Any, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Checks the CPU tensors of an operator on a GPU, and notes what makes the host wait."""
    others = [tensor for tensor in tensors if not isinstance(tensor, CudaTensor) and tensor.device.type == "cpu"]
    if function in _INDEXING:
        if any(tensor.dim() for tensor in others):
            _count(gpus, "uploads, pageable, blocking")
            gpus.synchronize([gpus.current(device)], f"{function} with indices of the host")
        if any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(args[1])):
            gpus.synchronize([gpus.current(device)], f"{function} with a boolean mask")
    elif any(tensor.dim() for tensor in others):
        raise MixedDevicesError(f"{function} mixes {device} and cpu")
    elif _WAITING & set(function.tags) or function in _ALSO_WAITING:
        gpus.synchronize([gpus.current(device)], str(function))


def _count(gpus: Gpus, what: str) -> None:
    if gpus.capture is not None:
        gpus.refuse(f"a copy between host and device ({what})")
    gpus.counts[what] += 1


def _on_host(gpus: Gpus, function: Any, args: Any, kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
    """Runs an operator on CPU tensors, and notes the use of page-locked memory."""
    if gpus.pinned and tensors:
        indices, _ = _written(function)
        used = [(tensor, gpus.pinned_memory(tensor)) for tensor in tensors]
        written = {id(args[index]) for index in indices if index < len(args)}
        result = function(*args, **kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout == torch.strided and not tensor.is_mkldnn}
        outputs = [tensor for tensor in tensors_in(result) if not tensor.is_mkldnn]
        if written or not all(tensor.untyped_storage()._cdata in known for tensor in outputs) or not outputs:
            reads = [memory for tensor, memory in used if memory is not None and id(tensor) not in written]
            gpus.on_host(
                str(function), reads, [memory for tensor, memory in used if memory is not None and id(tensor) in written]
            )
        return result
    if kwargs.get("pin_memory"):
        return gpus.pin(poison(function(*args, **{**kwargs, "pin_memory": False})))
    return function(*args, **kwargs)


def _transfer(gpus: Gpus, function: Any, args: Any, kwargs: dict[str, Any], source: Any, to: torch.device) -> Any:
    """Copies between devices, or between the host and one."""
    is_new = function is aten._to_copy.default
    non_blocking = bool(kwargs.get("non_blocking", args[2] if not is_new and len(args) > 2 else False))
    work = {**kwargs, "device": torch.device("cpu")} if is_new else kwargs
    if source.device.type == "cuda" and to.type == "cuda":
        return _between(gpus, function, args, work, source, to)
    on_gpu = to if to.type == "cuda" else source.device
    stream = gpus.current(on_gpu)
    is_upload = to.type == "cuda"
    if not is_new and not gpus.is_inference and isinstance(args[0], CudaTensor) and args[0].memory.is_inference:
        raise RuntimeError("Inplace update to inference tensor outside InferenceMode is not allowed")
    if to.type == "meta" or source.device.type == "meta":
        return function(*tree_map(_inner, args), **kwargs)
    on_host = source if is_upload else None if is_new else args[0]
    pinned = None if on_host is None or not on_host.is_contiguous() else gpus.pinned_memory(on_host)
    is_pinned = pinned is not None or (on_host is None and non_blocking)  # torch makes it so
    kind = ("uploads" if is_upload else "downloads", "pinned" if is_pinned else "pageable")
    _count(gpus, f"{kind[0]}, {kind[1]}, {'non-blocking' if non_blocking else 'blocking'}")
    hosts: list[Memory] = [] if pinned is None else [pinned]
    if is_upload:
        if is_new:
            result = outer(gpus, function(source, **work), to)
        else:
            args[0].inner.copy_(source)
            result = args[0]
        gpus.launch(stream, "an upload", hosts, [result.memory])
        if not non_blocking:
            gpus.synchronize([stream], "a blocking upload")
        return result
    values = function(source.inner, **work) if is_new else source.inner.clone()
    if is_new and non_blocking:
        gpus.pin(values)
        hosts = [gpus.pinned[values.untyped_storage()._cdata]]
    access = gpus.launch(stream, "a download", [source.memory], hosts)
    target = values if is_new else args[0]
    if non_blocking and is_pinned:
        assert access is not None
        gpus.pending.append((access, target, values.clone()))
        poison(target)
    else:
        if not is_new:
            target.copy_(values)
        gpus.synchronize([stream], "a download")
    return target


def _between(gpus: Gpus, function: Any, args: Any, kwargs: dict[str, Any], source: CudaTensor, to: torch.device) -> Any:
    """Copies from one GPU to another. Torch does so on the source's current stream, between waits for the target's."""
    here, there = gpus.current(source.device), gpus.current(to)
    _count(gpus, "copies between GPUs")
    if function is aten._to_copy.default:
        result = outer(gpus, function(source.inner, **kwargs), to)
    else:
        args[0].inner.copy_(source.inner)
        result = args[0]
    here.wait_stream(there)
    gpus.launch(here, "a copy between GPUs", [source.memory], [result.memory])
    there.wait_stream(here)
    return result


# ------------------------------------------------------------------ operators that need more than their CPU kernel


def _read_scalar(gpus: Gpus, tensor: torch.Tensor) -> Any:
    if isinstance(tensor, CudaTensor):
        stream = gpus.current(tensor.device)
        _count(gpus, "downloads, pinned, blocking")
        gpus.launch(stream, "item", [tensor.memory], [])
        gpus.synchronize([stream], "item")
        return aten._local_scalar_dense.default(tensor.inner)
    if (memory := gpus.pinned_memory(tensor)) is not None:
        gpus.on_host("item", [memory], [])
    return aten._local_scalar_dense.default(tensor)


def _pin(gpus: Gpus, tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    if isinstance(tensor, CudaTensor):
        raise RuntimeError("cannot pin a tensor of a GPU, only dense CPU tensors can be pinned")
    return gpus.pin(tensor.clone(memory_format=torch.contiguous_format))


def _is_pinned(gpus: Gpus, tensor: torch.Tensor, device: Any = None) -> bool:
    return not isinstance(tensor, CudaTensor) and gpus.pinned_memory(tensor) is not None


def _flash(
    gpus: Gpus,
    query: Any,
    keys: Any,
    values: Any,
    dropout: float = 0.0,
    is_causal: bool = False,
    *_: Any,
    scale: Any = None,
    **__: Any,
) -> Any:
    """Torch's flash attention, whose causal mask begins at the lower right."""
    size = query.shape[-1]
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if size % 8 or size > 256:
        raise RuntimeError("FlashAttention needs a head size that is a multiple of 8, of at most 256")
    count, length = query.shape[2], keys.shape[2]

    def work(query: Any, keys: Any, values: Any) -> torch.Tensor:
        mask = torch.ones(count, length, dtype=torch.bool).tril(length - count) if is_causal else None
        return _sdpa(query, keys, values, mask, scale=scale, enable_gqa=query.shape[1] != keys.shape[1])

    found = run(gpus, "flash attention", work, (query, keys, values), {}, query.device)
    empty = outer(gpus, torch.empty(0), query.device)
    return found, empty, empty, empty, count, length, empty, empty, empty


_SPECIAL: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _read_scalar,
    aten._pin_memory.default: _pin,
    aten.is_pinned.default: _is_pinned,
    aten._scaled_dot_product_flash_attention.default: _flash,
}


class Operators(TorchDispatchMode):
    """Lets tensors be made on pretended GPUs, and notes what the host does with page-locked memory."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(Stream.gpus, function, args, kwargs or {})


class Functions(TorchFunctionMode):
    """What dispatch does not see: functions that read memory directly, that choose kernels, or whose arguments it drops."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        gpus = Stream.gpus
        if function in (torch.tensor, torch.as_tensor, torch.asarray) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return function(*args, **kwargs).to(device)
        if function is torch.Tensor.tolist or function is torch.Tensor.numpy:
            if isinstance(args[0], CudaTensor):
                if function is torch.Tensor.numpy:
                    raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
                return args[0].cpu().tolist()
            if (memory := gpus.pinned_memory(args[0])) is not None:
                gpus.on_host(function.__name__, [memory], [])
        if function is _sdpa and isinstance(args[0], CudaTensor):
            with gpus.lock:
                return run(gpus, "attention", operator.call, (_sdpa, *args), kwargs, args[0].device)
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and isinstance(args[0], CudaTensor):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            args = (args[0], tuple(torch.tensor(part) if isinstance(part, list) else part for part in index), *args[2:])
        if isinstance(generator := kwargs.get("generator"), Generator):
            _check_generator(gpus, generator, args, kwargs)
        return function(*args, **kwargs)


def _check_generator(gpus: Gpus, generator: Generator, args: Any, kwargs: dict[str, Any]) -> None:
    device = torch.device(kwargs.get("device") or next((tensor.device for tensor in tensors_in(args)), "cpu"))
    if device.type != generator.device.type:
        raise RuntimeError(f"Expected a '{device.type}' device type for generator but found '{generator.device.type}'")
    if gpus.capture is not None:
        gpus.refuse("a random number")
