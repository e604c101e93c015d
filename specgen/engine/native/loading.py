"""Builds a native model from its safetensors files, one layer after the other, so that no weight is in memory twice for long."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from math import sqrt
from pathlib import Path

import torch

from specgen.engine.native.description import Architecture
from specgen.engine.native.inputs import layer_kinds
from specgen.engine.native.layer import NativeLayer
from specgen.engine.native.layer_weights import final_norm, layer_weights
from specgen.engine.native.native_model import NativeModel, NativeParts
from specgen.engine.native.products import DenseProduct, ProductFactory
from specgen.engine.native.tensor_names import EMBEDDING, FINAL_NORM, HEAD, LayerTensors, bias_of, layer_tensors
from specgen.engine.native.weight_files import WeightFiles


def load_native(
    folder: Path,
    name: str,
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    *,
    exact: bool = False,
    quantise: str | None = None,
    layer_devices: Sequence[torch.device] | None = None,
) -> NativeModel:
    """Loads the model in `folder`; `name` is used in messages. `exact`: see `NativeModel`; `quantise`: see `ProductFactory`.

    `layer_devices` has the device of each layer, if they are on several: then the embedding is on the first one's, and `device`
    is that of the final norm and the head. Raises SpecgenError for missing, damaged, unsuitable or unexpected tensors.
    """
    with torch.no_grad():
        files, names = open_weights(folder, name, architecture, device)
        devices = [device] * len(names) if layer_devices is None else layer_devices
        factories = {on: ProductFactory(on, dtype, quantise=quantise) for on in dict.fromkeys([*devices, device])}
        gain = _common_gain(architecture, dtype, list(factories))
        # before the layers: packing needs the head twice for a moment
        parts = _parts(architecture, files, factories[device], dtype, gain, (devices[0], device))
        kinds = layer_kinds(architecture)
        layers = []
        for index, (tensors, on) in enumerate(zip(names, devices, strict=True)):
            files.use_device(on)
            weights = layer_weights(architecture, tensors, files.take, dtype, gain)
            layers.append(NativeLayer(architecture, index, kinds.index(architecture.layers[index]), weights, factories[on]))
            del weights
            files.close()
            if not files.are_copied:
                return_free_memory()
        files.check_all_taken(len(layers))
        return NativeModel(
            architecture,
            layers,
            parts,
            dtype,
            norm_gain=gain,
            min_rows=max(factory.min_rows for factory in factories.values()),
            exact=exact,
            num_parameters=files.numbers_taken,
            product_choices=[choice for factory in factories.values() for choice in factory.choices],
            layer_devices=layer_devices,
        )


def open_weights(
    folder: Path, name: str, architecture: Architecture, device: torch.device
) -> tuple[WeightFiles, list[LayerTensors]]:
    """Returns a model's weight files and the names of each layer's tensors. Raises SpecgenError if they are not complete."""
    files = WeightFiles(folder, name, device)
    names = [layer_tensors(architecture, index) for index in range(len(architecture.layers))]
    required = _required(names)
    files.check_complete(required if architecture.tied else [*required, EMBEDDING, HEAD])
    norms = [
        name
        for layer in names
        for each in (layer.q_norm, layer.k_norm)
        for name in ((each,) if isinstance(each, str) else each or ())
    ]
    known = [*required, *norms, EMBEDDING, HEAD]
    files.check_no_others([*known, *map(bias_of, known)], len(names))
    return files, names


def table_names(files: WeightFiles) -> tuple[str, str]:
    """Returns the names of the embedding's and of the LM head's table. They are the same if the files have only one table."""
    return HEAD if HEAD in files and EMBEDDING not in files else EMBEDDING, HEAD if HEAD in files else EMBEDDING


def return_free_memory() -> None:
    """Returns freed memory to the system where the C library can (glibc), which otherwise keeps a tenth of a model's size."""
    with suppress(AttributeError, OSError, TypeError):  # TypeError: Windows has no such library
        ctypes.CDLL(None).malloc_trim(0)


def norm_gain(architecture: Architecture, dtype: torch.dtype, device: torch.device) -> float:
    """Returns the gain of the residual stream that the model is run with; see `residual`."""
    extended = architecture.norm == "rms" and architecture.pre_norms and dtype == torch.float32 and device.type == "cpu"
    return sqrt(architecture.hidden_size) if extended else 1.0


def _common_gain(architecture: Architecture, dtype: torch.dtype, devices: Sequence[torch.device]) -> float:
    """Returns the gain of a residual stream that goes through all of these devices."""
    gains = {norm_gain(architecture, dtype, device) for device in devices}
    return gains.pop() if len(gains) == 1 else 1.0


def _required(names: list[LayerTensors]) -> list[str]:
    """Returns the names of all tensors that a model with these layers has, without its embedding, LM head and biases."""
    required = [FINAL_NORM]
    for layer in names:
        for field in (
            layer.attention_norm,
            layer.mlp_norm,
            layer.attention_post_norm,
            layer.mlp_post_norm,
            layer.output,
            layer.down,
        ):
            if field is not None:
                required.append(field)
        required += [*layer.qkv, *layer.gate_up]
    return required


def _parts(
    architecture: Architecture,
    files: WeightFiles,
    factory: ProductFactory,
    dtype: torch.dtype,
    gain: float,
    devices: tuple[torch.device, torch.device],
) -> NativeParts:
    """Returns the embedding, on the first of the devices, and the final norm and the LM head, on the second one.

    A tied model's files have one of the two tables, which serves as both, or both, and then each serves its own purpose, as in
    transformers. If the head's weight is packed, the embedding stays as it is stored: its rows are converted when they are used.
    """
    shape = architecture.vocab_size, architecture.hidden_size
    embedding_name, head_name = table_names(files)
    matrix = files.take(head_name, shape).to(dtype)
    head = factory(matrix)
    if head_name == embedding_name and isinstance(head, DenseProduct) and devices[0] == devices[1]:
        embedding = matrix
    else:
        del matrix
        # mapped anew, the table takes memory only for the rows that are used, not for all that packing has read
        files.use_device(devices[0])
        embedding = files.take(embedding_name, shape)
        embedding = embedding.to(dtype) if files.are_copied else embedding
        files.use_device(devices[1])
    return NativeParts(embedding, *final_norm(architecture, files.take, dtype, gain), head)
