"""`specgen generate`: continues a prompt and shows the text while it is generated."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.text import Text

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.settings import parse_pairs
from specgen.base.types import LARGEST
from specgen.cli.commands import check_outputs
from specgen.cli.conversation import Conversation, Decoding
from specgen.cli.opening import choose, choose_found, models_in_words, open_pair, show_overlap
from specgen.cli.options import DecodingOptions, GenerateOptions, GenerateOutput, GenerateSampling
from specgen.cli.output_writers import OutputWriter
from specgen.cli.prompt_input import PromptInput, check_text
from specgen.pair.request import Prompt, messages
from specgen.traces.writer import TraceWriter
from specgen.view import theme
from specgen.view.pair_report import method_card
from specgen.view.progress import Progress

if TYPE_CHECKING:
    from specgen.methods.method import Method
    from specgen.pair.loading import Finding


def generate(asked: GenerateOptions, models: DecodingOptions, sampling: GenerateSampling, output: GenerateOutput) -> None:
    """Continues the prompt and shows the output, or with --help-method describes the method. Raises SpecgenError for wrong
    options and RunError for failures while running."""
    named, given = (None, {}) if asked.method is None else methods.split(asked.method)
    if asked.help_method:
        method_card(theme.console(no_color=output.no_color), methods.find(named or methods.DEFAULT_METHOD))
        return
    params, given = sampling.params(), {**given, **parse_pairs(asked.settings or [])}
    chosen = methods.find(methods.DEFAULT_METHOD if named is None else named)
    if chosen.needs_draft_model and not models.has_draft:
        raise chosen.without_part(models.target)
    by_text = methods.resolve(chosen, given).drafts_text
    record = output.record is not None
    if record and output.trace is None and not output.json:
        raise SpecgenError("--record distributions is given without --trace or --json", "Add --trace FILE.jsonl, or --json")
    _check_system(asked)
    is_read_in_turns = asked.chat and asked.prompt is None and asked.file is None and _is_on_terminal() and not output.json
    prompt = None if is_read_in_turns else PromptInput(asked.prompt, asked.file, reads_stdin=not asked.no_stdin)
    check_outputs({"--trace": output.trace}, [("--file", asked.file)], models)
    err, quiet = theme.console(stderr=True, no_color=output.no_color), output.quiet
    sequential = chosen.uses_draft_model and not chosen.is_parallel and not by_text
    with ExitStack() as opened:
        trace = None if output.trace is None else opened.enter_context(closing(TraceWriter(output.trace)))
        tuned_for = None if given else params
        pair, profile = open_pair(
            models,
            err,
            quiet=quiet,
            parallel=chosen.is_parallel,
            sequential=sequential,
            tuned_for=tuned_for,
            remembered=True,
            find=_looked_for(chosen, sequential=sequential),
        )
        opened.enter_context(pair)
        text = "" if prompt is None else prompt.text()
        name, values, tuned = choose(profile, named, given)
        if models.finds and profile is None and named is None:
            name = choose_found(pair, text, params, err, quiet=quiet)
        if tuned and models.finds and pair.draft is not None and methods.find(name).uses_draft_model:
            tuned += f", drafted by {pair.draft.name}"
        where = f"{pair.target.device} {pair.target.dtype_name}" if "auto" in (models.device, models.dtype) else ""

        def start(prompt: Prompt, decoding: Decoding) -> OutputWriter:
            request = pair.request(prompt, decoding.name, decoding.sampling, record=record, **decoding.settings)
            with Progress(err, quiet=quiet or not request.method.may_measure(request.settings)) as loading:
                loading.announce("preparing")
                run = pair.prepare(request)
            if (unused := pair.parts.unused(request.method)) is not None and not quiet:
                err.print(Text(unused), soft_wrap=True)
            by_profile = tuned if (decoding.name, decoding.settings) == (name, values) else ""
            return OutputWriter(pair, request, run, decoding.output, by_profile, trace, where)

        uses_draft = methods.find(name).uses_draft_model
        if not quiet:
            about = f"{models_in_words(pair, with_draft=uses_draft)}, {name}"
            err.print(Text(about, "quiet"), soft_wrap=True)
        if not quiet and uses_draft and values.get("translation") != "text":
            show_overlap(pair, err)
        decoding = Decoding(name, values, params, output)
        if is_read_in_turns:
            if sampling.max_new_tokens is None:
                decoding = replace(decoding, sampling=replace(params, max_new_tokens=LARGEST))
            Conversation(start, err, asked.system, decoding).run()
        else:
            start(messages(text, asked.system) if asked.chat else text, decoding).write()


def _check_system(asked: GenerateOptions) -> None:
    """Raises SpecgenError for a system message without --chat, or one that is not UTF-8."""
    if asked.system is None:
        return
    if not asked.chat:
        raise SpecgenError("--system is given without --chat", "Add --chat: a system message needs the chat template")
    check_text(asked.system, "--system")


def _looked_for(method: Method, *, sequential: bool) -> bool | Finding:
    """Returns what to look for on this machine that drafts for the method, as in `specgen.load`.

    `sequential`: the method runs a draft model in this process.
    """
    if method.head:
        return "heads"
    if not method.uses_draft_model:
        return False
    if not sequential:
        return "unloaded"
    return True if method.drafts_without_model else "untried"


def _is_on_terminal() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))
