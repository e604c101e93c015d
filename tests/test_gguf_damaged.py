"""GGUF files that are damaged or made to do harm: each is refused in one line, before anything
large is allocated."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_files import TYPES, random_stored, write_gguf
from gguf_models import model_of, write_model

import specgen
from specgen.base.errors import SpecgenError
from specgen.engine.gguf.blocks import read_tensor
from specgen.engine.gguf.file import is_gguf, open_gguf
from specgen.engine.gguf.header import read_header

DAMAGED_MODELS = 60
STRING = 8
ARRAY = 9
UINT8 = 0
UINT32 = 4
UINT64 = 10
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.tokens": [f"token {number} é" for number in range(100)],
    "tokenizer.ggml.scores": [number / 7 for number in range(100)],
    "tokenizer.ggml.token_type": list(range(100)),
}


def text(content: str | bytes) -> bytes:
    content = content if isinstance(content, bytes) else content.encode()
    return struct.pack("<Q", len(content)) + content


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str | bytes, sizes: list[int], kind: int = 0, offset: int = 0) -> bytes:
    """What a header says of a tensor; `sizes` has the innermost dimension first."""
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def header(pairs: list[bytes], tensors: list[bytes], version: int = 3, order: str = "<") -> bytes:
    numbers = struct.pack(f"{order}IQQ", version, len(tensors), len(pairs))
    return b"GGUF" + numbers + b"".join(pairs) + b"".join(tensors)


def file_with(pairs: list[bytes], tensors: list[bytes], data: int = 64) -> bytes:
    """A file with `data` bytes of tensors."""
    begin = header(pairs, tensors)
    return begin + bytes(-len(begin) % 32 + data)


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


def nested(depth: int) -> bytes:
    value = array(UINT8, 0)
    for _ in range(depth):
        value = array(ARRAY, 1, value)
    return value


HUGE = 2**63
SPLIT = [pair("split.count", UINT32, struct.pack("<I", 2)), pair("split.no", UINT32, bytes(4))]
REFUSED = {
    "the file ends within its header": header([], [])[:20],
    "GGUF of version 1, and the versions 2 and 3 are read": header([], [], version=1),
    "it is in big-endian byte order": header([], [], order=">"),
    "claims 9,223,372,036,854,775,808 tensors: more than the file can hold": b"GGUF"
    + struct.pack("<IQQ", 3, HUGE, 0),
    "claims 9,223,372,036,854,775,808 metadata values": b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE),
    "header: longer": file_with([pair("a", STRING, struct.pack("<Q", HUGE))], []),
    "two metadata values have the key a": file_with(
        [pair("a", UINT8, b"1"), pair("a", UINT8, b"2")], []
    ),
    "a metadata key is empty": file_with([pair("", UINT8, b"1")], []),
    "a metadata key has control characters: a␛[2J": file_with([pair("a\x1b[2J", UINT8, b"1")], []),
    "a metadata key is not UTF-8": file_with([pair(b"a\xff", UINT8, b"1")], []),
    "a string in a is not UTF-8": file_with([pair("a", STRING, text(b"\xc3("))], []),
    "a has the unknown value type 13": file_with([pair("a", 13, b"1")], []),
    "b has the unknown value type 99": file_with([pair("b", ARRAY, array(99, 1, b"1"))], []),
    "claims 9,223,372,036,854,775,808 values in a": file_with(
        [pair("a", ARRAY, array(UINT64, HUGE))], []
    ),
    "claims 1,099,511,627,776 values in a": file_with([pair("a", ARRAY, array(STRING, 2**40))], []),
    "claims 4,294,967,296 values in a": file_with([pair("a", ARRAY, array(ARRAY, 2**32))], []),
    "the arrays in a are nested too deeply": file_with([pair("a", ARRAY, nested(10_000))], []),
    "general.alignment is 0, not a power of two": file_with(
        [pair("general.alignment", UINT32, bytes(4))], []
    ),
    "general.alignment is 48": file_with(
        [pair("general.alignment", UINT32, struct.pack("<I", 48))], []
    ),
    "general.alignment is x": file_with([pair("general.alignment", STRING, text("x"))], []),
    "two tensors have the name a": file_with([], [tensor("a", [4]), tensor("a", [4], offset=32)]),
    "a tensor's name is empty": file_with([], [tensor("", [4])]),
    "a tensor's name has control characters: a↵b": file_with([], [tensor("a\nb", [4])]),
    "a tensor's name is not UTF-8": file_with([], [tensor(b"\xfe", [4])]),
    "a has 5 dimensions": file_with([], [tensor("a", [1] * 5)]),
    "a has 0 dimensions": file_with([], [tensor("a", [])]),
    "a has the impossible shape 0 x 4": file_with([], [tensor("a", [4, 0])]),
    "a has the impossible shape 4294967296 x 4294967296": file_with(
        [], [tensor("a", [2**32, 2**32])]
    ),
    "a row of a has 48 elements, and blocks of Q4_0 have 32": file_with([], [tensor("a", [48], 2)]),
    "a is not aligned to 32 bytes": file_with([], [tensor("a", [4], offset=16)]),
    "a ends at byte 144, and the file has 128 bytes": file_with([], [tensor("a", [20])]),
    "a ends at byte 9,223,372,036,854,775,888": file_with([], [tensor("a", [4], offset=HUGE)]),
    "b overlaps another tensor": file_with([], [tensor("a", [12]), tensor("b", [4], offset=32)]),
    "a is stored as IQ2_XXS. Take a file with Q4_K_M, Q6_K or Q8_0 in its name": file_with(
        [], [tensor("a", [256], 16)]
    ),
    "a is stored in the unknown type 77": file_with([], [tensor("a", [4], 77)]),
    "is one of 2 parts, and its name does not end like -00001-of-00002.gguf": file_with(SPLIT, []),
    "its split.count is x": file_with([pair("split.count", STRING, text("x"))], []),
}


def refusal(path: Path) -> str:
    with pytest.raises(SpecgenError) as raised:
        open_gguf(path, "the model")
    line = str(raised.value)
    assert line.isprintable(), "one line, without control characters"
    return line


@pytest.mark.parametrize("words", REFUSED)
def test_what_breaks_the_format_is_named_in_one_line(tmp_path: Path, words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(REFUSED[words])
    expected = "the file ends within its header" if words == "header: longer" else words
    assert expected in refusal(path)


def test_a_header_of_more_values_than_a_model_needs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    numbers = (
        pair("a", ARRAY, array(UINT8, 5, bytes(5))),
        pair("b", ARRAY, array(UINT8, 5, bytes(5))),
    )
    path.write_bytes(file_with([*numbers], [tensor("a", [4]), tensor("b", [4], offset=32)]))
    assert open_gguf(path, "the model").metadata == {"a": [0] * 5, "b": [0] * 5}
    for limit, most, words in (
        ("_MAX_NUMBERS", 9, "5 values in b: more than 4"),
        ("_MAX_PAIRS", 1, "2 metadata values: more than 1"),
        ("_MAX_TENSORS", 1, "2 tensors: more than 1"),
        ("_MAX_HEADER_BYTES", 120, "its header is longer than 0 MiB"),
    ):
        path.touch()
        with monkeypatch.context() as patch:
            patch.setattr(f"specgen.engine.gguf.header.{limit}", most)
            assert words in refusal(path)


def test_what_is_no_gguf_file_is_told_without_an_error(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"GGU")
    (tmp_path / "empty").touch()
    (tmp_path / "model").write_bytes(b"GGUF")
    names = "short", "empty", ".", "nothing", "a\0b", "a" * 10_000, "short/below"
    assert not any(is_gguf(tmp_path / name) for name in names)
    assert is_gguf(tmp_path / "model")
    assert "it is no GGUF file" in refusal(tmp_path / "short")
    assert "No such file" in refusal(tmp_path / "nothing")
    assert "Is a directory" in refusal(tmp_path)


def test_parts_of_a_split_file_have_to_belong_together(tmp_path: Path) -> None:
    tensors = {name: random_stored((2, 32), "F32", 0) for name in "abc"}
    first, second, third = write_gguf(tmp_path / "m.gguf", METADATA, tensors, parts=3)
    assert len(open_gguf(second, "the model").tensors) == 3
    kept = second.read_bytes()

    second.unlink()
    assert f"the model lacks its part {second}. Download all parts" in refusal(third)
    second.write_bytes(third.read_bytes())
    assert "m-00002-of-00003.gguf says that it is part 3 of 3" in refusal(first)
    second.write_bytes(kept[:-300])
    assert "m-00002-of-00003.gguf: the file ends within its header" in refusal(first)
    second.write_bytes(kept.replace(text("b"), text("a")))
    assert "two of its parts have a" in refusal(first)
    second.write_bytes(kept)
    fewer = first.read_bytes().replace(struct.pack("<Ii", 5, 3), struct.pack("<Ii", 5, 4))
    first.write_bytes(fewer)
    assert "its parts have 3 tensors together, and should have 4" in refusal(third)


def flipped(content: bytes, dice: random.Random, place: Callable[[], int]) -> bytes:
    damaged = bytearray(content)
    for _ in range(dice.choice((1, 1, 2, 8))):
        damaged[place()] ^= 1 << dice.randrange(8)
    return bytes(damaged)


def truncated(content: bytes, dice: random.Random, place: Callable[[], int]) -> bytes:
    return content[: place()]


def with_huge_number(content: bytes, dice: random.Random, place: Callable[[], int]) -> bytes:
    number = dice.choice((2**64 - 1, 2**63, 2**62, 2**40, 2**32, 2**31 - 1, len(content), 2**16, 0))
    width = dice.choice((4, 8))
    start = place()
    return (
        content[:start]
        + (number % 2 ** (8 * width)).to_bytes(width, "little")
        + content[start + width :]
    )


def spliced(content: bytes, dice: random.Random, place: Callable[[], int]) -> bytes:
    source = place()
    piece = content[source : source + dice.choice((1, 4, 8, 100))]
    start = place()
    end = start + dice.choice((0, len(piece), 50))
    return content[:start] + piece + content[end:]


DAMAGES = flipped, truncated, with_huge_number, spliced


@pytest.mark.parametrize(
    ("seeds", "least"),
    [(range(200), 60), pytest.param(range(200, 2200), 600, marks=pytest.mark.slow)],
)
def test_damaged_files_are_refused_in_one_line_or_read_without_large_allocations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: range, least: int
) -> None:
    """Half of the files are a part of a split one. Most damages are in the header, where they do
    most harm."""
    tensors = {kind: random_stored((2, 256), kind, seed) for seed, kind in enumerate(TYPES)}
    whole = write_gguf(tmp_path / "whole.gguf", METADATA, tensors)
    parts = write_gguf(tmp_path / "m.gguf", METADATA, tensors, parts=2)
    contents = {path: path.read_bytes() for path in (*whole, *parts)}
    monkeypatch.setattr(
        "specgen.engine.gguf.file._kept_header", lambda path, state: read_header(path)
    )
    ends = {
        path: min(found.offset for found in read_header(path).tensors.values()) for path in contents
    }
    refused = 0
    for seed in seeds:
        dice = random.Random(seed)
        path = dice.choice((*whole, dice.choice(parts)))
        content = contents[path]

        def place(
            dice: random.Random = dice, end: int = ends[path], size: int = len(content)
        ) -> int:
            return dice.randrange(end if dice.random() < 0.8 else size)

        path.write_bytes(dice.choice(DAMAGES)(content, dice, place))
        line = check_reading(path, seed)
        refused += line is not None
        assert line is None or line.isprintable(), seed
        path.write_bytes(content)
    assert least < refused < len(seeds)


def check_reading(path: Path, seed: int) -> str | None:
    """Opens and reads a file. Returns the line that refuses it, None if there is none.

    Checks that this takes no more memory than a small multiple of what is on the disk.
    """
    size = sum(file.stat().st_size for file in path.parent.glob(f"{path.name[0]}*.gguf"))
    tracemalloc.start()
    try:
        opened = open_gguf(path, "the model")
        for tensor in opened.tensors.values():
            assert read_tensor(tensor).nbytes <= 8 * tensor.bytes, seed
            assert tensor.bytes <= size, seed
    except SpecgenError as error:
        return str(error)
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 4 * size + 40_000, seed
    return None


def test_damaged_files_load_or_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the config, the tokenizer and the weights. All damages are in the header."""
    monkeypatch.setattr(
        "specgen.engine.gguf.file._kept_header", lambda path, state: read_header(path)
    )
    path = write_model(model_of("qwen2"), "qwen2", tmp_path / "model.gguf", "Q8_0")
    content = path.read_bytes()
    header_end = min(found.offset for found in read_header(path).tensors.values())
    loaded = 0
    problems = set()
    for seed in range(DAMAGED_MODELS):
        dice = random.Random(seed)

        def place(dice: random.Random = dice) -> int:
            return dice.randrange(header_end)

        path.write_bytes(
            dice.choice((flipped, flipped, with_huge_number, spliced))(content, dice, place)
        )
        try:
            with specgen.load(str(path), dtype="float32", backend="native") as pair:
                assert pair.tokenizer.vocabulary(), seed
                assert pair.target.model.reference_logits([1, 2]).shape[0] == 2, seed
            loaded += 1
        except SpecgenError as error:
            problems.add(str(error))
    assert all(problem.isprintable() for problem in problems)
    assert loaded > 5
    assert len(problems) > 10
