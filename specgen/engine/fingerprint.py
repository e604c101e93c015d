"""Which weights a folder holds, told without reading gigabytes, and the same on every machine."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from specgen.errors import SpecgenError

_SLICE = 256  # bytes, of which three are taken of each tensor: another training changes nearly every one
_LONGEST_HEADER = 1 << 28


def weights_fingerprint(folder: Path) -> str:
    """16 hexadecimal digits that stand for the safetensors weights in `folder`: every tensor's name, dtype, shape, and samples.

    How the tensors are spread over files makes no difference. Raises SpecgenError for a file that cannot be read.
    """
    entries: list[bytes] = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            entries += _entries(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SpecgenError(f"cannot read the weights {path}", "Download or save them anew") from error
    return sha256(b"".join(sorted(entries))).hexdigest()[:16]


def _entries(path: Path) -> list[bytes]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _LONGEST_HEADER:
            raise ValueError("no safetensors file")
        header = json.loads(file.read(size))
        entries = []
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            start, end = tensor["data_offsets"]
            digest = sha256(f"{name} {tensor['dtype']} {tensor['shape']}".encode())
            for position in (start, (start + end - _SLICE) // 2, end - _SLICE):
                position = max(start, position)
                file.seek(8 + size + position)
                digest.update(file.read(min(_SLICE, end - position)))
            entries.append(digest.digest())
        return entries
