"""Loads the models for a command, with the profile that `specgen tune` saved for them: the best
method and settings of a pair on a machine."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Mapping, Sequence
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
from specgen.cli.options import DecodingOptions, ModelOptions
from specgen.methods.base import DRAFT_MODEL
from specgen.view.progress import Progress
from specgen.workers.process import DraftProcess, is_possible

TRIAL_ROUNDS = 8

if TYPE_CHECKING:
    from rich.console import Console

    from specgen.compare.method_specs import MethodSpec
    from specgen.pair.finding import Found
    from specgen.pair.loading import Finding
    from specgen.pair.pair import Pair
    from specgen.pair.profile import Profile


def open_pair(
    models: ModelOptions,
    err: Console,
    *,
    quiet: bool,
    parallel: bool = False,
    sequential: bool = True,
    tuned_for: SamplingParams | None = None,
    remembered: bool = False,
    find: bool | Finding = "untried",
    is_method_named: bool = False,
) -> tuple[Pair, Profile | None]:
    """Loads the models and runs them once to warm them up, with a progress line on the console
    `err`. Returns the pair, and the profile for sampling as in `tuned_for`; None if there is no
    profile, or if `tuned_for` is None.

    `parallel`: a method drafts while the target verifies (PEARL), which on a CPU needs a second
    process for the draft model. That process is started first, so that both processes import torch
    at the same time. `sequential`: a method may run the draft model in this process, so its weights
    are loaded here too. The draft model's weights are rounded as the profile says, unless
    --draft-dtype is given. `remembered`: see `Pair.warm_up`. `find` says what to look for where no
    drafter is named: see `specgen.load`. `is_method_named`: nothing is said about a profile that
    does not fit, unless the user named it.
    """
    disable_hub_progress(err, quiet=quiet)
    profile = None
    # read by torch when it is imported, here and in the draft's process
    if models.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(models.threads)
    with Progress(err, quiet=quiet) as loading:
        process = DraftProcess() if parallel and models.probably_on_cpu and is_possible() else None
        loading.announce("loading torch")
        from specgen.pair.loading import load

        interrupts.check()
        looked_for = find if models.finds else False
        pair = load(
            **models.arguments(), find=looked_for, announce=loading.announce, process=process
        )
        if tuned_for is not None and isinstance(models, DecodingOptions) and models.uses_profile:

            def note(text: str) -> None:
                loading.keep(Text(text))

            pair = with_tuned_draft(
                pair, tuned_for, models.profile, (models.dtype, models.draft_dtype), process
            )
            may_round = models.draft_dtype is None and models.has_draft
            is_silent = is_method_named and models.profile is None
            why_not = (lambda _: None) if is_silent else note
            profile = find_profile(
                pair, tuned_for, models.profile, why_not, any_draft_dtype=may_round
            )
            if profile is not None:
                pair, profile = _with_profile(pair, profile, process, note)
        pair.warm_up(
            loading.announce, sequential=sequential, parallel=parallel, remembered=remembered
        )
        interrupts.check()
        for text in _notes(pair):
            loading.keep(Text(text))
    # `program` switched it off; no garbage is among the objects so far, and torch's are many
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    return pair, profile


def _notes(pair: Pair) -> list[str]:
    """Returns the lines that the user should see about the loaded models, and about what was found
    and does not work."""
    doubts = [
        f"{part.path}: {part.warning}"
        for part in pair.parts.named.values()
        if part.warning is not None
    ]
    if pair.draft is not None and pair.draft.warning is not None:
        doubts.append(pair.draft.warning)
    tokenizers = [model.tokenizer for model in (pair.target, pair.draft) if model is not None]
    doubts += [tokenizer.warning for tokenizer in tokenizers if tokenizer.warning is not None]
    notes = [f"warning: {doubt}" for doubt in doubts]
    files = [model.files for model in (pair.target, pair.draft) if model is not None]
    notes += [model.slow_path for model in files if model.slow_path is not None]
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
    """Returns the names of the models, the target's device and its dtype. `with_draft`: also the
    draft model's name."""
    target = pair.target
    models = (target, pair.draft if with_draft else None)
    names = " with ".join(model.name for model in models if model is not None)
    return (
        f"{'demo pair' if target.name == 'demo/target' else names}, {target.device} "
        f"{target.dtype_name}"
    )


def show_overlap(pair: Pair, err: Console) -> None:
    """Prints on `err` how much of the target's text the draft model can draft. Nothing if both
    models have the same tokens."""
    if pair.draft is not None and pair.draft.translation is not None:
        from specgen.engine.text.translation import overlap_of_examples
        from specgen.view import pair_report as words

        err.print(
            Text(words.notice(overlap_of_examples(pair.tokenizer, pair.draft.tokenizer))),
            soft_wrap=True,
        )


def find_profile(
    pair: Pair,
    sampling: SamplingParams,
    folder: Path | None,
    note: Callable[[str], None],
    *,
    any_draft_dtype: bool = False,
) -> Profile | None:
    """Returns `pair.profile_search.find`, and tells `note` why a profile is not used."""
    from specgen.pair.profile_search import find

    found, why = find(pair, sampling, folder, any_draft_dtype=any_draft_dtype)
    if why:
        note(why)
    return found


def with_tuned_draft(
    pair: Pair,
    sampling: SamplingParams,
    folder: Path | None,
    dtypes: tuple[str, str | None],
    process: DraftProcess | None = None,
) -> Pair:
    """Returns the pair with the draft model of the profile in `folder` (None: of the target's
    latest one for this sampling), if that is another one of those that were found for the target;
    else the pair as it is.

    `dtypes` are the values of --dtype and --draft-dtype, `process` is as for `_with_profile`.
    """
    from specgen.pair.finding import other_drafts
    from specgen.pair.loading import with_found
    from specgen.pair.profile_place import FILE, default_folder, profile_key_of

    others = other_drafts(pair.found, pair.draft)
    if not others or (folder is not None and not (folder / FILE).is_file()):
        return pair
    found = None
    latest = 0.0
    if folder is not None:
        from specgen.pair import profile as profiles  # imports pydantic

        fits = profiles.load(folder).fits["draft"]
        names = {each.name: each for each in others}
        found = names.get(fits["name"]) if isinstance(fits, dict) else None
    else:
        key = profile_key_of(pair)
        for each in (None, *others):
            if each is not None:
                key["draft"] = {"name": each.name, "device": pair.target.device_label}
            path = default_folder(key, sampling) / FILE
            if path.is_file() and path.stat().st_mtime > latest:
                found = each
                latest = path.stat().st_mtime
    if found is None:
        return pair
    return with_found(pair, found, dtypes, process=process)


def _with_profile(
    pair: Pair, profile: Profile, process: DraftProcess | None, note: Callable[[str], None]
) -> tuple[Pair, Profile | None]:
    """Returns the pair as it was tuned (`loading.as_tuned`), and the profile.

    If its draft's weights cannot be rounded here, returns the pair as it was, and None; `note` gets
    the reason. `process` is the process that was started to run PEARL's draft model; it then runs
    the rounded one.
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
    """Returns the method and settings to decode with, and a text about them. The user's `method`
    and `settings` go before the profile's.

    If the user named only a method, its settings are the profile's. If the user gave neither method
    nor settings, the profile chooses both. The text describes settings that come from a profile,
    and says if their speed was only expected and not measured; for other settings it is empty.
    """
    name = method or (methods.DEFAULT_METHOD if profile is None else profile.chosen.method)
    tuned = None if profile is None else profile.settings_of(name)
    if profile is None or tuned is None:
        return name, settings, ""
    entry = profile.methods.get(name)
    unconfirmed = ", not confirmed" if entry is not None and entry.measured is None else ""
    rounded = (
        f", {profile.draft_dtype} draft"
        if profile.draft_dtype and methods.find(name).uses_draft_model
        else ""
    )
    return name, tuned, f"tuned{unconfirmed}: {written(name, tuned)}{rounded}"


def choose_found(
    pair: Pair, text: str, sampling: SamplingParams, err: Console, *, quiet: bool
) -> str:
    """Returns the method that is the fastest in a short trial, with what was found to draft for the
    target; says so in a line.

    With a seed, sampled text depends on the method, and must not depend on times: then it is the
    one that is expected to be the fastest, by sizes and by counts of tokens.
    """
    from specgen.pair.finding import LEAST_GAIN, hint  # imports torch

    kinds = list(
        dict.fromkeys(each.kind for each in pair.found if each.kind in HEADS and each.kind != MTP)
    )
    names = [methods.DEFAULT_METHOD, *kinds]
    speeds = {methods.DEFAULT_METHOD: 0.0}
    if kinds and not sampling.greedy and sampling.seed is not None:
        best = max((each for each in pair.found if each.kind != MTP), key=lambda each: each.speedup)
        speeds = {methods.DEFAULT_METHOD if best.kind == DRAFT_MODEL else best.kind: 0.0}
    elif kinds:
        with Progress(err, quiet=quiet) as line:
            speeds = _speeds(pair, text or "1.", names, line.announce)
    name = next(iter(speeds))
    if quiet:
        return name
    used = next((each for each in pair.found if each.kind == name), None) or _drafts_by_default(
        pair
    )
    rejected = [
        each
        for each in pair.found
        if each.kind == DRAFT_MODEL and not each.is_assumed and each.speedup < LEAST_GAIN
    ]
    for each in rejected:
        err.print(
            Text(f"found {each.name}: {each.why}; too few, so it is not used", "quiet"),
            soft_wrap=True,
        )
    if used is not None:
        rates = ", ".join(f"{each} {speed:.0f}" for each, speed in speeds.items() if speed)
        tried = f" ({rates} tokens/s in a short trial)" if rates else ""
        err.print(
            Text(f"found {used.name}: {used.why}{tried}; -d none drafts without it", "quiet"),
            soft_wrap=True,
        )
    elif not rejected and (published := hint(pair.target.name)) is not None:
        err.print(Text(published, "quiet"), soft_wrap=True)
    return name


def _drafts_by_default(pair: Pair) -> Found | None:
    """Returns what the default method drafts with, of what was found: the draft model, else the
    target's own layers."""
    if pair.draft is not None:
        return next((each for each in pair.found if each.folder == pair.draft.folder), None)
    return next((each for each in pair.found if each.kind == MTP), None)


def _speeds(
    pair: Pair, text: str, names: Sequence[str], announce: Callable[[str], None]
) -> dict[str, float]:
    """Returns the tokens per second of those methods of `names` that can run, in a few rounds after
    the text, fastest first.

    Measured once for these models and what was found for them, and again if later runs have other
    times.
    """
    from specgen.models.measurements import LONGEST_COMPARED, pass_times  # imports torch

    sampling = SamplingParams(max_new_tokens=128, ignore_eos=True)

    def measure() -> Sample[dict[str, Any]]:
        speeds = {}
        passes: dict[int, float] = {}
        scatter = 1.0
        for name in names:
            announce(f"trying {name}")
            with suppress(SpecgenError):
                request = pair.request(text, name, sampling)
                # the first two warm up
                rounds = list(islice(pair.run(request).rounds(), TRIAL_ROUNDS))[2:]
                seconds = sum(sum(round_.seconds.values()) for round_ in rounds)
                speeds[name] = (
                    sum(len(round_.token_ids) for round_ in rounds) / seconds if seconds else 0.0
                )
                scatter = max(scatter, spread([round_.seconds["verify"] for round_ in rounds]))
                for round_ in rounds if len(request.prompt_ids) < LONGEST_COMPARED else ():
                    width = round_.pass_tokens
                    passes[width] = min(round_.seconds["verify"], passes.get(width, math.inf))
        return Sample({"speeds": speeds, "passes": passes}, TRIAL_ROUNDS - 2, scatter)

    def read(stored: Mapping[str, Any]) -> tuple[dict[str, float], dict[int, float]]:
        return dict(stored["speeds"]), pass_times(stored["passes"])

    key = tuple(f"{each.kind} {each.folder} {_weights(each.folder)}" for each in pair.found)
    speeds, passes = pair.measurements.get("drafters", key, measure, read)
    pair.measurements.watch("drafters", key, passes)
    return dict(sorted(speeds.items(), key=lambda each: -each[1])) or {methods.DEFAULT_METHOD: 0.0}


def _weights(folder: Path) -> str:
    """Returns a fingerprint of the weights in the folder; nothing where they cannot be read."""
    from specgen.engine.weights import weights_fingerprint

    with suppress(SpecgenError):
        return weights_fingerprint(folder)
    return ""


def tuned_specs(
    profile: Profile, specs: Sequence[MethodSpec], *, keep: bool
) -> tuple[list[MethodSpec], str]:
    """Returns the methods `specs` with settings from the profile, and in words which methods got
    them.

    Methods to which the user gave no settings get them, and are written with them from then on;
    with `keep` no method does. `MethodSpec.tuned_on` is set for all methods that have the profile's
    settings, also if the user wrote them, but not where these are the documented defaults.
    """
    completed = []
    taken = []
    prompts = profile.measured.prompt_fingerprints
    for spec in specs:
        tuned = None if spec.is_baseline else profile.settings_of(spec.name)
        if tuned:
            choice = methods.choose(spec.name, {name: str(value) for name, value in tuned.items()})
            if not keep and not spec.choice.given:
                taken.append(written(spec.name, tuned))
                spec = replace(spec, written=taken[-1], choice=choice)
            is_default = choice.settings == methods.choose(spec.name, {}).settings
            if prompts is not None and not is_default and spec.choice.settings == choice.settings:
                spec = replace(spec, tuned_on=frozenset(prompts))
        completed.append(spec)
    if taken and profile.draft_dtype is not None:
        taken.append(f"{profile.draft_dtype} draft")
    return list({spec.written: spec for spec in completed}.values()), "; ".join(taken)
