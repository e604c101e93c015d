"""The profile: the result of a tuning, stored in `profile.yaml`.

There is one for each combination of models, machine, device and sampling settings.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, model_validator

from specgen import methods
from specgen.base import schema
from specgen.base.errors import RunError, SpecgenError
from specgen.base.files import pair_folder, readable, write_whole
from specgen.base.settings import Value
from specgen.base.types import QUANTISED
from specgen.decoding.costs import RoundCosts
from specgen.tune.outcome import TuningOutcome, Verdict

if TYPE_CHECKING:
    from specgen.base.types import SamplingParams
    from specgen.compare.prompts import Prompt
    from specgen.engine.model_loading import LoadedModel
    from specgen.pair.measurements import Measurements
    from specgen.pair.pair import Pair

FILE = "profile.yaml"
MAX_BYTES = 1 << 20
TUNE_AGAIN = "Tune again: specgen tune"

_rounded = AfterValidator(lambda number: float(f"{number:.5g}"))  # five digits say all that a measurement does
Positive = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False), _rounded]
Number = Annotated[float, Field(ge=-1e12, le=1e12, allow_inf_nan=False), _rounded]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), _rounded]
Count = Annotated[int, Field(ge=1, le=1 << 40)]
Word = Annotated[str, Field(min_length=1, max_length=4096)]
Fingerprint = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
GivenSettings = dict[str, bool | int | float | str]


class _StrictModel(BaseModel):
    """Base of the parts of a profile: an unknown key or a value of a wrong type is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Model(_StrictModel):
    """A model: its name, a hash of its weights and config (`fingerprint`), and the device and dtype it ran with."""

    name: Word
    fingerprint: Word
    device: Word
    dtype: Word


class ProfileKey(_StrictModel):
    """The conditions under which a profile was made. If any of them has changed, the profile is no longer valid.

    `draft` and `exit_layer` (a hash of its files) are None if the pair has none. `heads` has a hash of each kind of trained head;
    profiles of older versions do not say. `translation` is a hash of the tokens that both models have, None if their tokenizers
    are the same. `versions` are those of the installed packages.
    """

    target: Model
    draft: Model | None
    exit_layer: Word | None
    heads: dict[Word, Word] | None = None
    translation: Word | None = None
    versions: dict[str, str]
    machine: dict[str, str | int | None]

    def with_draft_dtype(self, dtype: str | None) -> ProfileKey:
        """Returns the same conditions with a draft model of this dtype; None changes nothing."""
        if dtype is None or self.draft is None:
            return self
        return self.model_copy(update={"draft": self.draft.model_copy(update={"dtype": dtype})})


class Sampling(_StrictModel):
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
    top_k: Annotated[int, Field(ge=0)]


class Choice(_StrictModel):
    """The method that the profile recommends, with its settings."""

    method: Word
    settings: GivenSettings


class Tuned(_StrictModel):
    """The best settings of one method with their speeds in tokens per second. The fields are explained in `Candidate`."""

    model_config = ConfigDict(from_attributes=True, populate_by_name=True)

    settings: GivenSettings
    predicted: Positive
    measured: Positive | None
    speedup: Positive | None
    low: Positive | None = Field(alias="speedup_low")
    high: Positive | None = Field(alias="speedup_high")
    tried: Count
    perplexity: Positive | None = None


def _rounded_costs(costs: RoundCosts) -> dict[str, Any]:
    def rounded(value: Any) -> Any:
        return {key: rounded(each) for key, each in value.items()} if isinstance(value, dict) else float(f"{value:.5g}")

    return {name: rounded(value) for name, value in costs.as_dict().items()}


def _costs(saved: Any) -> RoundCosts:
    if not isinstance(saved, RoundCosts | dict):
        raise ValueError("the costs of a round have another form")
    return saved if isinstance(saved, RoundCosts) else RoundCosts.of_dict({"together": 0.0, **saved})


Costs = Annotated[RoundCosts, PlainValidator(_costs), PlainSerializer(_rounded_costs)]
"""The seconds of a round under the keys of `RoundCosts.as_dict`; tables are by context length, then by number of tokens."""


class Measured(_StrictModel):
    """What a tuning measured, and on how many prompts and new tokens per prompt.

    `prompt_fingerprints` (`Prompt.fingerprint`) say which prompts chose the settings; None in profiles of older versions.
    `acceptance` is the mean probability that the target accepts a drafted token, None without drafts. `costs` are the seconds of
    a round, by what a round runs: `echo` (the target alone), `model` (the draft model), `exit` (the exit layer), `parallel`
    (PEARL). `learned` is in older profiles, and not read.
    """

    prompts: Count
    new_tokens: Count
    acceptance: Share | None
    costs: dict[Word, Costs]
    prompt_fingerprints: list[Fingerprint] | None = None
    learned: Any = Field(default=None, exclude=True)


class Profile(_StrictModel):
    """The content of `profile.yaml`.

    `fits` are the conditions under which it is valid, `methods` the best settings of each tuned method, `chosen` the recommended
    method, `speedup` that of the chosen method over plain decoding, `verdict` whether speculation is faster than plain decoding.
    """

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
    def _is_known(self) -> Profile:
        """Refuses settings that methods do not have, and what `adaptive` cannot have learned."""
        tuned = [(self.chosen.method, self.chosen.settings), *((name, entry.settings) for name, entry in self.methods.items())]
        for name, settings in tuned:
            try:
                methods.resolve(methods.find(name), settings)
            except SpecgenError as error:
                raise ValueError(f"{name}: {error.message}") from error
        return self

    def inform(self, measurements: Measurements) -> None:
        """Gives the length policy `adaptive` of a pair what the tuning has measured."""
        measurements.tuned_costs = self.measured.costs

    @property
    def draft_dtype(self) -> str | None:
        """`int8` or `int4` if the settings are for a draft model whose weights are rounded to that, else None."""
        return self.fits.draft.dtype if self.fits.draft is not None and self.fits.draft.dtype in QUANTISED else None

    def settings_of(self, name: str) -> Mapping[str, Value] | None:
        """Returns the tuned settings of a method, None if it was not tuned.

        `eesd` stands for `eesd-cali`, and for `eesd-beta` if `eesd-cali` was not tuned.
        """
        if name == self.chosen.method:
            return self.chosen.settings
        names = methods.find(name).stands_for or (name,)
        return next((self.methods[each].settings for each in names if each in self.methods), None)

    def mismatch(self, now: ProfileKey) -> str | None:
        """Describes the first difference between the profile's conditions and the present ones, `now`; None if there is none."""
        before, current = self.fits.model_dump(), now.model_dump()
        changed = (name for name in before if before[name] != current[name])
        field = next((name for name in changed if name != "heads" or before[name] is not None), None)
        if field is None:
            return None
        name, old, new = field.replace("_", " "), before[field], current[field]
        if isinstance(old, dict) and isinstance(new, dict):
            key = next(key for key in old | new if old.get(key) != new.get(key))
            subject = {"versions": key, "heads": f"the {key} head"}.get(field, f"the {name}'s {key}")
            return f"{subject} was {old.get(key) or 'none'}, and is {new.get(key) or 'none'}"
        shown = [value["name"] if isinstance(value, dict) else value or "none" for value in (old, new)]
        return f"the {name} was {shown[0]}, and is {shown[1]}"


def profile_key_of(pair: Pair) -> ProfileKey:
    """Returns the present conditions, which a profile of this pair has to match."""
    from specgen.base.machine import machine, versions
    from specgen.engine.weights import weights_fingerprint

    def described(model: LoadedModel) -> Model:
        fingerprint = weights_fingerprint(model.folder)
        return Model(name=model.name, fingerprint=fingerprint, device=model.device_label, dtype=model.dtype_name)

    digests = pair.parts.digests()
    return ProfileKey(
        target=described(pair.target),
        draft=None if pair.draft is None else described(pair.draft),
        exit_layer=digests.pop("exit", None),
        heads=digests,
        translation=None if pair.draft is None or pair.draft.translation is None else pair.draft.translation.digest,
        versions=versions(),
        machine=machine(),
    )


def default_folder(key: ProfileKey, sampling: SamplingParams) -> Path:
    """Returns the default folder of a profile, named after the models, machine, device, dtype and sampling settings."""
    own = pair_folder(key.target.name, key.target.fingerprint, None if key.draft is None else key.draft.name)
    parts = [str(key.machine["node"]), key.target.device, key.target.dtype]
    if key.draft is not None and key.draft.device != key.target.device:
        parts.append(f"draft-{key.draft.device}")
    parts += [f"{ranks}-ranks"] if (ranks := key.machine.get("ranks")) else []
    if not sampling.greedy:
        parts.append(f"t{sampling.temperature:g}")
        parts += [f"p{sampling.top_p:g}"] if sampling.top_p < 1 else []
        parts += [f"k{sampling.top_k}"] if sampling.top_k else []
    return own / readable("-".join(part.replace("/", "-") for part in parts if part))


def from_outcome(outcome: TuningOutcome, key: ProfileKey, prompts: Sequence[Prompt] | None = None) -> Profile:
    """Returns the profile of a tuning that was done under the conditions `key` and on `prompts` (None: unknown)."""
    sampling = outcome.sampling
    return Profile(
        version=1,
        written=datetime.now(UTC).replace(microsecond=0),
        verdict=outcome.verdict,
        chosen=Choice(method=outcome.chosen.name, settings=dict(outcome.chosen.settings)),
        speedup=outcome.speedup_of(outcome.chosen),
        sampling=Sampling(temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k),
        fits=key.with_draft_dtype(outcome.draft_dtype),
        methods={each.name: Tuned.model_validate(each) for each in outcome.methods},
        measured=Measured(
            prompts=outcome.prompts,
            new_tokens=sampling.max_new_tokens,
            acceptance=outcome.acceptance_probability,
            costs=dict(outcome.costs),
            prompt_fingerprints=None if prompts is None else [prompt.fingerprint for prompt in prompts],
        ),
    )


def save(profile: Profile, folder: Path) -> Path:
    """Writes the profile into `folder` atomically and returns its path. Raises RunError if it cannot be written."""
    path = folder / FILE
    text = yaml.safe_dump(profile.model_dump(by_alias=True), sort_keys=False, allow_unicode=True, width=110)
    try:
        write_whole(path, text)
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}", "Make room, or name another folder: --out DIR"
        ) from error
    return path


def load(folder: Path) -> Profile:
    """Reads the profile in a folder. Raises SpecgenError with a message of one line if it is missing or not valid."""
    path = folder / FILE
    try:
        found = path.stat()
    except OSError as error:
        raise SpecgenError(f"cannot read the profile {path}: {error.strerror}", "Make one: specgen tune --out DIR") from error
    return _read(path, (found.st_ino, found.st_mtime_ns, found.st_size))


@lru_cache(maxsize=8)
def _read(path: Path, state: Hashable) -> Profile:
    """Reads a file in this state once, because a command needs it several times: before, while and after models are loaded."""
    return schema.read(path, Profile, "profile", TUNE_AGAIN, MAX_BYTES)
