"""Reads safetensors and GGUF files: single tensors of a model, a trained head or an exit layer,
sizes, and fingerprints.

Only what is used is read. A fingerprint is a short hash that identifies weights by a few hundred
bytes of each tensor.

Use: open `WeightFiles`, `check` the shapes of all tensors that have to be there, then `take` them
one by one. Every problem is a SpecgenError of one line that calls the files' owner by name, such as
"the head DIR" or a model's id.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from specgen.base.errors import SpecgenError
from specgen.base.files import files_in
from specgen.base.text import one_line, shown
from specgen.engine.gguf.file import gguf_fingerprint, is_gguf, open_gguf
from specgen.engine.gguf.tensors import GgufTensors

Shape = tuple[int, ...]
# by device, inode, size and time of change of a file
_known_digests: dict[tuple[int, ...], list[bytes]] = {}

# Returns the tensor with this name, in the shape that a layer of the model has, on the device of
# the weights.
Take = Callable[[str], torch.Tensor]

SINGLE_FILE = "model.safetensors"
FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
AGAIN = "Download or save it again"
# smaller files are copied, so that one that is written again cannot change the tensors
_COPIED_BYTES = 1 << 26
# read at three places of each tensor for a fingerprint, as further training changes nearly every
# element
_SAMPLE_BYTES = 256
_MAX_HEADER_BYTES = 1 << 28

# Buffers that older versions of transformers saved, which are computed from the config; and parts
# of a model that its next token does not depend on: heads that predict several tokens, value heads,
# and encoders of pictures and sound.
BUFFER = re.compile(r"\.(original_)?inv_freq$|\.(cos|sin)_cached$|(^|\.)position_ids$")
HARMLESS = re.compile(
    BUFFER.pattern
    + r"|(^|\.)(mtp|mtp_\w+|v_head|medusa_head|vision_tower|vision_model|visual|audio_tower"
    + r"|multi_modal_projector)\."
    + r"|(^|\.)embed_(vision|audio)\."
)
# the second one in models with vision or audio
_PREFIX = re.compile(r"^(model\.)?(language_model\.)?(model\.)?|^backbone\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def bias_of(weight: str) -> str:
    """Returns the name of the bias that belongs to a weight."""
    return weight.removesuffix("weight") + "bias"


class WeightFiles:
    """The tensors at `path` by name: of a safetensors or GGUF file, or of a folder with the file
    `single` or an index of several files.

    `owner` is what messages call the model or head. `name_of` turns a tensor's name in the files
    (its key) into the name by which it is known here, or into None, which leaves it out. `device`
    is where tensors are put. Only headers are read before `take` is called. Raises SpecgenError for
    files that are missing or damaged, and for two keys with the same name.
    """

    def __init__(
        self,
        path: Path,
        owner: str,
        device: torch.device | None = None,
        *,
        single: str = SINGLE_FILE,
        name_of: Callable[[str], str | None] = str,
    ) -> None:
        self.owner = owner
        self._open: dict[Path, Any] = {}
        self._is_gguf = is_gguf(path)
        self.use_device(device or torch.device("cpu"))
        with reading_weights(owner):
            self._paths = files_of_keys(path, single)
            self.bytes = sum(path.stat().st_size for path in set(self._paths.values()))
        self._keys: dict[str, str] = {}
        for key in self._paths:
            name = name_of(key)
            if name in self._keys:
                raise self.refuse(
                    f"both {shown(self._keys[name])} and {shown(key)} are its {shown(name)}"
                )
            if name is not None:
                self._keys[name] = key

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    @property
    def names(self) -> Collection[str]:
        return self._keys.keys()

    def key(self, name: str) -> str:
        """Returns a tensor's name in the files, for a message; `name` itself if the files lack the
        tensor."""
        return shown(self._keys.get(name, name))

    def shape(self, name: str) -> Shape:
        """Returns the shape of the tensor `name`. Raises SpecgenError if the tensor is missing or
        its file is damaged."""
        self._check_complete([name])
        with reading_weights(self.owner):
            return tuple(self._slice(name).get_shape())

    @property
    def metadata(self) -> Mapping[str, str]:
        """The metadata in the header of the first file, by name; empty if there is none."""
        with reading_weights(self.owner):
            return (
                self._file(next(iter(self._paths.values()))).metadata() or {} if self._paths else {}
            )

    def refuse(self, problem: str, hint: str = AGAIN) -> SpecgenError:
        """Returns the error to raise for these files: `problem` says what is wrong with them,
        `hint` what to do."""
        return SpecgenError(f"{self.owner}: {problem}", hint)

    def check(self, expected: Mapping[str, Shape]) -> None:
        """Raises SpecgenError if one of the expected tensors is missing or has another shape."""
        self._check_complete(expected)
        for name, shape in expected.items():
            if (stored := self.shape(name)) != shape:
                raise wrong_shape(self.owner, self.key(name), stored, shape)

    def check_no_others(self, known: Collection[str], layers: int) -> None:
        """Raises SpecgenError if the files have tensors that are not in `known` and may matter;
        `layers`: see `check_no_extra`."""
        others = (key for name, key in self._keys.items() if name not in known)
        check_no_extra(
            others, self.owner, layers, sum(name.endswith(".eh_proj.weight") for name in self._keys)
        )

    def _check_complete(self, names: Iterable[str]) -> None:
        if missing := sorted(name for name in names if name not in self._keys):
            raise missing_tensors(self.owner, missing)

    def take(self, name: str) -> torch.Tensor:
        """Returns a tensor in its stored dtype on the device; on a CPU a view of the mapped file,
        or a copy if the files are small.

        Raises SpecgenError if the tensor is missing or damaged, or holds no floating-point numbers.
        """
        tensor = self._stored(name)
        self._check_dtype(name, tensor.dtype)
        if self._device.type != "cpu":
            return tensor.to(self._device)
        return tensor.clone() if self.are_copied and not self._is_gguf else tensor

    def take_matrix(self, name: str, *, exact: bool = False) -> torch.Tensor:
        """Returns a matrix [rows, columns] for our own kernels: as `take` does, or as bytes [rows,
        bytes of a row] if it is quantised (see `gguf.rounded`), with `exact` only if these say the
        same as the file."""
        if not self._is_gguf:
            return self.take(name)
        return self._read(name, lambda file, key: file.get_matrix(key, exact=exact))

    def take_integers(self, name: str) -> torch.Tensor:
        """Returns a vector of integers or booleans as int64 on the CPU. Raises SpecgenError if the
        tensor is something else."""
        tensor = self._stored(name)
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dim() != 1:
            stored = f"{tensor.dim()}-dimensional {str(tensor.dtype).removeprefix('torch.')}"
            raise self.refuse(f"{self.key(name)} has to be a vector of integers, not {stored}")
        return tensor.to("cpu", torch.int64)

    def _stored(self, name: str) -> torch.Tensor:
        return self._read(name, lambda file, key: file.get_tensor(key))

    def _read(self, name: str, read: Callable[[Any, str], torch.Tensor]) -> torch.Tensor:
        """Returns what `read` makes of the opened file with the tensor `name`, and of its key
        there."""
        self._check_complete([name])
        with reading_weights(self.owner):
            key = self._keys[name]
            return read(self._file(self._paths[key]), key)

    def take_part(self, name: str, dimension: int, ranges: Sequence[range]) -> torch.Tensor:
        """Returns those rows (`dimension` 0) or columns (1) of a tensor that are in `ranges`, as a
        copy. Reads nothing else. Raises SpecgenError as `take` does."""
        self._check_complete([name])
        with reading_weights(self.owner):
            stored = self._slice(name)
            slices = [slice(part.start, part.stop) for part in ranges]
            parts = [stored[part] if dimension == 0 else stored[:, part] for part in slices]
        self._check_dtype(name, parts[0].dtype)
        return torch.cat(parts, dim=dimension).to(self._device)

    def _check_dtype(self, name: str, dtype: torch.dtype) -> None:
        if dtype not in FLOATS:
            stored = str(dtype).removeprefix("torch.")
            raise self.refuse(
                f"{self.key(name)} is stored as {stored}",
                "Take weights in float32, bfloat16 or float16",
            )

    @property
    def are_copied(self) -> bool:
        """Whether tensors are copies instead of views of the mapped files: always on an
        accelerator, of GGUF files, and of small files."""
        return self._device.type != "cpu" or self._is_gguf or self.bytes < _COPIED_BYTES

    def use_device(self, device: torch.device) -> None:
        """Puts tensors on `device` from now on. Closes the files."""
        self.close()
        self._device = device
        # where safetensors puts what it reads
        self._opened_on = str(device) if device.type == "cuda" else "cpu"

    def close(self) -> None:
        """Closes the files, which frees the memory of pages that no tensor uses any more. They are
        opened again when needed."""
        self._open.clear()

    def _slice(self, name: str) -> Any:
        return self._file(self._paths[self._keys[name]]).get_slice(self._keys[name])

    def _file(self, path: Path) -> Any:
        if path not in self._open and self._is_gguf:
            self._open[path] = GgufTensors(path, self.owner)
        elif path not in self._open:
            self._open[path] = safe_open(path, framework="pt", device=self._opened_on)
        return self._open[path]


def model_files(
    folder: Path, owner: str, device: torch.device, names: Mapping[str, str]
) -> WeightFiles:
    """Opens a model's tensors under their names without a prefix such as `model.` or
    `language_model.`, renamed by the family's `names` (see `renamed`). Raises SpecgenError as
    `WeightFiles` does."""

    def name_of(key: str) -> str:
        return renamed(_PREFIX.sub("", key, count=1), names)

    return WeightFiles(folder, owner, device, name_of=name_of)


def renamed(name: str, names: Mapping[str, str]) -> str:
    """Returns a tensor's name with parts of it renamed, each at most once. Parts are separated by
    dots; a key of `names` may consist of several. Where several keys fit, the longest counts."""
    if not names:
        return name
    keys = "|".join(re.escape(key) for key in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<![^.])({keys})(?![^.])", lambda match: names[match[0]], name)


def files_of_keys(path: Path, single: str = SINGLE_FILE) -> dict[str, Path]:
    """Returns the path of the file that holds each tensor, by the tensor's name in it.

    All tensors are in one file, or the index in a folder says where they are. Call it within
    `reading_weights`, because it raises the errors of damaged files.
    """
    file = path if path.is_file() else path / single
    if is_gguf(file):
        return dict.fromkeys(GgufTensors(file, str(file)).keys(), file)
    if file.is_file():
        with safe_open(file, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), file)
    index = file.with_name(f"{SINGLE_FILE}.index.json")
    files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return {key: index.parent / Path(name).name for key, name in files.items()}


@contextmanager
def reading_weights(owner: str) -> Iterator[None]:
    """Turns errors of reading weight files into a SpecgenError that calls their owner by name."""
    try:
        yield
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
        SafetensorError,
    ) as error:
        reason = one_line(" ".join(str(error).split()))[:160] or type(error).__name__
        raise SpecgenError(f"cannot read the weights of {owner}: {reason}", AGAIN) from error


def missing_tensors(owner: str, keys: Sequence[str]) -> SpecgenError:
    """Returns the error for files that lack these tensors."""
    return SpecgenError(
        f"{owner} lacks {len(keys)} of its tensors (the first: {shown(keys[0])})", AGAIN
    )


def wrong_shape(
    owner: str, key: str, stored: Iterable[int], expected: Iterable[int]
) -> SpecgenError:
    """Returns the error for a tensor whose shape `stored` in the files is not the shape `expected`
    by the config."""
    in_file, by_config = (
        " x ".join(map(str, sizes)) or "a single number" for sizes in (stored, expected)
    )
    return SpecgenError(
        f"{owner}: {key} is {in_file} in its file, but has to be {by_config} by its config.json",
        AGAIN,
    )


def check_no_extra(
    keys: Iterable[str], owner: str, layers: int, prediction_layers: int = 0
) -> None:
    """Raises SpecgenError if `keys` has tensors that may matter. `keys` are those in a model's
    files that the model has no use for.

    Then weights and config do not belong together, and the model would generate nonsense. Harmless
    are, for instance, vision encoders and buffers. `layers` is the number of the model's layers;
    its files may have `prediction_layers` further ones that predict several tokens at once
    (`num_nextn_predict_layers`).
    """

    def predicts(key: str) -> bool:
        match = _LAYER.search(key)
        return match is not None and layers <= int(match[1]) < layers + prediction_layers

    extra = sorted(key for key in keys if not HARMLESS.search(key) and not predicts(key))
    if extra:
        tensors = "a tensor" if len(extra) == 1 else f"{len(extra):,} tensors"
        raise SpecgenError(
            (
                f"{owner} has {tensors} that its config.json does not describe (the first: "
                f"{shown(extra[0])})"
            ),
            "Its weights and its config do not belong together: download or save it again",
        )


def stored_tensors(folder: Path) -> dict[str, tuple[list[int], str]]:
    """Returns each tensor in a model's files by name: its shape, and its dtype by safetensors' name
    (such as BF16), or the type by GGUF's.

    `folder` may be a GGUF file. Raises SpecgenError for an unreadable file.
    """
    if is_gguf(folder):
        return GgufTensors(folder, str(folder)).shapes_and_types()
    tensors: dict[str, tuple[list[int], str]] = {}
    for path in files_in(folder, "*.safetensors"):
        with reading_weights(str(path)), path.open("rb") as file:
            tensors |= {
                name: (tensor["shape"], tensor["dtype"])
                for name, tensor in _header(file)[0].items()
            }
    return tensors


def weights_fingerprint(folder: Path) -> str:
    """Returns 16 hexadecimal digits that identify the safetensors weights in `folder`, or the GGUF
    file that it is.

    They are a hash of each tensor's name, dtype, shape and some of its bytes. They do not depend on
    the machine, nor on how the tensors are distributed over files. Raises SpecgenError for an
    unreadable file.
    """
    if is_gguf(folder):
        return gguf_fingerprint(open_gguf(folder, str(folder)))
    digests: list[bytes] = []
    for path in files_in(folder, "*.safetensors"):
        with reading_weights(str(path)), path.open("rb") as file:
            facts = os.fstat(file.fileno())
            state = facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns
            if state not in _known_digests:  # a start asks a dozen times
                _known_digests[state] = _digests(file)
            digests += _known_digests[state]
    return _combined(digests)


def bytes_of_weights(folder: Path) -> int:
    """Returns the size of the safetensors files in `folder`, or of the GGUF file that it is, with
    all its parts."""
    paths = (
        open_gguf(folder, str(folder)).paths
        if is_gguf(folder)
        else files_in(folder, "*.safetensors")
    )
    return sum(path.stat().st_size for path in paths)


def file_fingerprint(file: BinaryIO) -> str:
    """Returns 16 hexadecimal digits that identify the weights in an open safetensors file, as
    `weights_fingerprint` does for a folder.

    Raises OSError and ValueError, among others, for a damaged file.
    """
    return _combined(_digests(file))


def _combined(digests: list[bytes]) -> str:
    return sha256(b"".join(sorted(digests))).hexdigest()[:16]


def _digests(file: BinaryIO) -> list[bytes]:
    """Returns a hash of each tensor in a safetensors file."""
    (header, begin), digests = _header(file), []
    for name, tensor in header.items():
        start, end = tensor["data_offsets"]
        digest = sha256(f"{name} {tensor['dtype']} {tensor['shape']}".encode())
        for offset in (start, (start + end - _SAMPLE_BYTES) // 2, end - _SAMPLE_BYTES):
            offset = max(start, offset)
            file.seek(begin + offset)
            digest.update(file.read(min(_SAMPLE_BYTES, end - offset)))
        digests.append(digest.digest())
    return digests


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Returns what the header of a safetensors file says of each tensor, and where the tensors'
    bytes begin."""
    size = int.from_bytes(file.read(8), "little")
    if size > _MAX_HEADER_BYTES:
        raise ValueError("no safetensors file")
    header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size
