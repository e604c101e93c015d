"""GGUF files: their header, their tensors' types, split files, and files that are damaged."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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

    stated = {
        key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")
    }
    assert ours.metadata == stated
    assert ours.paths == (source,)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        expected = np.array(quants.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(read_tensor(found), torch.from_numpy(expected).view(found.shape)), (
            tensor.name
        )


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


def test_tensors_of_every_type_are_read_whole_and_by_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_fingerprint_tells_models_apart_and_nothing_else(tmp_path: Path) -> None:
    """It knows weights, sizes, and what changes the computation; not names, chat templates, and
    where a file is."""
    metadata = {
        "general.architecture": "llama",
        "general.name": "a",
        "tokenizer.chat_template": "x",
        "llama.rope.freq_base": 1e4,
    }
    written = tensors_of_every_type(rows=64)

    def fingerprint(tensors: Mapping[str, Stored] = written, **changed: Any) -> str:
        named = {key.replace("__", "."): value for key, value in changed.items()}
        (path,) = write_gguf(
            tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf", metadata | named, tensors
        )
        return gguf_fingerprint(open_gguf(path, "the model"))

    expected = fingerprint()
    assert re.fullmatch("[0-9a-f]{16}", expected)
    assert fingerprint(general__name="b", tokenizer__chat_template="y") == expected
    others = {fingerprint(general__architecture="qwen3"), fingerprint(llama__rope__freq_base=2e4)}
    for place in (0, 32, 63):
        content = written["Q4_K"].content.copy()
        content[place] ^= 1
        others.add(fingerprint(written | {"Q4_K": as_stored(content, "Q4_K")}))
    renamed = {name.lower(): tensor for name, tensor in written.items()}
    turned = written | {"F32": as_stored(written["F32"].content.reshape(32, -1), "F32")}
    others |= {fingerprint(renamed), fingerprint(turned)}
    assert len(others | {expected}) == 8


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for length in (5, 77):
        write_gguf(path, {"general.architecture": "llama", "note": "x" * length}, {})
        assert len(open_gguf(path, "the model").metadata["note"]) == length


def test_a_file_that_becomes_shorter_is_an_error_of_the_system(tmp_path: Path) -> None:
    (path,) = write_gguf(
        tmp_path / "model.gguf",
        {"general.architecture": "llama"},
        {"a": random_stored((64, 32), "Q8_0", 0)},
    )
    tensor = open_gguf(path, "the model").tensors["a"]
    os.truncate(path, tensor.offset + 100)
    with pytest.raises(OSError, match="has become shorter"):
        read_tensor(tensor)


# What the format says of one block, number by number.


def half(block: bytes, place: int) -> np.float32:
    return np.float32(np.frombuffer(block, np.float16, 1, place)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def scale_and_minimum(packed: bytes, group: int) -> tuple[int, int]:
    """The 6-bit scale and minimum of a group of 32 elements in a block of Q4_K or Q5_K."""
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
    minimum = packed[group + 4] >> 4 | packed[group] >> 6 << 4
    return scale, minimum


def k_element(block: bytes, element: int, number: int) -> np.float32:
    scale, minimum = scale_and_minimum(block[4:16], element // 32)
    size = half(block, 0) * np.float32(scale)
    offset = half(block, 2) * np.float32(minimum)
    return size * np.float32(number) - offset


def q4_k(block: bytes, element: int) -> np.float32:
    byte = block[16 + element // 64 * 32 + element % 32]
    return k_element(block, element, byte >> 4 if element % 64 >= 32 else byte & 15)


def q5_k(block: bytes, element: int) -> np.float32:
    byte = block[48 + element // 64 * 32 + element % 32]
    fifth = block[16 + element % 32] >> element // 32 & 1
    return k_element(block, element, (byte >> 4 if element % 64 >= 32 else byte & 15) + 16 * fifth)


def q6_k(block: bytes, element: int) -> np.float32:
    part, rest = divmod(element, 128)
    group, place = divmod(rest, 32)
    lower = block[part * 64 + group % 2 * 32 + place] >> group // 2 * 4 & 15
    upper = block[128 + part * 32 + place] >> group * 2 & 3
    scale = half(block, 208) * np.float32(signed(block[192 + element // 16]))
    return scale * np.float32(lower + 16 * upper - 32)


def iq4_xs(block: bytes, element: int) -> np.float32:
    values = -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
    group, place = divmod(element, 32)
    lower = block[4 + group // 2] >> group % 2 * 4 & 15
    upper = int.from_bytes(block[2:4], "little") >> 2 * group & 3
    byte = block[8 + group * 16 + place % 16]
    scale = half(block, 0) * np.float32(lower + 16 * upper - 32)
    return scale * np.float32(values[byte >> 4 if place >= 16 else byte & 15])


@pytest.mark.parametrize(
    ("kind", "element_of"), [("Q4_K", q4_k), ("Q5_K", q5_k), ("Q6_K", q6_k), ("IQ4_XS", iq4_xs)]
)
def test_blocks_of_256_elements_stand_for_what_the_format_says(
    kind: str, element_of: Callable[[bytes, int], np.float32]
) -> None:
    content = random_stored((4, 256), kind, seed=5).content
    values = blocks.dequantise(torch.from_numpy(content), blocks.TYPES[kind])
    expected = [
        [element_of(block.tobytes(), element) for element in range(256)] for block in content
    ]
    assert torch.equal(values, torch.from_numpy(np.array(expected)))
