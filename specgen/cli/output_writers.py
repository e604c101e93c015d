"""Where a run's rounds go: text, round lines, JSON, the trace, the footer. Each is a fold over rounds."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.energy import energy_meter_for
from specgen.traces import trace_writer as traces
from specgen.traces.summary import Summary
from specgen.traces.trace_writer import check_writable
from specgen.types import Round
from specgen.ui import theme
from specgen.ui.sanitize import escaped_json
from specgen.ui.terminal.answer_stream import AnswerText, AnswerView, Piece
from specgen.ui.terminal.footer import footer
from specgen.ui.terminal.rounds import RoundsView

if TYPE_CHECKING:
    from specgen.pair import Pair, Plan

__all__ = ["Output", "OutputWriter", "check_writable"]


@dataclass(frozen=True, slots=True)
class Output:
    """What was asked to be shown, and how."""

    rounds: bool = False
    json: bool = False
    trace: Path | None = None
    quiet: bool = False
    no_color: bool = False
    perplexity: bool = False
    energy: bool = False
    tuned: str = ""  # what a profile chose, in words


class OutputWriter:
    """Takes one run's rounds as they come."""

    def __init__(self, pair: Pair, plan: Plan, output: Output) -> None:
        self._pair, self._plan, self._output = pair, plan, output
        self._out = theme.console(no_color=output.no_color)
        self._err = theme.console(stderr=True, no_color=output.no_color)
        self._summary = Summary(plan.method.name)
        self._answer = AnswerText(pair.tokenizer.detokenizer(plan.prompt_ids), plan.sampling.stop)
        self._view = AnswerView(self._out)
        self._pieces: list[Piece] = []  # with --rounds the answer stands below them
        self._trace = traces.TraceWriter(output.trace) if output.trace is not None else None
        self._meter = energy_meter_for(pair.devices(plan.method)) if output.energy else None
        self._rounds: RoundsView | None = None
        if output.rounds:
            eos_ids = pair.target.eos_ids
            self._rounds = RoundsView(
                self._err,
                pair.tokenizer.text_of,
                eos_ids,
                len(plan.prompt_ids),
                parallel=plan.method.is_parallel,
                window=_window(plan),
                branches=plan.method.drafts_trees(plan.settings),
            )

    def start(self) -> None:
        if self._records:
            self._line(traces.start_line(self._pair, self._plan))
        if self._rounds is not None:
            self._rounds.legend()
        if self._meter is not None:
            self._meter.start()

    def add(self, round_: Round) -> None:
        self._summary.add(round_)
        pieces = self._answer.add(round_)
        if self._records:  # before what may wait for a reader: an interruption there leaves a record that agrees with the summary
            self._line(traces.round_line(round_, self._pair.tokenizer.text_of, record=self._plan.record))
        self._show(pieces)
        if self._rounds is not None:
            self._rounds.show(round_)

    def end_text(self) -> None:
        """Show what was held back, also of a run that broke off."""
        self._show(self._answer.finish())
        if self._output.json:
            return
        if self._rounds is not None:
            self._err.print()
            self._view.show(self._pieces)
        self._view.end()

    def finish(self, finish_reason: str) -> None:
        """The summary, to whoever wants one."""
        if self._meter is not None:
            self._summary.add_energy(self._meter.stop())
        if self._output.perplexity or not self._plan.method.lossless:
            token_ids = self._summary.token_ids
            self._summary.add_log_likelihood(self._pair.log_likelihood(self._plan.prompt_ids, token_ids))
        if self._records:
            self._line(traces.summary_line(self._summary.as_dict(self._answer.text, finish_reason)))
        if self._output.quiet:
            return
        if not self._output.json:
            self._err.print()
        notes = self._notes(finish_reason)
        mono = theme.is_mono(no_color=self._output.no_color)
        width = self._err.width if self._err.is_terminal else 100
        self._err.print(footer(self._summary, notes, width, mono=mono, tuned=self._output.tuned))

    def close(self) -> None:
        if self._trace is not None:
            self._trace.close()

    @property
    def _records(self) -> bool:
        return self._output.json or self._trace is not None

    def _show(self, pieces: list[Piece]) -> None:
        if self._rounds is not None:
            self._pieces += pieces
        elif not self._output.json:
            self._view.show(pieces)

    def _line(self, line: Mapping[str, Any]) -> None:
        if self._trace is not None:
            self._trace.write(line)
        if self._output.json:
            text = escaped_json(traces.dumps(line)) + "\n"
            sys.stdout.buffer.write(text.encode("utf-8", "surrogatepass"))  # whatever the locale: JSON is UTF-8, as the trace is
            sys.stdout.buffer.flush()

    def _notes(self, finish_reason: str) -> list[str]:
        notes = []
        if not self._plan.method.lossless:
            notes.append("lossy")
        if self._plan.costs is not None:
            notes.append(f"window {self._plan.costs.window.size}, c {self._plan.costs.ratio:.1f}")
        elif "window" in self._plan.settings.values:
            notes.append(f"window {self._plan.settings.values['window']}")
        if self._plan.method.name == "lookup" and self._pair.draft is None:
            notes.append("no draft model")
        if self._plan.context_ends and finish_reason == "length":
            notes.append(f"the context of {len(self._plan.run.context):,} tokens is full")
        energy = self._summary.energy
        if energy is not None and energy.joules is None:
            notes.append(f"energy unavailable: {energy.reason}")
        if finish_reason == "interrupted":
            notes.append("interrupted")
        return notes


def _window(plan: Plan) -> str:
    """How PEARL's window was found, in words; nothing where it was set."""
    costs = plan.costs
    if costs is None:
        return ""
    first = f"; {costs.window.first} beside a pass over one" if costs.window.first != costs.window.size else ""
    return (
        f"window {costs.window.size}: a target pass over {costs.width} tokens takes {costs.target_pass * 1e3:.1f} ms, "
        f"a draft pass {costs.draft_pass * 1e3:.1f} ms, c {costs.ratio:.1f}{first}"
    )
