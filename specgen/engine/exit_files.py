"""An exit layer on disk: `exit.safetensors`, and beside it `exit.yaml`, which says what it is and whom it was trained for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from specgen import demo
from specgen.engine.exit_layer import ExitLayer, Predictor, decoder_of
from specgen.engine.fingerprint import weights_fingerprint
from specgen.errors import RunError, SpecgenError, is_out_of_memory
from specgen.files import load_yaml, whole_file, write_whole
from specgen.paths import EXIT_WEIGHTS, kept_exit

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

WEIGHTS, DESCRIPTION = EXIT_WEIGHTS, "exit.yaml"
FORMAT = 1
_ABOUT = "# Early exit for `specgen generate -m eesd`: the weights lie beside this file, in exit.safetensors.\n"


@dataclass(frozen=True, slots=True)
class Description:
    """What `exit.yaml` says. `fingerprint` is that of the target's weights; the exit stands behind its layer `after` (N).

    `figures` are what training measured, `made_with` the settings and versions that made it: for the reader, never relied on.
    """

    target: str
    fingerprint: str
    after: int
    layers: int = 1
    own_head: bool = True
    predictor: bool = False
    figures: Mapping[str, Any] = field(default_factory=dict)
    made_with: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that tell this training from another."""
        return sha256(repr(asdict(self)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Exit:
    """A trained exit, ready on its target's device. `predictor` None: only Beta-TS and fixed lengths can control it."""

    layer: ExitLayer
    predictor: Predictor | None
    description: Description

    @property
    def after(self) -> int:
        """N: how many of the target's layers stand before it."""
        return self.description.after


def save_exit(
    folder: Path,
    layer: ExitLayer,
    predictor: Predictor | None,
    description: Description,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write both files into `folder`, each whole or not at all; returns the weights' path. OSError where the disk refuses."""
    tensors = {f"exit.{name}": weight for name, weight in layer.state_dict().items()}
    if not description.own_head:
        tensors = {name: weight for name, weight in tensors.items() if not name.startswith("exit.head.")}
    if predictor is not None:
        tensors |= {f"predictor.{name}": weight for name, weight in predictor.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: weight.detach().to("cpu", dtype).contiguous().clone() for name, weight in tensors.items()}
    described = _ABOUT + yaml.safe_dump(_plain(asdict(description)), sort_keys=False, allow_unicode=True)
    with whole_file(folder / WEIGHTS) as file:  # moved into place behind the description
        # A single entry: several are written in an order that changes, and the same weights should make the same file.
        file.write(save(stored, {"fingerprint": description.fingerprint}))
        write_whole(folder / DESCRIPTION, described)
    return folder / WEIGHTS


def load_exit(path: Path, target: LoadedModel) -> Exit:
    """The exit in `path`: its folder, its weights or its description. SpecgenError where it is damaged or another target's."""
    weights, described = _files(path)
    description = read_description(described)
    if description.fingerprint != weights_fingerprint(target.folder):
        raise SpecgenError(
            f"the exit layer {weights} was trained for {description.target} ({description.fingerprint}), not for {target.name}",
            "Train one for this target: specgen tune --train --methods eesd",
        )
    count = len(getattr(decoder_of(target.model), "layers", ()))
    if count and not 1 <= description.after < count:
        raise SpecgenError(
            f"{described}: after is {description.after}", f"It has to be at least 1, and less than the target's {count} layers"
        )
    layer = ExitLayer.of(target.model, description.layers)
    if not description.own_head:
        layer.head = target.model.lm_head
    predictor = Predictor(target.model.config.get_text_config().hidden_size) if description.predictor else None
    tensors = _read_tensors(weights, described.name, description.fingerprint)
    _fill(layer, {n.removeprefix("exit."): w for n, w in tensors.items() if n.startswith("exit.")}, weights, description.own_head)
    if predictor is not None:
        _fill(predictor, {n.removeprefix("predictor."): w for n, w in tensors.items() if n.startswith("predictor.")}, weights)
        predictor.to(target.device).requires_grad_(False)
    return Exit(layer, predictor, description)


class FoundExit:
    """The exit that is there by itself: its description is read at once, its weights when a method first needs them.

    One that cannot be used is as good as none: `refusal` says why, and only a method that needs an exit tells.
    """

    def __init__(self, target: LoadedModel, *, is_bundled: bool) -> None:
        self.refusal: SpecgenError | None = None
        self.description: Description | None = None
        self._target = target
        try:
            self._folder = find_exit(target.name, target.folder, is_bundled=is_bundled)
            if self._folder is not None:
                self.description = read_description(self._folder / DESCRIPTION)
        except SpecgenError as error:
            self.refusal = error

    def load(self) -> Exit | None:
        if self.description is None or self._folder is None:
            return None
        try:
            return load_exit(self._folder, self._target)
        except SpecgenError as error:
            self.refusal = error
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            device = self._target.device
            self.refusal = RunError(f"the exit layer {self._folder} does not fit into the memory of {device}")
        self.description = None
        return None


def find_exit(target: str, folder: Path, *, is_bundled: bool) -> Path | None:
    """The exit that is taken where none is named: what was trained here for the target in `folder`, else what the bundled one
    brings; None where there is none. It is told by the files' names and the description, without reading weights: SpecgenError
    where it cannot be used."""
    fingerprint = weights_fingerprint(folder)
    found = kept_exit(target, fingerprint)
    if found is None:
        return demo.exit_folder() if is_bundled and demo.exit_folder().is_dir() else None
    description = read_description(found / DESCRIPTION)
    if description.fingerprint != fingerprint:
        raise SpecgenError(f"the exit layer {found / WEIGHTS} was trained for {description.target}", "Train it anew")
    return found


def _files(path: Path) -> tuple[Path, Path]:
    """The weights and the description: those of a folder, or a file and the one of the same name beside it."""
    if path.is_dir():
        return path / WEIGHTS, path / DESCRIPTION
    kinds = Path(WEIGHTS).suffix, Path(DESCRIPTION).suffix
    if path.suffix not in kinds:
        raise SpecgenError(f"there is no exit layer {path}", f"Name a folder with {WEIGHTS} and {DESCRIPTION}, or one of the two")
    for kind in kinds:
        if not path.with_suffix(kind).is_file():
            raise SpecgenError(
                f"there is no exit layer {path} (no file {path.with_suffix(kind)})",
                f"Name a folder with {WEIGHTS} and {DESCRIPTION}, or one of the two",
            )
    return path.with_suffix(kinds[0]), path.with_suffix(kinds[1])


def read_description(path: Path) -> Description:
    """What an exit's YAML file says. Raises SpecgenError for one that is missing, unreadable or of another format."""
    try:
        found = load_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SpecgenError(
            f"there is no exit layer in {path.parent} (no {path.name})", "Train one: specgen tune --train --methods eesd"
        ) from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # a date that is none is a ValueError
        raise SpecgenError(f"cannot read {path}", "Train the exit layer anew, or restore the file") from error
    if not isinstance(found, dict):
        raise SpecgenError(f"{path} describes no exit layer", "Train the exit layer anew, or restore the file")
    if found.get("format") != FORMAT:
        raise SpecgenError(f"{path} has the format {found.get('format')!r}, this version reads {FORMAT}", "Train it anew")
    kinds = {"target": str, "fingerprint": str, "after": int, "layers": int, "own_head": bool, "predictor": bool}
    for name, kind in kinds.items():
        if type(found.get(name)) is not kind:
            raise SpecgenError(f"{path}: {name} is {found.get(name)!r}", f"It has to be of the kind {kind.__name__}")
    for name in ("figures", "made_with"):
        if not isinstance(found.get(name, {}), dict):
            raise SpecgenError(f"{path}: {name} is {found[name]!r}", "Train the exit layer anew, or restore the file")
    unknown = set(found) - {entry.name for entry in fields(Description)}
    if unknown:
        raise SpecgenError(
            f"{path} holds {min(unknown, key=repr)!r}, which nothing here knows", "Take the line out, or train it anew"
        )
    return Description(**found)


def _read_tensors(path: Path, description: str, fingerprint: str) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dictionary
    except (OSError, SafetensorError) as error:
        raise SpecgenError(f"cannot read the exit layer {path}", "Train it anew, or restore the file") from error
    if metadata.get("fingerprint") != fingerprint:
        raise SpecgenError(f"{path} and its {description} do not belong together", "Restore the one that was there before")
    return tensors


def _fill(module: torch.nn.Module, tensors: dict[str, torch.Tensor], path: Path, own_head: bool = True) -> None:
    """Copy what was read into the module, whose dtype and device stay."""
    wanted = {n: w for n, w in module.state_dict().items() if own_head or not n.startswith("head.")}
    wrong = sorted(set(wanted) ^ set(tensors)) or sorted(n for n in wanted if wanted[n].shape != tensors[n].shape)
    if wrong:
        raise SpecgenError(f"the exit layer {path} does not fit its description (the first tensor: {wrong[0]})", "Train it anew")
    for name, weight in wanted.items():
        weight.copy_(tensors[name])
    if any(not weight.isfinite().all() for weight in wanted.values()):
        raise SpecgenError(f"the exit layer {path} holds NaN", "Its training went astray: train it anew")


def _plain(value: Any) -> Any:
    """For YAML: mappings and lists of plain values, figures to four places."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
