"""Builds a native model from its safetensors files, one layer after the other, so that no weight is in memory twice for long."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from specgen.engine.native.architecture import Architecture
from specgen.engine.native.inputs import layer_kinds
from specgen.engine.native.layer import NativeLayer, norm_gain
from specgen.engine.native.layer_weights import EMBEDDING, FINAL_NORM, HEAD, final_norm, layer_shapes, layer_weights
from specgen.engine.native.native_model import NativeModel, NativeParts
from specgen.engine.native.products import DenseProduct, ProductFactory
from specgen.engine.weights import WeightFiles, model_files


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
        files = open_model(folder, name, architecture, device)
        devices = layer_devices or [device] * len(architecture.layers)
        factories = {on: ProductFactory(on, dtype, quantise=quantise) for on in dict.fromkeys([*devices, device])}
        gain = norm_gain(architecture, dtype, *factories)
        # before the layers: packing needs the head twice for a moment
        parts = _parts(architecture, files, factories[device], dtype, gain, (devices[0], device))
        (_, kinds), layers = layer_kinds(architecture, devices), []
        for index, on in enumerate(devices):
            files.use_device(on)
            weights = layer_weights(architecture, index, files.take, dtype, gain)
            moves_to = None if layer_devices is None else on
            layers.append(NativeLayer(architecture, index, kinds[index], weights, factories[on], gain=gain, device=moves_to))
            del weights
            files.close()
            if not files.are_copied:
                return_free_memory()
        return NativeModel(
            architecture,
            layers,
            parts,
            dtype,
            norm_gain=gain,
            exact=exact,
            product_choices=[choice for factory in factories.values() for choice in factory.choices],
            layer_devices=layer_devices,
        )


def open_model(folder: Path, name: str, architecture: Architecture, device: torch.device) -> WeightFiles:
    """Returns a model's weight files. Raises SpecgenError unless they have the tensors that the config describes, and no others
    that may matter."""
    files = model_files(folder, name, device)
    expected: dict[str, tuple[int, ...]] = {FINAL_NORM: (architecture.hidden_size,)}
    for index in range(len(architecture.layers)):
        expected |= layer_shapes(architecture, index)
    tables = {EMBEDDING, HEAD} if not architecture.tied else {*table_names(files)}
    expected |= dict.fromkeys(tables, (architecture.vocab_size, architecture.hidden_size))
    files.check(expected)
    files.check_no_others(expected, len(architecture.layers))
    return files


def table_names(files: WeightFiles) -> tuple[str, str]:
    """Returns the names of the embedding's and of the LM head's table. They are the same if the files have only one table."""
    return HEAD if HEAD in files and EMBEDDING not in files else EMBEDDING, HEAD if HEAD in files else EMBEDDING


def return_free_memory() -> None:
    """Returns freed memory to the system where the C library can (glibc), which otherwise keeps a tenth of a model's size."""
    with suppress(AttributeError, OSError, TypeError):  # TypeError: Windows has no such library
        ctypes.CDLL(None).malloc_trim(0)


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
    embedding_name, head_name = table_names(files)
    matrix = files.take(head_name).to(dtype)
    head = factory(matrix)
    if head_name == embedding_name and isinstance(head, DenseProduct) and devices[0] == devices[1]:
        embedding = matrix
    else:
        del matrix
        # mapped anew, the table takes memory only for the rows that are used, not for all that packing has read
        files.use_device(devices[0])
        embedding = files.take(embedding_name)
        embedding = embedding.to(dtype) if files.are_copied else embedding
        files.use_device(devices[1])
    return NativeParts(embedding, final_norm(architecture, files.take, dtype, gain), head)
