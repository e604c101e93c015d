"""What specgen writes beside the weights of a head that it trained: `head.yaml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from specgen.base.errors import SpecgenError
from specgen.base.files import HEAD_DESCRIPTION
from specgen.engine.fingerprint import weights_fingerprint
from specgen.engine.model_loading import LoadedModel
from specgen.engine.parts.head_tensors import shown
from specgen.engine.parts.trained_parts import digest_of, read_described
from specgen.engine.parts.weights import HeadKind

RETRAIN = "Train it again"
COMMENT = "# A head for `specgen generate -m {kind}`. Its weights are beside this file.\n"
_RESTORE = "Train the head again, or restore the file"


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """The sizes of the target that a head was trained for. `vocab_size` is its number of logits."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    hidden_size: int
    num_layers: int
    num_heads: int
    head_size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class HeadDescription:
    """The contents of `head.yaml`, which describes a trained head.

    `target` and `fingerprint` are the name of the target and a hash of its weights, `sizes` its sizes. `weights` is a hash of the
    head's own weights, which `save_head` fills in. `feature_layers` (EAGLE-3) and `rank_accuracies` (Medusa) are as in the
    head's weights. `figures` (measured in training) and `made_with` (settings and versions of the training) inform people; the
    program does not use them. Make one by `describe_head`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: HeadKind
    target: str
    fingerprint: str
    sizes: TargetSizes
    weights: str = ""
    feature_layers: tuple[int, ...] = ()
    rank_accuracies: Sequence[Sequence[Annotated[float, Field(ge=0, le=1)]]] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    made_with: Mapping[str, Any] = field(default_factory=dict)
    format: Literal[1] = 1

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that identify this description, and so the training that made it."""
        return digest_of(self)


_ADAPTER = TypeAdapter(HeadDescription)


def describe_head(
    kind: HeadKind, target: LoadedModel, figures: Mapping[str, Any], made_with: Mapping[str, Any]
) -> HeadDescription:
    """Returns the description of a head that was trained for `target`."""
    return HeadDescription(
        kind, target.name, weights_fingerprint(target.folder), sizes_of(target), figures=figures, made_with=made_with
    )


def sizes_of(target: LoadedModel) -> TargetSizes:
    shape = target.model.shape
    return TargetSizes(shape.hidden_size, shape.num_layers, shape.num_heads, shape.head_size, target.model.vocab_size)


def read_head_description(folder: Path) -> HeadDescription:
    """Reads the `head.yaml` in a head's folder. Raises SpecgenError if it is missing, unreadable or in a wrong format."""
    return read_described(folder / HEAD_DESCRIPTION, _ADAPTER, "head.yaml", train="Train a head", restore=_RESTORE)


def description_for(folder: Path, target: str, target_folder: Path) -> HeadDescription | None:
    """Returns the description of the head in `folder`, which is to draft for the model `target` with the files in
    `target_folder`; None if it has none.

    Raises SpecgenError if the head was trained for another target, or its weights and description do not belong together.
    """
    if not (folder / HEAD_DESCRIPTION).exists():
        return None
    description = read_head_description(folder)
    if description.fingerprint != weights_fingerprint(target_folder):
        trained_for = f"{shown(description.target)} ({shown(description.fingerprint, 16)})"
        raise SpecgenError(
            f"the head {folder} was trained for {trained_for}, not for {target}",
            f"Train one for this target: specgen tune --train --methods {description.kind}",
        )
    if description.weights and description.weights != weights_fingerprint(folder):
        raise SpecgenError(f"the weights in {folder} and their {HEAD_DESCRIPTION} do not belong together", RETRAIN)
    return description
