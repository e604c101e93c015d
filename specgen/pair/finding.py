"""Finds what can draft for a target among the heads and models that are on this machine already: in its data folder and its own
files, beside it, and in the local hub cache. Downloads nothing, and reads only configs and the headers of weight files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from specgen.base.errors import SpecgenError
from specgen.decoding.costs import SpeedupModel
from specgen.engine.model_loading import LoadedModel, ModelSource, PreparedModel, describe
from specgen.engine.native.config_reading import read_config
from specgen.engine.parts.trained_part import TrainedPart, open_part
from specgen.engine.text.translation import same_tokens
from specgen.methods.method import DRAFT_MODEL, HEADS, MTP, ONE_PASS
from specgen.pair.parts import PartStore

MOST_FOLDERS = 300  # that are looked at, of each place
LARGEST_DRAFT = 0.5  # of the target's bytes
# Acceptance of a drafted token where none was measured: guesses, which only order what was found.
ASSUMED, ASSUMED_OF_OTHERS, ASSUMED_OF_HEADS = 0.6, 0.4, 0.7  # of a model of the target's family, of another, of a head
LEAST_GAIN = 1.1  # expected speedup from which a model drafts without being named
LEAST_COST = 0.05  # of a target pass: a draft pass of a smaller model takes no less time, and it guesses worse
WIDER = 0.03  # of a target pass, for each further token of it
_PUBLISHED = (  # target's name, drafters that were published for it, and where this is said
    (r"llama-?3\.1-8b-instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B or meta-llama/Llama-3.2-1B-Instruct", "SafeAILab/EAGLE"),
    (r"llama-?3\.3-70b-instruct", "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", "SafeAILab/EAGLE"),
    (r"vicuna-13b-v1\.3", "yuhuili/EAGLE3-Vicuna1.3-13B", "SafeAILab/EAGLE"),
    (r"qwen3-(4|8)b$", r"Qwen/Qwen3-0.6B or z-lab/Qwen3-\1B-DFlash-b16", "z-lab/dflash"),
    (r"qwen3-(14|32)b$", "Qwen/Qwen3-0.6B", "AMD-AIG-AIMA/PARD"),
    (r"qwen2\.5-(7|14|32|72)b-instruct", "Qwen/Qwen2.5-0.5B-Instruct", "AMD-AIG-AIMA/PARD"),
)


@dataclass(frozen=True, slots=True)
class Found:
    """Something that can draft. `kind` is `DRAFT_MODEL` or the kind of a trained part, `name` what users name it by.

    `acceptance` is that of a drafted token, `cost` a draft pass's time as a share of a target pass's, by the bytes of weights.
    `why` says where both come from. `is_assumed`: the acceptance was not measured.
    """

    kind: str
    name: str
    folder: Path
    acceptance: float
    cost: float
    why: str
    is_assumed: bool = True

    @property
    def speedup(self) -> float:
        """The expected speedup over plain decoding at the best draft length."""
        passes = {width: 1 + WIDER * (width - 1) for width in range(1, 12)}
        return SpeedupModel(passes, max(self.cost, LEAST_COST), 0, self.kind in ONE_PASS).best(self.acceptance)[1]

    def as_dict(self) -> dict[str, Any]:
        own = {"kind": self.kind, "name": self.name, "expected_speedup": round(self.speedup, 2), "why": self.why}
        return own | {"acceptance": round(self.acceptance, 3), "is_assumed": self.is_assumed}


def find_drafters(target: PreparedModel) -> list[Found]:
    """Returns what can draft for the target: parts that belong to it first, then by expected speedup."""
    store, own, size = PartStore(unloaded(target)), [], _bytes(target.folder)
    for kind in HEADS:
        if (part := store.find(kind)) is not None:
            own.append(_of_part(part, target, size, "in the model's own files" if kind == MTP else "trained here for this model"))
    found = [each for name, folder in _places(target) if (each := _judged(name, folder, target, size)) is not None]
    return own + sorted(found, key=lambda each: (-each.speedup, -each.cost))


def other_drafts(found: Sequence[Found], draft: LoadedModel | None) -> list[Found]:
    """Returns the draft models among what was found for a target, but for `draft`."""
    return [each for each in found if each.kind == DRAFT_MODEL and (draft is None or each.folder != draft.folder)]


def hint(target: str) -> str | None:
    """Returns which drafters were published for a target of this name, None if none is known."""
    for pattern, drafters, source in _PUBLISHED:
        if match := re.search(pattern, target.lower()):
            return f"published for it: {match.expand(drafters)} (see github.com/{source}); -d or --head downloads one"
    return None


def unloaded(target: PreparedModel) -> Any:
    """Returns what finding parts needs of a `LoadedModel`, without weights."""
    import torch

    device, shape = torch.device("cpu"), target.shape
    model = SimpleNamespace(shape=shape, device=device)
    limit = shape.context_limit
    return SimpleNamespace(
        name=target.name, folder=target.folder, prepared=target, device=device, context_limit=limit, model=model
    )


def _places(target: PreparedModel) -> Iterator[tuple[str, Path]]:
    """Yields the names and folders of models beside the target, if it is a folder, and of those in the hub cache."""
    from huggingface_hub import constants

    here, location = target.folder.resolve(), Path(target.source.location)
    if location.expanduser().is_dir():
        for folder in islice((each for place in (here, here.parent) for each in place.iterdir()), 20 * MOST_FOLDERS):
            if folder.is_dir() and folder != here:
                yield str(folder) if location.is_absolute() else os.path.relpath(folder), folder
    for cached in islice(Path(constants.HF_HUB_CACHE).glob("models--*--*"), MOST_FOLDERS):
        snapshots = sorted(cached.glob("snapshots/*"), key=lambda path: path.stat().st_mtime)
        if snapshots and snapshots[-1].resolve() != here:
            yield cached.name.removeprefix("models--").replace("--", "/"), snapshots[-1]


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _judged(name: str, folder: Path, target: PreparedModel, size: int) -> Found | None:
    """Returns what the folder's files show about it as a drafter for the target, whose weights take `size` bytes; None if it
    cannot be one."""
    with suppress(SpecgenError, OSError, ValueError):
        if not (folder / "config.json").is_file() or not 0 < _bytes(folder) <= LARGEST_DRAFT * size:
            return None
        config = read_config(folder, name)
        inner = config.get("transformer_layer_config")
        width = {**config, **(inner if isinstance(inner, dict) else {})}.get("hidden_size")
        if "backbone_hidden_size" in config:  # of an assistant of Gemma 4
            width = config["backbone_hidden_size"]
        if width in (None, target.shape.hidden_size):
            with suppress(SpecgenError):
                return _of_part(
                    open_part(folder, unloaded(target), is_exit=False), target, size, "its sizes fit this model", name
                )
        model = describe(folder, ModelSource(name))
        if same_tokens(target.tokenizer, model.tokenizer):
            is_related = model.shape.model_type == target.shape.model_type
            cost = _bytes(folder) / size
            why = f"the same tokenizer{'' if is_related else ', another family'}, {cost:.0%} of the size"
            return Found(DRAFT_MODEL, name, folder, ASSUMED if is_related else ASSUMED_OF_OTHERS, cost, why)
    return None


def _of_part(part: TrainedPart, target: PreparedModel, size: int, why: str, name: str = "") -> Found:
    figures: Mapping[str, Any] = {} if part.description is None else part.description.figures
    greedy = figures.get("held_out_agreement", {}).get("greedy")
    shares = [greedy] if isinstance(greedy, float) else greedy
    acceptance, cost = fmean(shares) if shares else ASSUMED_OF_HEADS, _bytes(part.path) / size
    if part.kind == MTP and part.path == target.folder:
        cost = 1 / target.shape.num_layers
    why += ", measured in training" if shares else ""
    return Found(part.kind, name or str(part.path), part.path, acceptance, cost, why, not shares)
