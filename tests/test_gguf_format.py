"""GGUF files: their header, their tensors' types, split files, and files that are damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, quants
from gguf_files import SCALES, TYPES, Stored, as_stored, random_stored, write_gguf
from published_model import gguf_file, needs_published_model

from specgen.engine.gguf import blocks
from specgen.engine.gguf.blocks import read_tensor
from specgen.engine.gguf.file import gguf_fingerprint, open_gguf


def tensors_of_every_type(rows: int = 3) -> dict[str, Stored]:
    return {kind: random_stored((rows, 512), kind, seed) for seed, kind in enumerate(TYPES)}


@needs_published_model
def test_a_published_file_is_read_as_by_the_gguf_package() -> None:
    source = gguf_file()
    assert source is not None
    ours = open_gguf(source, "the model")
    theirs = GGUFReader(source)

    stated = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == stated
    assert ours.paths == (source,)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        expected = np.array(quants.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(read_tensor(found), torch.from_numpy(expected).view(found.shape)), tensor.name


@pytest.mark.parametrize("kind", SCALES)
def test_any_bytes_stand_for_the_values_of_the_gguf_package_bit_for_bit(kind: str) -> None:
    """Scales are any float16 numbers, also infinite ones and NaN."""
    sizes = blocks.TYPES[kind]
    content = np.random.default_rng(0).integers(0, 256, (2000, sizes.bytes), dtype=np.uint8)
    values = blocks.dequantise(torch.from_numpy(content), sizes)
    with np.errstate(all="ignore"):
        expected = as_stored(content, kind).values.view(values.shape)

    is_number = ~expected.isnan()
    assert torch.equal(~values.isnan(), is_number)
    assert torch.equal(values[is_number].view(torch.int32), expected[is_number].view(torch.int32))
    assert is_number.any()


def test_tensors_of_every_type_are_read_whole_and_by_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tensors_of_every_type()
    monkeypatch.setattr(blocks, "_PIECE_ELEMENTS", 512)
    (path,) = write_gguf(tmp_path / "model.gguf", {"general.architecture": "llama"}, written)
    opened = open_gguf(path, "the model")
    for name, stored in written.items():
        tensor = opened.tensors[name]
        assert (tensor.shape, tensor.type) == ((3, 512), stored.type)
        values = read_tensor(tensor)
        assert values.dtype == (blocks.TYPES[name].dtype or torch.float32)
        assert torch.equal(values.float(), stored.values), name
        assert torch.equal(read_tensor(tensor, range(1, 3)), values[1:]), name
        assert torch.equal(read_tensor(tensor, dtype=torch.float16), values.half()), name


def test_a_split_file_is_the_same_model_as_the_whole_one(tmp_path: Path) -> None:
    written = tensors_of_every_type()
    metadata = {"general.architecture": "llama", "llama.context_length": 77, "general.name": "any"}
    (whole,) = write_gguf(tmp_path / "model.gguf", metadata, written)
    parts = write_gguf(tmp_path / "split.gguf", metadata, written, parts=3)
    assert len(parts) == 3
    expected = open_gguf(whole, "the model")
    for named in parts:
        opened = open_gguf(named, "the model")
        assert list(opened.paths) == parts
        assert opened.tensors.keys() == expected.tensors.keys()
        assert opened.metadata["llama.context_length"] == 77
        assert gguf_fingerprint(opened) == gguf_fingerprint(expected)
        for name, stored in written.items():
            assert torch.equal(read_tensor(opened.tensors[name]).float(), stored.values)
