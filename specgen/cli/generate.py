"""`specgen generate`: continues a prompt and shows the text while it is generated.

`output_writers` writes each answer, and what there is of it where Ctrl-C ends it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.types import LARGEST, SamplingParams
from specgen.cli.commands import check_outputs, holds_single_run
from specgen.cli.conversation import Conversation, Decoding
from specgen.cli.opening import Opening, check_grammar, show_what_decodes
from specgen.cli.options import DecodingGroup, GenerateOptions, GenerateOutput, GenerateSampling
from specgen.cli.output_writers import OutputWriter
from specgen.cli.prompt_input import PromptInput, check_text
from specgen.cli.prompts_file import PromptsFile, holds_prompts
from specgen.compare.prompts import ListedPrompt, load_prompts
from specgen.pair.prompts import Prompt, messages
from specgen.traces.writer import TraceWriter
from specgen.view import theme
from specgen.view.progress import Progress

if TYPE_CHECKING:
    from specgen.pair.pair import Pair


def generate(
    asked: GenerateOptions,
    models: DecodingGroup,
    sampling: GenerateSampling,
    output: GenerateOutput,
) -> None:
    """Continues the prompt and shows the output, or with --help-method describes the method. Raises
    SpecgenError for wrong options and RunError for failures while running."""
    if asked.help_method:
        _describe_method(asked.method, output)
        return
    params = sampling.params()
    check_grammar(params)
    opening = Opening.of(asked.method, asked.settings, models, params)
    _check_options(asked, params, output)
    prompts, prompt = _inputs(asked, output, models)

    err = theme.console(stderr=True, no_color=output.no_color)
    with ExitStack() as opened:
        trace = None
        if output.trace is not None:
            trace = opened.enter_context(closing(TraceWriter(output.trace)))
        _say_what_is_lost(asked, output, err)
        pair, profile = opening.open(err, quiet=output.quiet)
        opened.enter_context(pair)

        text = "" if prompt is None else _whole_text(prompt, err, quiet=output.quiet)
        trial_text = prompts[0].text if prompts else text
        name, settings, tuned = opening.decoding(pair, profile, trial_text, err, quiet=output.quiet)

        decoding = Decoding(name, settings, params, output)
        answers = _Answers(asked, pair, decoding, tuned, _where(pair, models), trace, err)
        if asked.file is not None and asked.prompt is None:
            _say_that_prompts_are_one_text(asked.file, text, err, quiet=output.quiet)
        if prompts is not None:
            answers.answer_each(prompts)
        elif prompt is not None:
            answers.answer(text)
        else:
            answers.converse(sampling.max_new_tokens)


@dataclass(frozen=True, slots=True)
class _Answers:
    """Answers what the user asked, decoded as `decoding` says. `tuned` and `where` are for the
    footer: see `OutputWriter`."""

    asked: GenerateOptions
    pair: Pair
    decoding: Decoding
    tuned: str
    where: str
    trace: TraceWriter | None
    err: Console

    def answer(self, text: str) -> None:
        """Answers one prompt."""
        prompt = messages(text, self.asked.system) if self.asked.chat else text
        writer = self._writer(prompt, self.decoding)
        _say_what_decodes(self.pair, self.decoding, self.err)
        writer.write()

    def answer_each(self, prompts: Sequence[ListedPrompt]) -> None:
        """Answers each prompt of --prompts."""
        file = PromptsFile(self.pair, prompts, self.asked, self.decoding, self.err)
        # not before the prompts are checked: a mistake is one line
        _say_what_decodes(self.pair, self.decoding, self.err)
        file.run(self._writer, self.trace)

    def converse(self, limit: int | None) -> None:
        """Answers what the user types, each answer of at most `limit` tokens (None: no limit)."""
        _say_what_decodes(self.pair, self.decoding, self.err)
        decoding = _with_limit_of_turns(self.decoding, limit)
        Conversation(self._writer, self.err, self.asked.system, decoding).run()

    def _writer(
        self, prompt: Prompt, decoding: Decoding, keys: Mapping[str, Any] | None = None
    ) -> OutputWriter:
        """Returns the writer of the answer to `prompt`, decoded as `decoding` says. What has to be
        measured first is measured now. Raises SpecgenError if the method cannot run."""
        pair = self.pair
        quiet = self.decoding.output.quiet
        is_recorded = self.decoding.output.record is not None
        request = pair.request(
            prompt, decoding.name, decoding.sampling, record=is_recorded, **decoding.settings
        )
        with Progress(self.err, quiet=quiet) as progress:
            progress.announce("preparing")
            run = pair.prepare(request)

        unused = pair.parts.unused(request.method.name, request.method.head)
        if unused is not None and not quiet:
            self.err.print(Text(unused), soft_wrap=True)

        first = self.decoding
        is_first = (decoding.name, decoding.settings) == (first.name, first.settings)
        tuned = self.tuned if is_first else ""
        return OutputWriter(
            pair, request, run, decoding.output, tuned, self.trace, self.where, keys
        )


def _describe_method(written: str | None, output: GenerateOutput) -> None:
    """Prints the description of the method in the value of --method, or of the default one."""
    from specgen.view.pair_report import method_card

    name = "" if written is None else methods.split(written)[0]
    method = methods.named(name or methods.DEFAULT_METHOD)
    method_card(theme.console(no_color=output.no_color), method)


def _inputs(
    asked: GenerateOptions, output: GenerateOutput, models: DecodingGroup
) -> tuple[list[ListedPrompt] | None, PromptInput | None]:
    """Returns the prompts of --prompts, or the one prompt; neither for a conversation. Raises
    SpecgenError if they cannot be read, or if an output would replace what is read."""
    prompts = None
    prompt = None
    if asked.prompts is not None:
        prompts = load_prompts(asked.prompts, all_turns=True, for_tuning=None)
    elif not _is_read_in_turns(asked, output):
        prompt = PromptInput(asked.prompt, asked.file, reads_stdin=not asked.no_stdin)
    inputs = [("--file", asked.file), ("--prompts", asked.prompts)]
    check_outputs({"--trace": output.trace}, inputs, models)
    return prompts, prompt


def _whole_text(prompt: PromptInput, err: Console, *, quiet: bool) -> str:
    """Waits for what is piped in, and returns the whole prompt. Prints why nothing was joined."""
    text = prompt.text()
    if prompt.note and not quiet:
        err.print(Text(prompt.note), soft_wrap=True)
    return text


def _where(pair: Pair, models: DecodingGroup) -> str:
    """Returns the target's device and dtype, if one of them was chosen for the user; else ""."""
    if "auto" not in (models.device, models.dtype):
        return ""
    return f"{pair.target.device} {pair.target.dtype_name}"


def _say_that_prompts_are_one_text(file: Path, text: str, err: Console, *, quiet: bool) -> None:
    """Prints, if the text of --file is one of prompts in JSON lines, that it is one prompt here."""
    if quiet or not holds_prompts(text):
        return
    note = f"{file} is continued as one text; --prompts {file} answers each of its prompts"
    err.print(Text(note))


def _with_limit_of_turns(decoding: Decoding, limit: int | None) -> Decoding:
    """Returns the decoding of a conversation: answers end at `limit` tokens, None for no limit."""
    if limit is not None:
        return decoding
    return replace(decoding, sampling=replace(decoding.sampling, max_new_tokens=LARGEST))


def _say_what_decodes(pair: Pair, decoding: Decoding, err: Console) -> None:
    """Prints the models, their device and dtype, the method, and how much of the text the draft
    model can draft; nothing with --quiet."""
    if decoding.output.quiet:
        return
    show_what_decodes(pair, decoding.name, decoding.settings, err)


def _check_options(
    asked: GenerateOptions, sampling: SamplingParams, output: GenerateOutput
) -> None:
    """Raises SpecgenError for a prompt beside --prompts, a record or log-probabilities that go
    nowhere, and for a system message without --chat or one that is not UTF-8."""
    if output.record is not None and output.trace is None and not output.json:
        raise SpecgenError(
            "--record distributions is given without --trace or --json",
            "Add --trace FILE.jsonl, or --json",
        )
    if sampling.logprobs is not None and asked.prompts is not None and output.trace is None:
        raise SpecgenError(
            "--logprobs is given with --prompts and without --trace", "Add --trace FILE.jsonl"
        )
    for prompt in (asked.prompt, asked.file):
        if asked.prompts is not None and prompt is not None:
            raise SpecgenError(
                f"--prompts {asked.prompts} and {prompt} are given", "Leave one of them out"
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
    """Prints that --trace replaces an earlier run of one prompt. Raises SpecgenError if the file
    holds the runs of several prompts."""
    if asked.prompts is not None or output.trace is None:
        return
    if holds_single_run(output.trace) and not output.quiet:
        err.print(
            Text(f"{output.trace} is written anew: the run that it holds is replaced", "quiet"),
            soft_wrap=True,
        )


def _is_read_in_turns(asked: GenerateOptions, output: GenerateOutput) -> bool:
    """Whether this is a conversation: the user types the messages on a terminal."""
    has_text = any(text is not None for text in (asked.prompt, asked.file, asked.prompts))
    return asked.chat and not has_text and _is_on_terminal() and not output.json


def _is_on_terminal() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))
