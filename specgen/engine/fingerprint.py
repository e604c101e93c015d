"""Computes a fingerprint of a model's weights, a short hash that identifies them, from a few hundred bytes of each tensor."""

from __future__ import annotations

import json
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from specgen.base.errors import SpecgenError

_SAMPLE_BYTES = 256  # read at three places of each tensor; this is enough, as further training changes nearly every number
_MAX_HEADER_BYTES = 1 << 28


def weights_fingerprint(folder: Path) -> str:
    """Returns 16 hexadecimal digits that identify the safetensors weights in `folder`.

    They are a hash of each tensor's name, dtype, shape and some of its bytes. They do not depend on the machine, nor on how the
    tensors are distributed over files. Raises SpecgenError for an unreadable file.
    """
    digests: list[bytes] = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            status = path.stat()
            digests += _tensor_digests(path, status.st_size, status.st_mtime_ns)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise SpecgenError(f"cannot read the weights {path}", "Download or save them again") from error
    return _combined(digests)


def file_fingerprint(file: BinaryIO) -> str:
    """Returns the fingerprint of the weights in an open safetensors file. Raises OSError and ValueError, among others."""
    return _combined(_digests(file))


def _combined(digests: list[bytes]) -> str:
    return sha256(b"".join(sorted(digests))).hexdigest()[:16]


@lru_cache(maxsize=64)
def _tensor_digests(path: Path, size_in_bytes: int, modified_ns: int) -> list[bytes]:
    """Returns a hash of each tensor in a safetensors file.

    The file's size and modification time are arguments only so that the cached result is not used after the file has changed.
    """
    with path.open("rb") as file:
        return _digests(file)


def _digests(file: BinaryIO) -> list[bytes]:
    size = int.from_bytes(file.read(8), "little")
    if size > _MAX_HEADER_BYTES:
        raise ValueError("no safetensors file")
    header = json.loads(file.read(size))
    digests = []
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        start, end = tensor["data_offsets"]
        digest = sha256(f"{name} {tensor['dtype']} {tensor['shape']}".encode())
        for offset in (start, (start + end - _SAMPLE_BYTES) // 2, end - _SAMPLE_BYTES):
            offset = max(start, offset)
            file.seek(8 + size + offset)
            digest.update(file.read(min(_SAMPLE_BYTES, end - offset)))
        digests.append(digest.digest())
    return digests
