"""What turns tensors as llama.cpp stores them into those of the model's safetensors files.

Each function takes the file's metadata and returns a `Change`. Those of the gated delta rule raise
SpecgenError for metadata that is missing or does not fit together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from specgen.engine.gguf.metadata import Metadata

# Makes a tensor of the model from one stored tensor, or from several in the order of their names.
# Raises ValueError or RuntimeError for shapes that do not fit.
Change = Callable[..., torch.Tensor]


def in_halves(key: str, metadata: Metadata) -> Change:
    """For queries or keys: the two rows of a rotated pair, stored as neighbours, are moved half a
    head apart. `key` is the metadata key of the number of heads."""
    heads = metadata.per_layer(key, metadata.per_layer("{arch}.attention.head_count"))
    return partial(_rows_in_halves, heads=heads)


def _rows_in_halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Returns the rows of all heads with the two rows of a rotated pair half a head apart; they are
    stored as neighbours."""
    if heads < 1 or len(rows) % (2 * heads):
        what = f"{len(rows):,} rows of queries or keys do not belong to {heads:,} heads"
        raise ValueError(what)
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def moves_rows(change: Change) -> bool:
    """Whether a change only puts the rows of matrices in another order."""
    is_of_halves = isinstance(change, partial) and change.func is _rows_in_halves
    return is_of_halves or isinstance(change, RowOrder)


@dataclass(frozen=True, slots=True)
class RowOrder:
    """A change that only puts the rows of matrices in another order."""

    change: Change

    def __call__(self, *matrices: torch.Tensor) -> torch.Tensor:
        return self.change(*matrices)


@dataclass(frozen=True, slots=True)
class ColumnOrder:
    """A change that only puts the columns of a matrix in another order, `size` neighbours at a
    time. `move` does it for a matrix with any number of columns in place of `size`."""

    move: Callable[[torch.Tensor, int], torch.Tensor]
    size: int

    def __call__(self, matrix: torch.Tensor) -> torch.Tensor:
        return self.move(matrix, self.size)


def less_one(metadata: Metadata) -> Change:
    """For norms that multiply by 1 + weight: stored is 1 + weight."""
    return _without_one


def _without_one(weight: torch.Tensor) -> torch.Tensor:
    return weight.float() - 1


def convolution(metadata: Metadata) -> Change:
    """For kernels [channels, 1, size], which are stored as [channels, size]."""
    return _with_inner


def _with_inner(kernels: torch.Tensor) -> torch.Tensor:
    return kernels.unsqueeze(1)


def one_row(metadata: Metadata) -> Change:
    """For matrices [1, width], which are stored as vectors."""
    return lambda weight: weight.reshape(1, -1)


def interleaved(metadata: Metadata) -> Change:
    """Joins the gate and the up matrices [experts, inner, width] of all experts to [experts, width,
    2 inner], in which columns of gate and up take turns."""
    return RowOrder(
        lambda gates, ups: torch.stack((gates, ups), dim=2).flatten(1, 2).transpose(1, 2)
    )


def interleaved_bias(metadata: Metadata) -> Change:
    """Joins the biases [experts, inner] of gate and up projection to [experts, 2 inner], in which
    they take turns."""
    return lambda gates, ups: torch.stack((gates, ups), dim=2).flatten(1, 2)


def transposed(metadata: Metadata) -> Change:
    """For the down matrices [experts, inner, width] of all experts, which are stored as [experts,
    width, inner]."""
    return RowOrder(lambda downs: downs.transpose(1, 2))


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """The heads of a gated delta rule: `keys` key heads of `key_size` elements, and `values` value
    heads of `value_size` elements. `values` / `keys` value heads share a key head.

    In the model, the value heads of one key head follow each other. Stored are the first value
    heads of all key heads, then the second ones, and so on.
    """

    keys: int
    values: int
    key_size: int
    value_size: int

    def grouped(self, stored: torch.Tensor, size: int) -> torch.Tensor:
        """Returns rows, `size` for each value head, moved from the stored order to the model's."""
        tiled = stored.view(self.values // self.keys, self.keys, size, *stored.shape[1:])
        return tiled.transpose(0, 1).reshape(stored.shape)


def delta_heads(metadata: Metadata) -> DeltaHeads:
    keys = metadata.integer("{arch}.ssm.group_count")
    values = metadata.integer("{arch}.ssm.time_step_rank")
    if keys < 1 or values < 1 or values % keys:
        what = f"has {keys:,} key heads and {values:,} value heads in its recurrent layers"
        raise metadata.refuse(what)
    inner = metadata.integer("{arch}.ssm.inner_size")
    return DeltaHeads(keys, values, metadata.integer("{arch}.ssm.state_size"), inner // values)


def grouped_heads(metadata: Metadata) -> Change:
    """For a tensor with one element or row for each value head: puts them into the model's order
    (see `DeltaHeads`)."""
    return partial(delta_heads(metadata).grouped, size=1)


def grouped_rows(metadata: Metadata) -> Change:
    """For a matrix with `value_size` rows for each value head: puts the heads into the model's
    order."""
    heads = delta_heads(metadata)
    return RowOrder(partial(heads.grouped, size=heads.value_size))


def grouped_columns(metadata: Metadata) -> Change:
    """For a matrix with `value_size` columns for each value head: puts the heads into the model's
    order."""
    heads = delta_heads(metadata)
    return ColumnOrder(lambda matrix, size: heads.grouped(matrix.t(), size).t(), heads.value_size)


def grouped_last(metadata: Metadata) -> Change:
    """For a matrix with the rows of all queries, of all keys, then of all values: puts the values'
    heads into the model's order."""
    heads = delta_heads(metadata)
    others = 2 * heads.keys * heads.key_size

    def change(stored: torch.Tensor) -> torch.Tensor:
        values = heads.grouped(stored[others:], heads.value_size)
        return torch.cat((stored[:others], values))

    return RowOrder(change)


def grouped_convolution(metadata: Metadata) -> Change:
    change = grouped_last(metadata)
    return lambda kernels: _with_inner(change(kernels))


def logarithms(metadata: Metadata) -> Change:
    """For the rates of decay, stored with a minus sign: the model has their logarithms."""
    return _logarithm


def grouped_logarithms(metadata: Metadata) -> Change:
    change = grouped_heads(metadata)
    return lambda rates: change(_logarithm(rates))


def _logarithm(rates: torch.Tensor) -> torch.Tensor:
    return (-rates.float()).log()


def by_key_head(metadata: Metadata) -> Change:
    """Joins the matrix of all gates and the one of all queries, keys and values: for each key head
    its queries, its keys, and the values and gates of its value heads."""
    heads = delta_heads(metadata)
    sizes = [heads.keys * heads.key_size] * 2 + [heads.values * heads.value_size]

    def change(gates: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        sorts = (*others.split_with_sizes(sizes), gates)
        of_heads = [rows.reshape(heads.keys, -1, rows.shape[1]) for rows in sorts]
        return torch.cat(of_heads, dim=1).flatten(0, 1)

    return RowOrder(change)
