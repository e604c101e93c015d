"""`specgen tune` from its request to its report, the profile and what is exported."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from specgen import methods
from specgen.cli import profile_lookup
from specgen.cli.model_options import ModelOptions, open_pair
from specgen.compare.prompts import load_prompts
from specgen.errors import SpecgenError
from specgen.json_lines import print_json
from specgen.tuning import export as exports
from specgen.types import SamplingParams
from specgen.ui.terminal import tune_report as view

if TYPE_CHECKING:
    from specgen.pair import Pair
    from specgen.tuning.outcome import TuningOutcome

LEAST_BUDGET = 5.0
_ENDING = 1.5  # seconds that are kept for the profile and the report


@dataclass(frozen=True, slots=True)
class TuneRequest:
    """What was asked for, checked as far as that can be done without a model. `begun` is by `time.perf_counter`."""

    begun: float
    budget: float
    methods: str | None
    prompts: Path | None
    category: str | None
    limit: int
    chat: bool
    sampling: SamplingParams
    export: str | None
    out: Path | None

    def __post_init__(self) -> None:
        if not LEAST_BUDGET <= self.budget < math.inf:
            raise SpecgenError(f"--budget is {self.budget:g}", f"It has to be at least {LEAST_BUDGET:g} seconds")
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise SpecgenError(f"--out is {self.out}, which is a file", "Name a folder")
        if self.export is not None:
            exports.check(self.export)
        for name in self.names or ():
            methods.find(name)

    @property
    def names(self) -> list[str] | None:
        """The methods that were asked for; `eesd` stands for both of its policies."""
        if self.methods is None:
            return None
        asked = [name.strip() for name in self.methods.split(",")]
        return [*asked, *(["eesd-cali", "eesd-beta"] if "eesd" in asked else [])]


def tune_pair(models: ModelOptions, request: TuneRequest, err: Console, *, quiet: bool, as_json: bool) -> int | None:
    prompts = load_prompts(request.prompts, category=request.category, limit=request.limit)
    names = request.names
    parallel = models.has_draft and (names is None or any(methods.find(name).is_parallel for name in names))
    with open_pair(models, err, quiet=quiet, parallel=parallel) as pair:
        if request.export is not None:
            kept = profile_lookup.find(pair, request.sampling, request.out, err, quiet=quiet) if _is_kept(request) else None
            if kept is not None:
                speeds = [(name, tuned.settings, tuned.measured or tuned.predicted) for name, tuned in kept.methods.items()]
                _export(request.export, pair, [exports.Tuned(*entry) for entry in speeds], kept.chosen.method, err, quiet)
                return None
        from specgen.tuning import profile as files
        from specgen.tuning.tuner import Tuner, TuningRequest

        fits = files.profile_key_of(pair)
        sampling = request.sampling
        folder = request.out or files.default_folder(fits, sampling.temperature, sampling.top_p, sampling.top_k)
        deadline = request.begun + request.budget - _ENDING
        with view.TuneProgress(err, request.begun, request.budget, quiet=quiet) as progress:
            progress.done(_headline(pair, sampling), time.perf_counter() - request.begun)
            outcome = Tuner(pair, TuningRequest(prompts, sampling, deadline, names, request.chat), progress).run()
        path = files.save(files.made_of(outcome, fits), folder)
        _show(outcome, path, err, quiet=quiet, as_json=as_json, silent=request.export is not None)
        if request.export is not None:
            found = [exports.Tuned(entry.name, entry.settings, entry.measured or entry.predicted) for entry in outcome.methods]
            _export(request.export, pair, found, outcome.chosen.name, err, quiet)
    return None


def _is_kept(request: TuneRequest) -> bool:
    """Whether there may be a profile to export from: nothing else was asked that would make another one."""
    named = (request.methods, request.prompts, request.category)
    return named == (None, None, None) and (request.out is None or (request.out / "profile.yaml").is_file())


def _headline(pair: Pair, sampling: SamplingParams) -> str:
    models = pair.target.name if pair.draft is None else f"{pair.target.name} with {pair.draft.name}"
    models = "demo pair" if pair.target.name == "demo/target" else models
    how = "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}"
    return f"{models}, {pair.target.device} {pair.target.dtype_name}, {how}: loaded"


def _show(outcome: TuningOutcome, path: Path, err: Console, *, quiet: bool, as_json: bool, silent: bool) -> None:
    """The answer on standard output: one line, with `--json` all of it; the report on standard error."""
    if not quiet:
        view.report(err, outcome, path)
    if silent:
        return
    if as_json:
        print_json(_line(outcome, path))
    else:
        print(outcome.chosen.written)


def _line(outcome: TuningOutcome, path: Path) -> dict[str, Any]:
    return {
        "type": "tune",
        "chosen": {"method": outcome.chosen.name, "settings": dict(outcome.chosen.settings)},
        "verdict": outcome.verdict,
        "speedup": outcome.speedup,
        "speedup_low": outcome.chosen.low,
        "speedup_high": outcome.chosen.high,
        "predicted": {found.name: found.predicted for found in outcome.methods},
        "measured": {found.name: found.measured for found in outcome.methods if found.measured is not None},
        "perplexity": {found.name: found.perplexity for found in outcome.methods if found.perplexity is not None},
        "settings": {found.name: dict(found.settings) for found in outcome.methods},
        "acceptance": outcome.acceptance,
        "pays_from": outcome.break_even_acceptance,
        "costs": outcome.costs,
        "left_out": dict(outcome.left_out),
        "profile": str(path),
    }


def _export(engine: str, pair: Pair, tuned: list[exports.Tuned], chosen: str, err: Console, quiet: bool) -> None:
    names = exports.Names(pair.target.name, None if pair.draft is None else pair.draft.name)
    made = exports.export(engine, tuned, chosen, names)
    print(made.text)
    for lost in made.lost if not quiet else ():
        err.print(Text(f"note: {lost}", "quiet"), soft_wrap=True)
