"""Finds the profile of a pair of models, and takes the method and settings from it.

A profile is the file in which `specgen tune` saves the best method and settings for a pair of models on a machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.text import Text

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.files import EXIT_WEIGHTS, pair_folder
from specgen.base.settings import written

if TYPE_CHECKING:
    from specgen.base.types import SamplingParams
    from specgen.cli.model_options import ModelOptions
    from specgen.compare.method_specs import MethodSpec
    from specgen.pair.pair import Pair
    from specgen.tune.profile import Profile
    from specgen.workers.process import DraftProcess

Options = TypeVar("Options", bound="ModelOptions")


@dataclass(frozen=True, slots=True)
class Choice:
    """The method and settings to decode with.

    If they come from a profile (the result of `specgen tune`), `tuned` describes them in words, and says if their speed was only
    predicted and not measured. Otherwise `tuned` is empty.
    """

    method: str
    settings: Mapping[str, object]
    tuned: str = ""


def with_exit(models: Options, folder: Path | None) -> Options:
    """Returns `models`, with the exit layer in the profile's folder if that folder has one and --exit-layer is not given.

    The exit layer is a trained layer that lets the eesd methods draft with the target's own first layers. `folder` is the folder
    of --profile, None if the option is not given.
    """
    if folder is None or models.exit_layer is not None or not (folder / EXIT_WEIGHTS).is_file():
        return models
    return replace(models, exit_layer=folder)


def with_tuned_draft(pair: Pair, process: DraftProcess | None, *, sampling: SamplingParams, folder: Path | None) -> Pair:
    """Returns the pair with its draft's weights rounded if the profile that `find` will find was made so, else `pair` itself.

    `process` is the one that was started for PEARL's draft model, which keeps running.
    """
    from specgen.pair.loading import with_draft_dtype

    console = Console(quiet=True)
    with suppress(SpecgenError):
        profile = find(pair, sampling, folder, console, quiet=True, any_draft_dtype=True)
        if profile is not None and profile.draft_dtype is not None:
            return with_draft_dtype(pair, profile.draft_dtype, process)
    return pair


def find(
    pair: Pair, sampling: SamplingParams, folder: Path | None, err: Console, *, quiet: bool, any_draft_dtype: bool = False
) -> Profile | None:
    """Returns the profile (the result of `specgen tune`) for this pair and sampling; None where there is none that can be used.

    The profile is read from `folder`. If `folder` is None, it is read from the folder where `specgen tune` saves it by default. A
    profile made for another machine, pair or sampling is not used, and a note on the console `err` says why; `quiet` omits the
    note. With `any_draft_dtype`, one that was made with rounded draft weights also fits a pair whose draft is as it is stored.
    Raises SpecgenError where `folder` is given and its profile cannot be read.
    """
    from specgen.tune import profile as profiles

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
    why, dtype = profile.mismatch(profiles.with_draft_dtype(key, profile.draft_dtype)), profile.draft_dtype
    is_run_by_transformers = pair.draft is not None and pair.draft.backend == "transformers"
    if why is None and dtype is not None and is_run_by_transformers and not any_draft_dtype:
        why = f"its draft was {dtype}, and the transformers backend, which runs the draft here, cannot quantise it"
    if (why := why or (None if any_draft_dtype else profile.mismatch(key))) is not None:
        _note(err, f"the profile {path} is stale: {why}; it is not used. {profiles.TUNE_AGAIN}", quiet)
    elif (why := _other_sampling(profile, sampling)) is not None:
        _note(err, f"the profile {path} was made for {why}; it is not used. {profiles.TUNE_AGAIN}, with the same options", quiet)
    else:
        pair.measurements.tuned_costs = profile.measured.costs
        return profile
    return None


def _other_sampling(profile: Profile, sampling: SamplingParams) -> str | None:
    """Says in words which sampling parameter differs between the profile and `sampling`; None where none differs.

    If both are greedy, top-p and top-k are not compared, because they have no effect.
    """
    if sampling.greedy and profile.sampling.temperature == 0:
        return None
    for name in ("temperature", "top_p", "top_k"):
        tuned, requested = getattr(profile.sampling, name), getattr(sampling, name)
        if tuned != requested:
            return f"{name} {tuned:g}, and this run has {requested:g}"
    return None


def _note(err: Console, text: str, quiet: bool) -> None:
    if not quiet:
        err.print(Text(text), soft_wrap=True)


def choose(profile: Profile | None, method: str | None, settings: Mapping[str, object]) -> Choice:
    """Returns the method and settings to decode with, where the user's choice goes before the profile's.

    If the user gave settings or there is no profile, the profile is not used; a `method` of None is then the default method. If
    the user named only a method, its settings are the profile's. If the user gave neither, the profile chooses both.
    """
    if settings or profile is None:
        return Choice(method or methods.DEFAULT_METHOD, settings)
    name = method or profile.chosen.method
    tuned = profile.settings_of(name)
    if tuned is None:
        return Choice(name, settings)
    unconfirmed = ", not confirmed" if profile.verdict == "unconfirmed" else ""
    rounded = f", {profile.draft_dtype} draft" if profile.draft_dtype and methods.find(name).uses_draft_model else ""
    return Choice(name, tuned, f"tuned{unconfirmed}: {written(name, tuned)}{rounded}")


def tuned_specs(profile: Profile | None, specs: list[MethodSpec], err: Console, *, quiet: bool) -> list[MethodSpec]:
    """Returns the methods to compare. Methods that the user gave without settings get the profile's settings.

    A note on the console `err` lists the methods that got settings; `quiet` omits it. Without a profile nothing changes.
    """
    if profile is None:
        return specs
    completed, notes = [], []
    for spec in specs:
        settings = None if spec.is_baseline or spec.settings else profile.settings_of(spec.name)
        if settings:
            notes.append(written(spec.name, settings))
            given = {name: str(value) for name, value in settings.items()}
            spec = replace(spec, choice=methods.choose(spec.name, given))
        completed.append(spec)
    if notes and profile.draft_dtype is not None:
        notes.append(f"{profile.draft_dtype} draft")
    if notes:
        _note(err, f"tuned: {'; '.join(notes)}", quiet)
    return completed


def with_origin(profile: Profile | None, specs: list[MethodSpec]) -> list[MethodSpec]:
    """Returns the methods to compare. Those with the profile's settings, also if the user wrote them, know its prompts."""
    prompts = None if profile is None else profile.measured.prompt_fingerprints
    if profile is None or prompts is None:
        return specs
    marked = []
    for spec in specs:
        tuned = None if spec.is_baseline else profile.settings_of(spec.name)
        if tuned and spec.choice.settings == methods.choose(spec.name, tuned).settings:
            spec = replace(spec, tuned_on=frozenset(prompts))
        marked.append(spec)
    return marked


def likely_parallel(models: ModelOptions, folder: Path | None) -> bool:
    """Whether a profile will probably choose PEARL, which needs a second process for the draft.

    It is a guess made before the models are loaded, so that this process can start early. `folder` is the folder of --profile;
    None means all default folders of this pair.
    """
    folders = [folder] if folder is not None else _possible_folders(models)
    if not folders:
        return False
    from specgen.tune import profile as profiles

    for candidate in folders:
        with suppress(SpecgenError):
            if methods.find(profiles.load(candidate).chosen.method).is_parallel:
                return True
    return False


def _possible_folders(models: ModelOptions) -> list[Path]:
    """Returns the default folders of all profiles of this pair, for any machine and device.

    Returns an empty list for a target on the hub, whose weights are not known before loading.
    """
    target, draft = ("demo/target", "demo/draft") if models.target is None else (models.target, models.draft)
    fingerprint = models.local_fingerprint
    found = [] if fingerprint is None else pair_folder(target, fingerprint, draft).glob("*/profile.yaml")
    return [path.parent for path in found]
