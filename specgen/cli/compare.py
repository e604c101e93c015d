"""`specgen compare`: which method, on this pair and these prompts?"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.cli import options
from specgen.cli.error_reporting import reported
from specgen.errors import SpecgenError
from specgen.types import SamplingParams

if TYPE_CHECKING:
    from specgen.cli.compare_run import Files, Look
    from specgen.cli.model_options import ModelOptions
    from specgen.compare.method_specs import MethodSpec
    from specgen.compare.prompts import Prompt
    from specgen.compare.resume import Earlier


@dataclass(frozen=True, slots=True)
class CompareRequest:
    """What was asked for, checked as far as that can be done without a model."""

    specs: list[MethodSpec]
    prompts: list[Prompt]
    repeats: int
    sampling: SamplingParams
    chat: bool
    record: bool
    perplexity: bool
    energy: bool
    look: Look
    files: Files
    earlier: Earlier | None  # what a trace that is resumed holds

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise SpecgenError(f"--repeats is {self.repeats}", "It has to be a whole number of at least 1")


@reported
def compare(
    methods: options.CompareMethods = None,
    prompts: options.Prompts = None,
    category: options.Category = None,
    limit: options.Limit = None,
    turns: options.Turns = False,
    chat: options.CompareChat = False,
    repeats: options.Repeats = 3,
    by_category: options.ByCategory = False,
    phases: options.Phases = False,
    predict: options.Predict = False,
    perplexity: options.Perplexity = False,
    energy: options.Energy = False,
    target: options.Target = None,
    draft: options.Draft = None,
    device: options.Device = "auto",
    draft_device: options.DraftDevice = None,
    dtype: options.Dtype = "auto",
    revision: options.Revision = None,
    draft_revision: options.DraftRevision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    offline: options.Offline = False,
    exit_layer: options.ExitLayer = None,
    profile: options.Profile = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    seed: options.Seed = None,
    ignore_eos: options.IgnoreEos = False,
    trace: options.Trace = None,
    record: options.Record = None,
    resume: options.Resume = None,
    json: options.Json = False,
    csv: options.Csv = None,
    svg: options.Svg = None,
    html: options.Html = None,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
) -> int | None:
    """Measure methods against plain decoding and against transformers: speed, acceptance, is the output the target's?"""
    from specgen.cli import profile_lookup
    from specgen.cli.compare_run import Files, Look
    from specgen.cli.model_options import ModelOptions
    from specgen.compare.prompts import load_prompts

    models = ModelOptions(
        target, draft, device, draft_device, dtype, revision, draft_revision, trust_remote_code, offline, exit_layer
    )
    models = profile_lookup.with_exit(models, profile)
    specs, earlier = _specs(methods, resume)
    loaded = load_prompts(prompts, category=category, limit=limit, all_turns=turns)
    sampling = SamplingParams(max_new_tokens, temperature, top_p, top_k, seed, (), ignore_eos)
    recorded = _recorded(record, trace or resume)
    look, files = Look(by_category, phases, predict, json, quiet, no_color), Files(trace, resume, csv, svg, html)
    request = CompareRequest(specs, loaded, repeats, sampling, chat, recorded, perplexity, energy, look, files, earlier)
    return _measured(models, request, profile)


def _specs(names: list[str] | None, resume: Path | None) -> tuple[list[MethodSpec], Earlier | None]:
    """The methods to compare, those of the trace to go on with where none are named, and what that trace holds."""
    from specgen.compare.method_specs import EVERY, parse_specs
    from specgen.compare.resume import read_earlier

    earlier = read_earlier(resume) if resume is not None else None
    return earlier.specs() if earlier is not None and not names else parse_specs(names or [EVERY]), earlier


def _measured(models: ModelOptions, request: CompareRequest, profile: Path | None) -> int | None:
    from specgen.cli import profile_lookup
    from specgen.cli.compare_run import Comparison
    from specgen.cli.model_options import open_pair
    from specgen.ui import theme

    quiet = request.look.quiet
    err = theme.console(stderr=True, no_color=request.look.no_color)
    parallel = any(spec.is_parallel for spec in request.specs)
    with open_pair(models, err, quiet=quiet, parallel=parallel) as pair:
        if request.earlier is None:  # a trace is gone on with as it was begun
            kept = profile_lookup.find(pair, request.sampling, profile, err, quiet=quiet)
            request = replace(request, specs=profile_lookup.tuned_specs(kept, request.specs, err, quiet=quiet))
        with closing(Comparison(pair, request)) as comparison:
            return comparison.run()


def _recorded(record: list[str] | None, trace: Path | None) -> bool:
    wanted = options.recorded(record)
    if wanted and trace is None:
        raise SpecgenError("--record distributions stands without --trace", "Name the trace too: --trace FILE.jsonl")
    return wanted
