"""`specgen generate`: continues a prompt and shows the text while it is generated."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
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
from specgen.cli.prompts_file import PromptsFile, holds_prompts
from specgen.compare.prompts import load_prompts
from specgen.pair.prompts import Prompt, messages
from specgen.traces.writer import TraceWriter
from specgen.view import theme
from specgen.view.progress import Progress

if TYPE_CHECKING:
    from specgen.methods.base import Method
    from specgen.pair.loading import Finding
    from specgen.pair.pair import Pair


def generate(
    asked: GenerateOptions,
    models: DecodingOptions,
    sampling: GenerateSampling,
    output: GenerateOutput,
) -> None:
    """Continues the prompt and shows the output, or with --help-method describes the method. Raises
    SpecgenError for wrong options and RunError for failures while running."""
    named, given = (None, {}) if asked.method is None else methods.split(asked.method)
    if asked.help_method:
        from specgen.view.pair_report import method_card

        method_card(
            theme.console(no_color=output.no_color), methods.find(named or methods.DEFAULT_METHOD)
        )
        return
    params = sampling.params()
    given = {**given, **parse_pairs(asked.settings or [])}
    chosen = methods.find(methods.DEFAULT_METHOD if named is None else named)
    if chosen.needs_draft_model and not models.has_draft:
        raise chosen.without_part(models.target)
    settings = methods.resolve(chosen, given)
    chosen.check_request(settings, params)
    by_text = settings.drafts_text
    record = output.record is not None
    _check_options(asked, output)
    prompts = (
        None
        if asked.prompts is None
        else load_prompts(asked.prompts, all_turns=True, for_tuning=None)
    )
    is_read_in_turns = _is_read_in_turns(asked, output)
    prompt = None
    if prompts is None and not is_read_in_turns:
        prompt = PromptInput(asked.prompt, asked.file, reads_stdin=not asked.no_stdin)
    check_outputs(
        {"--trace": output.trace}, [("--file", asked.file), ("--prompts", asked.prompts)], models
    )
    err = theme.console(stderr=True, no_color=output.no_color)
    quiet = output.quiet
    sequential = chosen.uses_draft_model and not chosen.is_parallel and not by_text
    with ExitStack() as opened:
        trace = (
            None
            if output.trace is None
            else opened.enter_context(closing(TraceWriter(output.trace)))
        )
        _say_what_is_lost(asked, output, err)
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
            is_method_named=named is not None,
        )
        opened.enter_context(pair)
        text = "" if prompt is None else prompt.text()
        if prompt is not None and prompt.note and not quiet:
            err.print(Text(prompt.note), soft_wrap=True)
        name, values, tuned = choose(profile, named, given)
        if models.finds and profile is None and named is None:
            name = choose_found(
                pair, prompts[0].text if prompts else text, params, err, quiet=quiet
            )
        if (
            tuned
            and models.finds
            and pair.draft is not None
            and methods.find(name).uses_draft_model
        ):
            tuned += f", drafted by {pair.draft.name}"
        where = (
            f"{pair.target.device} {pair.target.dtype_name}"
            if "auto" in (models.device, models.dtype)
            else ""
        )

        def start(
            prompt: Prompt, decoding: Decoding, keys: Mapping[str, Any] | None = None
        ) -> OutputWriter:
            request = pair.request(
                prompt, decoding.name, decoding.sampling, record=record, **decoding.settings
            )
            with Progress(
                err, quiet=quiet or not request.method.may_measure(request.settings)
            ) as loading:
                loading.announce("preparing")
                run = pair.prepare(request)
            if (
                unused := pair.parts.unused(request.method.name, request.method.head)
            ) is not None and not quiet:
                err.print(Text(unused), soft_wrap=True)
            by_profile = tuned if (decoding.name, decoding.settings) == (name, values) else ""
            return OutputWriter(pair, request, run, decoding.output, by_profile, trace, where, keys)

        if asked.file is not None and asked.prompt is None and holds_prompts(text) and not quiet:
            err.print(
                Text(
                    f"{asked.file} is continued as one text; --prompts {asked.file} "
                    "answers each of its prompts"
                )
            )
        decoding = Decoding(name, values, params, output)
        say = partial(_say_what_decodes, pair, name, values, err, quiet=quiet)
        if is_read_in_turns:
            say()
            Conversation(
                start, err, asked.system, _with_limit_of_turns(decoding, sampling.max_new_tokens)
            ).run()
        elif prompts is not None:
            answers = PromptsFile(pair, prompts, asked, decoding, err)
            say()  # a mistake in the options or in a prompt is one line
            answers.run(start, trace)
        else:
            answer = start(messages(text, asked.system) if asked.chat else text, decoding)
            say()
            answer.write()


def _with_limit_of_turns(decoding: Decoding, limit: int | None) -> Decoding:
    """Returns how a conversation decodes: without a limit on answers, unless the user gave one."""
    if limit is not None:
        return decoding
    return replace(decoding, sampling=replace(decoding.sampling, max_new_tokens=LARGEST))


def _say_what_decodes(
    pair: Pair, name: str, settings: Mapping[str, object], err: Console, *, quiet: bool
) -> None:
    """Prints the models, their device and dtype, and the method, and how much of the text the draft
    model can draft. Nothing with `quiet`."""
    if quiet:
        return
    uses_draft = methods.find(name).uses_draft_model
    err.print(
        Text(f"{models_in_words(pair, with_draft=uses_draft)}, {name}", "quiet"), soft_wrap=True
    )
    if uses_draft and settings.get("translation") != "text":
        show_overlap(pair, err)


def _check_options(asked: GenerateOptions, output: GenerateOutput) -> None:
    """Raises SpecgenError for a prompt beside --prompts, a record that goes nowhere, and for a
    system message without --chat or one that is not UTF-8."""
    if output.record is not None and output.trace is None and not output.json:
        raise SpecgenError(
            "--record distributions is given without --trace or --json",
            "Add --trace FILE.jsonl, or --json",
        )
    for given in (asked.prompt, asked.file):
        if asked.prompts is not None and given is not None:
            raise SpecgenError(
                f"--prompts {asked.prompts} and {given} are given", "Leave one of them out"
            )
    if asked.system is None:
        return
    if not asked.chat:
        raise SpecgenError(
            "--system is given without --chat",
            "Add --chat: a system message needs the chat template",
        )
    check_text(asked.system, "--system")


def _say_what_is_lost(asked: GenerateOptions, output: GenerateOutput, err: Console) -> None:
    """Prints that a recorded run is replaced by that of one prompt. Raises SpecgenError if the
    trace holds what is not."""
    if asked.prompts is not None or output.trace is None:
        return
    if _is_recorded(output.trace) and not output.quiet:
        err.print(
            Text(f"{output.trace} is written anew: it holds another run", "quiet"), soft_wrap=True
        )


def _is_recorded(path: Path) -> bool:
    """Whether a file holds a run of `generate`, which a new one may replace.

    Raises SpecgenError if it holds the runs of several prompts, of `generate --prompts` or of
    `compare`: they take long.
    """
    if not path.is_file():  # a pipe cannot be read without its reader's loss
        return False
    try:
        with path.open("rb") as file:
            start = json.loads(file.readline())
    except (OSError, ValueError):
        return False
    if not isinstance(start, dict):
        return False
    if start.get("prompt_index") is not None:
        problem = f"the trace {path} holds the runs of several prompts, which would be lost"
        raise SpecgenError(problem, "Name another file, or delete this one")
    return True


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


def _is_read_in_turns(asked: GenerateOptions, output: GenerateOutput) -> bool:
    """Whether the user types messages: a conversation."""
    has_text = any(given is not None for given in (asked.prompt, asked.file, asked.prompts))
    return asked.chat and not has_text and _is_on_terminal() and not output.json


def _is_on_terminal() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))
