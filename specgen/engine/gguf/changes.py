"""What turns tensors as llama.cpp stores them into those of the model's safetensors files.

Each function takes the file's metadata and returns a `Change`.
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
    """For queries or keys, whose heads are stored for a rotation of neighbours. `key` is that of
    the number of heads."""
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


def less_one(metadata: Metadata) -> Change:
    """For norms that multiply by 1 + weight, which is what is stored."""
    return _without_one


def _without_one(weight: torch.Tensor) -> torch.Tensor:
    return weight.float() - 1


def convolution(metadata: Metadata) -> Change:
    """For convolutions, which are stored without the inner dimension of 1."""
    return _with_inner


def _with_inner(kernels: torch.Tensor) -> torch.Tensor:
    return kernels.unsqueeze(1)


def one_row(metadata: Metadata) -> Change:
    """For matrices of one row, which are stored as vectors."""
    return lambda weight: weight.reshape(1, -1)


def interleaved(metadata: Metadata) -> Change:
    """For the gate and up matrices [experts, inner, width] of all experts, whose rows take turns as
    columns in the model."""
    return lambda gates, ups: torch.stack((gates, ups), dim=2).flatten(1, 2).transpose(1, 2)


def interleaved_bias(metadata: Metadata) -> Change:
    """For the biases [experts, inner] of these matrices."""
    return lambda gates, ups: torch.stack((gates, ups), dim=2).flatten(1, 2)


def transposed(metadata: Metadata) -> Change:
    """For the down matrices [experts, width, inner] that go with them."""
    return lambda downs: downs.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """The heads of a gated delta rule. Each of `keys` key heads of `key_size` numbers belongs to
    `values` / `keys` value heads of `value_size` numbers."""

    keys: int
    values: int
    key_size: int
    value_size: int

    def grouped(self, stored: torch.Tensor, size: int) -> torch.Tensor:
        """Returns the rows of all value heads, `size` of each, those of a key head together.

        They are stored with the first value heads of all key heads before the second ones.
        """
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
    """For what has a number for each value head."""
    return partial(delta_heads(metadata).grouped, size=1)


def grouped_rows(metadata: Metadata) -> Change:
    """For matrices with the rows of all value heads."""
    heads = delta_heads(metadata)
    return partial(heads.grouped, size=heads.value_size)


def grouped_columns(metadata: Metadata) -> Change:
    """For matrices with the columns of all value heads."""
    heads = delta_heads(metadata)
    return lambda weight: heads.grouped(weight.t(), heads.value_size).t()


def grouped_last(metadata: Metadata) -> Change:
    """For what has the rows of all queries and keys before those of the values."""
    heads = delta_heads(metadata)
    others = 2 * heads.keys * heads.key_size

    def change(stored: torch.Tensor) -> torch.Tensor:
        values = heads.grouped(stored[others:], heads.value_size)
        return torch.cat((stored[:others], values))

    return change


def grouped_convolution(metadata: Metadata) -> Change:
    change = grouped_last(metadata)
    return lambda kernels: _with_inner(change(kernels))


def logarithms(metadata: Metadata) -> Change:
    """For the rates of decay, of which the model has the logarithms."""
    return _logarithm


def grouped_logarithms(metadata: Metadata) -> Change:
    change = grouped_heads(metadata)
    return lambda rates: change(_logarithm(rates))


def _logarithm(rates: torch.Tensor) -> torch.Tensor:
    return (-rates.float()).log()


def by_key_head(metadata: Metadata) -> Change:
    """For the gates, and the queries, keys and values, which the model has for each key head
    together."""
    heads = delta_heads(metadata)
    sizes = [heads.keys * heads.key_size] * 2 + [heads.values * heads.value_size]

    def change(gates: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        sorts = (*others.split_with_sizes(sizes), gates)
        of_heads = [rows.reshape(heads.keys, -1, rows.shape[1]) for rows in sorts]
        return torch.cat(of_heads, dim=1).flatten(0, 1)

    return change
