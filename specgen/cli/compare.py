"""`specgen compare`: measures methods against plain decoding on a pair of models and a set of prompts."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.cli import options
from specgen.cli.error_reporting import reported
from specgen.errors import SpecgenError
from specgen.types import SamplingParams

if TYPE_CHECKING:
    from specgen.cli.compare_run import CompareRequest
    from specgen.cli.model_options import ModelOptions


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
    from specgen.cli.compare_run import CompareRequest, DisplayOptions, OutputFiles
    from specgen.cli.model_options import ModelOptions
    from specgen.compare.method_specs import EVERY, parse_specs
    from specgen.compare.prompts import load_prompts
    from specgen.compare.resume import read_comparison

    models = ModelOptions(
        target, draft, device, draft_device, dtype, revision, draft_revision, trust_remote_code, offline, exit_layer
    )
    models = profile_lookup.with_exit(models, profile)
    recorded = read_comparison(resume) if resume is not None else None
    specs = recorded.specs() if recorded is not None and not methods else parse_specs(methods or [EVERY])
    loaded = load_prompts(prompts, category=category, limit=limit, all_turns=turns)
    sampling = SamplingParams(max_new_tokens, temperature, top_p, top_k, seed, (), ignore_eos)
    distributions = _records_distributions(record, trace or resume)
    display = DisplayOptions(by_category, phases, predict, json, quiet, no_color)
    files = OutputFiles(trace, resume, csv, svg, html)
    request = CompareRequest(specs, loaded, repeats, sampling, chat, distributions, perplexity, energy, display, files, recorded)
    return _run(models, request, profile)


def _records_distributions(record: list[str] | None, trace: Path | None) -> bool:
    requested = options.recorded(record)
    if requested and trace is None:
        raise SpecgenError("--record distributions needs --trace", "Name the trace too: --trace FILE.jsonl")
    return requested


def _run(models: ModelOptions, request: CompareRequest, profile: Path | None) -> int | None:
    from specgen.cli import profile_lookup
    from specgen.cli.compare_run import Comparison
    from specgen.cli.model_options import open_pair
    from specgen.ui import theme

    quiet = request.display.quiet
    err = theme.console(stderr=True, no_color=request.display.no_color)
    parallel = any(spec.is_parallel for spec in request.specs)
    with open_pair(models, err, quiet=quiet, parallel=parallel) as pair:
        if request.recorded is None:  # a resumed comparison keeps the settings of its trace
            found = profile_lookup.find(pair, request.sampling, profile, err, quiet=quiet)
            request = replace(request, specs=profile_lookup.tuned_specs(found, request.specs, err, quiet=quiet))
        with closing(Comparison(pair, request)) as comparison:
            return comparison.run()
