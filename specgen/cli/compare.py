"""The command `specgen compare`, which measures methods against plain decoding on a pair of models and a set of prompts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from specgen.base.errors import SpecgenError
from specgen.base.files import file_identity
from specgen.cli import options
from specgen.cli.error_reporting import reported
from specgen.cli.model_options import DecodingOptions
from specgen.cli.options import shown

_METHODS = (
    "Methods separated by commas, settings after the name: svip,sd:k=8,lookup:policy=beta-ts. Default: all but joint. "
    "transformers and transformers-assisted are baselines."
)
_PROMPTS = "The prompts: YAML like examples.yaml (the default), JSON lines with prompt, or Spec-Bench's question.jsonl."
_LIMIT = "Use at most N prompts, taken from the categories in turn."
_TURNS = "Use all turns of a question, with plain decoding's answers between them, not only the first."
_PHASES = "Show the time for drafting, the length policy, verification and sampling."
_PREDICT = "Show the speedups predicted by EESD's Eq. 14 and by measured costs of the forward passes."
_RESUME = "Continue an interrupted comparison from its trace, and append to it."
_PAGE = "Write a self-contained page with all figures and an example of each method."


@dataclass(frozen=True, slots=True)
class CompareOutput:
    """What to measure, to display and to write to files. `resume` is the trace of an interrupted comparison, which is read first
    and then appended to. Paths that are None are not written.

    Raises SpecgenError for options that contradict each other.
    """

    by_category: Annotated[bool, shown(help="Show one row for each category as well.")] = False
    phases: Annotated[bool, shown(help=_PHASES)] = False
    predict: Annotated[bool, shown(help=_PREDICT)] = False
    perplexity: options.Perplexity = False
    energy: options.Energy = False
    trace: options.Trace = None
    record: options.Record = None
    resume: Annotated[Path | None, shown(metavar="FILE.jsonl", help=_RESUME)] = None
    csv: Annotated[Path | None, shown(metavar="FILE", help="Write all figures to a CSV file.")] = None
    svg: Annotated[Path | None, shown(metavar="FILE", help="Write the table as an SVG image.")] = None
    html: Annotated[Path | None, shown(metavar="FILE", help=_PAGE)] = None

    def __post_init__(self) -> None:
        if self.trace is not None and self.resume is not None and file_identity(self.trace) != file_identity(self.resume):
            raise SpecgenError(f"--trace {self.trace} differs from --resume {self.resume}", "--resume appends to its own file")
        if options.recorded(self.record) and self.trace_path is None:
            raise SpecgenError("--record distributions needs --trace", "Name the trace too: --trace FILE.jsonl")

    @property
    def files(self) -> dict[str, Path | None]:
        """The paths of the files to write, by their options."""
        trace = {"--trace": self.trace} if self.resume is None else {"--resume": self.resume}
        return {**trace, "--csv": self.csv, "--svg": self.svg, "--html": self.html}

    @property
    def trace_path(self) -> Path | None:
        return self.resume or self.trace


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
    output: CompareOutput,
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
            options.recorded(output.record),
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
