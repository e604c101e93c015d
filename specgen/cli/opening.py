"""Loads the models for a command, with the profile that `specgen tune` saved for them: the best
method and settings of a pair on a machine."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from specgen import methods
from specgen.base.interrupts import interrupts
from specgen.base.settings import parse_pairs, written
from specgen.base.types import SamplingParams
from specgen.cli.options import DecodingGroup
from specgen.pair import profile_search
from specgen.view.progress import Progress
from specgen.workers.process import DraftProcess, is_possible

if TYPE_CHECKING:
    from rich.console import Console

    from specgen.base.model_options import Finding
    from specgen.compare.method_specs import MethodSpec
    from specgen.methods.base import Choice
    from specgen.pair.pair import Pair
    from specgen.pair.profile import Profile


@dataclass(frozen=True, slots=True)
class Opening:
    """Opens the models for a command that decodes with one method, and decides how they decode.

    `choice` is the method of --method, else the default one (`is_named` False), with the settings
    that the user gave. `sampling` has the sampling parameters for which a profile is looked for.
    """

    models: DecodingGroup
    choice: Choice
    sampling: SamplingParams
    is_named: bool

    @classmethod
    def of(
        cls,
        named: str | None,
        settings: Sequence[str] | None,
        models: DecodingGroup,
        sampling: SamplingParams,
    ) -> Opening:
        """Reads the values of --method and --set. Imports the module of a method from outside.
        Raises SpecgenError if something is wrong with them, or if the method lacks a draft
        model."""
        name, given = methods.split(methods.DEFAULT_METHOD if named is None else named)
        given |= parse_pairs(list(settings or ()))
        method = methods.find(name) if named is None else methods.named(name)
        refusal = None if models.has_draft else method.refusal_without_draft(models.target)
        if refusal is not None:
            raise refusal
        choice = methods.choice_of(name, given)
        method.check_request(choice.settings, sampling)
        return cls(models, choice, sampling, named is not None)

    def open(self, err: Console, *, quiet: bool) -> tuple[Pair, Profile | None]:
        """Loads the models that the method needs, as `open_pair`. A profile is looked for unless
        the user gave settings."""
        loading = self.choice.method.loading
        return open_pair(
            self.models,
            err,
            quiet=quiet,
            drafts={loading.draft},
            tuned_for=None if self.choice.given else self.sampling,
            remembered=True,
            find=loading.find,
            is_method_named=self.is_named,
        )

    def decoding(
        self, pair: Pair, profile: Profile | None, text: str, err: Console, *, quiet: bool
    ) -> tuple[str, Mapping[str, object], str]:
        """Returns the method, its settings and a text about them, as `method_and_settings`. What
        was found to draft for the target is tried after `text`, if nothing else decides."""
        name, settings, tuned = method_and_settings(
            profile, self.choice.method.name if self.is_named else None, self.choice.given
        )
        if self.models.finds and profile is None and not self.is_named:
            from specgen.cli.drafter_trial import choose_found

            name = choose_found(pair, text, self.sampling, err, quiet=quiet)
        draft = methods.find(name).draft_of(pair.models)
        if tuned and self.models.finds and draft is not None:
            tuned += f", drafted by {draft.name}"
        return name, settings, tuned


def check_grammar(sampling: SamplingParams) -> None:
    """Raises SpecgenError for a grammar that cannot be used whatever the model is, before one is
    loaded."""
    if sampling.grammar is None:
        return
    from specgen.engine.text import grammar

    grammar.check_grammar(sampling.grammar)


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
    nothing is said about a profile that does not fit, unless the user named that profile. Raises
    SpecgenError and RunError as `specgen.load`.
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

    from specgen.cli.tuned_pair import with_profile, with_tuned_draft

    def note(text: str) -> None:
        loading.keep(Text(text))

    pair = with_tuned_draft(pair, sampling, models.profile, models, process)
    may_round = models.draft_dtype is None and models.has_draft
    say_why_not = (lambda _: None) if is_silent else note
    profile = find_profile(pair, sampling, models.profile, say_why_not, any_draft_dtype=may_round)
    if profile is None:
        return pair, None
    return with_profile(pair, profile, process, note)


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
    """Returns the models' names (without the draft's unless `with_draft`; `demo pair` for the
    bundled ones), the target's device and its dtype."""
    target = pair.target
    names = target.name
    if with_draft and pair.draft is not None:
        names += f" with {pair.draft.name}"
    if target.name == "demo/target":
        names = "demo pair"
    return f"{names}, {target.device} {target.dtype_name}"


def show_what_decodes(
    pair: Pair, method: str, settings: Mapping[str, object], err: Console
) -> None:
    """Prints the models, their device and dtype, the method, and how much of the text the draft
    model can draft."""
    draft = methods.find(method).draft_of(pair.models)
    models = models_in_words(pair, with_draft=draft is not None)
    err.print(Text(f"{models}, {method}", "quiet"), soft_wrap=True)
    if draft is not None and settings.get("translation") != "text":
        show_overlap(pair, err)


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
    """Returns the profile that `pair.profile_search.find` finds, None if it finds none; then tells
    `note` why, if it knows. Raises as that function."""
    profile, why_not = profile_search.find(pair, sampling, folder, any_draft_dtype=any_draft_dtype)
    if why_not:
        note(why_not)
    return profile


def method_and_settings(
    profile: Profile | None, method: str | None, settings: Mapping[str, object]
) -> tuple[str, Mapping[str, object], str]:
    """Returns the method and the settings to decode with, and a text about them.

    The user's `method` and `settings` go before the profile's. Without settings, those of the
    method are the profile's, if it has any; without a method, the method is too. The text describes
    settings that come from the profile, and says if their speed was only expected; for other
    settings it is empty.
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


def tuned_specs(
    profile: Profile, specs: Sequence[MethodSpec], *, keep: bool
) -> tuple[list[MethodSpec], str]:
    """Returns `specs`, some of them now with settings from the profile, and in words which methods
    got these (empty: none).

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
            choice = methods.choice_of(
                spec.name, {name: str(value) for name, value in tuned.items()}
            )
            if not keep and not spec.choice.given:
                tuned_methods.append(written(spec.name, tuned))
                spec = replace(spec, written=tuned_methods[-1], choice=choice)
            is_default = choice.settings == methods.choice_of(spec.name, {}).settings
            if prompts is not None and not is_default and spec.choice.settings == choice.settings:
                spec = replace(spec, tuned_on=frozenset(prompts))
        by_writing[spec.written] = spec
    if tuned_methods and profile.draft_dtype is not None:
        tuned_methods.append(f"{profile.draft_dtype} draft")
    return list(by_writing.values()), "; ".join(tuned_methods)
