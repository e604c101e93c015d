"""Finds what can draft for a target among the heads and models that are on this machine already: in
its data folder and its own files, beside it, and in the local hub cache. Downloads nothing, and
reads only configs and the headers of weight files.

What it finds is remembered (`found_cache`), so that a later search of the same files only lists
folders.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from specgen.base.errors import SpecgenError
from specgen.base.files import DRAFT_DESCRIPTION
from specgen.base.model_options import ModelOptions
from specgen.base.part_kinds import EXIT, HEADS, MTP, ONE_PASS
from specgen.base.part_verdict import PartVerdict
from specgen.base.schema import parse_yaml, read_text
from specgen.decoding.costs import FURTHER_TOKEN, LEAST_DRAFT_PASS, WIDTHS, SpeedupModel
from specgen.engine.gguf.file import is_gguf
from specgen.engine.gguf.naming import gguf_models
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.model_files import ModelFiles, ModelSource, describe
from specgen.engine.native.config_reading import read_config, text_config
from specgen.engine.native.native_model import open_model
from specgen.engine.parts.trained_part import TrainedPart, open_part
from specgen.engine.precision import Precision
from specgen.engine.text.tokenizer import has_tokenizer, load_tokenizer
from specgen.engine.text.translation import LEAST_SHARED, same_tokens
from specgen.engine.weights import bytes_of_weights, stored_tensors
from specgen.methods.base import DRAFT_MODEL
from specgen.models.parts import PartStore
from specgen.pair.found_cache import keep_search, read_search, search_state

MOST_FOLDERS = 300  # that are looked at, of each place
LARGEST_DRAFT = 0.5  # of the target's bytes
# Acceptance of a drafted token where none was measured: guesses, which only order what was found.
# of a model of the target's family, of another, of a head
ASSUMED = 0.6
ASSUMED_OF_OTHERS = 0.4
ASSUMED_OF_HEADS = 0.7
LEAST_GAIN = 1.1  # expected speedup from which a model drafts without being named
_PUBLISHED = (  # target's name, drafters that were published for it, and where this is said
    (
        r"llama-?3\.1-8b-instruct",
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B or meta-llama/Llama-3.2-1B-Instruct",
        "SafeAILab/EAGLE",
    ),
    (r"llama-?3\.3-70b-instruct", "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", "SafeAILab/EAGLE"),
    (r"vicuna-13b-v1\.3", "yuhuili/EAGLE3-Vicuna1.3-13B", "SafeAILab/EAGLE"),
    (r"qwen3-(4|8)b$", r"Qwen/Qwen3-0.6B or z-lab/Qwen3-\1B-DFlash-b16", "z-lab/dflash"),
    (r"qwen3-(14|32)b$", "Qwen/Qwen3-0.6B", "AMD-AIG-AIMA/PARD"),
    (r"qwen2\.5-(7|14|32|72)b-instruct", "Qwen/Qwen2.5-0.5B-Instruct", "AMD-AIG-AIMA/PARD"),
)


@dataclass(frozen=True, slots=True)
class Found:
    """Something that can draft. `kind` is `DRAFT_MODEL` or the kind of a trained part, `name` what
    users name it by.

    `acceptance` is that of a drafted token, `cost` a draft pass's time as a share of a target
    pass's, by the bytes of weights. `why` says where the two come from. `is_assumed`: the
    acceptance was not measured. `refusal` says why it cannot be used after all; None: it can, as
    far as is known. `may_pass`: the refusal is for something such as too little memory.
    `not_chosen` says why it is used only where the user names it: it was trained here, and
    something else was faster; None: it may be chosen.
    """

    kind: str
    name: str
    folder: Path
    acceptance: float
    cost: float
    why: str
    is_assumed: bool = True
    refusal: str | None = None
    may_pass: bool = False
    not_chosen: str | None = None

    @property
    def speedup(self) -> float:
        """The expected speedup over plain decoding at the best draft length."""
        passes = {width: 1 + FURTHER_TOKEN * (width - 1) for width in WIDTHS}
        return SpeedupModel(
            passes, max(self.cost, LEAST_DRAFT_PASS), 0, self.kind in ONE_PASS
        ).best(self.acceptance)[1]

    def as_dict(self) -> dict[str, Any]:
        own = {
            "kind": self.kind,
            "name": self.name,
            "expected_speedup": round(self.speedup, 2),
            "why": self.why,
        }
        own |= {"acceptance": round(self.acceptance, 3), "is_assumed": self.is_assumed}
        return own | ({} if self.not_chosen is None else {"not_chosen": self.not_chosen})


@dataclass(frozen=True, slots=True)
class Search:
    """What was looked at for a target, and what can draft for it.

    `folders` has what was looked at by name, and `state` changes with the files there. `judged` is
    what these files showed, with what was refused, best first; `own` are parts that belong to the
    target. `conditions` say how the models are run: what running them shows is remembered for these
    alone.
    """

    target: Path
    conditions: str
    folders: Mapping[str, Path]
    state: str
    own: Sequence[Found]
    judged: Sequence[Found]

    @property
    def found(self) -> list[Found]:
        """What can draft for the target: parts that belong to it first, then by expected
        speedup."""
        return [drafter for drafter in self._usable if drafter.not_chosen is None]

    @property
    def not_chosen(self) -> list[Found]:
        """What can draft, but is used only where the user names it."""
        return [drafter for drafter in self._usable if drafter.not_chosen is not None]

    @property
    def _usable(self) -> list[Found]:
        return [*self.own, *(drafter for drafter in self.judged if drafter.refusal is None)]

    @property
    def left_out(self) -> list[str]:
        """A line for each drafter that does not work, with the reason."""
        return [
            f"left out {drafter.name}: {drafter.refusal}"
            for drafter in self.judged
            if drafter.refusal is not None
        ]

    def learned(self, found: Found) -> Search:
        """Returns the search with `found` in place of what it has of the same folder."""
        judged = [found if drafter.folder == found.folder else drafter for drafter in self.judged]
        return replace(self, judged=_ordered(judged))

    def keep(self) -> None:
        """Stores what the files showed, for later searches of the same files."""
        lasting = [
            replace(drafter, refusal=None, may_pass=False) if drafter.may_pass else drafter
            for drafter in self.judged
        ]
        facts = [
            asdict(drafter) | {"name": None, "folder": str(drafter.folder)} for drafter in lasting
        ]
        keep_search(self.target, self.conditions, self.state, facts)


def search(
    target: ModelFiles,
    devices: Sequence[torch.device] = (),
    options: ModelOptions | None = None,
) -> Search:
    """Looks for what can draft for the target. Something that cannot be read is not found, and
    never an error.

    `devices` are the target's and the draft's. Whether a model works, and how much of it is
    accepted, was perhaps learned earlier in a run on such devices with the dtypes of `options`
    (None: the default ones).
    """
    store = PartStore(unloaded(target))
    size = _size(target.folder)
    device = devices[0].type if devices else "cpu"
    own = _own_parts(store, target, size, device)

    folders = dict(_places(target))
    state = search_state([target.folder.resolve(), *folders.values()])
    conditions = _conditions(target.source, devices, options or ModelOptions())
    kept = read_search(target.folder, conditions, state)
    if kept is not None:
        restored = [_with_verdict(drafter, device) for drafter in _restored(kept, folders)]
        return Search(target.folder, conditions, folders, state, own, restored)

    tokens = len(target.tokenizer.vocabulary()) if folders else 0
    judged = [_judged(name, folder, target, (size, tokens)) for name, folder in folders.items()]
    made = Search(
        target.folder,
        conditions,
        folders,
        state,
        own,
        _ordered([_with_verdict(drafter, device) for drafter in judged if drafter is not None]),
    )
    made.keep()
    return made


def _own_parts(store: PartStore, target: ModelFiles, size: int, device: str) -> list[Found]:
    """Returns the parts that belong to the target. An exit layer, which no method uses by default,
    is only among them if it is not chosen. `size` are the bytes of the target's weights, `device`
    is the type of its device."""
    own = []
    for kind in (*HEADS, EXIT):
        part = store.find(kind)
        if part is None:
            continue
        why = "in the model's own files" if kind == MTP else "trained here for this model"
        found = _of_part(part, target, size, why)
        if part.description is not None:
            found = replace(found, not_chosen=_refused(part.description.figures, device))
        if kind != EXIT or found.not_chosen is not None:
            own.append(found)
    return own


def _with_verdict(drafter: Found, device: str) -> Found:
    """Returns a draft model with the verdict of its training, if it was trained here."""
    description = drafter.folder / DRAFT_DESCRIPTION
    if drafter.kind != DRAFT_MODEL or not description.is_file():
        return drafter
    figures: Any = {}
    with suppress(SpecgenError, AttributeError):
        text = read_text(description, "description")
        figures = parse_yaml(text, str(description), "").get("figures")  # type: ignore[attr-defined]
    return replace(drafter, not_chosen=_refused(figures, device))


def _refused(figures: Mapping[str, Any], device: str) -> str | None:
    verdict = PartVerdict.read(figures)
    return None if verdict is None else verdict.refusal(device)


def _conditions(
    source: ModelSource,
    devices: Sequence[torch.device],
    named: ModelOptions,
) -> str:
    """Returns, as text, that on which it depends whether models can be loaded, and what the target
    accepts."""
    options = source.backend, source.trust_remote_code, source.exact
    limits = source.context, source.repetition_penalty
    dtypes = [named.dtype, named.draft_dtype]
    return json.dumps([*options, *limits, [device.type for device in devices], dtypes])


def _ordered(found: Sequence[Found]) -> list[Found]:
    return sorted(found, key=lambda drafter: (-drafter.speedup, -drafter.cost, drafter.name))


def _restored(kept: Sequence[Mapping[str, Any]], folders: Mapping[str, Path]) -> list[Found]:
    """Returns what an earlier search kept, under the names by which the folders go now."""
    names = {str(folder): name for name, folder in folders.items()}
    restored = []
    for facts in kept:
        with suppress(TypeError, KeyError):
            folder = str(facts["folder"])
            restored.append(Found(**{**facts, "name": names[folder], "folder": Path(folder)}))
    return _ordered(restored)


def other_drafts(found: Sequence[Found], draft: LoadedModel | None) -> list[Found]:
    """Returns the draft models among what was found for a target, but for `draft`."""
    return [
        model
        for model in found
        if model.kind == DRAFT_MODEL and (draft is None or model.folder != draft.folder)
    ]


def hint(target: str) -> str | None:
    """Returns which drafters were published for a target of this name, None if none is known."""
    for pattern, drafters, source in _PUBLISHED:
        if match := re.search(pattern, target.lower()):
            return (
                f"published for it: {match.expand(drafters)} (see "
                f"github.com/{source}); -d or --head downloads one"
            )
    return None


def unloaded(target: ModelFiles) -> LoadedModel:
    """Returns the target as its files describe it, to look for its parts: opening them loads none
    of its weights."""
    return LoadedModel(target, Precision(torch.float32), [torch.device("cpu")])


def _places(target: ModelFiles) -> Iterator[tuple[str, Path]]:
    """Yields the names and places of models in and beside the target's folder, if the user named a
    place on this machine, and of those in the hub cache. The place of a GGUF model is its first
    file."""
    from huggingface_hub import constants

    here = target.folder.resolve()
    location = target.folder if target.source.is_bundled else Path(target.source.name)
    if location.expanduser().exists():
        is_file = here.is_file()
        home = target.folder.parent.resolve() if is_file else here
        inside = _models_of_a_collection(home) if is_file else _models_in(home)
        beside = _models_of_a_collection(home.parent)
        as_named = location.expanduser().absolute()  # of which a part may be a link
        if as_named.parent.resolve() != home.parent and not is_file:
            beside = [*beside, *_models_of_a_collection(as_named.parent)]
        for folder in [*inside, *beside]:
            if folder != home and folder.resolve() != here:
                yield str(folder) if location.is_absolute() else os.path.relpath(folder), folder
    for cached in islice(_folders(Path(constants.HF_HUB_CACHE)), MOST_FOLDERS):
        if not cached.name.startswith("models--"):
            continue
        snapshot = max(_folders(cached / "snapshots"), key=_time, default=None)
        if snapshot is None:
            continue
        name = cached.name.removeprefix("models--").replace("--", "/")
        if not _is_model(snapshot):
            for file in _gguf_files(snapshot):
                if file.resolve() != here:
                    yield f"{name}:{file.name}", file
        elif snapshot.resolve() != here:
            yield name, snapshot


def _models_of_a_collection(place: Path) -> list[Path]:
    """Returns the models in `place` if it is a folder of models.

    It is one if at least half of its folders are models. Others, such as a home folder, hold what
    has nothing to do with the target, and may hold what strangers put there.
    """
    folders = _folders(place)
    models = [model for model in map(_model_in, folders) if model is not None]
    return [*models, *_gguf_files(place)] if 2 * len(models) >= len(folders) else []


def _models_in(place: Path) -> list[Path]:
    models = map(_model_in, _folders(place))
    return [*(model for model in models if model is not None), *_gguf_files(place)]


def _model_in(folder: Path) -> Path | None:
    """Returns a folder that is a model, else the first GGUF model in it; None if there is none."""
    return folder if _is_model(folder) else next(iter(_gguf_files(folder)), None)


def _gguf_files(place: Path) -> list[Path]:
    """Returns the first file of each GGUF model in `place`; none if it cannot be listed."""
    with suppress(OSError):
        names = [model[0] for model in gguf_models(os.listdir(place))]
        return [place / name for name in names[:MOST_FOLDERS] if is_gguf(place / name)]
    return []


def _size(model: Path) -> int:
    """Returns about how many bytes a model's weights take when they are loaded: those of GGUF files
    become 16-bit numbers."""
    if is_gguf(model):
        return 2 * sum(prod(shape) for shape, _ in stored_tensors(model).values())
    return bytes_of_weights(model)


def _folders(place: Path) -> list[Path]:
    """Returns the folders in `place` by name, but for hidden ones; at most `MOST_FOLDERS`, and none
    if it cannot be listed."""
    try:
        names = sorted(os.listdir(place))
    except OSError:
        return []
    folders = (place / name for name in names if not name.startswith((".", "__")))
    return list(islice((folder for folder in folders if os.path.isdir(folder)), MOST_FOLDERS))


def _is_model(folder: Path) -> bool:
    return os.path.isfile(folder / "config.json")


def _time(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def _judged(name: str, folder: Path, target: ModelFiles, sizes: tuple[int, int]) -> Found | None:
    """Returns what the folder's files show about it as a drafter for the target; None if it cannot
    be one.

    `sizes` are the bytes of the target's weights, and how many tokens its tokenizer has. The files
    are a stranger's, for which libraries may raise anything.
    """
    target_bytes, tokens = sizes
    with suppress(Exception):
        own_bytes = _size(folder)
        if not 0 < own_bytes <= LARGEST_DRAFT * target_bytes:
            return None
        config = read_config(folder, name)
        if _width(config) in (None, target.shape.hidden_size):
            with suppress(SpecgenError):
                part = open_part(folder, unloaded(target), is_exit=False)
                return _of_part(part, target, target_bytes, "its sizes fit this model", name)
        rows = text_config(config).get("vocab_size")
        if isinstance(rows, int) and rows < LEAST_SHARED * tokens:
            return None
        # some tokenizers need transformers, whose import takes seconds
        is_readable = is_gguf(folder) or has_tokenizer(folder)
        if is_readable and same_tokens(
            target.tokenizer, load_tokenizer(folder, config, False, name)
        ):
            return _of_model(name, folder, config, target, own_bytes / target_bytes)
    return None


def _width(config: Mapping[str, Any]) -> Any:
    """Returns the width of the target's hidden states that a head with this config reads; None if
    the config is silent."""
    if "backbone_hidden_size" in config:  # of an assistant of Gemma 4
        return config["backbone_hidden_size"]
    inner = config.get("transformer_layer_config")
    return {**config, **(inner if isinstance(inner, dict) else {})}.get("hidden_size")


def _of_model(
    name: str, folder: Path, config: Mapping[str, Any], target: ModelFiles, cost: float
) -> Found:
    """Returns a model with the target's tokenizer as a drafter, with a refusal if it cannot be run
    or lacks tensors."""
    is_related = text_config(config).get("model_type") == target.shape.model_type
    why = f"the same tokenizer{'' if is_related else ', another family'}, {cost:.0%} of the size"
    draft = Found(
        DRAFT_MODEL, name, folder, ASSUMED if is_related else ASSUMED_OF_OTHERS, cost, why
    )
    try:
        model = describe(folder, ModelSource(name))
        _ = model.generation, model.eos_ids
        if model.architecture is not None:
            open_model(folder, name, model.architecture, torch.device("cpu"))
    except SpecgenError as error:
        return replace(draft, refusal=error.message)
    return draft


def _of_part(part: TrainedPart, target: ModelFiles, size: int, why: str, name: str = "") -> Found:
    figures: Mapping[str, Any] = {} if part.description is None else part.description.figures
    greedy = figures.get("held_out_agreement", {}).get("greedy")
    shares = [greedy] if isinstance(greedy, float) else greedy
    acceptance = fmean(shares) if shares else ASSUMED_OF_HEADS
    cost = bytes_of_weights(part.path) / size
    if part.kind == MTP and part.path == target.folder:
        cost = 1 / target.shape.num_layers
    why += ", measured in training" if shares else ""
    return Found(part.kind, name or str(part.path), part.path, acceptance, cost, why, not shares)
