"""The command `specgen compare`, which measures methods against plain decoding on a pair of models and a set of prompts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from specgen.cli import options
from specgen.cli.error_reporting import reported
from specgen.cli.model_options import DecodingOptions

_METHODS = (
    "Methods separated by commas, settings after the name: svip,sd:k=8,lookup:policy=beta-ts. Default: all but joint. "
    "transformers and transformers-assisted are baselines."
)
_PROMPTS = "The prompts: YAML like examples.yaml (the default), JSON lines with prompt, or Spec-Bench's question.jsonl."
_LIMIT = "Use at most N prompts, taken from the categories in turn."
_TURNS = "Use all turns of a question, with plain decoding's answers between them, not only the first."


@reported
@options.grouped
def compare(
    methods: Annotated[list[str] | None, typer.Option("-m", metavar="LIST", help=_METHODS)] = None,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help=_PROMPTS)] = None,
    category: options.Category = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help=_LIMIT)] = None,
    turns: Annotated[bool, typer.Option(help=_TURNS)] = False,
    chat: options.CompareChat = False,
    repeats: Annotated[int, typer.Option(metavar="N", help="Run each prompt N times and use the median time.")] = 3,
    profile: options.Profile = None,
    *,
    models: DecodingOptions,
    sampling: options.SamplingOptions,
    output: options.CompareOutput,
    display: options.OutputOptions,
) -> int | None:
    """Measure methods against plain decoding and against transformers: speed, acceptance, is the output the target's?"""
    from specgen.base.files import examples_file
    from specgen.cli import profile_lookup
    from specgen.cli.compare_run import Comparison
    from specgen.cli.model_options import open_pair, show_overlap
    from specgen.cli.output_checks import check_outputs
    from specgen.compare.method_specs import EVERY, parse_specs
    from specgen.compare.prompts import load_prompts
    from specgen.compare.results import BenchmarkConfig
    from specgen.compare.resume import read_comparison
    from specgen.pair.records import TraceWriter
    from specgen.view import theme

    models = profile_lookup.with_exit(models, profile)
    prompts = prompts or examples_file()
    check_outputs(output.files, [("--prompts", prompts), ("--profile", profile)], models)
    err = theme.console(stderr=True, no_color=display.no_color)
    with ExitStack() as opened:
        path = output.trace_path  # locked before it is read
        trace = None if path is None else opened.enter_context(TraceWriter(path, resumes=output.resume is not None))
        recorded = None if output.resume is None else read_comparison(output.resume)
        specs = recorded.specs() if recorded is not None and not methods else parse_specs(methods or [EVERY])
        config = BenchmarkConfig(
            specs,
            load_prompts(prompts, category=category, limit=limit, all_turns=turns),
            repeats,
            sampling.params(),
            chat,
            output.record is not None,
            output.perplexity or (recorded is not None and recorded.has("perplexity")),
            output.energy or (recorded is not None and recorded.has("energy")),
        )
        choices = [spec.choice for spec in specs]
        parallel = any(choice.method.is_parallel for choice in choices)
        in_turn = [choice for choice in choices if choice.method.needs_draft_model and not choice.method.is_parallel]
        sequential = not all(choice.settings.drafts_text for choice in in_turn)
        tuned_draft = partial(profile_lookup.with_tuned_draft, sampling=config.sampling, folder=profile)
        loading = open_pair(models, err, quiet=display.quiet, parallel=parallel, sequential=sequential, tuned_draft=tuned_draft)
        pair = opened.enter_context(loading)
        quiet = display.quiet or recorded is not None
        show_overlap(pair, err, quiet=quiet or not (parallel or sequential))
        found = profile_lookup.find(pair, config.sampling, profile, err, quiet=quiet)
        if recorded is None:  # a resumed comparison keeps the settings of its trace
            specs = profile_lookup.tuned_specs(found, specs, err, quiet=quiet)
        config = replace(config, specs=profile_lookup.with_origin(found, specs))
        return Comparison(pair, config, recorded, trace, output, display).run()
