"""Finds the tuned profile that holds for a pair, and takes methods and settings from it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from specgen import methods
from specgen.errors import SpecgenError
from specgen.paths import EXIT_WEIGHTS, pair_folder
from specgen.setting_parsing import written
from specgen.ui.sanitize import inline

if TYPE_CHECKING:
    from specgen.cli.model_options import ModelOptions
    from specgen.compare.method_specs import MethodSpec
    from specgen.pair import Pair
    from specgen.tuning.profile import Profile
    from specgen.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Choice:
    """The method and settings to decode with.

    `tuned` describes settings that a profile chose, and says if they are not confirmed by real runs; empty without a profile.
    """

    method: str
    settings: Mapping[str, object]
    tuned: str = ""


def with_exit(models: ModelOptions, folder: Path | None) -> ModelOptions:
    """The models with the exit layer in a profile's folder, if there is one and no other is named."""
    if folder is None or models.exit_layer is not None or not (folder / EXIT_WEIGHTS).is_file():
        return models
    return replace(models, exit_layer=folder)


def find(pair: Pair, sampling: SamplingParams, folder: Path | None, err: Console, *, quiet: bool) -> Profile | None:
    """The profile for this pair and sampling: in `folder`, else in the pair's default folder. None where there is none.

    A profile for another machine, pair or sampling is not used, and a note on `err` says why. Raises SpecgenError where `folder`
    is given and its profile cannot be read.
    """
    from specgen.tuning import profile as profiles

    key = profiles.profile_key_of(pair)
    found_in = folder or profiles.default_folder(key, sampling)
    path = found_in / profiles.FILE
    if not path.is_file() and (folder is None or (folder / EXIT_WEIGHTS).is_file()):
        return None
    try:
        profile = profiles.load(found_in)
    except SpecgenError as error:
        if folder is not None:
            raise
        _note(err, f"{error.message}; it is not used. {error.hint}", quiet)
        return None
    if (why := profile.mismatch(key)) is not None:
        _note(err, f"the profile {path} is stale: {why}; it is not used. {profiles.TUNE_AGAIN}", quiet)
    elif (why := _other_sampling(profile, sampling)) is not None:
        _note(err, f"the profile {path} was made for {why}; it is not used. {profiles.TUNE_AGAIN}, with the same options", quiet)
    else:
        return profile
    return None


def _other_sampling(profile: Profile, sampling: SamplingParams) -> str | None:
    """The first sampling parameter that differs from the profile's, in words. All greedy decoding is the same."""
    if sampling.greedy and profile.sampling.temperature == 0:
        return None
    for name in ("temperature", "top_p", "top_k"):
        tuned, requested = getattr(profile.sampling, name), getattr(sampling, name)
        if tuned != requested:
            return f"{name} {tuned:g}, and this run has {requested:g}"
    return None


def _note(err: Console, text: str, quiet: bool) -> None:
    if not quiet:
        err.print(Text(inline(text)), soft_wrap=True)


def choose(profile: Profile | None, pair: Pair, method: str | None, settings: Mapping[str, object]) -> Choice:
    """The requested method and settings, completed by the profile.

    Given settings are used alone. A named method gets its tuned settings. Without a name, the profile's method is chosen.
    """
    if settings or profile is None:
        return Choice(method or pair.default_method, settings)
    name = method or profile.chosen.method
    tuned = profile.settings_of(name)
    if tuned is None:
        return Choice(name, settings)
    unconfirmed = ", not confirmed" if profile.verdict == "unconfirmed" else ""
    return Choice(name, tuned, f"tuned{unconfirmed}: {written(name, tuned)}")


def tuned_specs(profile: Profile | None, specs: list[MethodSpec], err: Console, *, quiet: bool) -> list[MethodSpec]:
    """The methods to compare, with tuned settings for those that have none. A note on `err` lists these."""
    if profile is None:
        return specs
    completed, notes = [], []
    for spec in specs:
        settings = None if spec.is_baseline or spec.settings else profile.settings_of(spec.name)
        if settings:
            notes.append(written(spec.name, settings))
            spec = replace(spec, settings={name: str(value) for name, value in settings.items()})
        completed.append(spec)
    if notes:
        _note(err, f"tuned: {'; '.join(notes)}", quiet)
    return completed


def likely_parallel(models: ModelOptions, folder: Path | None) -> bool:
    """Whether a profile will probably choose PEARL: a guess before loading, so that the draft's process can start early."""
    folders = [folder] if folder is not None else _possible_folders(models)
    if not folders:
        return False
    from specgen.tuning import profile as profiles

    for candidate in folders:
        with suppress(SpecgenError):
            if methods.find(profiles.load(candidate).chosen.method).is_parallel:
                return True
    return False


def _possible_folders(models: ModelOptions) -> list[Path]:
    """The folders of all profiles of this pair, for any machine and device. Empty for a target on the hub."""
    target, draft = ("demo/target", "demo/draft") if models.target is None else (models.target, models.draft)
    fingerprint = models.local_fingerprint
    found = [] if fingerprint is None else pair_folder(target, fingerprint, draft).glob("*/profile.yaml")
    return [path.parent for path in found]
