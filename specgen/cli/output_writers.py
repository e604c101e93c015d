"""Runs a generation and writes what it produces: text, lines about rounds, JSON lines, a trace file
and a footer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from specgen.base.errors import RunError
from specgen.base.interrupts import ReportedInterrupt, interrupts
from specgen.base.measuring import energy_meter_for
from specgen.base.text import print_json
from specgen.base.types import QUANTISED, Round, TokenLogProbs
from specgen.pair import records
from specgen.pair.figures import Figures
from specgen.view import theme
from specgen.view.generation import AnswerText, AnswerView, Piece, RoundsView, footer
from specgen.view.log_probs import show_log_probs
from specgen.view.progress import Progress, reading_prompt

if TYPE_CHECKING:
    from specgen.cli.options import GenerateOutput
    from specgen.decoding.run import Run
    from specgen.methods.base import Request
    from specgen.pair.pair import Pair
    from specgen.traces.writer import TraceWriter


class OutputWriter:
    """Writes the output of one generation.

    `tuned` says which method and settings come from a profile, `where` which device and dtype were
    chosen; each is empty for what the user named. `trace` gets every line of the recorded run. If a
    line cannot be written to it, the whole output is shown nevertheless, and `write` then raises
    the error. `keys` say which of several prompts is answered: they are in the first and the last
    line, and with --json only the last is shown.
    """

    def __init__(
        self,
        pair: Pair,
        request: Request,
        run: Run,
        output: GenerateOutput,
        tuned: str,
        trace: TraceWriter | None,
        where: str = "",
        keys: Mapping[str, Any] | None = None,
    ) -> None:
        from specgen.engine.text.stop_strings import StopStrings

        self._pair = pair
        self._request = request
        self._run = run
        self._output = output
        self._tuned = tuned
        self._where = where
        self._keys = keys
        self._out = theme.console(no_color=output.no_color)
        self._err = theme.console(stderr=True, no_color=output.no_color)
        self._figures = Figures(request.method.name)
        stop = StopStrings.of(request.sampling.stop, pair.tokenizer)
        self._answer = AnswerText(pair.tokenizer.detokenizer(request.prompt_ids), stop)
        self._view = AnswerView(self._out)
        self._pieces: list[Piece] = []  # with --rounds the answer is shown after all rounds
        self._trace = trace
        self._trace_error: RunError | None = None
        draft = request.method.draft_of(pair.models)
        devices = pair.models.devices(with_draft=draft is not None)
        self._meter = energy_meter_for(devices) if output.energy else None
        self._scores: list[tuple[int, TokenLogProbs]] = []  # of the answer's tokens
        self._rounds: RoundsView | None = None
        if output.rounds:
            self._rounds = RoundsView(
                self._err,
                pair.tokenizer.text_of,
                pair.target.eos_ids,
                len(request.prompt_ids),
                parallel=request.method.is_parallel,
                branches=request.method.drafts_trees(run.settings),
            )

    @property
    def text(self) -> str:
        """The answer so far."""
        return self._answer.text

    @property
    def has_begun(self) -> bool:
        """Whether the model has generated anything."""
        return self._figures.rounds > 0

    def write(self) -> None:
        """Runs the generation and writes each round as it ends.

        Raises KeyboardInterrupt once what was generated so far is written, and RunError if the
        trace could not be written.
        """
        progress = Progress(self._err, quiet=self._output.quiet)
        captured = self._pair.models.capture_seconds()
        interruption = None
        with interrupts.caught():
            try:
                with interrupts.held():
                    self._record(records.start_line(self._pair, self._request, self._run))
                    if self._rounds is not None:
                        self._rounds.legend()
                    if self._meter is not None:
                        self._meter.start()
                self._figures.prompt_tokens = self._run.uncached_tokens
                with reading_prompt(progress):
                    for round_ in self._run.rounds():
                        interrupts.check()  # Python may have lost one while preparing or decoding
                        with interrupts.held():
                            progress.clear()
                            self._add(round_)
            except KeyboardInterrupt as error:
                interruption = error
            finally:
                with interrupts.held():
                    self._end_text()
            reason = self._run.finish_reason or "length"
            if interruption is not None:
                reason = "interrupted"
            with interrupts.held():
                self._figures.capture_seconds = self._pair.models.capture_seconds() - captured
                self._finish(reason)
        if interruption is not None:
            raise ReportedInterrupt from interruption

    def _add(self, round_: Round) -> None:
        """Writes a round to the trace, then shows it: showing may wait for the reader of a pipe,
        and be interrupted there."""
        self._figures.add(round_)
        self._scores += zip(round_.token_ids, round_.verdict.log_probs, strict=False)
        pieces = self._answer.add(round_)
        if self._output.json or self._trace is not None:
            text_of = self._pair.tokenizer.text_of
            self._record(records.round_line(round_, text_of, record=self._request.record))
        self._show(pieces)
        if self._rounds is not None:
            self._rounds.show(round_)

    def _end_text(self) -> None:
        """Shows the text that was held back because it could have been the beginning of a stop
        string."""
        self._show(self._answer.finish())
        if self._output.json:
            return
        if self._rounds is not None:
            self._err.print()
            self._view.show(self._pieces)
        self._view.end()
        if self._scores:
            show_log_probs(self._err, self._scores, self._pair.tokenizer.text_of)

    def _finish(self, finish_reason: str) -> None:
        """Writes the summary to the trace and shows the footer. Raises RunError if a line could not
        be written to the trace."""
        figures = self._figures
        output = self._output
        if self._meter is not None:
            figures.add_energy(self._meter.stop())
        if output.perplexity or not self._request.method.lossless:
            figures.add_log_likelihood(
                self._pair.log_likelihood(self._request.prompt_ids, figures.token_ids)
            )
        self._record({"type": "summary", **figures.as_dict(self._answer.text, finish_reason)})
        if not output.quiet:
            if not output.json:
                self._err.print()
            is_limited = self._request.limit == self._request.sampling.max_new_tokens
            line = footer(
                figures,
                list(self._notes(finish_reason)),
                theme.width(self._err),
                tuned=self._tuned,
                where=self._where,
                is_cut=is_limited and finish_reason == "length",
            )
            self._err.print(line)
        if self._trace_error is not None:
            raise self._trace_error

    def _show(self, pieces: list[Piece]) -> None:
        if self._rounds is not None:
            self._pieces += pieces
        elif not self._output.json:
            self._view.show(pieces)

    def _record(self, line: Mapping[str, Any]) -> None:
        if self._keys is not None and line["type"] != "round":
            line = {**line, **self._keys}
        if self._trace is not None and self._trace_error is None:
            try:
                self._trace.write(line)
            except RunError as error:
                self._trace_error = error
        if self._output.json and (self._keys is None or line["type"] == "summary"):
            print_json(line)

    def _notes(self, finish_reason: str) -> Iterator[str]:
        """Yields the notes of the footer."""
        method = self._request.method
        target = self._pair.target
        run = self._run
        energy = self._figures.energy
        costs = run.costs
        draft = method.draft_of(self._pair.models)
        remark = method.drafting_remark(self._pair.models)
        if not method.lossless:
            yield "lossy"
        if target.precision.rounding is not None:
            yield f"{target.dtype_name} target"
        if draft is not None and draft.dtype_name in QUANTISED:
            rounded = f"{draft.dtype_name} draft"
            if rounded not in self._tuned:
                yield rounded
        if costs is not None:
            yield f"window {costs.window.size}, c {costs.ratio:.1f}"
        elif "window" in run.settings.values and not self._tuned:  # `tuned` contains the window
            yield f"window {run.settings.values['window']}"
        if remark:
            yield remark
        if finish_reason == "length":
            yield from self._notes_of_the_length()
        if energy is not None and energy.joules is None:
            yield f"energy unavailable: {energy.reason}"
        if finish_reason == "interrupted":
            yield "interrupted"
        if finish_reason in ("length", "interrupted") and self._is_incomplete:
            yield "the answer is incomplete"

    def _notes_of_the_length(self) -> Iterator[str]:
        """Yields what the footer says of an output that a limit has ended, besides the user's."""
        if self._request.limit >= self._request.sampling.max_new_tokens:
            return
        context = self._run.context
        target = self._pair.target
        length = f"{len(context):,} tokens"
        if target.max_tokens(context.prompt_length) == target.context_limit:
            yield f"the context of {length} is full"
        else:
            yield f"{length}: LongRoPE changes there"

    @property
    def _is_incomplete(self) -> bool:
        """Whether the output so far is only the beginning of what its grammar demands."""
        context = self._run.context
        return context.constraint is not None and not context.constraint.can_end(context)
