"""Decoding methods found in trace files (recorded generations), for `specgen inspect` in the terminal and as an HTML page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from specgen.compare.columns import Column, draft_length
from specgen.pair.accepted_runs import AcceptedRuns
from specgen.traces.acceptance_bounds import Bounds
from specgen.traces.calibration import Calibration
from specgen.traces.statistics import TraceStatistics
from specgen.traces.trace_reader import TracedRun

LOSSY = "lossy: the output differs from the target's by design, so it is not ranked."
ENDED = {"length": "at the limit", "eos": "at the eos token", "stop": "at a stop text", "interrupted": "by an interruption"}


def conditions(start: Mapping[str, Any], runs: int) -> str:
    """Returns in words the models, the device, the sampling and the number of recorded generations.

    `start` is the first line of a recorded generation in the trace, `runs` the number of generations.
    """
    models = f"{start['target']} with {start['draft']}" if start["draft"] else start["target"]
    temperature = start["sampling"].get("temperature")
    how = f"temperature {temperature:g}" if type(temperature) in (int, float) and temperature else "greedy"
    return f"{models}, {start['device']} {start['dtype']}, {how}" + (f", {runs} runs" if runs > 1 else "")


OVERLAP = "the overlap Σ min(p, q) of both models' distributions, which is the probability of acceptance at temperature 1"


def correlation_text(statistics: TraceStatistics) -> str:
    """Returns in words how a draft's entropy and its accepted length correlate; an empty string where they do not vary."""
    correlation = statistics.length_correlation()
    return "" if correlation is None else f" Correlation {correlation:.2f}.".replace("-", "−")


def tightness(bounds: Bounds) -> str:
    """Returns a sentence that compares how tight the two lower bounds of the acceptance probability are (SVIP, Appendix B)."""
    gaps = f"Mean distance to the true probability: Pinsker {bounds.pinsker_gap:.2f}, B–H {bounds.bretagnolle_huber_gap:.2f}."
    if bounds.pinsker_tighter is None:
        return gaps
    how = "tighter" if bounds.pinsker_tighter >= 0 else "looser"
    higher = f"the higher one for {bounds.pinsker_higher:.0%} of the tokens"
    return f"{gaps} Pinsker's bound is {abs(bounds.pinsker_tighter):.0%} {how}, and {higher}."


def calibration_text(calibration: Calibration) -> str:
    """Returns sentences that compare the predicted with the observed acceptance of all judged tokens."""
    return (
        f"Predicted {calibration.predicted:.1%} of {calibration.judged:,} tokens, accepted {calibration.rate:.1%}. "
        f"Calibration error {calibration.error:.3f}: the mean distance of both over the intervals."
    )


def runs_until_rejection(runs: AcceptedRuns) -> dict[str, str]:
    """Returns in words the `count`, the `mean` and the `deviation` of the runs of accepted tokens.

    Mean and deviation come with what PEARL's Theorem 2 expects.
    """
    expected = f"1/(1−α) = {runs.expected:.1f} by Theorem 2, α {runs.alpha:.0%} with unfinished runs"
    rest = f"; {runs.unfinished:,} tokens accepted after the last rejections" if runs.unfinished else ""
    return {
        "count": f"{runs.complete:,} complete runs, longest {runs.longest:,}{rest}",
        "mean": f"{runs.mean:.1f} with the correction; {expected}",
        "deviation": f"{runs.deviation:.1f}; {runs.expected_deviation:.1f} if tokens were accepted independently",
    }


@dataclass(frozen=True, slots=True)
class RecordedMethod:
    """A decoding method in a trace file, with the statistics of all its generations.

    `label` is its name in the report, `source` the name of the file. `run` is the one generation to show in detail. `varying` has
    the settings that differed between generations, each as a range of values such as "4–7".
    """

    label: str
    source: str
    statistics: TraceStatistics
    run: TracedRun
    varying: Mapping[str, str] = field(default_factory=dict)

    @property
    def lossless(self) -> bool:
        return self.run.start.get("lossless") is not False

    @property
    def speed(self) -> float:
        """The tokens per second over all generations of the method; 0 where no time was recorded."""
        return self.statistics.summary.tokens_per_second or 0.0


def _figure(name: str) -> Callable[[RecordedMethod], Any]:
    return attrgetter(f"statistics.summary.{name}")


def _length(entry: RecordedMethod) -> str:
    return draft_length(entry.statistics.summary.mean_draft_length, branches=entry.statistics.branches)


COLUMNS = (
    Column("acceptance_rate", _figure("acceptance_rate"), "accept-\nance", "{:.0%}", label="accepted"),
    Column("block_efficiency", _figure("block_efficiency"), "tokens\na pass", "{:.2f}", label="a pass"),
    Column("mean_draft_length", _figure("mean_draft_length"), "draft\nlength", _length, label="drafted"),
    Column("run_count", attrgetter("statistics.runs"), "runs", label="runs"),
)


def best(shown: Sequence[RecordedMethod]) -> RecordedMethod | None:
    """Returns the fastest lossless method; None where all methods are lossy or no time was recorded."""
    return max((entry for entry in shown if entry.lossless and entry.speed), key=lambda entry: entry.speed, default=None)
