"""The files of a head: tensors under one set of names, checks against the expected tensors, and
copies of the target's tables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from specgen.base.errors import SpecgenError
from specgen.base.files import files_in
from specgen.base.text import shown
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.native.layer_files import EMBEDDING, HEAD
from specgen.engine.weights import (
    BUFFER,
    SINGLE_FILE,
    Shape,
    WeightFiles,
    files_of_keys,
    reading_weights,
)

MEDUSA_FILE = "medusa_lm_head.safetensors"
OTHER_HEAD = "Take another head"

_CONVERTER = (
    "import sys, torch; from safetensors.torch import save_file; save_file({name: "
    "tensor.clone().contiguous() for path in"
    " sys.argv[2:] for name, tensor in torch.load(path, map_location='cpu', "
    "weights_only=True).items()}, sys.argv[1])"
)
# of targets
_TABLES = (
    EMBEDDING,
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    HEAD,
    "embed_out.weight",
)
_ROWS = 128  # rows that are compared; unrelated models differ in nearly every element


def open_head(
    folder: Path, device: torch.device, names: Sequence[tuple[str, str]], part: re.Pattern[str]
) -> tuple[WeightFiles, bool]:
    """Returns the tensors of a head, opened under the names that specgen uses for all layouts, and
    whether the files also hold the model that the head was trained with (Medusa-2).

    `names` has pairs of the beginning of a name in files (a pattern) and what replaces it. The
    files hold the model if some layers have names that do not match `part`; its tensors are left
    out. Raises SpecgenError if the folder has no safetensors weights, or if they cannot be read.
    """
    owner = f"the head {folder}"
    single = _weight_file(folder)
    with reading_weights(owner):
        keys = files_of_keys(folder, single)
    parts = {key for key in keys if part.match(key)}
    has_model = bool(parts) and any("layers." in key for key in keys if key not in parts)

    def name_of(key: str) -> str | None:
        if BUFFER.search(key) or (has_model and key not in parts):
            return None
        for published, own in names:
            key = re.sub(f"^{published}", own, key)
        return key

    return WeightFiles(folder, owner, device, single=single, name_of=name_of), has_model


def _weight_file(folder: Path) -> str:
    """Returns the name of the file that holds the head's tensors, unless there is an index of
    several files.

    Raises SpecgenError if there is none, and for formats that can run code when they are read.
    """
    names = [path.name for path in files_in(folder, "*.safetensors")]
    if MEDUSA_FILE in names:
        return MEDUSA_FILE
    if names:
        has_index = (folder / f"{SINGLE_FILE}.index.json").exists()
        return SINGLE_FILE if has_index or len(names) > 1 else names[0]
    others = files_in(folder, "*.bin", "*.pt", "*.pth")
    if not others:
        raise SpecgenError(
            f"there is no head in {folder}: it has no safetensors file",
            "Name the folder of a trained head",
        )
    paths = " ".join(shlex.quote(str(path)) for path in (folder / SINGLE_FILE, *others))
    raise SpecgenError(
        (
            f"the head {folder} has no safetensors weights (only {shown(others[0].name)}, "
            "which can run code when it is read)"
        ),
        f'Convert it: python -c "{_CONVERTER}" {paths}',
    )


_IDS = ("d2t", "t2d", "token_map", "masked_embedding.token_ordering", "exit.vocabulary")


def take_exactly(files: WeightFiles, expected: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
    """Returns the expected tensors in their stored dtype.

    Raises SpecgenError if the files lack one of them, have another one, or have one of another
    shape; this is checked before any tensor is read. Raises it too for tensors that hold NaN or
    infinities.
    """
    files.check(expected)
    if unknown := sorted(files.names - expected.keys()):
        problem = (
            f"it has {len(unknown)} tensors that such a part does not have (the "
            f"first: {files.key(unknown[0])})"
        )
        raise files.refuse(problem, "It is of a kind that specgen does not know")
    taken = {}
    for name in expected:
        if name in _IDS:
            taken[name] = files.take_integers(name)
            continue
        taken[name] = tensor = files.take(name)
        if not tensor.isfinite().all():
            raise files.refuse(
                f"{files.key(name)} holds NaN or infinities",
                "Its training diverged, or its file is damaged",
            )
    return taken


def matrix_shape(files: WeightFiles, name: str) -> tuple[int, int]:
    """Returns the numbers of rows and columns of the matrix `name`. Raises SpecgenError if it is
    missing, empty or no matrix."""
    shape = files.shape(name)
    if len(shape) != 2 or 0 in shape:
        raise files.refuse(f"{files.key(name)} is no matrix in its file")
    return shape[0], shape[1]


def check_size(
    files: WeightFiles, name: str, what: str, size: int, target: LoadedModel, expected: int
) -> None:
    """Raises SpecgenError unless `size`, which the head's files show, is the target's, `expected`.

    `name` is the tensor that shows the size, and `what` says in the message what has this size.
    """
    if size != expected:
        shows = f"{files.key(name)} is for {what} {size:,}, {target.name} has {expected:,}"
        hint = "Name a head for this target, or the target that it was made for"
        raise SpecgenError(f"{files.owner} was made for another target: {shows}", hint)


def check_vocabulary(
    files: WeightFiles, name: str, target: LoadedModel, size: int | None = None
) -> None:
    """Raises SpecgenError if the head was made for a target with another vocabulary size.

    The number of rows of the tensor `name` decides. If it is missing, `size`, from the head's
    config.json, decides; None: nothing is checked.
    """
    stated = (*files.shape(name), 1)[0] if name in files else size
    if stated is not None:
        shows = name if name in files else "config.json"
        check_size(files, shows, "a vocabulary of", stated, target, target.shape.vocab_size)


def drop_copies(
    files: WeightFiles, tensors: dict[str, torch.Tensor], names: Sequence[str], target: LoadedModel
) -> str | None:
    """Removes from `tensors` those of the tables `names` (embedding, LM head) that are copies of
    the target's.

    Returns a warning if a table differs from the target's, so that the head may have been made for
    another target; None otherwise.
    """
    warning = None
    for name in names:
        is_copy = _is_copy(files, name, target) if name in tensors else None
        if is_copy:
            del tensors[name]
        elif is_copy is False:
            table = "embedding" if name == EMBEDDING else "LM head"
            warning = (
                f"its {table} is not that of {target.name}: it may have been made "
                "for another target"
            )
    return warning


def _is_copy(files: WeightFiles, name: str, target: LoadedModel) -> bool | None:
    """Whether some rows of a head's embedding or LM head are the target's, rounded to the narrower
    dtype.

    None: the target's files do not have the table in a known form, as transformers may have loaded
    them.
    """
    rows = files.shape(name)[0]
    ranges = [range(row, row + 1) for row in range(0, rows, max(1, rows // _ROWS))]
    try:
        theirs = WeightFiles(target.folder, target.name)
        tables = _TABLES if name == EMBEDDING else _TABLES[::-1]
        key = next(
            (key for table in tables for key in theirs.names if f".{key}".endswith(f".{table}")),
            None,
        )
        if key is None or theirs.shape(key) != files.shape(name):
            return None
        of_target = theirs.take_part(key, 0, ranges)
    except SpecgenError:
        return None
    own = files.take_part(name, 0, ranges).cpu()
    return torch.equal(own.to(of_target.dtype), of_target) or torch.equal(
        own, of_target.to(own.dtype)
    )


def expect(
    files: WeightFiles,
    shapes: dict[str, Shape],
    some: Mapping[str, Shape],
    *,
    are_needed: bool = False,
) -> None:
    """Adds to `shapes` those of the tensors `some` that the files have, or all of these if they
    `are_needed`."""
    shapes |= {name: shape for name, shape in some.items() if are_needed or name in files}


def unsupported(files: WeightFiles, name: str, value: object) -> SpecgenError:
    return files.refuse(
        f"{shown(name)} = {shown(repr(value), 40)} in its config.json is not supported", OTHER_HEAD
    )


def target_ids(
    files: WeightFiles, tensors: dict[str, torch.Tensor], target: LoadedModel
) -> torch.Tensor | None:
    """Removes `d2t` and `t2d`, the maps of a reduced vocabulary, from a head's tensors. Returns the
    target's id of each of the head's ids; None if the head has the target's vocabulary.

    `d2t` holds the differences of the ids. Raises SpecgenError for maps that contradict each other
    or the target's vocabulary.
    """
    offsets = tensors.pop("d2t", None)
    used = tensors.pop("t2d", None)
    if offsets is None:
        return None
    ids = offsets + torch.arange(len(offsets))
    vocab_size = target.shape.vocab_size
    if not are_rising(ids, vocab_size):
        raise files.refuse(
            f"{files.key('d2t')} does not map its ids to rising ids of {target.name}"
        )
    if used is not None and not torch.equal(torch.isin(torch.arange(len(used)), ids), used != 0):
        raise files.refuse(f"{files.key('t2d')} and {files.key('d2t')} contradict each other")
    return None if len(ids) == vocab_size else ids.to(target.device)


def are_rising(ids: torch.Tensor, vocab_size: int) -> bool:
    """Whether `ids` are ascending ids, without repetitions, of a vocabulary of `vocab_size`
    tokens."""
    return (
        len(ids) > 0
        and int(ids[0]) >= 0
        and int(ids[-1]) < vocab_size
        and bool((ids.diff() > 0).all())
    )
