"""`specgen generate`: continues a prompt and shows the text while it is generated."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.interrupts import interrupts
from specgen.base.settings import parse_pairs
from specgen.cli import options
from specgen.cli.error_reporting import INTERRUPTED, reported
from specgen.cli.model_options import DecodingOptions, ModelOptions, open_pair, show_overlap
from specgen.methods.method import Method

if TYPE_CHECKING:
    from specgen.cli.output_writers import OutputWriter
    from specgen.decoding.run import Run
    from specgen.view.progress import Progress

LONGEST_PROMPT = 16 << 20  # bytes of standard input: more than any model's context


@reported
@options.grouped
def generate(
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT")] = None,
    method: Annotated[str | None, typer.Option("-m", metavar="NAME")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=options.HELP["set"])] = None,
    chat: Annotated[bool, typer.Option(help="Format the prompt with the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT")] = None,
    help_method: Annotated[bool, typer.Option()] = False,
    *,
    models: DecodingOptions,
    profile: options.Profile = None,
    sampling: options.SamplingOptions,
    stop: Annotated[list[str] | None, options.sampling(metavar="TEXT")] = None,
    output: options.GenerateOutput,
) -> int | None:
    """Continue a prompt. The tokens that the draft proposed are green, the target's own plain."""
    from rich.text import Text

    from specgen.cli import profile_lookup
    from specgen.cli.output_checks import check_outputs
    from specgen.cli.output_writers import OutputWriter
    from specgen.pair.records import TraceWriter
    from specgen.view import theme
    from specgen.view.pair_report import method_card
    from specgen.view.progress import Progress

    if help_method:
        method_card(theme.console(no_color=output.no_color), methods.find(methods.DEFAULT_METHOD if method is None else method))
        return None
    models = profile_lookup.with_exit(models, profile)
    params, given = sampling.params(stop or ()), parse_pairs(settings or [])
    chosen = _method(method, models)
    by_text = methods.resolve(chosen, given).drafts_text
    record = output.record is not None
    if record and output.trace is None and not output.json:
        raise SpecgenError("--record distributions is given without --trace or --json", "Add --trace FILE.jsonl, or --json")
    text = _prompt(prompt, system, chat=chat)
    check_outputs({"--trace": output.trace}, [("--profile", profile)], models)
    err, quiet = theme.console(stderr=True, no_color=output.no_color), output.quiet
    parallel = chosen.is_parallel if method or settings else profile_lookup.likely_parallel(models, profile)
    sequential = chosen.uses_draft_model and not parallel and not by_text
    with ExitStack() as opened:
        trace = None if output.trace is None else opened.enter_context(TraceWriter(output.trace))
        tuned_draft = None if settings else partial(profile_lookup.with_tuned_draft, sampling=params, folder=profile)
        loading_pair = open_pair(models, err, quiet=quiet, parallel=parallel, sequential=sequential, tuned_draft=tuned_draft)
        pair = opened.enter_context(loading_pair)
        tuned = None if settings else profile_lookup.find(pair, params, profile, err, quiet=quiet)
        choice = profile_lookup.choose(tuned, method, given)
        chosen = methods.find(choice.method)
        resolved = methods.resolve(chosen, choice.settings)
        show_overlap(pair, err, quiet=quiet or not chosen.uses_draft_model or resolved.drafts_text)
        with Progress(err, quiet=quiet or not chosen.may_measure(resolved)) as loading:
            loading.announce("preparing")
            formatted = pair.tokenizer.chat(text, system) if chat else text
            request = pair.request(formatted, choice.method, params, record=record, **choice.settings)
            pair.prepare(request)
            run = pair.run(request)
        if (unused := pair.parts.unused(chosen)) is not None and not quiet:
            err.print(Text(unused), soft_wrap=True)
        return _run(run, OutputWriter(pair, request, run, output, choice.tuned, trace), Progress(err, quiet=quiet))


def _method(name: str | None, models: ModelOptions) -> Method:
    """Returns the requested method, or the default one if `name` is None.

    Raises SpecgenError if the name is followed by settings, and if the method needs a draft model that is missing.
    """
    name = methods.DEFAULT_METHOD if name is None else name
    bare, *with_settings = name.split(":")
    if bare in methods.METHODS and with_settings:
        hint = " ".join(["-m", bare, *(f"--set {setting}" for setting in with_settings)])
        raise SpecgenError(f"--method is {name!r}: a name with settings, as for compare --methods", f"Write {hint}")
    chosen = methods.find(name)
    if chosen.needs_draft_model and not models.has_draft:
        raise chosen.without_part(models.target)
    return chosen


def _prompt(given: str | None, system: str | None, *, chat: bool) -> str:
    """Returns the prompt: the argument, or standard input if it is missing or `-`. Raises SpecgenError for an empty prompt, text
    that is not UTF-8, or a system message without --chat."""
    text = _standard_input(requested=given == "-") if given is None or given == "-" else given
    if system is not None and not chat:
        raise SpecgenError("--system is given without --chat", "Add --chat: a system message needs the chat template")
    for name, each in (("the prompt", text), ("--system", system or "")):
        if any("\ud800" <= character <= "\udfff" for character in each):  # how Python represents undecodable bytes
            raise SpecgenError(f"{name} is not UTF-8", "Convert it first, for instance with iconv")
    if not text.strip():
        raise SpecgenError("the prompt is empty", "Give the model a text to continue")
    return text


def _standard_input(*, requested: bool) -> str:
    """Returns all of standard input, without the line feed at its end.

    If standard input is a terminal, it is read only if `requested` (the prompt was given as `-`). Raises SpecgenError otherwise,
    and for more than `LONGEST_PROMPT` bytes.
    """
    if sys.stdin is None or (sys.stdin.isatty() and not requested):
        raise SpecgenError("there is no prompt", 'Give one: specgen generate "def fibonacci(n):", or pipe it in')
    data = sys.stdin.buffer.read(LONGEST_PROMPT + 1)
    if len(data) > LONGEST_PROMPT:
        raise SpecgenError(f"the prompt on standard input is longer than {LONGEST_PROMPT >> 20} MiB", "Give a part of it")
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        problem = f"the prompt on standard input is not UTF-8 (at byte {error.start:,})"
        raise SpecgenError(problem, "Convert it first, for instance with iconv") from error


def _run(run: Run, writer: OutputWriter, progress: Progress) -> int | None:
    from specgen.view.progress import reading_prompt

    interrupted = False
    with interrupts.caught():
        try:
            with interrupts.held():
                writer.start()
            with reading_prompt(progress):
                for round_ in run.rounds():
                    with interrupts.held():
                        progress.clear()
                        writer.add(round_)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            with interrupts.held():
                writer.end_text()
        with interrupts.held():
            writer.finish("interrupted" if interrupted else run.finish_reason or "length")
    return INTERRUPTED if interrupted else None
