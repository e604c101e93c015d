"""`specgen generate`: continues a prompt and shows the text while it is generated."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from rich.text import Text

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.schema import read_text
from specgen.base.settings import parse_pairs
from specgen.cli.commands import check_outputs
from specgen.cli.conversation import Conversation
from specgen.cli.opening import choose, choose_found, open_pair, show_overlap
from specgen.cli.options import DecodingOptions, GenerateOptions, GenerateOutput, GenerateSampling
from specgen.cli.output_writers import OutputWriter
from specgen.pair.request import Prompt, messages
from specgen.traces.writer import TraceWriter
from specgen.view import theme
from specgen.view.pair_report import method_card
from specgen.view.progress import Progress

LONGEST_PROMPT = 16 << 20  # bytes of standard input: more than any model's context


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
    is_read_in_turns = asked.chat and asked.prompt is None and asked.file is None and _is_on_terminal() and not output.json
    text = "" if is_read_in_turns else _prompt(asked.prompt, asked.file, asked.system, chat=asked.chat)
    check_outputs({"--trace": output.trace}, [("--file", asked.file)], models)
    err, quiet = theme.console(stderr=True, no_color=output.no_color), output.quiet
    sequential = chosen.uses_draft_model and not chosen.is_parallel and not by_text
    with ExitStack() as opened:
        trace = None if output.trace is None else opened.enter_context(closing(TraceWriter(output.trace)))
        tuned_for = None if given else params
        pair, profile = open_pair(
            models, err, quiet=quiet, parallel=chosen.is_parallel, sequential=sequential, tuned_for=tuned_for, remembered=True
        )
        opened.enter_context(pair)
        name, values, tuned = choose(profile, named, given)
        if models.finds and profile is None and named is None:
            name = choose_found(pair, text, err, quiet=quiet)
        if tuned and models.finds and pair.draft is not None and methods.find(name).uses_draft_model:
            tuned += f", drafted by {pair.draft.name}"
        where = f"{pair.target.device} {pair.target.dtype_name}" if "auto" in (models.device, models.dtype) else ""

        def start(prompt: Prompt, method: str, settings: Mapping[str, object], shown: GenerateOutput) -> OutputWriter:
            request = pair.request(prompt, method, params, record=record, **settings)
            with Progress(err, quiet=quiet or not request.method.may_measure(request.settings)) as loading:
                loading.announce("preparing")
                run = pair.prepare(request)
            if (unused := pair.parts.unused(request.method)) is not None and not quiet:
                err.print(Text(unused), soft_wrap=True)
            by_profile = tuned if (method, settings) == (name, values) else ""
            return OutputWriter(pair, request, run, shown, by_profile, trace, where)

        if not quiet and methods.find(name).uses_draft_model and values.get("translation") != "text":
            show_overlap(pair, err)
        if is_read_in_turns:
            Conversation(start, err, asked.system, name, values, output).run()
        else:
            start(messages(text, asked.system) if asked.chat else text, name, values, output).write()


def _is_on_terminal() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def _prompt(given: str | None, file: Path | None, system: str | None, *, chat: bool) -> str:
    """Returns the prompt: the argument, or standard input if it is missing or `-`. Raises SpecgenError for an empty prompt, text
    that is not UTF-8, or a system message without --chat."""
    if file is not None and given is not None:
        raise SpecgenError(f"--file {file} and a prompt are given", "Leave one of them out")
    if file is not None:
        text = read_text(file, "prompt", largest=LONGEST_PROMPT).removesuffix("\n")
    else:
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
    and for more than `LONGEST_PROMPT` bytes. A byte that is not UTF-8 becomes a surrogate, as in arguments.
    """
    if sys.stdin is None or (sys.stdin.isatty() and not requested):
        raise SpecgenError(
            "there is no prompt", 'Give one: specgen generate "def fibonacci(n):", pipe it in, or chat: specgen generate --chat'
        )
    data = sys.stdin.buffer.read(LONGEST_PROMPT + 1)
    if len(data) > LONGEST_PROMPT:
        raise SpecgenError(f"the prompt on standard input is longer than {LONGEST_PROMPT >> 20} MiB", "Give a part of it")
    return data.decode("utf-8", "surrogateescape").removesuffix("\n").removesuffix("\r")
