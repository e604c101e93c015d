"""Random models of the native families, and a recorder that stands in for CUDA graphs: it refuses
operators that they cannot capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from native_models import sparse
from torch.utils._python_dispatch import TorchDispatchMode

from specgen.engine.native.config_reading import read_architecture
from specgen.engine.native.inputs import layer_kinds
from specgen.engine.native.layer import NativeLayer
from specgen.engine.native.layer_files import layer_files, read_layer
from specgen.engine.native.linear import LinearFactory
from specgen.engine.native.native_model import NativeModel, OuterWeights
from specgen.engine.native.norms import norm_gain
from specgen.engine.native.tensors import tensor_shapes

LENGTH = 2048
WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that needs a CUDA device."""
    return pytest.mark.gpu(
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")(test)
    )


def random_model(
    family: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **changes: Any
) -> NativeModel:
    """A random model of a family, with 5 layers; `changes` are made to its config."""
    architecture = read_architecture(
        sparse(family, num_hidden_layers=5, max_position_embeddings=LENGTH, **changes)
    )
    generator = torch.Generator(device="cpu").manual_seed(0)
    on = torch.device(device)
    width = architecture.hidden_size
    gain = norm_gain(architecture, dtype, on)

    def numbers(name: str, *shape: int) -> torch.Tensor:
        if device == "meta":
            return torch.zeros(shape, dtype=dtype, device=device)
        drawn = torch.randn(shape, generator=generator)
        return (
            1 - architecture.norm_weight_offset + drawn / 8 if "norm" in name else drawn / 8
        ).to(device, dtype)

    with torch.no_grad():
        factory = LinearFactory(on, dtype)
        _, kinds = layer_kinds(architecture, [on] * len(architecture.layers))
        layers = []
        for index, kind in enumerate(kinds):
            by_name = {
                name: numbers(name, *shape)
                for name, shape in tensor_shapes(layer_files(architecture, index)).items()
            }
            weights = read_layer(architecture, index, by_name.__getitem__, dtype, gain)
            layers.append(NativeLayer(architecture, index, kind, weights, factory, gain=gain))
        norm = ((numbers("norm", width).float() + architecture.norm_weight_offset) * gain).to(dtype)
        table, head = (
            numbers(name, architecture.vocab_size, width) for name in ("embedding", "head")
        )
        return NativeModel(
            architecture, layers, OuterWeights(table, norm, factory(head)), dtype, norm_gain=gain
        )


def refused(func: Any, args: Any, kwargs: Any) -> bool:
    if WAITING & set(func.tags) or func in (
        torch.ops.aten.lift_fresh.default,
        torch.ops.aten._pin_memory.default,
    ):
        return True
    masks = [tensor for tensor in tensors_in(args[1:]) if tensor.dtype == torch.bool]
    return bool(
        func.overloadpacket
        in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
        and masks
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [tensor for one in value for tensor in tensors_in(one)]
        if isinstance(value, (list, tuple))
        else []
    )


class Recording(TorchDispatchMode):
    """Records operators with the storages they read and write, and replays them on the same
    storages, as a CUDA graph does.

    Refuses what a CUDA graph cannot capture.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if refused(func, args, kwargs or {}):
            raise RuntimeError(f"{func} cannot be captured")
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self._calls:
            # packed weights have no storage
            inputs = (tensor for tensor in tensors_in((args, kwargs)) if not tensor.is_mkldnn)
            known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
            outputs = tensors_in(result)
            if func._schema.is_mutable:
                func(*args, **kwargs)
            elif not all(tensor.untyped_storage().data_ptr() in known for tensor in outputs):
                for old, new in zip(outputs, tensors_in(func(*args, **kwargs)), strict=True):
                    old.copy_(new)


class RecordedGraphs:
    """Captures work by recording its operators, on any device, and returns a function that replays
    it. Implements `graphs.Capture`."""

    def __call__(
        self, work: Callable[[], None], state: Sequence[torch.Tensor]
    ) -> Callable[[], None]:
        saved = [tensor.clone() for tensor in state]

        def restore() -> None:
            for tensor, value in zip(state, saved, strict=True):
                tensor.copy_(value)

        for _ in range(2):  # as for a CUDA graph, whose work is run before it is captured
            restore()
            with torch.inference_mode(), Recording() as graph:
                work()
        restore()
        return torch.inference_mode()(graph.replay)
