"""Builds a native model from its safetensors files, one layer after the other, so that no weight is in memory twice for long."""

from __future__ import annotations

import ctypes
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
) -> NativeModel:
    """Loads the model in `folder`; `name` is used in messages. `exact`: see `NativeModel`; `quantise`: see `ProductFactory`.

    Raises SpecgenError for missing, damaged, unsuitable or unexpected tensors.
    """
    with torch.no_grad():
        files, names = open_weights(folder, name, architecture, device)
        factory = ProductFactory(device, dtype, quantise=quantise)
        gain = norm_gain(architecture, dtype, device)
        parts = _parts(architecture, files, factory, dtype, gain)  # before the layers: packing needs the head twice for a moment
        files.close()
        kinds = layer_kinds(architecture)
        layers = []
        for index, tensors in enumerate(names):
            weights = layer_weights(architecture, tensors, files.take, dtype, gain)
            layers.append(NativeLayer(architecture, index, kinds.index(architecture.layers[index]), weights, factory))
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
            min_rows=factory.min_rows,
            exact=exact,
            num_parameters=files.numbers_taken,
            product_choices=factory.choices,
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
    architecture: Architecture, files: WeightFiles, factory: ProductFactory, dtype: torch.dtype, gain: float
) -> NativeParts:
    """Returns the embedding, the final norm and the LM head.

    A tied model's files have one of the two tables, which serves as both, or both, and then each serves its own purpose, as in
    transformers. If the head's weight is packed, the embedding stays as it is stored: its rows are converted when they are used.
    """
    shape = architecture.vocab_size, architecture.hidden_size
    embedding_name, head_name = table_names(files)
    matrix = files.take(head_name, shape).to(dtype)
    head = factory(matrix)
    if head_name == embedding_name and isinstance(head, DenseProduct):
        embedding = matrix
    else:
        del matrix
        files.close()  # mapped anew, the table takes memory only for the rows that are used, not for all that packing has read
        embedding = files.take(embedding_name, shape)
        embedding = embedding.to(dtype) if files.are_copied else embedding
    return NativeParts(embedding, *final_norm(architecture, files.take, dtype, gain), head)
