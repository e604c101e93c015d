"""What a profile depends on, and the folder where `specgen tune` saves it. Imports neither pydantic
nor PyYAML, which a start without a profile does not need.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from specgen.base.files import pair_folder, readable

if TYPE_CHECKING:
    from specgen.base.types import SamplingParams
    from specgen.engine.draft_model import DraftModel
    from specgen.engine.loaded_model import LoadedModel
    from specgen.models.parts import PartStore

FILE = "profile.yaml"
_LETTERS = {"top_p": "p", "top_k": "k", "min_p": "m"}  # of filters, in names of folders

# What a profile was made with. If any of it has changed, the profile is no longer valid.  `target`
# and `draft` (None: there is none) are models: each one's name, a hash of its weights and config
# (`fingerprint`), and the device and dtype it ran with. `exit_layer` is a hash of its files,
# `heads` has one for each kind of trained head (None in profiles of older versions: not known),
# `translation` is a hash of the tokens that both models have, None if their tokenizers are the
# same. `versions` are those of the installed packages, `machine` says what it ran on.
Conditions = dict[str, dict[str, Any] | str | None]


def flat(conditions: Conditions) -> dict[str, Any]:
    """Returns the conditions as one mapping, with names such as `exit layer` and `target device` as
    keys."""
    named: dict[str, Any] = {}
    for field, value in conditions.items():
        name = field.removesuffix("s").replace("_", " ")
        named |= (
            {f"{name} {key}": each for key, each in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    return named


class ProfileSource(NamedTuple):
    """Where to look for profiles: in `folder`, or if that is None in the folders where `specgen
    tune` saves them by default."""

    folder: Path | None = None


class LoadedPair(Protocol):
    """What a profile is for: a target, its draft model (None: there is none), and the parts trained
    for the target."""

    target: LoadedModel
    draft: DraftModel | None
    parts: PartStore


def profile_key_of(pair: LoadedPair) -> Conditions:
    """Returns the conditions under which this pair runs now: models, trained parts, versions and
    machine. A profile made under other ones does not fit. Raises SpecgenError if weight files
    cannot be read."""
    from specgen.base.machine import machine, versions
    from specgen.engine.kernels import library
    from specgen.engine.weights import weights_fingerprint

    def described(model: LoadedModel) -> dict[str, Any]:
        fingerprint = weights_fingerprint(model.folder)
        return {
            "name": model.name,
            "fingerprint": fingerprint,
            "device": model.device_label,
            "dtype": model.dtype_name,
        }

    digests = pair.parts.digests()
    return {
        "target": described(pair.target),
        "draft": None if pair.draft is None else described(pair.draft),
        "exit_layer": digests.pop("exit", None),
        "heads": digests,
        "translation": None
        if pair.draft is None or pair.draft.translation is None
        else pair.draft.translation.digest,
        "versions": versions(),
        "machine": machine() | {"kernels": library.kind()},
    }


def with_rounded_draft(conditions: Conditions, dtype: str | None) -> Conditions:
    """Returns a profile's `conditions` with `dtype` as the draft model's. Unchanged if `dtype` is
    None or without a draft model."""
    draft = conditions["draft"]
    if dtype is None or not isinstance(draft, dict):
        return conditions
    return {**conditions, "draft": {**draft, "dtype": dtype}}


def default_folder(conditions: Conditions, sampling: SamplingParams) -> Path:
    """Returns the default folder of a profile, named after the models, machine, device, dtype and
    sampling settings."""
    facts = flat(conditions)
    target = facts["target name"]
    draft = facts.get("draft name")
    parts = [facts["machine node"], facts["target device"], facts["target dtype"]]
    if draft is not None and facts["draft device"] != facts["target device"]:
        parts.append(f"draft-{facts['draft device']}")
    if facts.get("machine ranks"):
        parts.append(f"{facts['machine ranks']}-ranks")
    if not sampling.greedy:
        parts.append(f"t{sampling.temperature:g}")
        for name, value in sampling.active_filters.items():
            number = f"{value:g}" if isinstance(value, float) else str(value)
            parts.append(_LETTERS.get(name, name) + number)
    name = readable("-".join(str(part).replace("/", "-") for part in parts if part))
    return pair_folder(target, facts["target fingerprint"], draft) / name
