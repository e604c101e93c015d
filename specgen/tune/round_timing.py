"""Measures the time of rounds (one draft and its verification) by running real rounds with drafts of different lengths.

Passes of one model alone would be too fast: in a round, the two models evict each other from the processor's caches.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from statistics import mean, median
from typing import TYPE_CHECKING, Any, cast

from specgen.base.errors import SpecgenError
from specgen.base.types import Context, Round, SamplingParams
from specgen.decoding.costs import CostTable, Curve, RoundCosts
from specgen.decoding.drafting import RepeatDrafter
from specgen.decoding.policy import WARM_UP, LengthSweep, Signals
from specgen.engine.devices import synchronizer
from specgen.engine.inference_mode import inference
from specgen.methods.pearl import Parallel
from specgen.tune.outcome import Deadline

if TYPE_CHECKING:
    from collections.abc import Generator

    from specgen.decoding.drafting import Drafter
    from specgen.engine.model_runner import DraftRunner, ModelRunner
    from specgen.pair.pair import Pair

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15)  # drafted tokens; the target's pass covers one more
_SWEEPS = (LENGTHS, (1, 2, 4, 8, 15), (1, 4, 12), (2, 8))  # draft lengths to time: fewer for a slower target
SIGNALS: Signals = frozenset({"entropy", "prob"})
MOST_ROUNDS = 9  # rounds that are timed with each draft length
NEW_TOKENS = 96  # tokens that one run generates at most
PARALLEL_ROUNDS = 24  # rounds of PEARL that are timed in one run
SHORT_PROMPT = 48  # tokens of the shorter context
_TURNS = 2  # each kind of rounds is timed in this many turns
_LABELS = {"echo": "the target alone", "model": "with the draft", "exit": "with the exit layer"}


@dataclass(frozen=True, slots=True)
class ReferenceOutput:
    """The target's output after a prompt, by plain decoding, with its times.

    `limit` is the largest number of new tokens; a token in `eos_ids` ends the output earlier. `prefill_seconds` is the time of
    the pass over the prompt, which gives the first new token. `seconds` is the time of the whole output, prefill included.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    limit: int
    eos_ids: frozenset[int]
    prefill_seconds: float
    seconds: float


@inference
def record_reference(pair: Pair, prompt_ids: list[int], sampling: SamplingParams) -> ReferenceOutput:
    """Generates the target's output after a prompt by plain decoding, and returns it with its times.

    The key-value caches are emptied first, so that the time of the pass over the whole prompt is measured.
    """
    run = pair.run(pair.request(prompt_ids, "ar", sampling))
    pair.forget()
    rounds = list(run.rounds())
    ids = [token for round_ in rounds for token in round_.token_ids]
    seconds = [sum(round_.seconds.values()) for round_ in rounds]
    return ReferenceOutput(prompt_ids, ids, run.limit, frozenset(run.eos_ids), seconds[0], sum(seconds))


@inference
def draft_prefill_seconds(target: ModelRunner, draft: DraftRunner, reference: ReferenceOutput) -> float:
    """Returns the seconds of the draft model's pass over the prompt, minus the seconds of its pass over one token."""
    target.logits(Context(reference.prompt_ids))  # an exit layer reads the first layers' hidden states from the target's pass
    wait = synchronizer(draft.device) or (lambda: None)
    context, seconds = Context(reference.prompt_ids), []
    for _ in range(2):  # the second pass finds all but the last token in the cache
        wait()
        start = time.perf_counter()
        draft.logits(context)
        wait()
        seconds.append(time.perf_counter() - start)
    return max(0.0, seconds[0] - seconds[1])


class RoundProbe:
    """Times rounds of `method` after a prompt (token ids), with the draft `lengths` in turn.

    Every other round also computes `signals` (numbers about a drafted token, such as entropy), if there are any. `drafter`
    replaces the method's drafter (None: keeps it).
    """

    def __init__(
        self,
        pair: Pair,
        method: str,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        lengths: Sequence[int] = LENGTHS,
        signals: Signals = frozenset(),
        drafter: Drafter | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self._pair, self._method, self._prompt, self._sampling, self._drafter = pair, method, prompt, _endless(sampling), drafter
        self._settings: dict[str, Any] = dict(settings or {})
        self._sweep = LengthSweep(lengths, [frozenset(), signals] if signals else [frozenset()])
        self._drafting = defaultdict[tuple[int, bool], list[float]](list)  # seconds by levels and whether signals were computed
        self._verification = defaultdict[int, list[float]](list)  # seconds by tokens of the target's pass
        self._context_lengths: list[int] = []

    def run(self, deadline: Deadline) -> None:
        """Times rounds until the deadline. Raises SpecgenError if the method cannot run with this pair or drafts nothing."""
        combinations, counted = len(self._sweep.combinations), 0
        while True:
            self._sweep.start_run()
            run = self._pair.run(self._pair.request(self._prompt, self._method, self._sampling, **self._settings))
            run = replace(run, policy=self._sweep, drafter=self._drafter or run.drafter)
            rounds, before = run.rounds(), counted
            for position in range(NEW_TOKENS):
                with_signals = bool(self._sweep.signals)
                round_ = next(rounds, None) if run.remaining > self._sweep.longest else None
                if round_ is None:
                    break
                if position >= WARM_UP and (self._drafter is not None or round_.draft.tokens):
                    levels = max(self._sweep.levels, round_.draft.levels)
                    self._drafting[levels, with_signals].append(round_.drafting_seconds)
                    self._verification[round_.pass_tokens].append(round_.verification_seconds)
                    self._context_lengths.append(len(run.context))
                    counted += 1
                if counted >= combinations and (counted >= MOST_ROUNDS * combinations or deadline.left < 0):
                    return
            if counted == before:
                raise _drafts_nothing(self._method)

    @property
    def costs(self) -> RoundCosts:
        """The medians of the times, at the median length of the context."""
        drafting = {key: median(seconds) for key, seconds in sorted(self._drafting.items())}
        verification = {tokens: median(seconds) for tokens, seconds in sorted(self._verification.items())}
        without = {levels: seconds for (levels, with_signals), seconds in drafting.items() if not with_signals}
        both = [levels for levels, with_signals in drafting if with_signals and levels in without]
        signal_costs = [(drafting[levels, True] - without[levels]) / levels for levels in both]
        length = round(median(self._context_lengths))
        tables = CostTable({length: Curve({0: 0.0} | without)}), CostTable({length: Curve(verification)})
        return RoundCosts(*tables, max(0.0, median(signal_costs)) if signal_costs else 0.0)


def time_parallel_rounds(pair: Pair, reference: ReferenceOutput, sampling: SamplingParams) -> RoundCosts:
    """Returns the costs of PEARL's rounds: those of passes at the same time, from which its window is computed, and an overhead.

    The overhead is by how much rounds of a real run are longer than the longer of their draft and their target pass. Raises
    SpecgenError if PEARL cannot run with this pair, or drafts nothing.
    """
    request = pair.request(reference.prompt_ids, "pearl", _endless(sampling))
    pair.prepare(request)
    run, late = pair.run(request), list[float]()
    passes = run.costs
    assert isinstance(run.schedule, Parallel)
    assert passes is not None
    with closing(cast("Generator[Round, None, None]", run.rounds())) as rounds:
        for round_ in islice(rounds, WARM_UP, WARM_UP + PARALLEL_ROUNDS):
            if not round_.draft.tokens:  # the draft model has no room for this context
                break
            late.append(sum(round_.seconds.values()) - max(run.schedule.drafter.seconds, round_.seconds["verify"]))
    if not late or passes.draft_pass == math.inf:
        raise _drafts_nothing("pearl")
    drafting = CostTable({passes.context_length: Curve({0: 0.0, 1: passes.draft_pass})})
    verification = CostTable({passes.context_length: Curve({1: passes.single_pass, passes.width: passes.target_pass})})
    return RoundCosts(drafting, verification, synchronisation_overhead=max(0.0, mean(late)))


def _drafts_nothing(method: str) -> SpecgenError:
    return SpecgenError(f"{method} drafts nothing after these prompts", "Take others: --prompts FILE")


def _endless(sampling: SamplingParams) -> SamplingParams:
    return replace(sampling, max_new_tokens=NEW_TOKENS, ignore_eos=True, stop=(), seed=0)


def measure_costs(
    pair: Pair,
    kinds: Sequence[str],
    references: Sequence[ReferenceOutput],
    sampling: SamplingParams,
    deadline: Deadline,
    announce: Callable[[str], None],
) -> tuple[dict[str, RoundCosts], dict[str, str]]:
    """Times rounds of each of `kinds` until the deadline, after prompts taken from `references`.

    The kinds are `echo` (the target alone), `model` (with the draft model), `exit` (with the exit layer) and `parallel` (PEARL).
    They take turns, so that a machine that slows down affects all of them. Returns the costs by kind, and why kinds could not be
    timed. Raises SpecgenError if the rounds of the target alone cannot be timed.
    """
    costs, failures = dict[str, RoundCosts](), dict[str, str]()
    if "parallel" in kinds:
        announce("timing rounds (pearl)")
        try:
            costs["parallel"] = time_parallel_rounds(pair, references[0], sampling)
        except SpecgenError as error:
            failures["parallel"] = error.message
    sequential = [kind for kind in kinds if kind != "parallel"]
    prompts = _prompts(pair, references)
    seconds = deadline.left / (_TURNS * len(sequential) * len(prompts))
    token_seconds = sum(reference.seconds for reference in references) / sum(len(each.token_ids) for each in references)
    fitting = (sweep for sweep in _SWEEPS if token_seconds * (4 * len(sweep) + sum(sweep)) < seconds / 2)
    lengths = next(fitting, _SWEEPS[-1])
    probes = {kind: [_probe(pair, kind, prompt, sampling, lengths) for prompt in prompts] for kind in sequential}
    for turn in range(_TURNS):
        for kind in sequential:
            if kind in failures or (turn and deadline.left < 0):
                continue
            announce(f"timing rounds ({_LABELS[kind]})")
            try:
                for probe in probes[kind]:
                    probe.run(Deadline.after(seconds, deadline.clock))
            except SpecgenError as error:
                if kind == "echo":
                    raise
                failures[kind] = error.message
    alone = _merged(probes["echo"])
    return costs | {kind: _merged(probes[kind], alone) for kind in sequential if kind not in failures}, failures


def _merged(probes: Sequence[RoundProbe], alone: RoundCosts | None = None) -> RoundCosts:
    """Returns the costs at the context lengths of all `probes`.

    The pass over one token is taken from those of the target `alone` (None: these are they) if it was not timed: it is the pass
    of a round without a draft, which is rare or missing where another model drafts.
    """
    found = [probe.costs for probe in probes]
    drafting = {length: curve for costs in found for length, curve in costs.draft_cost.curves.items()}
    verification = {length: curve for costs in found for length, curve in costs.verification_cost.curves.items()}
    if alone is not None:
        single = alone.verification_cost
        verification = {length: Curve({1: single.at(1, length), **curve.points}) for length, curve in verification.items()}
    return RoundCosts(CostTable(drafting), CostTable(verification), median(costs.signal_cost for costs in found))


def _probe(pair: Pair, kind: str, prompt: list[int], sampling: SamplingParams, lengths: Sequence[int]) -> RoundProbe:
    if kind == "echo":
        return RoundProbe(pair, "ar", prompt, sampling, lengths=(0, *lengths), drafter=RepeatDrafter())
    if kind == "model":
        return RoundProbe(pair, "sd", prompt, sampling, lengths=lengths, signals=SIGNALS)
    signals = frozenset({"predicted_acceptance"} if pair.parts.has_predictor() else ())
    return RoundProbe(pair, "eesd-fixed", prompt, sampling, lengths=lengths, signals=signals)


def _prompts(pair: Pair, references: Sequence[ReferenceOutput]) -> list[list[int]]:
    """Returns one or two prompts (token ids) after which rounds are timed, so that costs are known at different context lengths.

    The first has at most `SHORT_PROMPT` tokens. The second is about as long as the longest prompt with its output; it is left out
    if it is not more than twice as long as the first. Neither fills more than half of a model's context.
    """
    prompts = sorted((reference.prompt_ids for reference in references), key=len)
    limits = [model.context_limit for model in (pair.target, pair.draft) if model is not None]
    longest = max(1, min(limits) // 2)
    all_tokens = [token for ids in prompts[::-1] for token in ids]
    short = prompts[0][: min(SHORT_PROMPT, longest)]
    long = all_tokens[: min(len(prompts[-1]) + len(references[0].token_ids), longest)]
    return [short, long] if len(long) > 2 * len(short) else [short]
