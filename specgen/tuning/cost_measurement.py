"""Measures the round costs of every kind of method, kind by kind in turn, so that a drifting machine affects all alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specgen.decoding.drafter_kinds import EXIT, MODEL
from specgen.errors import SpecgenError
from specgen.tuning.request import Deadline
from specgen.tuning.round_timing import LENGTHS, SIGNALS, ParallelProbe, RepeatDrafter, RoundProbe

if TYPE_CHECKING:
    from specgen.cost_model import RoundCosts
    from specgen.pair import Pair
    from specgen.tuning.recorded_drafts import ReferenceOutput
    from specgen.types import SamplingParams

SHORT_PROMPT = 48  # tokens of the shorter context
_SWEEPS = (LENGTHS, (1, 2, 4, 8, 15), (1, 4, 12), (2, 8))  # draft lengths, fewer where a pass is slow
_TURNS = 2  # of each kind
_LABELS = {"echo": "the target alone", "parallel": "pearl"} | {kind.cost_kind: f"with {kind.title}" for kind in (MODEL, EXIT)}


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Round costs by kind and the slowdown (see `PairMeasurements`), and the reason for each kind that could not be timed."""

    costs: Mapping[str, RoundCosts]
    slowdown: float
    failures: Mapping[str, str]

    @property
    def description(self) -> str:
        target = self.costs["echo"].verification_cost
        length = min(target.curves)
        wider = ", ".join(f"{1e3 * target.at(tokens, length):.3g} for {tokens}" for tokens in (6, 16))
        return f"a target pass takes {1e3 * target.at(1, length):.3g} ms for 1 token, {wider}"


def measure_costs(
    pair: Pair,
    kinds: Sequence[str],
    references: Sequence[ReferenceOutput],
    sampling: SamplingParams,
    deadline: Deadline,
    announce: Callable[[str], None],
) -> MeasuredCosts:
    """Time rounds of these kinds until the deadline. Raises SpecgenError where not even the target can be timed."""
    seconds = deadline.left / (len(kinds) * _TURNS)
    probes = _probes(pair, kinds, references, sampling, seconds / 2)
    failures: dict[str, str] = {}
    for position, kind in enumerate([*kinds] * _TURNS):
        if kind in failures or (position >= len(kinds) and deadline.left < 0):
            continue
        announce(f"timing rounds ({_LABELS[kind]})")
        try:
            probes[kind].run(Deadline.after(seconds, deadline.clock))
        except SpecgenError as error:
            if kind == "echo":
                raise
            failures[kind] = error.message
    timed = {kind: probe for kind, probe in probes.items() if kind not in failures}
    slowdown = next((probe.slowdown for probe in timed.values() if isinstance(probe, ParallelProbe)), 1.0)
    return MeasuredCosts({kind: probe.costs for kind, probe in timed.items()}, slowdown, failures)


def _probes(
    pair: Pair, kinds: Sequence[str], references: Sequence[ReferenceOutput], sampling: SamplingParams, seconds: float
) -> dict[str, RoundProbe | ParallelProbe]:
    """A probe of each kind, with draft lengths that can be swept in `seconds` on all prompts."""
    prompts = _prompts(pair, references)
    token_seconds = sum(reference.seconds for reference in references) / sum(len(each.token_ids) for each in references)
    room = seconds / len(prompts)
    lengths = next((sweep for sweep in _SWEEPS if token_seconds * (4 * len(sweep) + sum(sweep)) < room), _SWEEPS[-1])
    has_predictor = pair.exit_layer is not None and pair.exit_layer.predictor is not None
    exit_signals = frozenset({"predicted_acceptance"} if has_predictor else ())
    given = (prompts, sampling)
    makers: Mapping[str, Callable[[], RoundProbe | ParallelProbe]] = {
        "echo": lambda: RoundProbe(pair, "ar", *given, lengths=(0, *lengths), drafter=RepeatDrafter()),
        MODEL.cost_kind: lambda: RoundProbe(pair, "sd", *given, lengths=lengths, signals=SIGNALS),
        EXIT.cost_kind: lambda: RoundProbe(pair, "eesd-fixed", *given, lengths=lengths, signals=exit_signals),
        "parallel": lambda: ParallelProbe(pair, *given),
    }
    return {kind: makers[kind]() for kind in kinds}


def _prompts(pair: Pair, references: Sequence[ReferenceOutput]) -> list[list[int]]:
    """A short context, and one as long as the longest prompt with its output, where that is more than twice as long."""
    prompts = sorted((reference.prompt_ids for reference in references), key=len)
    limits = [model.context_limit for model in (pair.target, pair.draft) if model is not None]
    longest = max(1, min(limits) // 2)
    all_tokens = [token for ids in prompts[::-1] for token in ids]
    short = prompts[0][: min(SHORT_PROMPT, longest)]
    long = all_tokens[: min(len(prompts[-1]) + len(references[0].token_ids), longest)]
    return [short, long] if len(long) > 2 * len(short) else [short]
