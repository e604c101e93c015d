"""Saves and loads trained exit layers of EESD: `exit.safetensors` holds the weights, `exit.yaml` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict, TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from specgen import demo
from specgen.base.errors import SpecgenError, is_out_of_memory
from specgen.base.files import EXIT_WEIGHTS, kept_exit, whole_file, write_whole
from specgen.engine.exit_parts import Predictor, check_exit_depth, check_exit_layers
from specgen.engine.fingerprint import weights_fingerprint
from specgen.engine.model import ExitLayers
from specgen.engine.model_loading import LoadedModel
from specgen.engine.parts.trained_parts import FoundPart, description_text, digest_of, read_described

WEIGHTS, DESCRIPTION = EXIT_WEIGHTS, "exit.yaml"
_SAVED_DTYPE = torch.bfloat16
_COMMENT = "# Early exit for `specgen generate -m eesd`. Its weights are in exit.safetensors.\n"
_TRAIN = "Train one for this target: specgen tune --train --methods eesd"
_RETRAIN = "Train it again"
_RESTORE = "Train the exit layer again, or restore the file"
_NAME_FILES = f"Name a folder with {WEIGHTS} and {DESCRIPTION}, or one of the two"


@dataclass(frozen=True, slots=True)
class Description:
    """The contents of `exit.yaml`, which describes a trained exit layer.

    `target` and `fingerprint` are the name of the target and a hash of its weights. The exit comes after the target's first
    `after` layers and has `layers` layers itself. `own_head`: it has an LM head of its own instead of the target's. `predictor`:
    a predictor of acceptance was trained too. `figures` (measured in training) and `made_with` (settings and versions of the
    training) inform people; the program does not use them.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    target: str
    fingerprint: str
    after: int
    layers: int = 1
    own_head: bool = True
    predictor: bool = False
    figures: Mapping[str, Any] = field(default_factory=dict)
    made_with: Mapping[str, Any] = field(default_factory=dict)
    format: Literal[1] = 1

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that identify this description, and so the training that made it."""
        return digest_of(self)


_DESCRIPTION = TypeAdapter(Description)


@dataclass(frozen=True, slots=True)
class Exit:
    """A trained exit layer on its target's device, with its predictor of acceptance (None if none was trained)."""

    layer: ExitLayers
    predictor: Predictor | None
    description: Description


def save_exit(folder: Path, layer: torch.nn.Module, predictor: Predictor | None, description: Description) -> Path:
    """Writes `exit.safetensors` and `exit.yaml` into `folder`, the weights in bfloat16. Returns the path of the weights.

    Each file is written completely or not at all. Raises OSError.
    """
    tensors = {f"exit.{name}": weight for name, weight in layer.state_dict().items()}
    if not description.own_head:
        tensors = {name: weight for name, weight in tensors.items() if not name.startswith("exit.head.")}
    return _write(folder, tensors, predictor, description)


def replace_predictor(path: Path, folder: Path, predictor: Predictor, description: Description) -> Path:
    """Writes a copy of the exit layer `path` with another predictor into `folder`, as `save_exit` does."""
    weights, described = _files(path)
    tensors = _read_tensors(weights, described.name, description.fingerprint)
    layer = {name: tensor for name, tensor in tensors.items() if name.startswith("exit.")}
    return _write(folder, layer, predictor, description)


def round_as_saved(module: torch.nn.Module) -> None:
    """Rounds the parameters that are trained to what a file keeps of them, and ends their training.

    What is measured after that are the figures of the saved weights.
    """
    with torch.no_grad():
        for weight in module.parameters():
            if weight.requires_grad:
                weight.copy_(weight.to(_SAVED_DTYPE))
    module.requires_grad_(False).eval()


def _write(folder: Path, tensors: dict[str, torch.Tensor], predictor: Predictor | None, description: Description) -> Path:
    if predictor is not None:
        tensors = tensors | {f"predictor.{name}": weight for name, weight in predictor.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: weight.detach().to("cpu", _SAVED_DTYPE).contiguous().clone() for name, weight in tensors.items()}
    with whole_file(folder / WEIGHTS) as file:  # moved into place after the description
        # One entry only: the order of several changes, and the same weights should give the same file.
        file.write(save(stored, {"fingerprint": description.fingerprint}))
        write_whole(folder / DESCRIPTION, description_text(_COMMENT, description))
    return folder / WEIGHTS


def load_exit(path: Path, target: LoadedModel) -> Exit:
    """Loads a trained exit layer. `path` is its folder, its weights file or its `exit.yaml`.

    Raises SpecgenError for damaged files and for an exit layer that was trained for another target.
    """
    weights, description_path = _files(path)
    description = read_named_description(path, target.name, target.folder)
    check_exit_layers(description.layers)
    check_exit_depth(target.model.shape.num_layers, description.after, f"the exit layer {weights}")
    tensors = _read_tensors(weights, description_path.name, description.fingerprint)
    if description.own_head != ("exit.head.weight" in tensors):
        raise SpecgenError(f"the exit layer {weights} does not fit its description", _RETRAIN)
    if any(not weight.isfinite().all() for weight in tensors.values()):
        raise SpecgenError(f"the exit layer {weights} holds NaN", f"Its training diverged. {_RETRAIN}")
    try:
        layer = target.model.exit_layers(_part(tensors, "exit."), description.layers)
        predictor = _predictor(_part(tensors, "predictor."), target) if description.predictor else None
    except (ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise SpecgenError(f"the exit layer {weights} does not fit its description", _RETRAIN) from error
    return Exit(layer, predictor, description)


def read_named_description(path: Path, target: str, folder: Path) -> Description:
    """Reads the description of the exit layer `path`, as the user named it, for the model `target` with the files in `folder`.

    Raises SpecgenError if there is no such exit layer, or if it was trained for another target.
    """
    weights, description_path = _files(path)
    description = read_description(description_path)
    if description.fingerprint != weights_fingerprint(folder):
        raise SpecgenError(
            f"the exit layer {weights} was trained for {description.target} ({description.fingerprint}), not for {target}", _TRAIN
        )
    return description


class FoundExit(FoundPart[Description, Exit]):
    """Finds the exit layer that is used if the user names none. `is_bundled`: the target is the small model that comes with
    specgen, with an exit layer."""

    def __init__(self, target: LoadedModel, *, is_bundled: bool) -> None:
        super().__init__(
            "the exit layer",
            target.device,
            lambda: find_exit(target.name, target.folder, is_bundled=is_bundled),
            lambda folder: read_description(folder / DESCRIPTION),
            lambda folder: load_exit(folder, target),
        )


def find_exit(target: str, folder: Path, *, is_bundled: bool) -> Path | None:
    """Returns the folder of the exit layer that is used if the user names none; None if there is none.

    It is the one trained on this machine for the weights in `folder`, preferably under the model name `target`. If there is none
    and the target comes with specgen (`is_bundled`), it is the exit layer that comes with it. Reads only `exit.yaml`. Raises
    SpecgenError if this file is damaged or names other weights.
    """
    fingerprint = weights_fingerprint(folder)
    found = kept_exit(target, fingerprint)
    if found is None:
        return demo.exit_folder() if is_bundled and demo.exit_folder().is_dir() else None
    description = read_description(found / DESCRIPTION)
    if description.fingerprint != fingerprint:
        raise SpecgenError(f"the exit layer {found / WEIGHTS} was trained for {description.target}", _RETRAIN)
    return found


def _files(path: Path) -> tuple[Path, Path]:
    """Returns the paths of the weights and of the description. `path` is their folder or one of the two files.

    The two files have the same name with different suffixes.
    """
    if path.is_dir():
        return path / WEIGHTS, path / DESCRIPTION
    weights, description = (path.with_suffix(Path(name).suffix) for name in (WEIGHTS, DESCRIPTION))
    for file in (path, weights, description):
        if not file.is_file():
            raise SpecgenError(f"there is no exit layer {path} (no file {file})", _NAME_FILES)
    return weights, description


def read_description(path: Path) -> Description:
    """Reads an `exit.yaml`. Raises SpecgenError if the file is missing, unreadable or in a wrong format."""
    return read_described(path, _DESCRIPTION, "exit layer", train=_TRAIN, restore=_RESTORE)


def _read_tensors(path: Path, description: str, fingerprint: str) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dictionary
    except (OSError, SafetensorError) as error:
        raise SpecgenError(f"cannot read the exit layer {path}", _RESTORE) from error
    if metadata.get("fingerprint") != fingerprint:
        raise SpecgenError(f"{path} and its {description} do not belong together", "Restore the one that was replaced")
    return tensors


def _part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Returns the tensors whose names start with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _predictor(tensors: dict[str, torch.Tensor], target: LoadedModel) -> Predictor:
    predictor = Predictor(target.model.shape.hidden_size)
    predictor.load_state_dict(tensors)
    return predictor.to(target.device).requires_grad_(False)
