"""Opens GGUF files: which files a model has, what its metadata says, and where its tensors are.

A model is one file, or several that were split from one: `NAME-00001-of-00003.gguf` and so on.
Every problem is a SpecgenError of one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from specgen.base.errors import SpecgenError
from specgen.base.text import one_line, shown
from specgen.engine.gguf.blocks import GgufTensor
from specgen.engine.gguf.header import (
    MAGIC,
    READ_TYPES,
    DamagedError,
    Header,
    UnreadTypeError,
    read_header,
)
from specgen.engine.gguf.naming import PART

AGAIN = "Download it again"
_RENAMED = "Give the parts the names that they had"
_SAMPLE_BYTES = 256  # read at three places of each tensor for a fingerprint
# Metadata that describes the model without changing what it computes, and how its file was split.
_DESCRIPTION = re.compile(r"general\.(?!architecture$)|split\.|quantize\.|tokenizer\.chat_template")


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An opened model. `paths` are its files, in order: one, or all parts of a split file.

    `metadata` is that of the first part: Python values (str, int, float, bool, and lists of them)
    by their keys, such as `general.architecture`. `tensors` has the tensors of all parts by name.
    """

    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that begins like a GGUF file, whatever its name is.

    False for what cannot be read.
    """
    try:
        if not path.is_file():  # reading a FIFO would wait for another program
            return False
        with path.open("rb", buffering=0) as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def open_gguf(path: Path, name: str) -> GgufFile:
    """Returns what the header of a GGUF file says, or the headers of all parts of a split one.

    `path` is any of the parts. `name` is what messages call the model. Headers are kept for the
    next call, for the last two models and as long as the files do not change. Raises SpecgenError
    for a file that is damaged, cannot be read or has tensors of a type that is not read, and for
    missing parts.
    """
    header = _header(path, name)
    count = _split_number(header, "count", name) if "split.count" in header.metadata else 1
    if count <= 1:
        return GgufFile((path,), header.metadata, header.tensors)
    paths = _paths_of_parts(path, count, name)
    return _joined(paths, [_header(part, name) for part in paths], name)


def _header(path: Path, name: str) -> Header:
    try:
        state = path.stat()
        part = PART.fullmatch(path.name)
        if part is not None and int(part["number"]) > 1:
            return read_header(path)
        return _kept_header(path, (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns))
    except UnreadTypeError as error:
        hint = f"Take a file with Q4_K_M, Q6_K or Q8_0 in its name; read are {READ_TYPES}"
        raise SpecgenError(f"{name} cannot be read: {error}", hint) from error
    except DamagedError as error:
        where = "" if name.endswith(path.name) else f"{one_line(path.name)}: "
        raise SpecgenError(f"{name} cannot be read: {where}{error}", AGAIN) from error
    except OSError as error:
        problem = f"{name} cannot be read: {one_line(str(path))}: {_reason(error)}"
        raise SpecgenError(problem, "Check the file") from error


# A large vocabulary takes a few tenths of a second to read, and much memory to keep: those of a
# target and a draft are kept. The later parts of a split file have none.
@lru_cache(maxsize=2)
def _kept_header(path: Path, state: tuple[int, ...]) -> Header:
    return read_header(path)


def _paths_of_parts(path: Path, count: int, name: str) -> tuple[Path, ...]:
    """Returns the files of a split model in order. Raises SpecgenError if one is missing."""
    named = PART.fullmatch(path.name)
    if named is None or int(named["count"]) != count:
        ending = f"-00001-of-{count:05}.gguf"
        problem = f"{name} is one of {count:,} parts, and its name does not end like {ending}"
        raise SpecgenError(problem, _RENAMED)

    names = (f"{named['name']}-{part:05}-of-{count:05}.gguf" for part in range(1, count + 1))
    paths = tuple(path.with_name(part) for part in names)
    missing = [part for part in paths if not part.is_file()]
    if missing:
        others = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise SpecgenError(
            f"{name} lacks its part {one_line(str(missing[0]))}{others}",
            "Download all parts into one folder",
        )
    return paths


def _joined(paths: tuple[Path, ...], headers: list[Header], name: str) -> GgufFile:
    """Returns the model of all parts. Raises SpecgenError if they do not belong together."""
    tensors: dict[str, GgufTensor] = {}
    for number, header in enumerate(headers):
        part = _split_number(header, "no", name)
        count = _split_number(header, "count", name)
        if (part, count) != (number, len(paths)):
            file = one_line(paths[number].name)
            problem = f"{file} says that it is part {part + 1:,} of {count:,}"
            raise SpecgenError(f"{name} cannot be read: {problem}", _RENAMED)
        twice = next((key for key in header.tensors if key in tensors), None)
        if twice is not None:
            problem = f"two of its parts have {shown(twice)}"
            raise SpecgenError(f"{name} cannot be read: {problem}", AGAIN)
        tensors |= header.tensors

    total = _split_number(headers[0], "tensors.count", name)
    if total != len(tensors):
        problem = f"its parts have {len(tensors):,} tensors together, and should have {total:,}"
        raise SpecgenError(f"{name} cannot be read: {problem}", AGAIN)
    return GgufFile(paths, headers[0].metadata, tensors)


def _split_number(header: Header, key: str, name: str) -> int:
    value = header.metadata.get(f"split.{key}")
    if type(value) is not int or value < 0:
        raise SpecgenError(f"{name} cannot be read: its split.{key} is {shown(value, 40)}", AGAIN)
    return value


def gguf_fingerprint(opened: GgufFile) -> str:
    """Returns 16 hexadecimal digits that identify a model's weights and its tokenizer.

    They are a hash of each tensor's name, type, shape and some of its bytes, and of the metadata
    that changes what is computed. They do not depend on how the tensors are distributed over files.
    Raises SpecgenError if a file cannot be read.
    """
    tensors = opened.tensors.values()
    digests: list[bytes] = []
    for path in opened.paths:
        try:
            with path.open("rb") as file:
                digests += [_digest(file, tensor) for tensor in tensors if tensor.path == path]
        except OSError as error:
            problem = f"{one_line(str(path))} cannot be read: {_reason(error)}"
            raise SpecgenError(problem, "Check the file") from error

    metadata = {key: value for key, value in opened.metadata.items() if not _DESCRIPTION.match(key)}
    total = sha256(repr(sorted(metadata.items())).encode("utf-8"))
    total.update(b"".join(sorted(digests)))
    return total.hexdigest()[:16]


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


def _digest(file: BinaryIO, tensor: GgufTensor) -> bytes:
    digest = sha256(f"{tensor.name} {tensor.type} {tensor.shape}".encode())
    end = tensor.offset + tensor.bytes
    middle = tensor.offset + (tensor.bytes - _SAMPLE_BYTES) // 2
    for offset in (tensor.offset, middle, end - _SAMPLE_BYTES):
        begin = max(tensor.offset, offset)
        file.seek(begin)
        digest.update(file.read(min(_SAMPLE_BYTES, end - begin)))
    return digest.digest()
