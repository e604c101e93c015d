"""Reads single tensors of a model from its safetensors files, which are mapped into memory: only what is used is read."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from specgen.base.errors import SpecgenError
from specgen.base.text import one_line
from specgen.engine.extra_tensors import check_no_extra

_PREFIX = "model."
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHT_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
_COPIED_BYTES = 1 << 26  # smaller models are copied, so that a file that is written again cannot change them
_AGAIN = "Download or save it again"


class WeightFiles:
    """The tensors of a model by name. `name` is the model's, for messages.

    Names are given without the prefix `model.` that most files have; the LM head's has none in either. Raises SpecgenError for
    files that cannot be read.
    """

    def __init__(self, folder: Path, name: str, device: torch.device) -> None:
        self._name = name
        self._open: dict[Path, Any] = {}
        self.use_device(device)
        with reading_weights(self._name):
            self._paths = tensor_files(folder)
            self.bytes = sum(path.stat().st_size for path in set(self._paths.values()))
        self._taken: dict[str, int] = {}  # how many numbers each tensor has that was taken; some are taken twice
        self._prefix = _PREFIX if any(key.startswith(_PREFIX) for key in self._paths) else ""

    def use_device(self, device: torch.device) -> None:
        """Makes `device` the one that tensors are put on from now on."""
        self.close()
        self._device = device
        self._opened_on = str(device) if device.type == "cuda" else "cpu"  # where safetensors puts what it reads

    def __contains__(self, name: str) -> bool:
        return self._key(name) in self._paths

    def check_complete(self, names: Collection[str]) -> None:
        """Raises SpecgenError if tensors with these names are missing."""
        missing = sorted(self._key(name) for name in names if name not in self)
        if missing:
            raise SpecgenError(f"{self._name} lacks {len(missing)} of its tensors (the first: {missing[0]})", _AGAIN)

    def check_no_others(self, names: Collection[str], layers: int) -> None:
        """Raises SpecgenError if the files have tensors that may matter and have none of these names. Reads only names.

        `layers` is the number of layers.
        """
        check_no_extra(self._paths.keys() - {self._key(name) for name in names}, self._name, layers)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns the tensor in its stored dtype on the device; on a CPU a view of the mapped file, unless the model is small.

        Raises SpecgenError if it is missing, or has another shape than the config says.
        """
        self.check_complete([name])
        key = self._key(name)
        with reading_weights(self._name):
            tensor: torch.Tensor = self._file(self._paths[key]).get_tensor(key)
        self._check(key, tuple(tensor.shape), shape, tensor.dtype)
        if self._device.type != "cpu":
            return tensor.to(self._device)
        return tensor.clone() if self.are_copied else tensor

    def take_part(self, name: str, shape: tuple[int, ...], dimension: int, ranges: Sequence[range]) -> torch.Tensor:
        """Returns some rows (`dimension` 0) or columns (1) of the tensor, those of all `ranges`, as a copy. Reads nothing else.

        `shape` is the whole tensor's. Raises SpecgenError as `take`.
        """
        self.check_complete([name])
        key = self._key(name)
        with reading_weights(self._name):
            stored = self._file(self._paths[key]).get_slice(key)
            found = tuple(stored.get_shape())
            parts = []
            if found == shape:
                slices = (slice(part.start, part.stop) for part in ranges)
                parts = [stored[part] if dimension == 0 else stored[:, part] for part in slices]
        self._check(key, found, shape, parts[0].dtype if parts else None)
        return torch.cat(parts).to(self._device) if dimension == 0 else torch.cat(parts, dim=1).to(self._device)

    def _check(self, key: str, found: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
        """Counts a tensor as taken. Raises SpecgenError if its shape is not what the config says, or its dtype unsuitable."""
        if found != shape:
            stored, expected = (" x ".join(map(str, sizes)) for sizes in (found, shape))
            raise SpecgenError(f"{self._name}: {key} is {stored} in its file, but {expected} by its config.json", _AGAIN)
        if dtype not in WEIGHT_DTYPES:
            named = str(dtype).removeprefix("torch.")
            raise SpecgenError(f"{self._name}: {key} is stored as {named}", "Take weights in float32, bfloat16 or float16")
        self._taken[key] = math.prod(shape)

    def check_all_taken(self, layers: int) -> None:
        """Raises SpecgenError if the files have tensors that were not taken and may matter. `layers` is the number of layers."""
        check_no_extra(self._paths.keys() - self._taken.keys(), self._name, layers)

    @property
    def numbers_taken(self) -> int:
        """How many numbers the tensors have that were taken so far."""
        return sum(self._taken.values())

    @property
    def are_copied(self) -> bool:
        """Whether tensors are copies instead of views of the mapped files: always on an accelerator, and for small models."""
        return self._device.type != "cpu" or self.bytes < _COPIED_BYTES

    def close(self) -> None:
        """Closes the files, which frees the memory of pages that no tensor uses any more. They are opened again when needed."""
        self._open.clear()

    def _key(self, name: str) -> str:
        return name if name.startswith("lm_head.") else self._prefix + name

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt", device=self._opened_on)
        return self._open[path]


@contextmanager
def reading_weights(name: str) -> Iterator[None]:
    """Turns errors of reading weight files into a SpecgenError that calls their owner `name`."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        reason = one_line(" ".join(str(error).split()))[:160] or type(error).__name__
        raise SpecgenError(f"cannot read the weights of {name}: {reason}", _AGAIN) from error


def tensor_files(folder: Path, single: str = _SINGLE) -> dict[str, Path]:
    """Returns the file of each tensor: the file named `single` if it is there, or as the index says. Use `reading_weights`."""
    single_file = folder / single
    if single_file.is_file():
        with safe_open(single_file, framework="pt") as file:
            return dict.fromkeys(file.keys(), single_file)
    files = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
    return {key: folder / Path(name).name for key, name in files.items()}
