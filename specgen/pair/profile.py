"""The profile: the result of a tuning, stored in `profile.yaml`.

There is one for each combination of models, machine, device and sampling settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    model_validator,
)

from specgen import methods
from specgen.base import schema
from specgen.base.errors import RunError, SpecgenError
from specgen.base.files import write_whole
from specgen.base.settings import Value
from specgen.base.types import FILTERS, QUANTISED, SamplingParams, TuningVerdict
from specgen.decoding.costs import RoundCosts
from specgen.methods.outside import is_reference
from specgen.pair.profile_place import FILE, Conditions, flat, with_rounded_draft

TUNE_AGAIN = "Tune again: specgen tune"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
GivenSettings = dict[str, bool | int | float | str]


class _StrictModel(BaseModel):
    """Base of the parts of a profile: an unknown key or a value of a wrong type is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _checked_sampling(given: dict[str, int | float]) -> dict[str, int | float]:
    names = ("temperature", *FILTERS)
    if given.keys() != set(names):
        raise ValueError(f"it has to have {', '.join(names)} and nothing else")
    try:
        SamplingParams(**given)  # type: ignore[arg-type]
    except SpecgenError as error:
        raise ValueError(error.message) from error
    return given


# the temperature and the filters of `SamplingParams`, by name
Sampling = Annotated[dict[str, int | float], AfterValidator(_checked_sampling)]


class Choice(_StrictModel):
    """The method that the profile recommends, with its settings."""

    method: str
    settings: GivenSettings


class Tuned(_StrictModel):
    """The best settings of one method with their speeds in tokens per second. The fields are
    explained in `Candidate`."""

    model_config = ConfigDict(from_attributes=True, populate_by_name=True)

    settings: GivenSettings
    predicted: Positive
    measured: Positive | None
    speedup: Positive | None
    low: Positive | None = Field(alias="speedup_low")
    high: Positive | None = Field(alias="speedup_high")
    perplexity: Positive | None = None
    draft_length: Positive | None = None
    tried: Any = Field(default=None, exclude=True)  # in older profiles, and not read


# The seconds of a round under the keys of `RoundCosts.as_dict`; tables are by context length, then
# by number of tokens.
Costs = Annotated[
    RoundCosts, PlainValidator(RoundCosts.of_dict), PlainSerializer(RoundCosts.as_dict)
]


class Measured(_StrictModel):
    """What a tuning measured, and on how many prompts and new tokens per prompt.

    `prompt_fingerprints` (`Prompt.fingerprint`) identify the prompts on which the settings were
    chosen; None in older profiles. `acceptance` is the mean probability that the target accepts a
    drafted token, None without drafts. `costs` are the seconds of a round, by what a round runs:
    `echo` (the target alone), `model` (the draft model), `exit` (the exit layer), `parallel`
    (PEARL). `rounding` has the fields of `RoundingCost`, None if the weights are not rounded or it
    was not measured. `learned` is in older profiles, and not read.
    """

    prompts: Count
    new_tokens: Count
    acceptance: Share | None
    costs: dict[str, Costs]
    prompt_fingerprints: list[str] | None = None
    rounding: dict[str, int | Annotated[float, Field(ge=0)]] | None = None
    learned: Any = Field(default=None, exclude=True)


class Profile(_StrictModel):
    """The content of `profile.yaml`.

    `fits` are the conditions under which it is valid, `methods` the best settings of each tuned
    method, `chosen` the recommended method. `speedup` is that of the chosen method over plain
    decoding, measured, or expected if it was not run on the real models. `verdict` says whether
    speculation is faster than plain decoding (see `TuningOutcome.verdict`).
    """

    version: Literal[1]
    written: datetime
    verdict: TuningVerdict
    chosen: Choice
    speedup: Positive
    sampling: Sampling
    fits: Conditions
    methods: dict[str, Tuned]
    measured: Measured

    @model_validator(mode="after")
    def _is_known(self) -> Profile:
        """Refuses settings that methods do not have. Those of a class from outside that is not
        loaded are not known: a profile is no reason to run a module."""
        tuned = [
            (self.chosen.method, self.chosen.settings),
            *((name, entry.settings) for name, entry in self.methods.items()),
        ]
        for name, settings in tuned:
            if not methods.is_known(name) and is_reference(name):
                continue
            try:
                methods.resolve(methods.find(name), settings)
            except SpecgenError as error:
                raise ValueError(f"{name}: {error.message}") from error
        return self

    @property
    def draft_dtype(self) -> str | None:
        """`int8` or `int4` if the settings are for a draft model whose weights are rounded to that,
        else None."""
        dtype = flat(self.fits).get("draft dtype")
        return dtype if dtype in QUANTISED else None

    def settings_of(self, name: str) -> Mapping[str, Value] | None:
        """Returns the tuned settings of a method, None if it was not tuned."""
        if name == self.chosen.method:
            return self.chosen.settings
        if name in self.methods:
            return self.methods[name].settings
        return None

    def mismatch(self, now: Conditions) -> str | None:
        """Describes the first difference between the profile's conditions and the present ones,
        `now`; None if there is none."""
        before = flat(self.fits)
        current = flat(now)
        for name in before | current:
            old = before.get(name)
            new = current.get(name)
            if old != new and not (name.startswith("head") and self.fits.get("heads") is None):
                return f"{name} was {old or 'none'}, and is {new or 'none'}"
        return None

    def mismatch_with(
        self, now: Conditions, sampling: SamplingParams, *, any_draft_dtype: bool
    ) -> str | None:
        """Describes the first difference between what the profile was made for and the present
        conditions and sampling; None if there is none. `any_draft_dtype`: see
        `profile_search.find`."""
        why = self.mismatch(with_rounded_draft(now, self.draft_dtype) if any_draft_dtype else now)
        for name, requested in sampling.warping.items():
            tuned = self.sampling[name]
            if tuned != requested:
                why = why or f"it was made for {name} {tuned:g}, and this run has {requested:g}"
        return why


def save(profile: Profile, folder: Path) -> Path:
    """Writes the profile into `folder` atomically and returns its path. Raises RunError if it
    cannot be written."""
    path = folder / FILE
    content = profile.model_dump(by_alias=True)
    try:
        write_whole(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=110))
    except OSError as error:
        why = error.strerror or error
        raise RunError(
            f"cannot write {path}: {why}", "Make room, or name another folder: --out DIR"
        ) from error
    return path


def load(folder: Path) -> Profile:
    """Reads the profile in a folder. Raises SpecgenError with a message of one line if it is
    missing or not valid."""
    return schema.read(folder / FILE, Profile, "profile", TUNE_AGAIN)
