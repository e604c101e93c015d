"""`specgen tune`: loads the models, tunes them, writes the profile (the result, `profile.yaml`) and
prints a report.

With `--export` it prints the tuned settings as options of another engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
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
from specgen.cli.commands import check_outputs, given
from specgen.cli.opening import (
    find_profile,
    models_in_words,
    open_pair,
    show_overlap,
    with_tuned_draft,
)
from specgen.cli.options import (
    ModelOptions,
    OutputOptions,
    TrainingOptions,
    TuneOptions,
    TuneSampling,
)
from specgen.cli.train import train as run_training
from specgen.compare.prompts import load_prompts
from specgen.tune import export as exports
from specgen.tune.outcome import BY_SPEED, Deadline, Objective, TuningRequest
from specgen.view import pair_report as view
from specgen.view import theme
from specgen.view.progress import Progress, TuneProgress

if TYPE_CHECKING:
    from specgen.engine.loaded_model import LoadedModel
    from specgen.pair.finding import Found
    from specgen.pair.pair import Pair
    from specgen.pair.profile import Profile
    from specgen.tune.outcome import TuningOutcome

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
    models: ModelOptions,
    output: OutputOptions,
) -> None:
    """Tunes the pair, or with --train trains a draft model, an exit layer or a head. Raises
    SpecgenError for wrong options, and RunError for failures while running."""
    begin = time.perf_counter()
    of_tuning = [
        name for name in (*given(tuning), *given(sampling)) if name not in _ALSO_FOR_TRAINING
    ]
    if not training.train:
        if wrong := given(training):
            raise SpecgenError(f"{', '.join(wrong)} needs --train", _IN_TURN)
        tune_pair(models, tuning, sampling.params(), output, begin)
        return
    # training needs whole weights
    of_tuning += [name for name in given(models) if name in ("--head", "--draft-dtype")]
    if of_tuning:
        raise SpecgenError(f"{', '.join(of_tuning)} cannot be combined with --train", _IN_TURN)
    if launch() is not None:
        raise SpecgenError(
            "under torchrun nothing is trained", "Train in one process: specgen tune --train"
        )
    err = theme.console(stderr=True, no_color=output.no_color)
    run_training(
        models, tuning, sampling.seed or 0, training, err, quiet=output.quiet, as_json=output.json
    )


def tune_pair(
    models: ModelOptions,
    asked: TuneOptions,
    sampling: SamplingParams,
    output: OutputOptions,
    begin: float,
) -> None:
    """Tunes the pair, writes its profile and a report, and prints the chosen method or the options
    for another engine.

    `begin` is when the command started, by `time.perf_counter`. Raises SpecgenError if an option is
    wrong.
    """
    goal = Objective.parse(asked.objective, asked.max_perplexity)
    names = _names(asked.methods)
    _check(asked, names, goal, has_draft=models.has_draft)
    prompts = load_prompts(
        asked.prompts, category=asked.category, limit=asked.limit, for_tuning=True
    )
    deadline = Deadline(begin + asked.budget - _REPORT_SECONDS)
    request = TuningRequest(prompts, sampling, deadline, names, asked.chat, goal)
    # --export may take the profile of an earlier tuning, if it has what the options ask for
    may_reuse = goal == BY_SPEED and asked.export is not None
    may_reuse = may_reuse and (asked.out is None or (asked.out / "profile.yaml").is_file())
    if asked.out is None or not may_reuse:
        _check_folder(asked.out or data_folder(), asked)
    err = theme.console(stderr=True, no_color=output.no_color)
    parallel = models.has_draft and any(
        methods.find(name).is_parallel for name in names or methods.METHODS
    )
    pair, profile = open_pair(models, err, quiet=output.quiet, parallel=parallel)
    failure = None
    with ExitStack() as opened:
        opened.enter_context(pair)
        dtypes = models.dtype, models.draft_dtype
        if may_reuse:
            note = Progress(err, quiet=output.quiet).keep
            pair = opened.enter_context(with_tuned_draft(pair, sampling, asked.out, dtypes))
            profile = find_profile(
                pair, sampling, asked.out, lambda text: note(Text(text)), any_draft_dtype=True
            )
            if profile is not None and not _covers(profile, request, asked):
                profile = None
        if profile is None:
            if not output.quiet:
                show_overlap(pair, err)
            pair, others = _others(pair, dtypes, opened)
            pair, profile, failure = _tune(pair, others, request, asked, output, begin)
        if asked.export is not None:
            _export(asked.export, pair, profile, names, err, output.quiet)
    if failure is not None:
        raise failure


def _names(given: str | None) -> list[str] | None:
    """Returns the names of the methods in the value of --methods, or None if the option was not
    given."""
    if given is None:
        return None
    found = [methods.find(name.strip()) for name in given.split(",")]
    return list(dict.fromkeys(method.alias_of or method.name for method in found))


def _covers(profile: Profile, request: TuningRequest, asked: TuneOptions) -> bool:
    """Whether the profile is of a tuning of the methods, and on the prompts, that the options
    name."""
    if not set(request.names or ()) <= set(profile.methods):
        return False
    if asked.prompts is None and asked.category is None:
        return True
    known = profile.measured.prompt_fingerprints
    return known is not None and set(known) == {prompt.fingerprint for prompt in request.prompts}


def _check(
    asked: TuneOptions, names: list[str] | None, goal: Objective, *, has_draft: bool
) -> None:
    """Raises SpecgenError for a wrong option, and if no named method can be tuned or exported
    because there is no draft model."""
    if not LEAST_BUDGET <= asked.budget < math.inf:
        raise SpecgenError(
            f"--budget is {asked.budget:g}", f"It has to be at least {LEAST_BUDGET:g} seconds"
        )
    exported = None if asked.export is None else exports.methods_of(asked.export)
    named = [methods.find(name) for name in names or methods.METHODS]
    if names and (yardsticks := [method.name for method in named if method.tuning.is_yardstick]):
        hint = "Compare others with it: specgen compare --methods mtad," + yardsticks[0]
        raise SpecgenError(
            f"{', '.join(yardsticks)} is only a yardstick for other methods and cannot be tuned",
            hint,
        )
    if goal != BY_SPEED and all(method.lossless or method.tuning.is_yardstick for method in named):
        option = "--objective perplexity" if goal.lowest_perplexity else "--max-perplexity"
        raise SpecgenError(
            f"{option} is for lossy methods, and none is tuned", "Add one: --methods mtad,bild"
        )
    usable = [method for method in named if has_draft or not method.needs_draft_model]
    if len(usable) < len(named) and all(method.name == "ar" for method in usable):
        raise next(method for method in named if method.needs_draft_model).without_part(None)
    if (
        names is not None
        and exported is not None
        and not any(method.name in exported for method in usable)
    ):
        ways = (
            f"It has {', '.join(exported)}: name one with --methods, and the draft "
            "model with --draft if it needs one"
        )
        raise SpecgenError(f"{asked.export} has none of the methods that can be tuned", ways)


def _check_folder(folder: Path, asked: TuneOptions) -> None:
    """Creates the profile's folder. Raises SpecgenError if the profile cannot be written there."""
    make_writable_folder(folder)
    check_outputs({"--out": folder / "profile.yaml"}, [("--prompts", asked.prompts)])


def _others(
    pair: Pair, dtypes: tuple[str, str | None], opened: ExitStack
) -> tuple[Pair, list[Callable[[Pair], Pair | None]]]:
    """Returns the pair, with a draft model if one was found for the target, and what makes pairs
    with other drafts: the further ones that were found, and the best one with rounded weights,
    unless `dtypes` (the values of --dtype and --draft-dtype) say how its weights are. `opened`
    closes the pairs."""
    from specgen.pair.finding import other_drafts
    from specgen.pair.loading import with_found

    def make(found: Found | None, best: Pair) -> Pair | None:
        other = _rounded(best) if found is None else with_found(best, found, dtypes)
        return None if other is None else opened.enter_context(other)

    found = other_drafts(pair.found, pair.draft)
    if pair.draft is None and found:  # little is expected of it
        pair = opened.enter_context(with_found(pair, found.pop(0), dtypes))
    return pair, [partial(make, each) for each in (*found, *([None] if dtypes[1] is None else []))]


def _rounded(pair: Pair) -> Pair | None:
    """Returns the pair with its draft's weights rounded to int8; None if that cannot gain, or
    cannot be done here."""
    from specgen.pair.loading import with_draft_dtype
    from specgen.tune.tuner import worth_rounding

    try:
        return with_draft_dtype(pair, "int8") if worth_rounding(pair) else None
    except SpecgenError:  # transformers runs it, or this machine has no products for it
        return None


def _tune(
    pair: Pair,
    others: Sequence[Callable[[Pair], Pair | None]],
    request: TuningRequest,
    asked: TuneOptions,
    output: OutputOptions,
    begin: float,
) -> tuple[Pair, Profile, RunError | None]:
    """Tunes the methods, writes the profile and prints the result. Returns the pair with the draft
    that was chosen, the profile and why it could not be written. `others` make pairs with other
    drafts (see `tuner.tune`).
    """
    from specgen.pair import profile as profiles
    from specgen.pair.profile_place import default_folder, profile_key_of
    from specgen.tune.profile import from_outcome
    from specgen.tune.rounding_cost import rounding_cost
    from specgen.tune.tuner import tune

    sampling = request.sampling
    _check_folder(asked.out or default_folder(profile_key_of(pair), sampling), asked)
    how = "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}"
    err = theme.console(stderr=True, no_color=output.no_color)
    with Progress(err, quiet=output.quiet) as line:
        progress = TuneProgress(line, begin, asked.budget)
        progress.done(f"{models_in_words(pair)}, {how}: loaded")
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
    """Returns what `tune --json` prints: the result of the tuning and the path of the profile, None
    if it was not written."""
    tuned = outcome.methods
    return {
        "type": "tune",
        "chosen": {"method": outcome.chosen.name, "settings": dict(outcome.chosen.settings)},
        "verdict": outcome.verdict,
        "confirmed": outcome.verdict not in ("unconfirmed", "no time"),
        "speedup": outcome.speedup_of(outcome.chosen),
        "speedup_low": outcome.chosen.low,
        "speedup_high": outcome.chosen.high,
        "predicted": {each.name: each.predicted for each in tuned},
        "measured": {each.name: each.measured for each in tuned if each.measured is not None},
        "perplexity": {each.name: each.perplexity for each in tuned if each.perplexity is not None},
        "settings": {each.name: dict(each.settings) for each in tuned},
        "acceptance": outcome.acceptance_probability,
        "pays_from": None
        if outcome.speedup_model is None
        else outcome.speedup_model.break_even_acceptance(1),
        "costs": outcome.costs,
        "left_out": dict(outcome.left_out),
        "new_tokens": outcome.sampling.max_new_tokens,
        "real_runs": outcome.real_runs,
        "simulated": outcome.simulated,
        "draft": None
        if outcome.pair is None or outcome.pair.draft is None
        else outcome.pair.draft.name,
        "draft_dtype": outcome.draft_dtype,
        "profile": None if path is None else str(path),
    }


def _export(
    engine: str, pair: Pair, profile: Profile, names: list[str] | None, err: Console, quiet: bool
) -> None:
    """Prints the options for the engine. `names` are the methods that may be exported, None for
    all."""

    def name_of(model: LoadedModel) -> str:  # the bundled pair has no name in transformers
        return (
            str(model.folder)
            if engine == "transformers" and model.files.source.is_bundled
            else model.name
        )

    def file_of(model: LoadedModel) -> str | None:
        return str(model.folder) if model.folder.is_file() else None

    found = [
        part for kind in ("medusa", "eagle", "glide") if (part := pair.parts.load(kind)) is not None
    ]
    heads = {
        str(part.kind): exports.ExportedHead(
            str(part.path), "eagle3" if part.version == 3 else part.kind
        )
        for part in found
    }
    differ = pair.draft is not None and (
        pair.draft.translation is not None or pair.draft.refusal is not None
    )
    tuned = {name: each for name, each in profile.methods.items() if names is None or name in names}
    text, notes = exports.export(
        engine,
        tuned,
        profile.chosen.method,
        name_of(pair.target),
        None if pair.draft is None else name_of(pair.draft),
        heads,
        tokenizers_differ=differ,
        draft_dtype=profile.draft_dtype,
        gguf=(file_of(pair.target), None if pair.draft is None else file_of(pair.draft)),
    )
    print_result(text)
    for note in notes if not quiet else ():
        err.print(Text(f"note: {note}", "quiet"), soft_wrap=True)
