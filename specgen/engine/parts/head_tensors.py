"""The tensors of a trained head's safetensors files: their shapes, which are read first, then the tensors one by one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from specgen.base.errors import SpecgenError
from specgen.base.text import one_line
from specgen.engine.weights import BUFFER, FLOATS, files_of_keys, reading_weights

MEDUSA_FILE = "medusa_lm_head.safetensors"
HEAD_FILE = "model.safetensors"
Shape = tuple[int, ...]

_COPIED_BYTES = 1 << 26  # tensors of smaller files are copied, so that a file that is written again cannot change them
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool})
_PREFIXES = ("module.", "draft_model.", "model.", "medusa_heads.", "medusa_head.")
_MEDUSA_PART = re.compile(r"(model\.)?medusa_heads?\.")
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth")
_AGAIN = "Download or save it again"
_CONVERTER = (
    "import sys, torch; from safetensors.torch import save_file; save_file({name: tensor.clone().contiguous() for path in"
    " sys.argv[2:] for name, tensor in torch.load(path, map_location='cpu', weights_only=True).items()}, sys.argv[1])"
)


def shown(text: object, longest: int = 80) -> str:
    """Returns text from a head's files for a message: on one line, without control characters, and not too long."""
    line = one_line(str(text))
    return line if len(line) <= longest else line[: longest - 1] + "…"


def size_text(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "a single number"


@dataclass(frozen=True, slots=True)
class _Stored:
    path: Path
    key: str
    shape: Shape


class HeadTensors:
    """The tensors in a head's folder by name. Only the headers of the files are read before `take` is called.

    Names have no prefix such as `model.` or `medusa_head.`; buffers that are computed from the config are left out. Raises
    SpecgenError if the folder has no safetensors weights, or if they cannot be read.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder, self._device = folder, device
        self._name = f"the head {folder}"
        self.warnings: list[str] = []  # what is doubtful about the head
        self._open: dict[Path, Any] = {}
        single = _weight_file(folder)
        with reading_weights(self._name):
            files = files_of_keys(folder, single)
            self._bytes = sum(path.stat().st_size for path in set(files.values()))
            stored = [_Stored(path, key, tuple(self._file(path).get_slice(key).get_shape())) for key, path in files.items()]
        if not stored:
            raise self.refuse("its files hold no tensors")
        parts = [each for each in stored if _MEDUSA_PART.match(each.key)]
        self.has_model = bool(parts) and any("layers." in each.key for each in stored if each not in parts)
        if self.has_model:  # Medusa-2: a fine-tuned target with its heads
            stored = parts
        self._stored: dict[str, _Stored] = {}
        self._add((_without_prefixes(each.key), each) for each in stored if not BUFFER.search(each.key))

    def _add(self, named: Iterable[tuple[str, _Stored]]) -> None:
        for name, each in named:
            if name in self._stored:
                raise self.refuse(f"both {shown(self._stored[name].key)} and {shown(each.key)} are its {shown(name)}")
            self._stored[name] = each

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    @property
    def names(self) -> Collection[str]:
        return self._stored.keys()

    def shape(self, name: str) -> Shape:
        """Returns the shape of a tensor. Raises SpecgenError if it is missing."""
        self.check_complete([name])
        return self._stored[name].shape

    def rename(self, new_name: Callable[[str], str]) -> None:
        """Changes the names of all tensors. Messages still call a tensor as its file does."""
        old = list(self._stored.items())
        self._stored = {}
        self._add((new_name(name), each) for name, each in old)

    def refuse(self, problem: str, hint: str = _AGAIN) -> SpecgenError:
        """Returns an error that says what is wrong with this head."""
        return SpecgenError(f"{self._name}: {problem}", hint)

    def refuse_target(self, name: str, what: str, found: int, target: str, expected: int) -> SpecgenError:
        """Returns an error for a head that was made for a model with other sizes. `name` is the tensor that shows it."""
        shows = f"{self.stored_name(name)} is for {what} {found:,}"
        return SpecgenError(
            f"{self._name} was made for another target: {shows}, {target} has {expected:,}",
            "Name a head for this target, or the target that it was made for",
        )

    def stored_name(self, name: str) -> str:
        """Returns what the file calls a tensor, for a message."""
        return shown(self._stored[name].key if name in self._stored else name)

    def check_complete(self, names: Iterable[str]) -> None:
        """Raises SpecgenError if tensors with these names are missing."""
        missing = [name for name in names if name not in self._stored]
        if missing:
            raise self.refuse(f"it lacks {len(missing)} of its tensors (the first: {missing[0]})")

    def check_shapes(self, expected: Mapping[str, Shape]) -> None:
        """Raises SpecgenError unless there are exactly the expected tensors, with the expected shapes. Reads no tensor."""
        self.check_complete(expected)
        for name, shape in expected.items():
            found = self._stored[name].shape
            if found != shape:
                stored, wanted = size_text(found), size_text(shape)
                raise self.refuse(f"{self.stored_name(name)} is {stored} in its file, but has to be {wanted}")
        unknown = sorted(self._stored.keys() - expected.keys())
        if unknown:
            tensors = "a tensor" if len(unknown) == 1 else f"{len(unknown):,} tensors"
            raise self.refuse(
                f"it has {tensors} that such a head does not have (the first: {self.stored_name(unknown[0])})",
                "It is of a kind that specgen does not know",
            )

    def take(self, name: str, *, may_be_zero: bool = False) -> torch.Tensor:
        """Returns a weight in its stored dtype on the device; on a CPU a view of the mapped file, unless the file is small.

        Raises SpecgenError if it holds NaN or infinities, or, unless `may_be_zero`, only zeros.
        """
        tensor = self._read(name)
        if tensor.dtype not in FLOATS:
            dtype = str(tensor.dtype).removeprefix("torch.")
            problem = f"{self.stored_name(name)} is stored as {dtype}"
            raise self.refuse(problem, "Take a head in float32, bfloat16 or float16")
        least, most = torch.aminmax(tensor) if tensor.numel() else (tensor.new_zeros(()), tensor.new_zeros(()))
        if not (torch.isfinite(least) and torch.isfinite(most)):
            raise self.refuse(
                f"{self.stored_name(name)} holds NaN or infinities", "Its training diverged, or its file is damaged"
            )
        if not may_be_zero and least == 0 and most == 0:
            raise self.refuse(f"{self.stored_name(name)} holds only zeros", "It was not trained, or its file is damaged")
        return tensor

    def take_integers(self, name: str) -> torch.Tensor:
        """Returns a vector of integers as int64 on the CPU."""
        tensor = self._read(name)
        if tensor.dtype not in _INTEGERS or tensor.dim() != 1:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise self.refuse(f"{self.stored_name(name)} has to be a vector of integers, not {tensor.dim()}-dimensional {dtype}")
        return tensor.to("cpu", torch.int64)

    def rows(self, name: str, indices: Iterable[int]) -> torch.Tensor:
        """Returns some rows of a matrix on the CPU, without reading the others."""
        each = self._stored[name]
        with reading_weights(self._name):
            table = self._file(each.path).get_slice(each.key)
            return torch.cat([table[index : index + 1] for index in indices]).cpu()

    def _read(self, name: str) -> torch.Tensor:
        each = self._stored[name]
        with reading_weights(self._name):
            tensor: torch.Tensor = self._file(each.path).get_tensor(each.key)
        if self._device.type != "cpu":
            return tensor.to(self._device)
        return tensor.clone() if self._bytes < _COPIED_BYTES else tensor

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt", device=str(self._device) if self._device.type == "cuda" else "cpu")
        return self._open[path]


def _weight_file(folder: Path) -> str:
    """Returns the name of the file that holds the head's tensors, unless there is an index of several files.

    Raises SpecgenError if there is none, and for formats that can run code when they are read.
    """
    found = sorted(folder.glob("*.safetensors"))
    for path in found:
        if not path.is_file():  # reading a FIFO would wait for another program
            raise SpecgenError(f"cannot read the head {folder}: {shown(path.name)} is not a file", _AGAIN)
    names = [path.name for path in found]
    for preferred in (MEDUSA_FILE, HEAD_FILE):
        if preferred in names:
            return preferred
    if any(folder.glob("*.safetensors.index.json")):
        return HEAD_FILE
    if len(names) == 1:
        return names[0]
    if names:
        raise SpecgenError(f"the head {folder} has {len(names)} weight files and no index of them", _AGAIN)
    others = sorted(path for pattern in _OTHER_FORMATS for path in folder.glob(pattern))
    if not others:
        raise SpecgenError(f"there is no head in {folder}: it has no safetensors file", "Name the folder of a trained head")
    paths = " ".join(shlex.quote(str(path)) for path in (folder / HEAD_FILE, *others))
    raise SpecgenError(
        f"the head {folder} has no safetensors weights (only {shown(others[0].name)}, which can run code when it is read)",
        f'Convert it: python -c "{_CONVERTER}" {paths}',
    )


def _without_prefixes(key: str) -> str:
    while prefix := next((prefix for prefix in _PREFIXES if key.startswith(prefix)), None):
        key = key.removeprefix(prefix)
    return key
