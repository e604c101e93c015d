"""`specgen generate`: text as it is committed, and what happened on the way."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specgen import methods
from specgen.cli import options
from specgen.cli.error_reporting import INTERRUPTED, reported
from specgen.errors import SpecgenError
from specgen.settings import parse_pairs
from specgen.types import SamplingParams

if TYPE_CHECKING:
    from specgen.cli.model_options import ModelOptions
    from specgen.cli.output_writers import Output
    from specgen.pair import Pair


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What was asked for, checked as far as that can be done without a model."""

    prompt: str
    method: str
    settings: Mapping[str, object]
    sampling: SamplingParams
    chat: bool
    system: str | None
    record: bool


@reported
def generate(
    prompt: options.Prompt = None,
    method: options.MethodName = None,
    settings: options.Settings = None,
    chat: options.Chat = False,
    system: options.System = None,
    help_method: options.HelpMethod = False,
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
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    rounds: options.Rounds = False,
    trace: options.Trace = None,
    perplexity: options.Perplexity = False,
    energy: options.Energy = False,
    record: options.Record = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
) -> int | None:
    """Write on from a prompt: the draft's accepted tokens in green, the target's own plain."""
    from specgen.cli import profile_lookup
    from specgen.cli.model_options import ModelOptions, open_pair  # here, not above: --help has no need of Rich's consoles
    from specgen.cli.output_writers import Output, check_writable
    from specgen.ui import theme
    from specgen.ui.terminal import method_catalogue

    if help_method:
        method_catalogue.method_card(theme.console(no_color=no_color), methods.find(method or "svip"))
        return None
    models = ModelOptions(
        target, draft, device, draft_device, dtype, revision, draft_revision, trust_remote_code, offline, exit_layer
    )
    models = profile_lookup.with_exit(models, profile)
    sampling = SamplingParams(max_new_tokens, temperature, top_p, top_k, seed, tuple(stop or ()), ignore_eos)
    chosen = _method(method, models)
    recorded = _recorded(record, has_record=trace is not None or json)
    request = _check(prompt, chosen, parse_pairs(settings or []), sampling, chat, system, recorded)
    if trace is not None:
        check_writable(trace)
    err = theme.console(stderr=True, no_color=no_color)
    parallel = chosen.is_parallel if method or settings else profile_lookup.likely_parallel(models, profile)
    with open_pair(models, err, quiet=quiet, parallel=parallel) as pair:
        kept = None if settings else profile_lookup.find(pair, sampling, profile, err, quiet=quiet)
        choice = profile_lookup.choose(kept, pair, method, request.settings)
        request = replace(request, method=choice.method, settings=choice.settings)
        return _run(pair, request, Output(rounds, json, trace, quiet, no_color, perplexity, energy, choice.tuned))


def _method(name: str | None, models: ModelOptions) -> methods.Method:
    """The one that is asked for, or the usual one. Refused where the models lack what it needs."""
    chosen = methods.find(name or methods.default_name(has_draft_model=models.has_draft))
    if chosen.needs_draft_model and not models.has_draft:
        raise methods.no_draft_model(chosen)
    if chosen.needs_exit_layer and models.has_no_exit:
        raise methods.no_exit_layer(chosen, models.target)
    return chosen


def _recorded(record: list[str] | None, *, has_record: bool) -> bool:
    wanted = options.recorded(record)
    if wanted and not has_record:
        raise SpecgenError("--record distributions stands without a record", "Name one: --trace FILE.jsonl, or --json")
    return wanted


def _check(
    prompt: str | None,
    method: methods.Method,
    settings: dict[str, str],
    sampling: SamplingParams,
    chat: bool,
    system: str | None,
    record: bool,
) -> GenerateRequest:
    methods.resolve(method, settings)
    if system is not None and not chat:
        raise SpecgenError("--system stands without --chat", "Add --chat: a system turn needs the model's chat template")
    for name, argument in (("the prompt", prompt), ("--system", system)):
        if argument is not None and not _is_utf8(argument):
            raise SpecgenError(f"{name} is not UTF-8", "Convert it first, for instance with iconv")
    text = _standard_input(asked_for=prompt == "-") if prompt in (None, "-") else str(prompt)
    if not text.strip():
        raise SpecgenError("the prompt is empty", "Give the model something to go on from")
    return GenerateRequest(text, method.name, settings, sampling, chat, system, record)


def _is_utf8(argument: str) -> bool:
    """False where Python found bytes on the command line that it could not decode, and smuggles them in surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in argument)


def _standard_input(*, asked_for: bool) -> str:
    """All of it, less the line feed that echo and editors put at the end."""
    if sys.stdin is None or (sys.stdin.isatty() and not asked_for):
        raise SpecgenError("there is no prompt", 'Give one: specgen generate "def fibonacci(n):", or pipe it in')
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise SpecgenError(
            f"the prompt on standard input is not UTF-8 (at byte {error.start:,})",
            "Convert it first, for instance with iconv",
        ) from error


def _run(pair: Pair, request: GenerateRequest, output: Output) -> int | None:
    from specgen.cli.interrupts import Interrupts
    from specgen.cli.output_writers import OutputWriter
    from specgen.ui import theme
    from specgen.ui.terminal.loading_line import LoadingLine

    prompt = pair.tokenizer.chat(request.prompt, request.system) if request.chat else request.prompt
    silent = output.quiet or not methods.find(request.method).may_measure
    with LoadingLine(theme.console(stderr=True, no_color=output.no_color), quiet=silent) as loading:
        loading.still("getting ready")
        plan = pair.plan(prompt, request.method, request.sampling, record=request.record, **request.settings)
    interrupted = False
    with closing(OutputWriter(pair, plan, output)) as sink, Interrupts() as interrupts:
        try:
            with interrupts.held():
                sink.start()
            for round_ in plan.run.rounds():
                with interrupts.held():
                    sink.add(round_)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            with interrupts.held():
                sink.end_text()
        with interrupts.held():
            sink.finish("interrupted" if interrupted else plan.run.finish_reason or "length")
    return INTERRUPTED if interrupted else None
