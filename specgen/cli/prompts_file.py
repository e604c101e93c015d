"""`specgen generate --prompts FILE`: answers each prompt of a file, with the models loaded once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from specgen.base import schema
from specgen.base.errors import SpecgenError
from specgen.base.machine import versions
from specgen.base.text import counted, print_json, print_result
from specgen.cli.conversation import Decoding
from specgen.compare.prompts import ListedPrompt
from specgen.pair.prompts import messages
from specgen.view.progress import Progress

if TYPE_CHECKING:
    from specgen.cli.options import GenerateOptions
    from specgen.cli.output_writers import OutputWriter
    from specgen.methods.base import Request
    from specgen.pair.pair import Pair
    from specgen.traces.reader import TracedRun
    from specgen.traces.writer import TraceWriter

# Makes the writer of an answer, whose lines in traces get the keys in the mapping.
Start = Callable[[Any, Decoding, Mapping[str, Any]], "OutputWriter"]


class PromptsFile:
    """Answers prompts one after the other; of a question with several turns the first. An
    interrupted run is continued from its trace by the same command.

    Raises SpecgenError if one of the prompts cannot be answered, for instance because it is too
    long.
    """

    def __init__(
        self,
        pair: Pair,
        prompts: Sequence[ListedPrompt],
        asked: GenerateOptions,
        decoding: Decoding,
        err: Console,
    ) -> None:
        self._prompts = [prompt for prompt in prompts if not prompt.previous_turns]
        self._later_turns = len(prompts) - len(self._prompts)
        self._pair = pair
        self._asked = asked
        self._err = err
        self._output = decoding.output
        self._decoding = decoding
        if decoding.output.json:  # one line a prompt, and no footers
            self._decoding = replace(decoding, output=replace(decoding.output, quiet=True))
        self._requests = [self._request(prompt) for prompt in self._prompts]
        self._finished: list[TracedRun] = []  # of the first prompts, from the trace

    def run(self, start: Start, trace: TraceWriter | None) -> None:
        """Answers all prompts. Answers in the trace of an interrupted run are shown again, so that
        standard output holds all. Raises SpecgenError if the trace holds another interrupted run,
        and as `OutputWriter.write`."""
        if trace is not None and self._output.trace is not None:
            self._continue(self._output.trace, trace)
        if self._later_turns:
            self._say(
                f"{counted(self._later_turns, 'later turn')} left out: the first of each "
                "question is answered"
            )
        is_shown = not self._output.json
        is_silent = self._output.quiet or is_shown or sys.stdout.isatty()
        with Progress(self._err, quiet=is_silent) as progress:
            for number, prompt in enumerate(self._prompts):
                title = f"prompt {number + 1} of {len(self._prompts)}"
                if prompt.name:
                    title += f": {prompt.name}"
                progress.announce(title)
                if is_shown:
                    self._say(title)
                if number < len(self._finished):
                    self._show(self._finished[number])
                    continue
                try:
                    start(self._messages(prompt), self._decoding, keys_of(prompt)).write()
                except KeyboardInterrupt:
                    progress.clear()
                    self._say(self._interruption(number))
                    raise
                if is_shown and not self._output.quiet:
                    self._err.print()

    def _continue(self, path: Path, trace: TraceWriter) -> None:
        """Takes over the finished runs in the trace, if this command wrote it and was interrupted.
        Its complete trace, and the run of a single prompt, are written anew. Raises SpecgenError if
        other answers would be lost."""
        if not path.is_file():
            return
        from specgen.traces.reader import read_trace  # imports pydantic

        runs: list[TracedRun] = []
        with suppress(SpecgenError):
            for run in read_trace(path):
                run.rounds.clear()
                runs.append(run)

        own = 0  # of the first runs
        for run, prompt, request in zip(runs, self._prompts, self._requests, strict=False):
            if not self._is_of(run.start, prompt, request):
                break
            own += 1
            if not _is_finished(run):
                break
            self._finished.append(run)

        if own < len(runs) and runs[-1].start.get("prompt_index") is not None:
            held = counted(sum(map(_is_finished, runs)), "finished answer")
            kind = "a run" if _is_finished(runs[-1]) else "an interrupted run"
            raise SpecgenError(
                (
                    f"the trace {path} holds {kind} of other prompts or options "
                    f"({runs[0].method}, {held}), which would be lost"
                ),
                "Name another file, or delete this one",
            )
        if len(self._finished) == len(self._prompts):  # nothing was interrupted
            self._finished.clear()
        if self._finished:
            trace.keep = self._finished[-1].end
            self._say(f"continuing {path}, which has {counted(len(self._finished), 'answer')}")
            return
        if runs:
            self._say(f"{path} is written anew: it holds nothing to continue")

    def _interruption(self, answered: int) -> str:
        hint = "with --trace FILE.jsonl the same command continues it"
        if self._output.trace is not None:
            hint = "the same command continues it"
        return f"Interrupted after {answered} of {counted(len(self._prompts), 'prompt')}; {hint}."

    def _messages(self, prompt: ListedPrompt) -> Any:
        return messages(prompt.text, self._asked.system) if self._asked.chat else prompt.text

    def _request(self, prompt: ListedPrompt) -> Request:
        decoding = self._decoding
        try:
            return self._pair.request(
                self._messages(prompt),
                decoding.name,
                decoding.sampling,
                record=False,
                **decoding.settings,
            )
        except SpecgenError as error:
            raise type(error)(f"{prompt.label}: {error.message}", error.hint) from error

    def _is_of(self, start: Mapping[str, Any], prompt: ListedPrompt, request: Request) -> bool:
        """Whether a trace's start line is that of a run of this request."""
        target = self._pair.target
        sampling = asdict(request.sampling) | {"stop": list(request.sampling.stop)}
        settings = request.method.as_dict(request.settings)
        pairs = [
            (start.get("prompt_index"), prompt.index),
            (start["prompt_ids"], request.prompt_ids),
            (start["method"], request.method.name),
            (start["target"], target.name),
            (start["device"], str(target.device)),
            (start["dtype"], target.dtype_name),
            (start["versions"], versions()),
            *(
                (start["sampling"].get(name), value)
                for name, value in sampling.items()
                if value is not None
            ),
            *(
                (start["settings"].get(name), value)
                for name, value in settings.items()
                if value != "auto"
            ),
        ]
        return all(before == now for before, now in pairs)

    def _show(self, run: TracedRun) -> None:
        assert run.summary is not None
        if self._output.json:
            print_json(run.summary)
        else:
            print_result(run.summary["text"])

    def _say(self, text: str) -> None:
        if not self._output.quiet:
            self._err.print(Text(text, "quiet"), soft_wrap=True)


def _is_finished(run: TracedRun) -> bool:
    return run.finish_reason not in (None, "interrupted")


def keys_of(prompt: ListedPrompt) -> dict[str, Any]:
    """The keys that say which prompt a line is about, as in traces of comparisons."""
    return {"prompt_index": prompt.index, "prompt_name": prompt.name, "category": prompt.category}


def holds_prompts(text: str) -> bool:
    """Whether a text is one of prompts in JSON lines, by its first line."""
    line = text.lstrip().partition("\n")[0]
    if not line.startswith("{"):
        return False
    try:
        value = schema.parse_json(line, "")
    except SpecgenError:
        return False
    return isinstance(value, dict) and not {"prompt", "turns"}.isdisjoint(value)
