"""What the figures of `measure_gpu.py` say about the goals: one line for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Found = Mapping[str, Mapping[str, Any]]  # the figures of each stage by name


@dataclass(frozen=True)
class Goal:
    """`read` gets the figures of the stage `stage`, and `is_met` what it returns. KeyError in `read`: it was not measured."""

    title: str
    stage: str
    read: Callable[[Mapping[str, Any]], Any]
    is_met: Callable[[Any], bool]
    wanted: str


def _at_least(title: str, stage: str, name: str, goal: float) -> Goal:
    return Goal(title, stage, lambda figures: figures[name], lambda value: bool(value >= goal), f"at least {goal:g}")


def _at_most(title: str, stage: str, name: str, goal: float) -> Goal:
    return Goal(title, stage, lambda figures: figures[name], lambda value: bool(value <= goal), f"at most {goal:g}")


def _is(title: str, stage: str, name: str, goal: object) -> Goal:
    return Goal(title, stage, lambda figures: figures[name], lambda value: value == goal, str(goal))


def _largest_error(figures: Mapping[str, Any]) -> float:
    return max([value for name, value in figures.items() if name.endswith("_error")] or [figures["same_error"]])


def _waiting_passes(figures: Mapping[str, Any]) -> str:
    cases = {name: value for name, value in figures.items() if name not in ("stage_seconds", "error")}
    figures = cases if cases else {"none": figures["eager_1"]}
    return ", ".join(name for name, value in figures.items() if value != "no synchronisation") or "none"


GOALS = (
    _at_least("plain decoding, 8B: share of the copy bandwidth", "plain", "share_of_bandwidth", 0.85),
    _at_most("draft step, 1B: ms", "draft", "ms_per_drafted_token", 1.0),
    _at_most("round of K = 5: ms", "speedup", "sd_ms_per_round", 10.0),
    *(
        _at_least(f"{name}: its speedup over that of assisted generation", "speedup", f"{name}_against_assisted_speedup", 1.5)
        for name in ("sd", "svip", "pearl")
    ),
    *(
        _at_least(
            f"tokens/s after 8,000 tokens against 100, over what bytes say: {name}", "context", f"{name}_ratio_against_bytes", 0.9
        )
        for name in ("ar", "sd")
    ),
    _is("--exact: the first token that speculation changes", "exact", "one_width_first_difference", None),
    _is("--exact: equal bits of logits", "exact", "one_width_logits_equal", True),
    Goal("graphs against eager passes: largest error", "capture", _largest_error, lambda value: value <= 0.03, "at most 0.03"),
    Goal("passes in which the host waits", "sync", _waiting_passes, lambda value: value == "none", "none"),
    _is("two streams: the results of one", "streams", "equal", True),
    _is("tests on the GPU: exit code", "tests", "exit_code", 0),
)


def verdicts(found: Found) -> list[str]:
    """Returns a line per goal: whether it is met, the figure, and the goal; or why it was not measured."""
    lines = []
    for goal in GOALS:
        figures = found.get(goal.stage, {})
        try:
            value = goal.read(figures)
        except KeyError:
            reason = str(figures.get("error") or figures.get("skipped") or "not run").strip().splitlines()[-1]
            lines.append(f"{'not measured':13}{goal.title}: stage {goal.stage}: {reason[:120]}")
            continue
        shown = f"{value:.3g}" if isinstance(value, float) else str(value)
        lines.append(f"{'met' if goal.is_met(value) else 'MISSED':13}{goal.title}: {shown} ({goal.wanted})")
    return lines
