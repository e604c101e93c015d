"""Reads trained heads (Medusa, EAGLE, GliDe) in the layouts that are published, and writes the ones trained here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from specgen import demo
from specgen.base.errors import RunError, SpecgenError, is_out_of_memory
from specgen.base.files import HEAD_DESCRIPTION, kept_head, whole_file, write_whole
from specgen.engine.fingerprint import file_fingerprint, weights_fingerprint
from specgen.engine.model_loading import LoadedModel
from specgen.engine.native.families import read_config
from specgen.engine.parts.eagle_layouts import AUX_LAYERS, eagle_layout, read_eagle, rename_eagle
from specgen.engine.parts.glide_layout import glide_layout, read_glide
from specgen.engine.parts.head_description import COMMENT, RETRAIN, HeadDescription, description_for, read_head_description
from specgen.engine.parts.head_tensors import HEAD_FILE, MEDUSA_FILE, HeadTensors
from specgen.engine.parts.medusa_layouts import is_medusa, medusa_layout, read_medusa
from specgen.engine.parts.trained_parts import FoundPart, description_text
from specgen.engine.parts.weights import EagleWeights, HeadKind, HeadWeights, MedusaWeights

_SAVED_DTYPE = torch.bfloat16
_KINDS_HINT = "Name the folder of a Medusa, EAGLE or GliDe head"
_Reader = Callable[[HeadTensors, Mapping[str, Any], LoadedModel], HeadWeights]


@dataclass(frozen=True, slots=True)
class Head:
    """A trained head that fits its target. The weights are on the target's device, in the dtype of their files.

    `description` is None for heads that others trained. `path` is the head's folder. `warning` says what is doubtful about it.
    """

    weights: HeadWeights
    description: HeadDescription | None
    path: Path
    warning: str | None = None


def load_head(folder: Path, target: LoadedModel) -> Head:
    """Loads the head in `folder`, in any published layout, for `target`. All shapes are checked before a tensor is read.

    Raises SpecgenError, in one line, for files that are missing, damaged, of an unknown kind or in another format than
    safetensors, and for a head of another target; RunError if memory is short.
    """
    try:
        description = description_for(_existing(folder), target.name, target.folder)
        files = HeadTensors(folder, target.device)
        kind, read = _recognise(files)
        if description is not None and description.kind != kind:
            raise files.refuse(f"it is of the kind {kind}, and its {HEAD_DESCRIPTION} says {description.kind}", RETRAIN)
        if files.has_model and weights_fingerprint(folder) != weights_fingerprint(target.folder):
            raise files.refuse("its heads were trained with the model in the same files", f"Take that as the target: -t {folder}")
        config = _read_config(files) if kind != "medusa" or (folder / "config.json").exists() else {}
        if description is not None and description.feature_layers:  # the config's may be in either of two conventions
            config = {**config, "eagle_config": None, AUX_LAYERS: list(description.feature_layers)}
        weights = read(files, config, target)
        if description is not None and isinstance(weights, MedusaWeights):
            weights = replace(weights, rank_accuracies=description.rank_accuracies)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(f"the head {folder} does not fit into the memory of {target.device}") from error
    return Head(weights, description, folder, "; ".join(files.warnings) or None)


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        problem = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
        raise SpecgenError(problem, _KINDS_HINT)
    return folder


def _recognise(files: HeadTensors) -> tuple[HeadKind, _Reader]:
    """Returns the kind of a head by the names of its tensors, and the function that reads it."""
    names = {rename_eagle(name) for name in files.names}
    parts = {part for name in names for part in name.split(".")}
    if parts & {"eh_proj", "enorm", "hnorm"}:
        raise files.refuse("it is an MTP layer (multi-token prediction), which specgen cannot run", _KINDS_HINT)
    if any(map(is_medusa, names)):
        return "medusa", read_medusa
    if "cross_attn" in parts:
        return "glide", read_glide
    has_fusion = bool(names & {"fc.weight", "layers.0.hidden_norm.weight"})
    is_model = "layers.0.input_layernorm.weight" in names and not has_fusion
    if any(name.startswith("layers.0.") for name in names) and not is_model:
        return "eagle", read_eagle
    if is_model:
        raise files.refuse("it is a model, not a head", "Name it as a draft model: -d")
    raise files.refuse(f"it is of no kind that specgen knows (its first tensor: {files.stored_name(min(names))})", _KINDS_HINT)


def _read_config(files: HeadTensors) -> dict[str, Any]:
    if not (files.folder / "config.json").is_file():
        raise files.refuse("it has no config.json")
    return read_config(files.folder, f"the head {files.folder}")


def check_head_folder(folder: Path) -> None:
    """Raises SpecgenError if `save_head` would overwrite what is no head of specgen's in `folder`, such as a model."""
    names = ("config.json", HEAD_FILE, MEDUSA_FILE)
    found = next((name for name in names if (folder / name).exists()), None)
    if found is not None and not (folder / HEAD_DESCRIPTION).exists():
        raise SpecgenError(f"{folder} has a {found} that does not belong to a head trained by specgen", "Name another folder")


def save_head(folder: Path, weights: HeadWeights, description: HeadDescription) -> Path:
    """Writes a head in a published layout, in bfloat16, with its `head.yaml`. Returns the path of the weights.

    Medusa: the authors' "version 2" in `medusa_lm_head.safetensors` (v0.1 if it has LM heads of its own; vLLM's if its
    vocabulary is reduced). EAGLE-1 and 3: the authors', which SGLang and vLLM read too, and for EAGLE-3 SpecForge. GliDe: the
    authors'. Each file is written completely or not at all. Raises SpecgenError as `check_head_folder` does, and OSError.
    """
    check_head_folder(folder)
    sizes = description.sizes
    name = HEAD_FILE
    if isinstance(weights, MedusaWeights):
        config, tensors = medusa_layout(weights, description.target, sizes.vocab_size)
        name = MEDUSA_FILE if weights.vocabulary is None else HEAD_FILE
        description = replace(description, rank_accuracies=[list(each) for each in weights.rank_accuracies])
    elif isinstance(weights, EagleWeights):
        config, tensors = eagle_layout(weights, sizes.hidden_size, sizes.vocab_size)
        description = replace(description, feature_layers=weights.feature_layers)
    else:
        config, tensors = glide_layout(weights, sizes.hidden_size, sizes.num_heads, sizes.head_size, sizes.vocab_size)
    # One entry only: the order of several changes, and the same weights should give the same file.
    data = save({key: _stored(tensor) for key, tensor in tensors.items()}, {"format": "pt"})
    description = replace(description, weights=file_fingerprint(BytesIO(data)))
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / HEAD_DESCRIPTION) as described:  # moved into place last
        described.write(description_text(COMMENT.format(kind=description.kind), description).encode())
        write_whole(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
        with whole_file(folder / name) as file:
            file.write(data)
        (folder / (HEAD_FILE if name == MEDUSA_FILE else MEDUSA_FILE)).unlink(missing_ok=True)  # of an older head
    return folder / name


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    dtype = _SAVED_DTYPE if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", dtype).contiguous().clone()


class FoundHead(FoundPart[HeadDescription, Head]):
    """Finds the head of a kind that is used if the user names none. `is_bundled`: the target is the small model that comes with
    specgen, with heads."""

    def __init__(self, kind: HeadKind, target: LoadedModel, *, is_bundled: bool) -> None:
        super().__init__(
            "the head",
            target.device,
            lambda: find_head(kind, target.name, target.folder, is_bundled=is_bundled),
            lambda folder: description_for(folder, target.name, target.folder) or read_head_description(folder),
            lambda folder: load_head(folder, target),
        )


def find_head(kind: HeadKind, target_name: str, target_folder: Path, *, is_bundled: bool) -> Path | None:
    """Returns the folder of the head of a kind that is used if the user names none; None if there is none.

    It is the one trained on this machine for the weights in `target_folder`, preferably under the model name `target_name`. If
    there is none and the target comes with specgen (`is_bundled`), it is the head that comes with it.
    """
    found = kept_head(kind, target_name, weights_fingerprint(target_folder))
    bundled = demo.head_folder(kind)
    return bundled if found is None and is_bundled and bundled.is_dir() else found
