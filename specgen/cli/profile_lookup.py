"""The profile that a command goes by: found for its pair, or named; and what it says of methods and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from specgen import demo, methods
from specgen.errors import SpecgenError
from specgen.settings import written
from specgen.ui.sanitize import inline

if TYPE_CHECKING:
    from specgen.cli.model_options import ModelOptions
    from specgen.compare.method_specs import MethodSpec
    from specgen.pair import Pair
    from specgen.tuning.profile import Profile
    from specgen.types import SamplingParams

_EXIT = "exit.safetensors"


@dataclass(frozen=True, slots=True)
class Choice:
    """The method to decode with. `tuned` says in a few words what a profile had to do with it, nothing where it had not."""

    method: str
    settings: Mapping[str, object]
    tuned: str = ""


def with_exit(models: ModelOptions, folder: Path | None) -> ModelOptions:
    """What was trained lies in a profile's folder too."""
    if folder is None or models.exit_layer is not None or not (folder / _EXIT).is_file():
        return models
    return replace(models, exit_layer=folder)


def find(pair: Pair, sampling: SamplingParams, named: Path | None, err: Console, *, quiet: bool) -> Profile | None:
    """The profile that holds for this pair and this way of sampling; one that does not is said not to, and is not used.

    Raises SpecgenError where one is named and cannot be read.
    """
    from specgen.tuning import profile as profiles

    key = profiles.profile_key_of(pair)
    folder = named or profiles.default_folder(key, sampling)
    path = folder / profiles.FILE
    if not path.is_file() and (named is None or (folder / _EXIT).is_file()):
        return None
    try:
        found = profiles.load(folder)
    except SpecgenError as error:
        if named is not None:
            raise
        _say(err, f"{error.message}; it is not used. {error.hint}", quiet)
        return None
    why = found.mismatch(key)
    if why is not None:
        _say(err, f"the profile {path} is stale: {why}; it is not used. {profiles.TUNE_AGAIN}", quiet)
        return None
    if (why := _other_sampling(found, sampling)) is not None:
        _say(err, f"the profile {path} was made for {why}; it is not used. {profiles.TUNE_AGAIN}, with the same options", quiet)
        return None
    return found


def _other_sampling(profile: Profile, sampling: SamplingParams) -> str | None:
    tuned = profile.sampling
    if sampling.greedy and tuned.temperature == 0:
        return None
    for name in ("temperature", "top_p", "top_k"):
        then, now = getattr(tuned, name), getattr(sampling, name)
        if then != now:
            return f"{name} {then:g}, and this run has {now:g}"
    return None


def _say(err: Console, what: str, quiet: bool) -> None:
    if not quiet:
        err.print(Text(inline(what)), soft_wrap=True)


def choose(profile: Profile | None, pair: Pair, method: str | None, given: Mapping[str, object]) -> Choice:
    """What was asked for comes first: settings that are given stand alone, and a method that is named is tuned, not replaced."""
    if given or profile is None:
        return Choice(method or pair.default_method, given)
    name = method or profile.chosen.method
    settings = profile.settings_of(name)
    if settings is None:
        return Choice(name, given)
    return Choice(name, settings, f"tuned: {written(name, settings)}")


def tuned_specs(profile: Profile | None, specs: list[MethodSpec], err: Console, *, quiet: bool) -> list[MethodSpec]:
    """Methods that are named without settings get the tuned ones; a line says which."""
    if profile is None:
        return specs
    made, told = [], []
    for spec in specs:
        settings = None if spec.is_rival or spec.settings else profile.settings_of(spec.name)
        if settings:
            told.append(written(spec.name, settings))
            spec = replace(spec, settings={name: str(value) for name, value in settings.items()})
        made.append(spec)
    if told:
        _say(err, f"tuned: {'; '.join(told)}", quiet)
    return made


def likely_parallel(models: ModelOptions, named: Path | None) -> bool:
    """A guess, before models are loaded, whether a profile will choose PEARL: its draft's process then gets ready meanwhile."""
    folders = [named] if named is not None else _likely_folders(models)
    if not folders:
        return False
    from specgen.tuning import profile as profiles

    for folder in folders:
        try:
            if methods.find(profiles.load(folder).chosen.method).schedule == "parallel":
                return True
        except SpecgenError:
            continue
    return False


def _likely_folders(models: ModelOptions) -> list[Path]:
    """All profiles of this pair, on whatever machine and device."""
    folder = demo.folder("target") if models.target is None else Path(models.target)
    if not (folder / "config.json").is_file():
        return []  # a name on the hub: its files are looked for when it is loaded
    from specgen.engine.fingerprint import weights_fingerprint
    from specgen.paths import pair_folder

    names = ("demo/target", "demo/draft") if models.target is None else (models.target, models.draft)
    try:
        own = pair_folder(names[0], weights_fingerprint(folder), names[1])
    except SpecgenError:
        return []
    return [path.parent for path in own.glob("*/profile.yaml")]
