"""The result of a tuning on disk: `profile.yaml`, one for each pair, machine, device and way of sampling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specgen import methods
from specgen.errors import RunError, SpecgenError
from specgen.files import load_yaml, write_whole
from specgen.paths import pair_folder, readable
from specgen.settings import Value
from specgen.tuning.outcome import TuningOutcome, Verdict

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel
    from specgen.pair import Pair
    from specgen.types import SamplingParams

FILE = "profile.yaml"
LARGEST = 1 << 20  # bytes
TUNE_AGAIN = "Tune again: specgen tune"

Positive = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Kind = Literal["echo", "model", "exit", "parallel", "tree", "beams", "skip"]
Count = Annotated[int, Field(ge=1, le=1 << 40)]
Word = Annotated[str, Field(min_length=1, max_length=4096)]


class _StrictModel(BaseModel):
    """Unknown keys and values of other types are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Model(_StrictModel):
    """A model: its name, a fingerprint of its weights and config, and how it ran."""

    name: Word
    fingerprint: Word
    device: Word
    dtype: Word


class Machine(_StrictModel):
    node: str
    processor: str
    cores: Count | None


class Versions(_StrictModel):
    specgen: Word
    python: Word
    torch: Word
    transformers: Word


class ProfileKey(_StrictModel):
    """What a profile is valid for. A profile whose key differs in any field is stale."""

    target: Model
    draft: Model | None
    exit_layer: Word | None
    machine: Machine
    versions: Versions


class Sampling(_StrictModel):
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
    top_k: Annotated[int, Field(ge=0)]


GivenSettings = dict[str, bool | int | float | str]


class Choice(_StrictModel):
    """A method with its settings, both checked like those of a command line."""

    method: Word
    settings: GivenSettings

    @model_validator(mode="after")
    def _is_known(self) -> Choice:
        _check_method(self.method, self.settings)
        return self


def _check_method(name: str, settings: GivenSettings, key: str = "") -> None:
    try:
        methods.resolve(methods.find(name), settings)
    except SpecgenError as error:
        raise ValueError(f"{key}{error.message}") from error


class Tuned(_StrictModel):
    """The best settings of one method, as in `Candidate`: speeds are tokens per second."""

    settings: GivenSettings
    predicted: Positive
    measured: Positive | None
    speedup: Positive | None
    speedup_low: Positive | None
    speedup_high: Positive | None
    tried: Count
    perplexity: Positive | None = None


class DrafterCosts(_StrictModel):
    """`RoundCosts` in seconds, by context length and then by tokens."""

    drafting: dict[int, dict[int, Seconds]]
    judging: dict[int, dict[int, Seconds]]
    looking: Seconds
    together: Seconds | None = None


class Measured(_StrictModel):
    """What tuning measured: `acceptance` is the mean probability that the target accepts a draft's token."""

    prompts: Count
    new_tokens: Count
    acceptance: Share | None
    costs: dict[Kind, DrafterCosts]


class Profile(_StrictModel):
    """The whole file."""

    version: Literal[1]
    written: datetime
    verdict: Verdict
    chosen: Choice
    speedup: Positive
    sampling: Sampling
    fits: ProfileKey
    methods: dict[str, Tuned]
    measured: Measured

    @model_validator(mode="after")
    def _methods_are_known(self) -> Profile:
        for name, tuned in self.methods.items():
            _check_method(name, tuned.settings, f"methods, {name}: ")
        return self

    def settings_of(self, name: str) -> Mapping[str, Value] | None:
        """The tuned settings of a method; None where it was not tuned."""
        if name == self.chosen.method:
            return self.chosen.settings
        if name == "eesd":  # stands for one of two methods
            eesd = [self.methods[other] for other in ("eesd-cali", "eesd-beta") if other in self.methods]
            return eesd[0].settings if eesd else None
        return self.methods[name].settings if name in self.methods else None

    def mismatch(self, now: ProfileKey) -> str | None:
        """The first difference from the key `now`; None where the profile is valid."""
        ours, theirs = self.fits.model_dump(), now.model_dump()
        for name in ("target", "draft", "exit_layer", "versions", "machine"):
            if ours[name] != theirs[name]:
                return _difference(name.replace("_", " "), ours[name], theirs[name])
        return None


def _difference(name: str, then: Any, now: Any) -> str:
    if isinstance(then, dict) and isinstance(now, dict):
        key = next(key for key in then if then[key] != now[key])
        subject = f"the {name}'s {key}" if name in ("target", "draft", "machine") else key
        return f"{subject} was {then[key]}, and is {now[key]}"
    shown = [value["name"] if isinstance(value, dict) else value or "none" for value in (then, now)]
    return f"the {name} was {shown[0]}, and is {shown[1]}"


def profile_key_of(pair: Pair) -> ProfileKey:
    """The key of a profile of this pair on this machine."""
    from specgen.engine.devices import device_name
    from specgen.engine.fingerprint import weights_fingerprint
    from specgen.environment import machine, versions

    def described(model: LoadedModel) -> Model:
        fingerprint = weights_fingerprint(model.folder)
        return Model(name=model.name, fingerprint=fingerprint, device=device_name(model.device), dtype=model.dtype_name)

    return ProfileKey(
        target=described(pair.target),
        draft=None if pair.draft is None else described(pair.draft),
        exit_layer=None if pair.exit_description is None else pair.exit_description.digest,
        machine=Machine(**machine()),
        versions=Versions(**versions()),
    )


def default_folder(key: ProfileKey, sampling: SamplingParams) -> Path:
    """The profile's folder in the data folder, named after the pair, machine, device and way of sampling."""
    own = pair_folder(key.target.name, key.target.fingerprint, None if key.draft is None else key.draft.name)
    parts = [key.machine.node, key.target.device, key.target.dtype]
    if not sampling.greedy:
        parts.append(f"t{sampling.temperature:g}")
        parts += [f"p{sampling.top_p:g}"] if sampling.top_p < 1 else []
        parts += [f"k{sampling.top_k}"] if sampling.top_k else []
    return own / readable("-".join(part.replace("/", "-") for part in parts if part))


def from_outcome(outcome: TuningOutcome, key: ProfileKey) -> Profile:
    sampling = outcome.sampling
    shared = ("predicted", "measured", "speedup", "tried", "perplexity")
    tuned = {
        each.name: Tuned(
            settings=dict(each.settings),
            speedup_low=each.low,
            speedup_high=each.high,
            **{name: getattr(each, name) for name in shared},
        )
        for each in outcome.methods
    }
    return Profile(
        version=1,
        written=datetime.now(UTC).replace(microsecond=0),
        verdict=outcome.verdict,
        chosen=Choice(method=outcome.chosen.name, settings=dict(outcome.chosen.settings)),
        speedup=outcome.speedup_of(outcome.chosen),
        sampling=Sampling(temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k),
        fits=key,
        methods=tuned,
        measured=Measured(
            prompts=outcome.prompts,
            new_tokens=sampling.max_new_tokens,
            acceptance=outcome.acceptance_probability,
            costs={cast("Kind", kind): DrafterCosts(**cost) for kind, cost in outcome.costs.items()},
        ),
    )


def save(profile: Profile, folder: Path) -> Path:
    """Write the profile atomically. Raises RunError where that fails."""
    path = folder / FILE
    text = yaml.safe_dump(_rounded(profile.model_dump(mode="python")), sort_keys=False, allow_unicode=True, width=110)
    try:
        write_whole(path, text)
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}", "Make room, or name another folder: --out DIR"
        ) from error
    return path


def load(folder: Path) -> Profile:
    """Raises SpecgenError, in one line, where the file is missing, damaged or of another version."""
    path = folder / FILE
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise SpecgenError(f"the profile {path} is larger than {LARGEST >> 20} MB", TUNE_AGAIN)
        found = load_yaml(data.decode("utf-8"))
    except OSError as error:
        raise SpecgenError(f"cannot read the profile {path}: {error.strerror}", "Make one: specgen tune --out DIR") from error
    except UnicodeDecodeError as error:
        raise SpecgenError(f"the profile {path} is not UTF-8", TUNE_AGAIN) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise SpecgenError(f"the profile {path}{where} is not valid YAML: {problem}", TUNE_AGAIN) from error
    if not isinstance(found, dict):
        raise SpecgenError(f"the profile {path} holds no settings", TUNE_AGAIN)
    if isinstance(found.get("version"), int) and found["version"] != 1:
        raise SpecgenError(f"the profile {path} is of version {found['version']}, and this specgen reads version 1", TUNE_AGAIN)
    try:
        return Profile.model_validate(found)
    except ValidationError as error:
        raise SpecgenError(f"the profile {path} is damaged: {_first_error(error)}", TUNE_AGAIN) from error


def _first_error(error: ValidationError) -> str:
    """The first of pydantic's errors in one line: the key, the problem and the value."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    what = str(first["msg"]).removeprefix("Value error, ")
    value = "" if first["type"] in ("missing", "value_error") else f" (it is {_shown(first['input'])})"
    return f"{where}: {what}{value}" if where else f"{what}{value}"


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else text[:39] + "…"


def _rounded(value: Any) -> Any:
    """Numbers rounded to five digits."""
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.5g}")
    return value
