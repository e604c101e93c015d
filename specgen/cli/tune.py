"""`specgen tune`: loads the models, tunes them, writes the profile (the result, `profile.yaml`) and
prints a report.

With `--export` it prints the tuned settings as options of another engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from specgen import methods
from specgen.base.errors import RunError, SpecgenError
from specgen.base.files import data_folder, make_writable_folder
from specgen.base.machine import launch
from specgen.base.text import print_json, print_result
from specgen.base.types import SamplingParams
from specgen.cli.commands import check_outputs, options_given
from specgen.cli.opening import (
    find_profile,
    models_in_words,
    open_pair,
    show_overlap,
)
from specgen.cli.options import (
    ModelGroup,
    OutputOptions,
    TrainingOptions,
    TuneOptions,
    TuneSampling,
)
from specgen.cli.train import train as run_training
from specgen.compare.prompts import load_prompts
from specgen.pair.profile_place import default_folder, profile_key_of
from specgen.tune.exports import choice as exports
from specgen.tune.outcome import BY_SPEED, Deadline, Objective, TuningRequest
from specgen.view import pair_report as view
from specgen.view import theme
from specgen.view.progress import Progress, TuneProgress

if TYPE_CHECKING:
    from specgen.pair.pair import Pair
    from specgen.pair.profile import Profile
    from specgen.tune.outcome import Candidate, TuningOutcome

LEAST_BUDGET = 5.0
_REPORT_SECONDS = 1.5  # reserved for writing the profile and the report
_ALSO_FOR_TRAINING = ("--methods", "--prompts", "--chat", "--out", "--seed")
_IN_TURN = (
    "Tune and train in turn: specgen tune --train, then specgen tune with the options for tuning"
)


def tune(
    tuning: TuneOptions,
    training: TrainingOptions,
    sampling: TuneSampling,
    models: ModelGroup,
    output: OutputOptions,
) -> None:
    """Tunes the pair, or with --train trains a draft model, an exit layer or a head. Raises
    SpecgenError for wrong options, and RunError for failures while running."""
    begin = time.perf_counter()
    if not training.train:
        for_training = options_given(training)
        if for_training:
            raise SpecgenError(f"{', '.join(for_training)} needs --train", _IN_TURN)
        tune_pair(models, tuning, sampling.params(), output, begin)
        return

    options = (*options_given(tuning), *options_given(sampling))
    wrong = [name for name in options if name not in _ALSO_FOR_TRAINING]
    # training needs whole weights
    wrong += [name for name in options_given(models) if name in ("--head", "--draft-dtype")]
    if wrong:
        raise SpecgenError(f"{', '.join(wrong)} cannot be combined with --train", _IN_TURN)
    if launch() is not None:
        raise SpecgenError(
            "under torchrun nothing is trained", "Train in one process: specgen tune --train"
        )
    err = theme.console(stderr=True, no_color=output.no_color)
    run_training(
        models, tuning, sampling.seed or 0, training, err, quiet=output.quiet, as_json=output.json
    )


def tune_pair(
    models: ModelGroup,
    asked: TuneOptions,
    sampling: SamplingParams,
    output: OutputOptions,
    begin: float,
) -> None:
    """Tunes the pair, writes its profile and a report, and prints the chosen method or the options
    for another engine.

    `begin` is when the command started, by `time.perf_counter`. Raises SpecgenError if an option is
    wrong or nothing can be tuned, and RunError if the profile cannot be written, after all else is
    done.
    """
    request = _request(models, asked, sampling, begin)
    # --export may take the profile of an earlier tuning, if it has what the options ask for
    may_reuse = asked.export is not None and request.objective == BY_SPEED
    if asked.out is not None and not (asked.out / "profile.yaml").is_file():
        may_reuse = False
    if asked.out is None or not may_reuse:
        _check_folder(asked.out or data_folder(), asked)
    err = theme.console(stderr=True, no_color=output.no_color)
    drafts = {"here"}
    if models.has_draft:
        names = request.names or methods.METHODS
        drafts |= {methods.find(name).loading.draft for name in names}
    pair, profile = open_pair(models, err, quiet=output.quiet, drafts=drafts)

    from specgen.cli.tuned_pair import with_tuned_draft
    from specgen.tune.other_drafts import with_other_drafts

    failure = None
    with ExitStack() as opened:
        opened.enter_context(pair)
        if may_reuse:
            pair = opened.enter_context(with_tuned_draft(pair, sampling, asked.out, models))
            profile = _earlier_profile(pair, request, asked, Progress(err, quiet=output.quiet))
        if profile is None:
            if not output.quiet:
                show_overlap(pair, err)
            pair, others = with_other_drafts(pair, models, opened)
            pair, profile, failure = _tune(pair, others, request, asked, output, begin)
        if asked.export is not None:
            _export(asked.export, pair, profile, request, err, output.quiet)
    if failure is not None:
        raise failure


def _request(
    models: ModelGroup, asked: TuneOptions, sampling: SamplingParams, begin: float
) -> TuningRequest:
    """Returns what the options ask to tune, by when. Raises SpecgenError if one is wrong."""
    objective = Objective.parse(asked.objective, asked.max_perplexity)
    names = _names(asked.methods)
    _check(asked, names, objective, has_draft=models.has_draft)
    prompts = load_prompts(
        asked.prompts, category=asked.category, limit=asked.limit, for_tuning=True
    )
    deadline = Deadline(begin + asked.budget - _REPORT_SECONDS)
    return TuningRequest(prompts, sampling, deadline, names, asked.chat, objective)


def _names(option: str | None) -> list[str] | None:
    """Returns the names of the methods in the value of --methods; None if it is not given."""
    if option is None:
        return None
    names = []
    for written in option.split(","):
        method, settings = methods.given(written)
        if settings:
            raise SpecgenError(
                f"--methods has settings: {written.strip()}",
                f"tune chooses them: --methods {method.name}",
            )
        names.append(method.alias_of or method.name)
    return list(dict.fromkeys(names))


def _earlier_profile(
    pair: Pair, request: TuningRequest, asked: TuneOptions, progress: Progress
) -> Profile | None:
    """Returns the profile that was tuned for the pair, if it has what the options ask for."""

    def note(text: str) -> None:
        progress.keep(Text(text))

    profile = find_profile(pair, request.sampling, asked.out, note, any_draft_dtype=True)
    if profile is None or not _covers(profile, request, asked):
        return None
    return profile


def _covers(profile: Profile, request: TuningRequest, asked: TuneOptions) -> bool:
    """Whether the profile has the methods that the options name, and was tuned on the prompts that
    they name."""
    if not set(request.names or ()) <= set(profile.methods):
        return False
    if asked.prompts is None and asked.category is None:
        return True
    tuned_on = profile.measured.prompt_fingerprints
    if tuned_on is None:
        return False
    return set(tuned_on) == {prompt.fingerprint for prompt in request.prompts}


def _check(
    asked: TuneOptions, names: list[str] | None, objective: Objective, *, has_draft: bool
) -> None:
    """Raises SpecgenError for a wrong option, and if no named method can be tuned or exported
    because there is no draft model."""
    if not LEAST_BUDGET <= asked.budget < math.inf:
        raise SpecgenError(
            f"--budget is {asked.budget:g}", f"It has to be at least {LEAST_BUDGET:g} seconds"
        )
    exportable = None if asked.export is None else exports.methods_of(asked.export)
    tuned = [methods.find(name) for name in names or methods.METHODS]
    yardsticks = [method.name for method in tuned if method.tuning.is_yardstick]
    if names and yardsticks:
        raise SpecgenError(
            f"{', '.join(yardsticks)} is only a yardstick for other methods and cannot be tuned",
            f"Compare others with it: specgen compare --methods mtad,{yardsticks[0]}",
        )
    has_lossy = any(not method.lossless and not method.tuning.is_yardstick for method in tuned)
    if objective != BY_SPEED and not has_lossy:
        option = "--objective perplexity" if objective.lowest_perplexity else "--max-perplexity"
        raise SpecgenError(
            f"{option} is for lossy methods, and none is tuned", "Add one: --methods mtad,bild"
        )

    refusals = {
        method.name: None if has_draft else method.refusal_without_draft(None) for method in tuned
    }
    usable = [method for method in tuned if refusals[method.name] is None]
    first = next((refusal for refusal in refusals.values() if refusal is not None), None)
    if first is not None and all(method.name == "ar" for method in usable):
        raise first
    if names is None or exportable is None:
        return
    if not any(method.name in exportable for method in usable):
        raise SpecgenError(
            f"{asked.export} has none of the methods that can be tuned",
            f"It has {', '.join(exportable)}: name one with --methods, and the draft "
            "model with --draft if it needs one",
        )


def _check_folder(folder: Path, asked: TuneOptions) -> None:
    """Creates the profile's folder. Raises SpecgenError if the profile cannot be written there."""
    make_writable_folder(folder)
    check_outputs({"--out": folder / "profile.yaml"}, [("--prompts", asked.prompts)])


def _tune(
    pair: Pair,
    others: Sequence[Callable[[Pair], Pair | None]],
    request: TuningRequest,
    asked: TuneOptions,
    output: OutputOptions,
    begin: float,
) -> tuple[Pair, Profile, RunError | None]:
    """Tunes the methods, writes the profile and prints the result. `others` make pairs with other
    drafts (see `tuner.tune`). Returns the pair with the chosen draft, the profile, and the error if
    it could not be written.
    """
    from specgen.pair import profile as profiles
    from specgen.tune.profile import from_outcome
    from specgen.tune.rounding_cost import rounding_cost
    from specgen.tune.tuner import tune

    sampling = request.sampling
    _check_folder(asked.out or default_folder(profile_key_of(pair), sampling), asked)
    sampling_words = "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}"
    err = theme.console(stderr=True, no_color=output.no_color)
    with Progress(err, quiet=output.quiet) as line:
        progress = TuneProgress(line, begin, asked.budget)
        progress.done(f"{models_in_words(pair)}, {sampling_words}: loaded")
        rounding = rounding_cost(pair, line.announce, is_small_only=True)
        outcome = tune(pair, request, progress, others)
    pair = outcome.pair or pair

    key = profile_key_of(pair)
    default = default_folder(key, sampling)
    folder = asked.out or default
    profile = from_outcome(outcome, key, request.prompts, rounding)
    path = None
    failure = None
    try:
        path = profiles.save(profile, folder)
    except RunError as error:
        failure = error

    if not output.quiet:
        is_default = folder.resolve() == default.resolve()
        view.show_tuning(err, outcome, path, is_default=is_default, budget=asked.budget)
    if asked.export is None and output.json:
        print_json(json_line(outcome, path) | {"objective": asked.objective})
    elif asked.export is None:
        print_result(outcome.chosen.written)
    return pair, profile, failure


def json_line(outcome: TuningOutcome, path: Path | None) -> dict[str, Any]:
    """Returns what `tune --json` prints: the result, and the path of the profile (None: it was not
    written)."""
    tuned = outcome.methods
    speedup_model = outcome.speedup_model
    pays_from = None if speedup_model is None else speedup_model.break_even_acceptance(1)
    draft = None if outcome.pair is None else outcome.pair.draft
    return {
        "type": "tune",
        "chosen": {"method": outcome.chosen.name, "settings": dict(outcome.chosen.settings)},
        "verdict": outcome.verdict,
        "confirmed": outcome.verdict not in ("unconfirmed", "no time"),
        "speedup": outcome.speedup_of(outcome.chosen),
        "speedup_low": outcome.chosen.low,
        "speedup_high": outcome.chosen.high,
        "predicted": {method.name: method.predicted for method in tuned},
        "measured": _known(tuned, "measured"),
        "perplexity": _known(tuned, "perplexity"),
        "settings": {method.name: dict(method.settings) for method in tuned},
        "acceptance": outcome.acceptance_probability,
        "pays_from": pays_from,
        "costs": outcome.costs,
        "left_out": dict(outcome.left_out),
        "new_tokens": outcome.sampling.max_new_tokens,
        "real_runs": outcome.real_runs,
        "simulated": outcome.simulated,
        "draft": None if draft is None else draft.name,
        "draft_dtype": outcome.draft_dtype,
        "profile": None if path is None else str(path),
    }


def _known(tuned: Iterable[Candidate], figure: str) -> dict[str, float]:
    """Returns the figure (an attribute) by method, for those whose figure is known."""
    values = {method.name: getattr(method, figure) for method in tuned}
    return {name: value for name, value in values.items() if value is not None}


def _export(
    engine: str,
    pair: Pair,
    profile: Profile,
    request: TuningRequest,
    err: Console,
    quiet: bool,
) -> None:
    """Prints the options for the engine."""
    from specgen.tune.exports.loaded_pair import exported_models

    names = profile.methods if request.names is None else request.names
    tuned = {name: method for name, method in profile.methods.items() if name in names}
    models = exported_models(pair, engine, tuned, request.sampling, profile.draft_dtype)
    text, notes = exports.export(engine, tuned, profile.chosen.method, models)
    print_result(text)
    for note in notes if not quiet else ():
        err.print(Text(f"note: {note}", "quiet"), soft_wrap=True)
