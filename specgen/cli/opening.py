"""Loads the models for a command, with the profile that `specgen tune` saved for them: the best
method and settings of a pair on a machine."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.interrupts import interrupts
from specgen.base.measuring import Sample, spread
from specgen.base.part_kinds import HEADS, MTP
from specgen.base.settings import written
from specgen.base.types import SamplingParams
from specgen.cli.options import DecodingGroup
from specgen.methods.base import DRAFT_MODEL
from specgen.pair import profile_search
from specgen.pair.profile_place import FILE, default_folder, profile_key_of
from specgen.view.progress import Progress
from specgen.workers.process import DraftProcess, is_possible

TRIAL_ROUNDS = 8
_WARM_UP_ROUNDS = 2  # of these, not counted

if TYPE_CHECKING:
    from rich.console import Console

    from specgen.base.model_options import Finding, ModelOptions
    from specgen.compare.method_specs import MethodSpec
    from specgen.pair.finding import Found
    from specgen.pair.pair import Pair
    from specgen.pair.profile import Profile


def open_pair(
    models: DecodingGroup,
    err: Console,
    *,
    quiet: bool,
    drafts: Collection[str] = ("here",),
    tuned_for: SamplingParams | None = None,
    remembered: bool = False,
    find: bool | Finding = "untried",
    is_method_named: bool = False,
) -> tuple[Pair, Profile | None]:
    """Loads the models and warms them up, with a progress line on the console `err`. Returns the
    pair as it was tuned for the sampling `tuned_for`, and its profile; None without a profile, or
    with `tuned_for` None.

    `drafts` says where the draft model runs in the methods to come, as `Loading.draft`: `here`, so
    its weights are loaded too, or in a `worker`, which on a CPU is a second process. That process
    is started first, so that both import torch at the same time. `remembered`: see `Pair.warm_up`.
    `find` says what to look for where no drafter is named: see `specgen.load`. `is_method_named`:
    nothing is said about a profile that does not fit, unless the user named that profile.
    """
    disable_hub_progress(err, quiet=quiet)
    profile = None
    if models.threads is not None:  # torch reads it when it is imported, here and in the process
        os.environ["OMP_NUM_THREADS"] = str(models.threads)
    with Progress(err, quiet=quiet) as loading:
        process = None
        if "worker" in drafts and models.probably_on_cpu and is_possible():
            process = DraftProcess()
        loading.announce("loading torch")
        from specgen.pair.loading import load_pair

        interrupts.check()
        pair = load_pair(models.loaded(find), loading.announce, process)
        if tuned_for is not None and models.uses_profile:
            is_silent = is_method_named and models.profile is None
            pair, profile = _tuned_pair(
                pair, tuned_for, models, process, loading, is_silent=is_silent
            )
        pair.warm_up(
            loading.announce,
            sequential="here" in drafts,
            parallel="worker" in drafts,
            remembered=remembered,
        )
        interrupts.check()
        for text in _notes(pair):
            loading.keep(Text(text))

    # `program` switched it off; the objects so far, of which torch has many, are no garbage
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    return pair, profile


def _tuned_pair(
    pair: Pair,
    sampling: SamplingParams,
    models: DecodingGroup,
    process: DraftProcess | None,
    loading: Progress,
    *,
    is_silent: bool,
) -> tuple[Pair, Profile | None]:
    """Returns the pair as it was tuned for the sampling, and the profile; the pair as it is, and
    None, if no profile fits. A note says why not, unless `is_silent`."""

    def note(text: str) -> None:
        loading.keep(Text(text))

    pair = with_tuned_draft(pair, sampling, models.profile, models, process)
    may_round = models.draft_dtype is None and models.has_draft
    say_why_not = (lambda _: None) if is_silent else note
    profile = find_profile(pair, sampling, models.profile, say_why_not, any_draft_dtype=may_round)
    if profile is None:
        return pair, None
    return _with_profile(pair, profile, process, note)


def _notes(pair: Pair) -> list[str]:
    """Returns the lines to show about the loaded models, and about what was found for the target
    but cannot be used."""
    models = [model for model in (pair.target, pair.draft) if model is not None]
    warnings = []
    for part in pair.parts.named.values():
        if part.warning is not None:
            warnings.append(f"{part.path}: {part.warning}")
    if pair.draft is not None and pair.draft.warning is not None:
        warnings.append(pair.draft.warning)
    for model in models:
        if model.tokenizer.warning is not None:
            warnings.append(model.tokenizer.warning)

    notes = [f"warning: {warning}" for warning in warnings]
    for model in models:
        if model.files.slow_path is not None:
            notes.append(model.files.slow_path)
    if pair.target.warning:
        notes.append(pair.target.warning)
    if pair.searched is not None:
        notes += pair.searched.left_out
    return notes


def disable_hub_progress(err: Console, *, quiet: bool) -> None:
    """Disables huggingface_hub's progress bars if `quiet` is True or `err` is not a terminal.

    It has no effect once huggingface_hub is imported.
    """
    if quiet or not err.is_terminal:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def models_in_words(pair: Pair, *, with_draft: bool = True) -> str:
    """Returns the models' names (without the draft's unless `with_draft`), the target's device and
    its dtype."""
    target = pair.target
    names = target.name
    if with_draft and pair.draft is not None:
        names += f" with {pair.draft.name}"
    if target.name == "demo/target":
        names = "demo pair"
    return f"{names}, {target.device} {target.dtype_name}"


def show_overlap(pair: Pair, err: Console) -> None:
    """Prints how much of the target's text the draft model can draft; nothing if both models have
    the same tokens."""
    if pair.draft is not None and pair.draft.translation is not None:
        from specgen.engine.text.translation import overlap_of_examples
        from specgen.view.pair_report import notice

        overlap = overlap_of_examples(pair.tokenizer, pair.draft.tokenizer)
        err.print(Text(notice(overlap)), soft_wrap=True)


def find_profile(
    pair: Pair,
    sampling: SamplingParams,
    folder: Path | None,
    note: Callable[[str], None],
    *,
    any_draft_dtype: bool = False,
) -> Profile | None:
    """Returns the profile that `pair.profile_search.find` finds; tells `note` why it finds none."""
    profile, why_not = profile_search.find(pair, sampling, folder, any_draft_dtype=any_draft_dtype)
    if why_not:
        note(why_not)
    return profile


def with_tuned_draft(
    pair: Pair,
    sampling: SamplingParams,
    folder: Path | None,
    options: ModelOptions,
    process: DraftProcess | None = None,
) -> Pair:
    """Returns the pair with the draft model that was tuned, if it is one of the others that were
    found for the target; else the pair as it is.

    It is that of the profile in `folder`; None: that of the target's latest profile for this
    sampling. `options` say in which dtype it is loaded, `process` is as for `_with_profile`.
    """
    from specgen.pair.finding import other_drafts
    from specgen.pair.loading import with_found

    drafts = other_drafts(pair.found, pair.draft)
    if not drafts:
        return pair
    tuned = _latest_tuned(pair, drafts, sampling) if folder is None else _tuned_in(folder, drafts)
    return pair if tuned is None else with_found(pair, tuned, options, process=process)


def _tuned_in(folder: Path, drafts: Sequence[Found]) -> Found | None:
    """Returns the one of the draft models that the profile in the folder is for; None if it is for
    none of them."""
    from specgen.pair import profile as profiles  # imports pydantic

    if not (folder / FILE).is_file():
        return None
    tuned = profiles.load(folder).fits["draft"]
    if not isinstance(tuned, dict):
        return None
    by_name = {draft.name: draft for draft in drafts}
    return by_name.get(tuned["name"])


def _latest_tuned(pair: Pair, drafts: Sequence[Found], sampling: SamplingParams) -> Found | None:
    """Returns the one of the draft models that the target's latest profile is for; None if it is
    for the pair's own draft, or if there is no profile."""
    key = profile_key_of(pair)
    tuned = None
    latest = 0.0
    for draft in (None, *drafts):  # the pair's own first
        if draft is not None:
            key["draft"] = {"name": draft.name, "device": pair.target.device_label}
        path = default_folder(key, sampling) / FILE
        if path.is_file() and path.stat().st_mtime > latest:
            tuned = draft
            latest = path.stat().st_mtime
    return tuned


def _with_profile(
    pair: Pair, profile: Profile, process: DraftProcess | None, note: Callable[[str], None]
) -> tuple[Pair, Profile | None]:
    """Returns the pair with its draft's weights rounded as the profile says, and the profile.

    If they cannot be rounded here, returns the pair as it is, and None, and tells `note` why.
    `process` was started to run PEARL's draft model; it then runs the rounded one.
    """
    from specgen.pair.loading import as_tuned

    try:
        return as_tuned(pair, profile, process), profile
    except SpecgenError as error:
        note(
            f"the profile is stale: its draft was {profile.draft_dtype}; it is not used. "
            f"{error.message}"
        )
        return pair, None


def choose(
    profile: Profile | None, method: str | None, settings: Mapping[str, object]
) -> tuple[str, Mapping[str, object], str]:
    """Returns the method and the settings to decode with, and a text about them.

    The user's `method` and `settings` go before the profile's: with a method alone its settings are
    the profile's, and with neither the profile chooses both. The text describes settings that come
    from the profile, and says if their speed was only expected; for other settings it is empty.
    """
    name = method or (methods.DEFAULT_METHOD if profile is None else profile.chosen.method)
    tuned = None if profile is None else profile.settings_of(name)
    if profile is None or tuned is None:
        return name, settings, ""

    result = profile.methods.get(name)
    unconfirmed = ", not confirmed" if result is not None and result.measured is None else ""
    rounded = ""
    if profile.draft_dtype and methods.find(name).uses_draft_model:
        rounded = f", {profile.draft_dtype} draft"
    return name, tuned, f"tuned{unconfirmed}: {written(name, tuned)}{rounded}"


def choose_found(
    pair: Pair, text: str, sampling: SamplingParams, err: Console, *, quiet: bool
) -> str:
    """Returns the method that is the fastest in a short trial with what was found to draft for the
    target, and says so in a line.

    Sampled text depends on the method. With a seed it must not depend on times: then the method is
    the one that is expected to be the fastest, by sizes and by counts of tokens.
    """
    heads = dict.fromkeys(
        found.kind for found in pair.found if found.kind in HEADS and found.kind != MTP
    )
    speeds = {methods.DEFAULT_METHOD: 0.0}
    if heads and not sampling.greedy and sampling.seed is not None:
        drafters = [found for found in pair.found if found.kind != MTP]
        best = max(drafters, key=lambda found: found.speedup)
        if best.kind != DRAFT_MODEL:
            speeds = {best.kind: 0.0}
    elif heads:
        with Progress(err, quiet=quiet) as line:
            speeds = _speeds(pair, text or "1.", [methods.DEFAULT_METHOD, *heads], line.announce)
    fastest = next(iter(speeds))
    if not quiet:
        _show_found(pair, fastest, speeds, err)
    return fastest


def _show_found(pair: Pair, method: str, speeds: Mapping[str, float], err: Console) -> None:
    """Prints what was found and drafts for the method, with the tokens per second of the trial
    (`speeds`, by method; 0: not measured), and the draft models that were rejected. If nothing was
    found, prints what is published for the target."""
    from specgen.pair.finding import LEAST_GAIN, hint  # imports torch

    rejected = []
    for found in pair.found:
        is_measured = found.kind == DRAFT_MODEL and not found.is_assumed
        if is_measured and found.speedup < LEAST_GAIN:
            rejected.append(found)
            line = f"found {found.name}: {found.why}; too few, so it is not used"
            err.print(Text(line, "quiet"), soft_wrap=True)

    used = next((found for found in pair.found if found.kind == method), None)
    used = used or _drafts_by_default(pair)
    if used is not None:
        rates = ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items() if speed)
        tried = f" ({rates} tokens/s in a short trial)" if rates else ""
        line = f"found {used.name}: {used.why}{tried}; -d none drafts without it"
        err.print(Text(line, "quiet"), soft_wrap=True)
        return
    published = hint(pair.target.name)
    if not rejected and published is not None:
        err.print(Text(published, "quiet"), soft_wrap=True)


def _drafts_by_default(pair: Pair) -> Found | None:
    """Returns what the default method drafts with, of what was found: the draft model, else the
    target's own layers."""
    if pair.draft is not None:
        return next((found for found in pair.found if found.folder == pair.draft.folder), None)
    return next((found for found in pair.found if found.kind == MTP), None)


def _speeds(
    pair: Pair, text: str, names: Sequence[str], announce: Callable[[str], None]
) -> dict[str, float]:
    """Returns the tokens per second of the methods `names` in a short trial after the text, fastest
    first, without those that cannot run.

    Measured once for these models and what was found for them, and again if later runs have other
    times.
    """
    from specgen.models.measurements import pass_times  # imports torch

    def measure() -> Sample[dict[str, Any]]:
        return _trial(pair, text, names, announce)

    def read(stored: Mapping[str, Any]) -> tuple[dict[str, float], dict[int, float]]:
        return dict(stored["speeds"]), pass_times(stored["passes"])

    key = tuple(f"{found.kind} {found.folder} {_weights(found.folder)}" for found in pair.found)
    speeds, passes = pair.measurements.get("drafters", key, measure, read)
    pair.measurements.watch("drafters", key, passes)
    if not speeds:
        return {methods.DEFAULT_METHOD: 0.0}
    return dict(sorted(speeds.items(), key=lambda item: -item[1]))


def _trial(
    pair: Pair, text: str, names: Sequence[str], announce: Callable[[str], None]
) -> Sample[dict[str, Any]]:
    """Runs a few rounds of each method. The sample has `speeds`, the tokens per second by method,
    and `passes`, the shortest seconds of a target pass by its number of tokens."""
    from specgen.models.measurements import LONGEST_COMPARED

    sampling = SamplingParams(max_new_tokens=128, ignore_eos=True)
    speeds = {}
    passes: dict[int, float] = {}
    scatter = 1.0
    for name in names:
        announce(f"trying {name}")
        with suppress(SpecgenError):
            request = pair.request(text, name, sampling)
            rounds = list(islice(pair.run(request).rounds(), TRIAL_ROUNDS))[_WARM_UP_ROUNDS:]
            seconds = sum(sum(round_.seconds.values()) for round_ in rounds)
            tokens = sum(len(round_.token_ids) for round_ in rounds)
            speeds[name] = tokens / seconds if seconds else 0.0
            scatter = max(scatter, spread([round_.seconds["verify"] for round_ in rounds]))
            if len(request.prompt_ids) >= LONGEST_COMPARED:
                continue
            for round_ in rounds:
                width = round_.pass_tokens
                passes[width] = min(round_.seconds["verify"], passes.get(width, math.inf))
    return Sample({"speeds": speeds, "passes": passes}, TRIAL_ROUNDS - _WARM_UP_ROUNDS, scatter)


def _weights(folder: Path) -> str:
    """Returns a fingerprint of the weights in the folder; "" where they cannot be read."""
    from specgen.engine.weights import weights_fingerprint

    with suppress(SpecgenError):
        return weights_fingerprint(folder)
    return ""


def tuned_specs(
    profile: Profile, specs: Sequence[MethodSpec], *, keep: bool
) -> tuple[list[MethodSpec], str]:
    """Returns the methods with settings from the profile, and in words which methods got them.

    A method to which the user gave no settings gets the profile's, unless `keep`, and is written
    with them from then on. `MethodSpec.tuned_on` is set for all methods that have the profile's
    settings, also if the user wrote them, but not where these are the documented defaults.
    """
    by_writing = {}
    tuned_methods = []
    prompts = profile.measured.prompt_fingerprints
    for spec in specs:
        tuned = None if spec.is_baseline else profile.settings_of(spec.name)
        if tuned:
            choice = methods.choose(spec.name, {name: str(value) for name, value in tuned.items()})
            if not keep and not spec.choice.given:
                tuned_methods.append(written(spec.name, tuned))
                spec = replace(spec, written=tuned_methods[-1], choice=choice)
            is_default = choice.settings == methods.choose(spec.name, {}).settings
            if prompts is not None and not is_default and spec.choice.settings == choice.settings:
                spec = replace(spec, tuned_on=frozenset(prompts))
        by_writing[spec.written] = spec
    if tuned_methods and profile.draft_dtype is not None:
        tuned_methods.append(f"{profile.draft_dtype} draft")
    return list(by_writing.values()), "; ".join(tuned_methods)
