"""What weights are in a model's files: name and shape of each tensor, and how ranks share it.

Each block of a layer (attention, recurrence, MLP, experts) describes its weights by a record of
`Tensor`s. Shapes, reading and the parts of ranks all follow from these records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch

from specgen.engine.gguf.rounded import restored
from specgen.engine.weights import Take

Side = Literal["rows", "columns"]
Unit = Literal["heads", "kv_heads", "neurons"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a model's files.

    `split` says along which side ranks share it; None: each has all of it. Its rows or columns then
    belong to `units`: first those of all units of the first kind, then those of the next one, each
    unit with equally many. `added_once`: each rank adds the tensor to its part of a sum, so that
    all ranks but the first take zeros.
    """

    name: str
    shape: tuple[int, ...]
    split: Side | None = None
    units: tuple[Unit, ...] = ()
    added_once: bool = False


@dataclass(frozen=True, slots=True)
class LinearFiles:
    """The weight [out, in] and the bias [out] of a linear layer; None: it has no bias."""

    weight: Tensor
    bias: Tensor | None = None


def linear_files(
    name: str,
    rows: int,
    columns: int,
    *,
    has_bias: bool = False,
    split: Side | None = None,
    units: tuple[Unit, ...] = (),
) -> LinearFiles:
    """Returns the tensors of the linear layer `name`, with a weight [`rows`, `columns`].

    A bias is split with the rows. Of a layer that is split by columns, the ranks' outputs are added
    up, so its bias is added once.
    """
    weight = Tensor(f"{name}.weight", (rows, columns), split, units)
    if not has_bias:
        return LinearFiles(weight)
    if split == "rows":
        return LinearFiles(weight, Tensor(f"{name}.bias", (rows,), split, units))
    return LinearFiles(weight, Tensor(f"{name}.bias", (rows,), added_once=split == "columns"))


def tensor_shapes(files: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor in a record, by name."""
    return {tensor.name: tensor.shape for tensor in walk(files)}


def walk(files: Any) -> Iterator[Tensor]:
    """Yields the tensors in a record, in the order of its fields, with those in tuples and records
    in these."""
    if isinstance(files, Tensor):
        yield files
    elif isinstance(files, tuple):
        for entry in files:
            yield from walk(entry)
    elif is_dataclass(files):
        for field in fields(files):
            yield from walk(getattr(files, field.name))


def as_floats(weight: torch.Tensor) -> torch.Tensor:
    """Returns a matrix in float32 that is stored in floating point or as bytes."""
    return restored(weight) if weight.dtype == torch.uint8 else weight.float()


def stacked(
    layers: Sequence[LinearFiles], take: Take, take_matrix: Take | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the weights of linear layers, joined along their rows, and their biases, joined too;
    None if there are none.

    `take_matrix` returns the weights, if need be as bytes (see `gguf.rounded`); by default `take`
    does.
    """
    take_matrix = take_matrix or take
    weights = [take_matrix(layer.weight.name) for layer in layers]
    if len({weight.dtype for weight in weights}) > 1:
        weights = [as_floats(weight) for weight in weights]
    biases = [take(layer.bias.name) for layer in layers if layer.bias is not None]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return weight, torch.cat(biases) if biases else None


def scaled(copy: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Returns `copy` times `gain`. Where it can, it changes `copy` itself: new memory costs as much
    time as the multiplication."""
    if torch.is_grad_enabled() or copy.dtype != gain.dtype:
        return copy * gain
    return copy.mul_(gain)
