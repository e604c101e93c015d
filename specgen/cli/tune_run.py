"""Runs `specgen tune`: loads the models, tunes them, writes the profile (the result, `profile.yaml`) and prints a report.

With `--export` it prints the tuned settings as options of another engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from specgen import methods
from specgen.base.errors import RunError, SpecgenError
from specgen.base.files import data_folder, make_writable_folder
from specgen.base.text import print_json, print_result
from specgen.base.types import SamplingParams
from specgen.cli import profile_lookup
from specgen.cli.model_options import ModelOptions, open_pair, show_overlap
from specgen.cli.output_checks import check_outputs
from specgen.compare.prompts import load_prompts
from specgen.tune import export as exports
from specgen.tune.outcome import BY_SPEED, Objective
from specgen.view import tune_report as view
from specgen.view.progress import Progress, TuneProgress

if TYPE_CHECKING:
    from specgen.pair.pair import Pair
    from specgen.tune.outcome import TuningOutcome
    from specgen.tune.profile import Profile

LEAST_BUDGET = 5.0
_REPORT_SECONDS = 1.5  # reserved for writing the profile and the report


@dataclass(frozen=True, slots=True)
class TuneRequest:
    """The options of `specgen tune`. Raises SpecgenError if one is wrong.

    `begin` is when the command started, by `time.perf_counter`. `budget` is the seconds for everything. `limit` is the number of
    prompts. `objective` and `max_perplexity` say how settings of lossy methods are chosen. `export` is the engine whose options
    are printed, None for no export. `out` is the profile's folder.
    """

    begin: float
    budget: float
    methods: str | None
    prompts: Path | None
    category: str | None
    limit: int
    chat: bool
    sampling: SamplingParams
    objective: str
    max_perplexity: str | None
    export: str | None
    out: Path | None

    def __post_init__(self) -> None:
        if not LEAST_BUDGET <= self.budget < math.inf:
            raise SpecgenError(f"--budget is {self.budget:g}", f"It has to be at least {LEAST_BUDGET:g} seconds")
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise SpecgenError(f"--out is {self.out}, which is a file", "Name a folder")
        if self.export is not None:
            exports.check(self.export)
        named = [methods.find(name) for name in self.names or methods.METHODS]
        if self.names and (yardsticks := [method.name for method in named if method.is_yardstick]):
            hint = "Compare others with it: specgen compare --methods mtad," + yardsticks[0]
            raise SpecgenError(f"{', '.join(yardsticks)} is only a yardstick for other methods and cannot be tuned", hint)
        goal = self.goal
        if goal != BY_SPEED and all(method.lossless or method.is_yardstick for method in named):
            option = "--objective perplexity" if goal.lowest_perplexity else "--max-perplexity"
            raise SpecgenError(f"{option} is for lossy methods, and none is tuned", "Add one: --methods mtad,bild")

    def check_draft(self, *, has_draft: bool) -> None:
        """Raises SpecgenError if no named method can be tuned, or none exported, because there is no draft model."""
        known = [methods.find(name) for name in self.names or methods.METHODS]
        usable = [method for method in known if has_draft or not method.needs_draft_model]
        if all(method.name == "ar" for method in usable) and len(usable) < len(known):
            raise next(method for method in known if method.needs_draft_model).without_part(None)
        engine = self.export
        if engine is not None and not any(method.name in exports.ENGINES[engine].methods for method in usable):
            without, draft = ("", "") if has_draft else (" without a draft model", ", and a draft model with --draft")
            ways = f"It has {', '.join(exports.ENGINES[engine].methods)}: name one with --methods{draft}"
            raise SpecgenError(f"{engine} has none of the methods that can be tuned{without}", ways)

    @property
    def goal(self) -> Objective:
        """How the settings of lossy methods are chosen."""
        return Objective.parse(self.objective, self.max_perplexity)

    @property
    def names(self) -> list[str] | None:
        """The methods to tune, None for all. `eesd` stands for both of its length policies, `eesd-cali` and `eesd-beta`."""
        if self.methods is None:
            return None
        names = [name.strip() for name in self.methods.split(",")]
        return [*names, *(other for name in names if name in methods.METHODS for other in methods.find(name).stands_for)]

    @property
    def may_reuse_profile(self) -> bool:
        """Whether `--export` may use the profile of an earlier tuning, so that nothing has to be tuned now.

        It may if none of `--methods`, `--prompts`, `--category`, `--objective` and `--max-perplexity` is given, and `--out`, if
        given, is a folder with a profile.
        """
        default = (self.methods, self.prompts, self.category, self.goal) == (None, None, None, BY_SPEED)
        return default and (self.out is None or (self.out / "profile.yaml").is_file())

    def check_folder(self, folder: Path) -> None:
        """Creates the profile's folder. Raises SpecgenError if the profile cannot be written there."""
        make_writable_folder(folder)
        check_outputs({"--out": folder / "profile.yaml"}, [("--prompts", self.prompts)])


def tune_pair(models: ModelOptions, request: TuneRequest, err: Console, *, quiet: bool, as_json: bool) -> None:
    """Tunes the pair, writes its profile and a report, and prints the chosen method or the options for another engine."""
    request.check_draft(has_draft=models.has_draft)
    prompts = load_prompts(request.prompts, category=request.category, limit=request.limit, for_tuning=True)
    names, sampling = request.names, request.sampling
    may_reuse = request.export is not None and request.may_reuse_profile
    if request.out is None:
        make_writable_folder(data_folder())
    elif not may_reuse:
        request.check_folder(request.out)
    parallel = models.has_draft and (names is None or any(methods.find(name).is_parallel for name in names))
    with open_pair(models, err, quiet=quiet, parallel=parallel) as pair:
        if request.export is not None and may_reuse:
            existing = profile_lookup.find(pair, sampling, request.out, err, quiet=quiet, any_draft_dtype=True)
            if existing is not None:
                _export(request.export, pair, existing, err, quiet)
                return
        show_overlap(pair, err, quiet=quiet)
        from specgen.tune import profile as profiles
        from specgen.tune.outcome import Deadline, TuningRequest
        from specgen.tune.tuner import tune

        key = profiles.profile_key_of(pair)
        default = profiles.default_folder(key, sampling)
        folder = request.out or default
        request.check_folder(folder)
        deadline = Deadline(request.begin + request.budget - _REPORT_SECONDS)
        with Progress(err, quiet=quiet) as line:
            progress = TuneProgress(line, request.begin, request.budget)
            progress.done(_headline(pair, sampling))
            task = TuningRequest(prompts, sampling, deadline, names, request.chat, request.goal)
            with _rounded(models, pair) as rounded:
                outcome = tune(pair, task, progress, rounded)
        profile = profiles.from_outcome(outcome, key, prompts)
        path, failure = None, None
        try:
            path = profiles.save(profile, folder)
        except RunError as error:  # raised once the result is shown
            failure = error
        if not quiet:
            view.report(err, outcome, path, is_default=folder.resolve() == default.resolve())
        if request.export is not None:
            _export(request.export, pair, profile, err, quiet)
        elif as_json:
            print_json(json_line(outcome, path) | {"objective": request.objective})
        else:
            print_result(outcome.chosen.written)
        if failure is not None:
            raise failure


@contextmanager
def _rounded(models: ModelOptions, pair: Pair) -> Iterator[Pair | None]:
    """Yields the pair with its draft's weights rounded to int8; None if the user chose the draft's dtype, or it cannot gain."""
    from specgen.pair.loading import with_draft_dtype
    from specgen.tune.tuner import worth_rounding

    rounded = None
    if models.draft_dtype is None and worth_rounding(pair):
        with suppress(SpecgenError):  # transformers runs it, or this machine has no products for it
            rounded = with_draft_dtype(pair, "int8")
    try:
        yield rounded
    finally:
        if rounded is not None:
            rounded.close()


def _headline(pair: Pair, sampling: SamplingParams) -> str:
    models = pair.target.name if pair.draft is None else f"{pair.target.name} with {pair.draft.name}"
    models = "demo pair" if pair.target.name == "demo/target" else models
    how = "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}"
    return f"{models}, {pair.target.device} {pair.target.dtype_name}, {how}: loaded"


def json_line(outcome: TuningOutcome, path: Path | None) -> dict[str, Any]:
    """Returns what `tune --json` prints: the result of the tuning and the path of the profile, None if it was not written."""
    tuned = outcome.methods
    return {
        "type": "tune",
        "chosen": {"method": outcome.chosen.name, "settings": dict(outcome.chosen.settings)},
        "verdict": outcome.verdict,
        "confirmed": outcome.verdict != "unconfirmed",
        "speedup": outcome.speedup_of(outcome.chosen),
        "speedup_low": outcome.chosen.low,
        "speedup_high": outcome.chosen.high,
        "predicted": {each.name: each.predicted for each in tuned},
        "measured": {each.name: each.measured for each in tuned if each.measured is not None},
        "perplexity": {each.name: each.perplexity for each in tuned if each.perplexity is not None},
        "settings": {each.name: dict(each.settings) for each in tuned},
        "acceptance": outcome.acceptance_probability,
        "pays_from": outcome.break_even_acceptance,
        "costs": outcome.costs,
        "left_out": dict(outcome.left_out),
        "draft_dtype": outcome.draft_dtype,
        "profile": None if path is None else str(path),
    }


def _export(engine: str, pair: Pair, profile: Profile, err: Console, quiet: bool) -> None:
    draft = None if pair.draft is None else pair.draft.name
    found = [part for kind in ("medusa", "eagle", "glide") if (part := pair.parts.load(kind)) is not None]
    heads = {str(part.kind): exports.ExportedHead(str(part.path), "eagle3" if part.version == 3 else part.kind) for part in found}
    differ = pair.draft is not None and (pair.draft.translation is not None or pair.draft.refusal is not None)
    made = exports.export(
        engine,
        profile.methods,
        profile.chosen.method,
        pair.target.name,
        draft,
        heads,
        tokenizers_differ=differ,
        draft_dtype=profile.draft_dtype,
    )
    print_result(made.text)
    for note in made.lost if not quiet else ():
        err.print(Text(f"note: {note}", "quiet"), soft_wrap=True)
