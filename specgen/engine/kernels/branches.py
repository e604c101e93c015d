"""Branches of layers (attention or an MLP, with the norms around them) as the kernels run them:
many in one call, or all of a pass.

The structures are those of `kernels.c`. Each class keeps the tensors whose addresses C has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specgen.engine.kernels.packing import FLOAT_KINDS, PackedWeight

MOST_RUNS = 4
_POINTER = ctypes.c_void_p
_LONG = ctypes.c_long
_FLOAT = ctypes.c_float


class _Linear(ctypes.Structure):
    _fields_ = [
        ("weights", _POINTER * MOST_RUNS),
        ("biases", _POINTER * MOST_RUNS),
        ("runs", _LONG),
        ("inputs", _LONG),
        ("outputs", _LONG),
    ]


class _Branch(ctypes.Structure):
    _fields_ = [
        ("input", _Linear),
        ("output", _Linear),
        ("is_normed", _LONG),
        ("norm", _POINTER),
        ("post_norm", _POINTER),
        ("eps", _FLOAT),
        ("scale", _FLOAT),
        ("activation", _LONG),
        ("layer", _LONG),
        ("kind", _LONG),
        ("heads", _LONG),
        ("kv_heads", _LONG),
        ("size", _LONG),
        ("head_norm", _POINTER),
        ("normed_heads", _LONG),
        ("is_norm_over_all", _LONG),
        ("score_scale", _FLOAT),
        ("score_cap", _FLOAT),
        ("sinks", _POINTER),
    ]


class KindAddresses(ctypes.Structure):
    """The inputs of the layers of one kind; `kind_inputs` in C."""

    _fields_ = [
        ("rotation", _POINTER),
        ("rotation_stride", _LONG),
        ("rotated", _LONG),
        ("seen", _POINTER),
        ("others", _POINTER),
    ]


class _Place(ctypes.Structure):
    _fields_ = [
        ("keys", _POINTER),
        ("values", _POINTER),
        ("kv_heads", _LONG),
        ("head_stride", _LONG),
    ]


class _Join(ctypes.Structure):
    _fields_ = [("map", _Linear), ("eps", _FLOAT)]


class _Segment(ctypes.Structure):
    _fields_ = [
        ("branches", _POINTER),
        ("count", _LONG),
        ("kinds", _POINTER),
        ("first_row", _LONG),
        ("places", _POINTER),
        ("first_layer", _LONG),
        ("tap", _POINTER),
        ("tap_stride", _LONG),
        ("join", _POINTER),
        ("before", _POINTER),
    ]


class _Pass(ctypes.Structure):
    _fields_ = [
        ("table", _POINTER),
        ("table_kind", _LONG),
        ("table_scale", _FLOAT),
        ("ids", _POINTER),
        ("input", _POINTER),
        ("known", _LONG),
        ("segments", _POINTER),
        ("count", _LONG),
        ("rows", _LONG),
        ("width", _LONG),
        ("slot", _LONG),
        ("numbers", _LONG),
        ("is_normed", _LONG),
        ("norm", _POINTER),
        ("eps", _FLOAT),
        ("head", _Linear),
        ("kept", _LONG),
        ("states", _POINTER),
        ("logits", _POINTER),
    ]


@dataclass(frozen=True, slots=True)
class LinearRuns:
    """The weights of a linear layer in runs of its outputs, in order, and the bias [out] of each,
    float32."""

    weights: Sequence[PackedWeight]
    biases: Sequence[Tensor | None]

    @property
    def inputs(self) -> int:
        return self.weights[0].inputs

    @property
    def outputs(self) -> int:
        return sum(weight.outputs for weight in self.weights)


class BranchNorms(NamedTuple):
    """The norms around a branch: of its input if `is_normed`, with the weights `before` [width]
    (None: without), and of its output with the weights `after` (None: there is none)."""

    is_normed: bool
    before: Tensor | None
    after: Tensor | None
    eps: float


class HeadOptions(NamedTuple):
    """What an attention needs beside its linear layers; see `attention.Attention`.

    `layer` and `kind` are the indices of the layer and of the kind of its inputs. `norm` [k, size]
    are the weights of the norms of the first k heads; with `is_norm_over_all`, of one norm over all
    query heads and one over all key heads.
    """

    layer: int
    kind: int
    heads: int
    kv_heads: int
    size: int
    norm: Tensor | None
    is_norm_over_all: bool
    score_scale: float
    score_cap: float | None
    sinks: Tensor | None


class KernelBranch:
    """An attention (`heads`) or an MLP (`activation`, C's number) with its norms. `scale` is the
    factor of its output on the residual stream.

    `numbers` is how many numbers of scratch space it needs for each row.
    """

    def __init__(
        self,
        linears: Sequence[LinearRuns],
        norms: BranchNorms,
        scale: float,
        *,
        heads: HeadOptions | None = None,
        activation: int = 0,
    ) -> None:
        into, out = linears
        self._kept = (linears, norms, heads)  # C has the addresses of their tensors
        self.numbers = into.outputs + out.inputs
        self._data = _Branch(
            input=_linear(into),
            output=_linear(out),
            is_normed=norms.is_normed,
            norm=address(norms.before),
            post_norm=address(norms.after),
            eps=norms.eps,
            scale=scale,
            activation=activation,
        )
        if heads is not None:
            self._set_heads(heads)
        self.address = ctypes.addressof(self._data)

    def _set_heads(self, heads: HeadOptions) -> None:
        data = self._data
        data.layer = heads.layer
        data.kind = heads.kind
        data.heads = heads.heads
        data.kv_heads = heads.kv_heads
        data.size = heads.size
        data.head_norm = address(heads.norm)
        data.normed_heads = 0 if heads.norm is None else heads.norm.shape[0]
        data.is_norm_over_all = heads.is_norm_over_all
        data.score_scale = heads.score_scale
        data.score_cap = heads.score_cap or 0.0
        data.sinks = address(heads.sinks)


def _linear(runs: LinearRuns) -> _Linear:
    weights = (_POINTER * MOST_RUNS)(*(weight.address for weight in runs.weights))
    biases = (_POINTER * MOST_RUNS)(*(address(bias) for bias in runs.biases))
    return _Linear(weights, biases, len(runs.weights), runs.inputs, runs.outputs)


def address(tensor: Tensor | None) -> int | None:
    """Returns where a tensor's first element is; None for None, C's NULL."""
    if tensor is None:
        return None
    assert tensor.dtype == torch.float32
    assert tensor.is_contiguous()
    return tensor.data_ptr()


class Program:
    """Branches that are run in one call, in order."""

    def __init__(self, branches: Sequence[KernelBranch]) -> None:
        self._branches = branches
        self._addresses = (_POINTER * len(branches))(*(each.address for each in branches))
        self.address = ctypes.addressof(self._addresses)
        self.count = len(branches)
        self.numbers = max((branch.numbers for branch in branches), default=0)


class Places:
    """Where a cache has the keys and values of each layer.

    `buffers` are those of `KVBuffer` [layers, 2, kv heads, capacity, size], whose layers are
    numbered one after the other; `slots` has the number of each of the cache's layers.
    """

    def __init__(self, buffers: Sequence[Tensor], slots: Sequence[int]) -> None:
        self._buffers = buffers  # C has their addresses
        numbered: list[_Place] = []
        for buffer in buffers:
            _, _, kv_heads, capacity, size = buffer.shape
            in_bytes = buffer.element_size()
            of_layer = buffer.stride(0) * in_bytes
            of_part = buffer.stride(1) * in_bytes
            for layer in range(buffer.shape[0]):
                keys = buffer.data_ptr() + layer * of_layer
                numbered.append(_Place(keys, keys + of_part, kv_heads, capacity * size))
        self._data = (_Place * len(slots))(*(numbered[slot] for slot in slots))
        self.address = ctypes.addressof(self._data)


class KindTable(NamedTuple):
    """C's form of the `kinds`, the `KindInputs` of a pass, whose rows begin at `first_row` of
    them."""

    addresses: ctypes.Array[KindAddresses]
    kinds: Sequence[Any]  # C has the addresses of their tensors
    first_row: int = 0

    @classmethod
    def of(cls, kinds: Sequence[Any]) -> KindTable:
        made = (KindAddresses * len(kinds))()
        for own, kind in zip(made, kinds, strict=True):
            rotation = kind.rotation
            if rotation is not None:  # complex64 [rows, 1, pairs]
                own.rotation = rotation.data_ptr()
                own.rotation_stride = 2 * rotation.stride(0)
                own.rotated = 2 * rotation.shape[-1]
            own.seen = kind.seen.ranges.data_ptr()
            own.others = kind.seen.others.data_ptr()
        return cls(made, kinds)


class Join(NamedTuple):
    """Replaces the residual stream by a linear map of two normed states: its own, and another one
    of each row."""

    map: LinearRuns
    eps: float


class Table(NamedTuple):
    """Embeddings [tokens, width] in a dtype of floating point, and their factor."""

    rows: Tensor
    scale: float


class SegmentInputs(NamedTuple):
    """What a segment reads in one pass: the inputs of its kinds of layers, and its cache, whose
    first layer has the index `first_layer`.

    `tap` is the address of the rows to which the residual stream is copied before the segment, and
    the distance between these in numbers; None: it is not copied. `before` is the address of the
    other states [rows, width] of a `Join`.
    """

    kinds: KindTable
    places: Places
    first_layer: int
    tap: tuple[int, int] | None = None
    before: int | None = None


class PassProgram:
    """All that a short pass runs, in one call: embeddings, segments of layers, the final norm and
    the LM head. `pass` in C.

    `segments` are run in order, each after its `Join`, if it has one. Without a `table`, the pass
    begins with hidden states. `norm` [width] and `eps` are those of the final norm (`norm` None:
    there is none). `head` None: no logits are computed. A pass has at most `most_rows` rows.
    """

    def __init__(
        self,
        segments: Sequence[tuple[Program, Join | None]],
        width: int,
        most_rows: int,
        *,
        table: Table | None = None,
        norm: Tensor | None = None,
        eps: float = 0.0,
        head: LinearRuns | None = None,
    ) -> None:
        self._kept = (segments, table, norm, head)  # C has the addresses of their tensors
        self.width = width
        self.outputs = 0 if head is None else head.outputs
        self.num_tokens = 0 if table is None else len(table.rows)
        self.ids = (ctypes.c_int64 * most_rows)()
        self.segments = (_Segment * len(segments))()
        self._joins: list[_Join] = []
        for own, (program, join) in zip(self.segments, segments, strict=True):
            own.branches = program.address
            own.count = program.count
            if join is not None:
                self._joins.append(_Join(_linear(join.map), join.eps))
                own.join = ctypes.addressof(self._joins[-1])
        self.data = _Pass(
            ids=ctypes.addressof(self.ids),
            segments=ctypes.addressof(self.segments),
            count=len(segments),
            width=width,
            numbers=max(program.numbers for program, _ in segments),
            is_normed=norm is not None,
            norm=address(norm),
            eps=eps,
        )
        if table is not None:
            self.data.table = table.rows.data_ptr()
            self.data.table_kind = FLOAT_KINDS[table.rows.dtype]
            self.data.table_scale = table.scale
        if head is not None:
            self.data.head = _linear(head)
        self.address = ctypes.addressof(self.data)
