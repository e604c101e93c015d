"""The tensors of a GGUF file by the native decoder's names (a Llama's safetensors names, where the
model has the same tensors), with the values of the same model's safetensors files.

llama.cpp stores some tensors otherwise than the model does: the rows of queries and keys in another
order, norms with 1 added, the matrices of all experts together. `GgufTensors` has the methods of an
opened safetensors file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specgen.engine.gguf.architectures import ARCHITECTURES, Architecture
from specgen.engine.gguf.blocks import GgufTensor, read_tensor
from specgen.engine.gguf.changes import Change, ColumnOrder, moves_rows
from specgen.engine.gguf.file import GgufFile, open_gguf
from specgen.engine.gguf.metadata import Metadata
from specgen.engine.gguf.rounded import is_exact, is_rounded, read_rounded, with_columns_moved
from specgen.engine.kernels.packing import GROUP

# read by `config`
_SETTINGS = re.compile(
    r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.attn_rot_embd\.weight"
)
_MOST_EXPERTS = 4096
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of the model: its `shape`, the stored tensors that it is made of, and the `change`
    that makes it of them."""

    sources: tuple[GgufTensor, ...]
    shape: tuple[int, ...]
    change: Change | None = None

    def read(self, rows: range | None = None) -> torch.Tensor:
        """Returns the tensor, or those of its outermost rows that are in `rows`, which needs one
        that is stored as it is."""
        if self.change is not None:
            assert rows is None
            return self.change(*[read_tensor(source) for source in self.sources])
        return read_tensor(self.sources[0], rows)

    def read_rounded(self) -> torch.Tensor:
        """Returns a quantised matrix, or those of all experts, as bytes (see `rounded`), with the
        rows as the model has them."""
        matrices = [read_rounded(source) for source in self.sources]
        if self.change is None:
            return matrices[0]
        if isinstance(self.change, ColumnOrder):
            return with_columns_moved(matrices[0], self.change)
        return self.change(*matrices)

    @property
    def is_rounded(self) -> bool:
        """Whether it is stored as `read_rounded` can read it: rows, or whole groups of a row, in
        another order at most."""
        change = self.change
        if isinstance(change, ColumnOrder):
            has_rows = change.size % GROUP == 0
        else:
            has_rows = change is None or moves_rows(change)
        return has_rows and all(map(is_rounded, self.sources))

    @property
    def is_exact(self) -> bool:
        """Whether `read_rounded` returns exactly what the file says."""
        return self.is_rounded and all(map(is_exact, self.sources))

    @property
    def has_rows(self) -> bool:
        """Whether rows can be read."""
        return self.change is None


class GgufTensors:
    """The tensors of the model in the GGUF file `path`, on the CPU. Messages call the model `name`.

    A tensor is a copy: as stored if it is F32, F16 or BF16, in float32 if it is quantised. Of an
    architecture that is not in `ARCHITECTURES`, the tensors have the names of the file. Raises
    SpecgenError for a damaged file.
    """

    def __init__(self, path: Path, name: str) -> None:
        opened = open_gguf(path, name)
        self._stored = _by_model_name(opened, Metadata(opened.metadata, name))

    def keys(self) -> list[str]:
        return list(self._stored)

    def metadata(self) -> Mapping[str, str]:
        """The text in a safetensors file's header: none."""
        return {}

    def get_tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor. Raises KeyError for an unknown name, and ValueError or OSError for
        damaged data."""
        return self._stored[name].read()

    def get_matrix(self, name: str, *, exact: bool) -> torch.Tensor:
        """Returns a tensor, as bytes if it is a quantised matrix (see `rounded`), with `exact` only
        if they say the same. Raises as `get_tensor` does."""
        stored = self._stored[name]
        takes_bytes = stored.is_exact if exact else stored.is_rounded
        return stored.read_rounded() if takes_bytes else stored.read()

    def get_slice(self, name: str) -> GgufSlice:
        """Returns a tensor that is read when a part of it is taken."""
        return GgufSlice(self._stored[name])

    def shapes_and_types(self) -> dict[str, tuple[list[int], str]]:
        """Returns the shape of each tensor by name, and the name of the type in which it is stored,
        such as Q4_K."""
        return {
            name: (list(stored.shape), stored.sources[0].type)
            for name, stored in self._stored.items()
        }


class GgufSlice:
    """A tensor of which parts can be read."""

    def __init__(self, stored: _Stored) -> None:
        self._stored = stored

    def get_shape(self) -> list[int]:
        return list(self._stored.shape)

    def __getitem__(self, part: Any) -> torch.Tensor:
        """Returns a part of the tensor, by what indexes a torch tensor.

        Of a range of rows only these are read, unless the tensor is stored otherwise than the model
        has it. For any other part the whole tensor is read.
        """
        if part is ...:
            return self._stored.read()
        index = part if isinstance(part, tuple) else (part,)
        if not self._stored.has_rows or not index or not isinstance(index[0], slice):
            return self._stored.read()[part].clone()
        rows = range(self._stored.shape[0])[index[0]]
        if rows.step != 1:
            return self._stored.read()[part].clone()
        read = self._stored.read(range(rows.start, max(rows.start, rows.stop)))
        rest = index[1:]
        return read[(slice(None), *rest)].clone() if rest else read


def _by_model_name(opened: GgufFile, metadata: Metadata) -> dict[str, _Stored]:
    architecture = ARCHITECTURES.get(metadata.architecture)
    if architecture is None:
        return {name: _Stored((tensor,), tensor.shape) for name, tensor in opened.tensors.items()}

    sources: dict[str, list[GgufTensor]] = defaultdict(list)
    for name in sorted(opened.tensors):
        if not _SETTINGS.fullmatch(name):
            sources[_model_name(name, architecture)].append(opened.tensors[name])
    stored: dict[str, _Stored] = {}
    for name, tensors in sources.items():
        expected = 2 if _within_layer(name) in architecture.joined else 1
        if len(tensors) > expected:
            raise metadata.refuse(f"has two tensors that are its {name}")
        if len(tensors) < expected:
            raise metadata.refuse(f"lacks one of the two tensors that are its {name}")
        stored.update(_made_of(name, tuple(tensors), architecture, metadata))
    return stored


def _model_name(name: str, architecture: Architecture) -> str:
    """Returns the name of a tensor in safetensors files; the name itself if it is not known, so
    that it is noticed later."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return architecture.model_name(name) or name
    own = architecture.model_name(layer[2])
    return name if own is None else f"model.layers.{layer[1]}.{own}"


def _within_layer(name: str) -> str:
    """Returns a tensor's name without the number of its layer."""
    return re.sub(r"^(blk|model\.layers)\.\d+\.", "", name)


def _of_expert(tensor: GgufTensor, expert: int) -> GgufTensor:
    """Returns the part of a stored tensor that has the matrix of one expert."""
    size = tensor.bytes // tensor.shape[0]
    offset = tensor.offset + expert * size
    return replace(tensor, shape=tensor.shape[1:], offset=offset, bytes=size)


def _made_of(
    name: str, sources: tuple[GgufTensor, ...], architecture: Architecture, metadata: Metadata
) -> Iterator[tuple[str, _Stored]]:
    """Yields the tensors of the model that are made of the stored ones `sources`, by name; `{}` in
    `name` is an expert."""
    source = sources[0]
    if "{}" in name:
        count = metadata.integer("{arch}.expert_count")
        if len(source.shape) != 3 or source.shape[0] != count or count > _MOST_EXPERTS:
            sizes = " x ".join(map(str, source.shape))
            raise metadata.refuse(f"has {source.name} of {sizes} for {count:,} experts")
        for expert in range(count):
            own = _of_expert(source, expert)
            yield name.replace("{}", str(expert)), _Stored((own,), own.shape)
        return
    change = architecture.change(_within_layer(source.name), metadata)
    if change is None:
        yield name, _Stored(sources, source.shape)
        return
    try:
        shape = change(*[torch.empty(source.shape, device="meta") for source in sources]).shape
    except (RuntimeError, ValueError, IndexError) as error:
        shapes = " and ".join(" x ".join(map(str, source.shape)) for source in sources)
        raise metadata.refuse(
            f"has {source.name} of {shapes}, which does not fit its metadata"
        ) from error
    yield name, _Stored(sources, tuple(shape), change)
