"""A trained part of a target (an exit layer, a head, or its own drafting layers): its folder,
description and weights.

The files of an exit layer are `exit.yaml` and `exit.safetensors`. A head has one of the published
layouts (`published_heads`), and, if specgen trained it, also `head.yaml`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field
from safetensors.torch import save

from specgen.base.errors import SpecgenError
from specgen.base.files import EXIT_WEIGHTS, HEAD_DESCRIPTION, whole_file
from specgen.base.part_kinds import HeadKind
from specgen.base.schema import read
from specgen.base.text import shown
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.parts.head_files import MEDUSA_FILE, are_rising, take_exactly
from specgen.engine.parts.mtp import find_layers, read_layers
from specgen.engine.parts.own_layers import (
    VOCABULARY,
    ExitLayers,
    ExitWeights,
    Predictor,
    check_exit,
    exit_shapes,
)
from specgen.engine.parts.part import (
    AssistantWeights,
    BlockWeights,
    EagleWeights,
    HeadWeights,
    MedusaWeights,
    MtpWeights,
)
from specgen.engine.parts.published_heads import PublishedHead, published
from specgen.engine.weights import SINGLE_FILE, WeightFiles, file_fingerprint, weights_fingerprint

EXIT_DESCRIPTION = "exit.yaml"
_COMMENT = "# A head for `specgen generate -m {}`. Its weights are beside this file.\n"
_EXIT_COMMENT = (
    "# Early exit for `specgen generate -m eesd`. Its weights are in exit.safetensors.\n"
)
_SAVED_DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class ExitDescription:
    """The contents of `exit.yaml`, which describes a trained exit layer.

    `target` and `fingerprint` are the name of the target and a hash of its weights. The exit comes
    after the target's first `after` layers and has `layers` layers itself. `own_head`: it has an LM
    head of its own instead of the target's, which knows `vocabulary` tokens (None: all of the
    target's). `joined`: see `ExitLayers.is_joined`. `predictor`: a predictor of acceptance was
    trained too. In format 1 there are neither `joined` nor `vocabulary`.
    `figures` (measured in training) and `made_with` (settings and versions of the training) inform
    people; the program does not use them.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    target: str
    fingerprint: str
    after: int
    layers: int = 1
    own_head: bool = True
    joined: bool = False
    vocabulary: Annotated[int, Field(ge=1)] | None = None
    predictor: bool = False
    figures: Mapping[str, Any] = field(default_factory=dict)
    made_with: Mapping[str, Any] = field(default_factory=dict)
    format: Literal[1, 2] = 2


@dataclass(frozen=True, slots=True)
class HeadDescription:
    """The contents of `head.yaml`, which describes a head that specgen trained. Fields that are not
    named here: see `ExitDescription`.

    `sizes` are the target's: `hidden_size`, `num_layers`, `num_heads`, `head_size` and `vocab_size`
    (its number of logits). `weights` is a hash of the head's own weights, which `save_head` fills
    in. `rank_accuracies` are those of `MedusaWeights`, empty for other heads. `feature_layers` is
    not used any more; earlier versions of specgen wrote it.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: HeadKind
    target: str
    fingerprint: str
    sizes: Mapping[str, int]
    weights: str = ""
    feature_layers: tuple[int, ...] = ()
    rank_accuracies: Sequence[Sequence[Annotated[float, Field(ge=0, le=1)]]] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    made_with: Mapping[str, Any] = field(default_factory=dict)
    format: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class HeadVariant:
    """The kind of a head, by the `name` that other engines use, such as `eagle3` or `dspark`.

    `longest` is the longest draft that it makes in one pass, None if it drafts one token a pass;
    `rows` is the number of rows of that pass, 0 if it is no block. `layers` is the number of layers
    of MTP, each of which drafts one token, 1 for other heads.
    """

    name: str
    longest: int | None = None
    rows: int = 0
    layers: int = 1


class TrainedPart:
    """A trained part that belongs to `target`. Its description has been read and compared with the
    target, its weights not yet.

    Made by `open_part`. `path` is a head's folder, or the file with an exit layer's weights.
    `description` is None for heads that others trained. After `load`, `warning` says that a head
    may have been made for another target, or is None, and `variant` is a head's, None for an exit
    layer.
    """

    def __init__(
        self,
        kind: str,
        path: Path,
        target: LoadedModel,
        description: ExitDescription | HeadDescription | None,
    ) -> None:
        self.kind = kind
        self.path = path
        self.description = description
        self.name = f"the {'exit layer' if kind == 'exit' else 'head'} {path}"
        self.warning: str | None = None
        self.variant: HeadVariant | None = None
        self._target = target
        self._weights: ExitWeights | HeadWeights | MtpWeights | AssistantWeights | None = None
        if description is not None and description.fingerprint != weights_fingerprint(
            target.folder
        ):
            trained_for = f"{shown(description.target)} ({shown(description.fingerprint, 16)})"
            problem = f"{self.name} was trained for {trained_for}, not for {target.name}"
            raise SpecgenError(problem, _training("eesd" if kind == "exit" else kind))

    @property
    def has_predictor(self) -> bool:
        return isinstance(self.description, ExitDescription) and self.description.predictor

    def load(self) -> ExitWeights | HeadWeights | MtpWeights | AssistantWeights:
        """Returns the weights, which are read and checked once, and kept until `release`.

        Raises SpecgenError, in one line, for files that are damaged or do not fit the target.
        """
        if self._weights is None:
            described = self.description
            if isinstance(described, ExitDescription):
                self._weights = self._read_exit(described)
            else:
                self._weights = self._read_head()
                self.variant = variant_of(self._weights)
        return self._weights

    def release(self) -> None:
        """Frees the memory of the weights as they were read from files. Runners that were made of
        them have their own copies."""
        self._weights = None

    def exit_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors in an exit layer's file, by their names there: `exit.` or
        `predictor.` before a name.

        The rest of a name is that in `ExitLayers` or `Predictor`. Raises SpecgenError unless these
        are exactly the tensors that the description and the target ask for.
        """
        described = self.description
        model = self._target.model
        assert isinstance(described, ExitDescription)
        check_exit(model, described.after, described.layers, self.name)
        files = WeightFiles(self.path, self.name)
        if files.metadata.get("fingerprint") != described.fingerprint:
            problem = f"{self.path} and its description do not belong together"
            raise SpecgenError(problem, "Restore the one that was replaced")
        own = exit_shapes(
            model,
            described.layers,
            own_head=described.own_head,
            is_joined=described.joined,
            vocabulary=described.vocabulary,
        )
        shapes: dict[str, tuple[int, ...]] = {f"exit.{name}": shape for name, shape in own.items()}
        if described.predictor:
            weights = Predictor(model.shape.hidden_size).named_parameters()
            shapes |= {f"predictor.{name}": tuple(weight.shape) for name, weight in weights}
        tensors = take_exactly(files, shapes)
        ids = tensors.get(f"exit.{VOCABULARY}")
        if ids is not None and not are_rising(ids, model.shape.vocab_size):
            raise files.refuse(f"its vocabulary does not hold rising ids of {self._target.name}")
        return tensors

    def _read_exit(self, described: ExitDescription) -> ExitWeights:
        tensors = self.exit_tensors()
        model = self._target.model
        predictor = None
        if described.predictor:
            predictor = Predictor(model.shape.hidden_size)
            predictor.load_state_dict(under("predictor.", tensors))
            predictor.to(model.device).requires_grad_(False)
        return ExitWeights(
            ExitLayers(model, described.layers, under("exit.", tensors)), described.after, predictor
        )

    def _read_head(self) -> HeadWeights | MtpWeights | AssistantWeights:
        if self.kind == "mtp" and self.path == self._target.folder:
            return read_layers(self._target)
        files = PublishedHead(self.path, self._target)
        weights = files.read()
        if isinstance(self.description, HeadDescription) and isinstance(weights, MedusaWeights):
            weights = replace(weights, rank_accuracies=self.description.rank_accuracies)
        self.warning = files.warning
        return weights


def variant_of(weights: HeadWeights | MtpWeights | AssistantWeights) -> HeadVariant:
    if isinstance(weights, EagleWeights):
        return HeadVariant("eagle3" if weights.version == 3 else "eagle")
    if isinstance(weights, BlockWeights):
        return HeadVariant(weights.kind.lower(), weights.drafts, weights.block_size)
    if isinstance(weights, MedusaWeights):
        return HeadVariant("medusa", len(weights.blocks))
    if isinstance(weights, MtpWeights):
        return HeadVariant("mtp", layers=weights.architecture.num_layers)
    return HeadVariant("assistant" if isinstance(weights, AssistantWeights) else "glide")


def part_digest(path: Path, *, is_exit: bool) -> str:
    """Returns 16 hexadecimal digits that identify a trained part, without opening it: a hash of an
    exit layer's description, or the fingerprint of a head's weights.

    Raises SpecgenError or OSError if the files cannot be read.
    """
    if not is_exit:
        return weights_fingerprint(path)
    _, description = _exit_paths(path)
    return sha256(description.read_bytes()).hexdigest()[:16]


def open_part(path: Path, target: LoadedModel, *, is_exit: bool) -> TrainedPart:
    """Opens the exit layer or head that `path` names: its folder, or for an exit layer also one of
    its two files.

    Raises SpecgenError if there is none, if it was trained for another target, or if its files do
    not belong together.
    """
    if is_exit:
        weights, yaml_file = _exit_paths(path)
        exit_ = read(yaml_file, ExitDescription, "description of the exit layer", _training("eesd"))
        return TrainedPart("exit", weights, target, exit_)
    if not path.is_dir():
        problem = f"{path} is a file" if path.exists() else f"there is no folder {path}"
        raise SpecgenError(
            problem, "Name the folder of a Medusa, EAGLE, GliDe, DFlash or DSpark head"
        )
    head: HeadDescription | None = None
    if (path / HEAD_DESCRIPTION).exists():
        head = read(
            path / HEAD_DESCRIPTION,
            HeadDescription,
            "description of the head",
            "Train it again, or restore the file",
        )
    part = TrainedPart(PublishedHead(path, target).kind, path, target, head)
    if head is not None and (
        head.kind != part.kind or head.weights not in ("", weights_fingerprint(path))
    ):
        problem = (
            f"the weights in {path}, of the kind {part.kind}, and their "
            f"{HEAD_DESCRIPTION} do not belong together"
        )
        raise SpecgenError(problem, "Train it again, or restore the file")
    return part


def own_layers(target: LoadedModel) -> TrainedPart | None:
    """Returns the drafting layers in the target's own files as a trained part; None if the files
    have none.

    Raises SpecgenError for layers of an unknown layout, and if the native decoder does not know the
    target's family.
    """
    return None if find_layers(target) is None else TrainedPart("mtp", target.folder, target, None)


def _training(method: str) -> str:
    return f"Train one for this target: specgen tune --train --methods {method}"


def _exit_paths(path: Path) -> tuple[Path, Path]:
    """Returns the paths of an exit layer's weights and description, whose names differ in their
    suffixes."""
    if path.is_dir():
        return path / EXIT_WEIGHTS, path / EXIT_DESCRIPTION
    weights, description = (
        path.with_suffix(Path(name).suffix) for name in (EXIT_WEIGHTS, EXIT_DESCRIPTION)
    )
    for file in (path, weights, description):
        if not file.is_file():
            hint = f"Name a folder with {EXIT_WEIGHTS} and {EXIT_DESCRIPTION}, or one of the two"
            raise SpecgenError(f"there is no exit layer {path} (no file {file})", hint)
    return weights, description


def under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors whose names start with `prefix`, under their names without it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def describe_head(
    kind: HeadKind, target: LoadedModel, figures: Mapping[str, Any], made_with: Mapping[str, Any]
) -> HeadDescription:
    """Returns the description of a head that was trained for `target`."""
    names = ("hidden_size", "num_layers", "num_heads", "head_size", "vocab_size")
    sizes = {name: getattr(target.shape, name) for name in names}
    return HeadDescription(
        kind,
        target.name,
        weights_fingerprint(target.folder),
        sizes,
        figures=figures,
        made_with=made_with,
    )


def check_head_folder(folder: Path) -> None:
    """Raises SpecgenError if `save_head` would overwrite files in `folder` that are no head trained
    by specgen, such as a model's."""
    names = ("config.json", SINGLE_FILE, MEDUSA_FILE)
    foreign = next((name for name in names if (folder / name).exists()), None)
    if foreign is not None and not (folder / HEAD_DESCRIPTION).exists():
        raise SpecgenError(
            f"{folder} has a {foreign} that does not belong to a head trained by specgen",
            "Name another folder",
        )


def save_head(folder: Path, weights: HeadWeights, description: HeadDescription) -> Path:
    """Writes a head in a published layout, in bfloat16, with its `head.yaml`. Returns the path of
    the weights.

    All files are replaced together. Raises SpecgenError as `check_head_folder` does, and OSError.
    """
    check_head_folder(folder)
    config, tensors, name = published(weights, description.target, description.sizes)
    if isinstance(weights, MedusaWeights):
        description = replace(
            description,
            rank_accuracies=[list(accuracies) for accuracies in weights.rank_accuracies],
        )
    data = save({key: _stored(tensor) for key, tensor in tensors.items()}, {"format": "pt"})
    description = replace(description, weights=file_fingerprint(BytesIO(data)))
    shown_config = json.dumps(config, indent=2, sort_keys=True) + "\n"
    _write(
        folder,
        {HEAD_DESCRIPTION: _yaml(description), "config.json": shown_config.encode(), name: data},
    )
    # of an older head
    (folder / (SINGLE_FILE if name == MEDUSA_FILE else MEDUSA_FILE)).unlink(missing_ok=True)
    return folder / name


def save_exit(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    predictor: Predictor | None,
    description: ExitDescription,
) -> Path:
    """Writes `exit.safetensors` and `exit.yaml`, the weights in bfloat16. Returns the path of the
    weights. Raises OSError.

    `tensors` has those of `ExitLayers` by name; the LM head is left out unless it is the exit's
    own.
    """
    kept = {
        f"exit.{name}": weight
        for name, weight in tensors.items()
        if description.own_head or name != "head.weight"
    }
    if predictor is not None:
        kept |= {f"predictor.{name}": weight for name, weight in predictor.state_dict().items()}
    # One entry only: the order of several changes, and the same weights should give the same file.
    data = save(
        {name: _stored(weight) for name, weight in kept.items()},
        {"fingerprint": description.fingerprint},
    )
    _write(folder, {EXIT_WEIGHTS: data, EXIT_DESCRIPTION: _yaml(description)})
    return folder / EXIT_WEIGHTS


def round_as_saved(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Rounds trained parameters to the dtype in which files keep them (bfloat16), and ends their
    training (no gradients).

    Figures measured after that hold for the saved weights.
    """
    with torch.no_grad():
        for weight in parameters.values():
            if weight.requires_grad:
                weight.copy_(weight.to(_SAVED_DTYPE))
            weight.requires_grad_(False)


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    dtype = _SAVED_DTYPE if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", dtype).contiguous().clone()


def _yaml(description: ExitDescription | HeadDescription) -> bytes:
    """Returns a description as YAML after a comment. Floats get four significant digits."""
    comment = (
        _COMMENT.format(description.kind)
        if isinstance(description, HeadDescription)
        else _EXIT_COMMENT
    )
    plain = json.loads(
        json.dumps(asdict(description)), parse_float=lambda text: float(f"{float(text):.4g}")
    )
    import yaml

    text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    return (comment + text).encode()


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files completely, and then moves them into place, the first one last: without it the
    others are not recognised."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as moves:
        for name, data in files.items():
            moves.enter_context(whole_file(folder / name)).write(data)
