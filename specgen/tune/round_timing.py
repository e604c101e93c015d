"""Measures the time of rounds (one draft and its verification) by running real rounds with drafts
of different lengths.

Passes of one model alone would be too fast: in a round, the two models evict each other from the
processor's caches.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from statistics import mean, median
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.measuring import distinct_ids
from specgen.base.types import Context, Round, SamplingParams
from specgen.decoding.costs import LONG_COPIES, CostTable, Curve, RoundCosts
from specgen.decoding.drafting import UnrelatedDrafter
from specgen.decoding.parallel import Parallel
from specgen.decoding.policy_base import WARM_UP, LengthSweep, Signals
from specgen.engine.devices import inference, synchronizer
from specgen.engine.model_runner import ModelRunner
from specgen.engine.text.translated_runner import TranslatedRunner
from specgen.methods.pass_times import PassTimes
from specgen.tune.outcome import Deadline

if TYPE_CHECKING:
    from collections.abc import Generator

    from specgen.decoding.drafting import Drafter
    from specgen.engine.model_runner import DraftRunner
    from specgen.pair.pair import Pair

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15)  # drafted tokens; the target's pass covers one more
# Draft lengths to time, and further ones of copied drafts: fewer for a slower target.
_SWEEPS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    (LENGTHS, LONG_COPIES),
    ((1, 2, 4, 8, 15), LONG_COPIES[1:]),
    ((1, 4, 12), LONG_COPIES[1:2]),
    ((2, 8), ()),
)
_ROWS_A_PASS = 4  # so many further tokens of a target pass take about as long as a pass, at most
_COPIED_SHARE = 4  # a copied draft is timed if the context has room for so many
MOST_ROUNDS = 9  # rounds that are timed with each draft length
NEW_TOKENS = 96  # tokens that one run generates at most
_SIGNALS = frozenset({"entropy", "prob"})  # those of a drafted token that most policies read
_UNRELATED = 256  # tokens that are drafted in turn while the target alone is timed
PARALLEL_ROUNDS = 24  # rounds of PEARL that are timed in one run
_LABELS = {
    "parallel": "pearl",
    "echo": "the target alone",
    "model": "with the draft",
    "exit": "with the exit layer",
}
_ORDER = list(_LABELS)  # of timing: PEARL's worker has started before anything else is timed


@dataclass(frozen=True, slots=True)
class ReferenceOutput:
    """The target's output after a prompt, by plain decoding, with its times.

    `limit` is the largest number of new tokens; a token in `eos_ids` ends the output earlier.
    `prefill_seconds` is the time of the pass over the prompt, which gives the first new token.
    `seconds` is the time of the whole output, prefill included.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    limit: int
    eos_ids: frozenset[int]
    prefill_seconds: float
    seconds: float


@inference
def record_reference(
    pair: Pair, prompt_ids: list[int], sampling: SamplingParams
) -> ReferenceOutput:
    """Generates the target's output after a prompt by plain decoding, and returns it with its
    times.

    The key-value caches are emptied first, so that the time of the pass over the whole prompt is
    measured. Raises as `Pair.request`.
    """
    run = pair.run(pair.request(prompt_ids, "ar", sampling))
    pair.forget()
    rounds = list(run.rounds())
    ids = [token for round_ in rounds for token in round_.token_ids]
    seconds = [sum(round_.seconds.values()) for round_ in rounds]
    return ReferenceOutput(
        prompt_ids, ids, run.limit, frozenset(run.eos_ids), seconds[0], sum(seconds)
    )


@inference
def draft_prefill_seconds(
    target: DraftRunner, draft: DraftRunner, reference: ReferenceOutput
) -> float:
    """Returns the seconds of the draft model's pass over the prompt. The target's pass, which runs
    before it, is not timed."""
    context = Context(reference.prompt_ids)
    wait = synchronizer(draft.device) or (lambda: None)
    # an exit layer reads the first layers' hidden states from the target's pass
    target.logits(context)
    wait()
    start = time.perf_counter()
    draft.logits(context)
    wait()
    return time.perf_counter() - start


class TimedRound(NamedTuple):
    """The times of one round in seconds: `drafting`, and `verification` by a target pass over
    `tokens` tokens.

    `passes` is the number of the draft model's passes (of the draft's levels, if no draft model
    ran). `with_signals`: signals (numbers about a drafted token, such as entropy) were computed.
    `context_length` is in tokens.
    """

    context_length: int
    passes: int
    with_signals: bool
    drafting: float
    tokens: int
    verification: float


def time_rounds(
    pair: Pair,
    method: str,
    prompt: list[int],
    sampling: SamplingParams,
    deadline: Deadline,
    lengths: Sequence[int],
    signals: Signals = frozenset(),
    *,
    drafter: Drafter | None = None,
    settings: Mapping[str, object] | None = None,
) -> list[TimedRound]:
    """Times rounds of `method` after a prompt (token ids) until the deadline. The drafts have
    `lengths` tokens (levels) in turn.

    Each length is timed at least once. Every other round also computes `signals`, if there are any.
    `drafter` replaces the method's (None: keeps it), `settings` are the method's. Raises
    SpecgenError if the method cannot run with this pair or drafts nothing.
    """
    sweep = LengthSweep(lengths, [frozenset(), signals] if signals else [frozenset()])
    fewest = len(sweep.combinations)
    timed = list[TimedRound]()
    runner = _draft_runner(pair, method)
    while len(timed) < fewest or (deadline.left >= 0 and len(timed) < MOST_ROUNDS * fewest):
        before = len(timed)
        sweep.start_run()
        values: dict[str, Any] = dict(settings or {})
        run = pair.run(pair.request(prompt, method, _endless(sampling), **values))
        run = replace(run, policy=sweep, drafter=drafter or run.drafter)
        rounds = run.rounds()
        for position in range(NEW_TOKENS):
            count = 0 if runner is None else runner.forward_count
            with_signals = bool(sweep.signals)
            round_ = next(rounds, None) if run.remaining > sweep.longest else None
            if round_ is None or (len(timed) >= fewest and deadline.left < 0):
                break
            if position >= WARM_UP and (drafter is not None or round_.draft.tokens):
                passes = 0 if runner is None else runner.forward_count - count
                passes = passes or max(sweep.levels, round_.draft.levels)
                seconds = round_.drafting_seconds, round_.pass_tokens, round_.verification_seconds
                timed.append(TimedRound(len(run.context), passes, with_signals, *seconds))
        if len(timed) == before < fewest:
            raise _drafts_nothing(method)
    return timed


def _draft_runner(pair: Pair, method: str) -> ModelRunner | None:
    """Returns the runner whose passes are counted, in the draft model's own ids; None if the method
    uses no draft model, or one that drafts in one pass."""
    if methods.find(method).draft_of(pair.models) is None:
        return None
    runners = pair.models.with_draft_model()
    draft = None if runners is None else runners.draft
    if isinstance(draft, TranslatedRunner):
        return draft.own
    return draft if isinstance(draft, ModelRunner) else None


def costs_of(rounds: Sequence[TimedRound], alone: RoundCosts | None = None) -> RoundCosts:
    """Returns the median seconds of drafts and target passes by their numbers of tokens, at the
    contexts' median length.

    `alone` are the costs of rounds without a draft model; None if `rounds` are such rounds. If no
    round of `rounds` had an empty draft, the time of a target pass over one token is taken from
    `alone`.
    """
    length = round(median(timed.context_length for timed in rounds))
    plain = _medians((timed.passes, timed.drafting) for timed in rounds if not timed.with_signals)
    with_signals = _medians(
        (timed.passes, timed.drafting) for timed in rounds if timed.with_signals
    )
    signal_costs = [
        (with_signals[passes] - plain[passes]) / passes
        for passes in with_signals
        if passes in plain
    ]
    passes = _medians((timed.tokens, timed.verification) for timed in rounds)
    if alone is not None:
        passes.setdefault(1, alone.verification_cost.at(1, length))
    tables = CostTable({length: Curve({0: 0.0} | plain)}), CostTable({length: Curve(passes)})
    return RoundCosts(*tables, max(0.0, median(signal_costs)) if signal_costs else 0.0)


def _medians(timed: Iterable[tuple[int, float]]) -> dict[int, float]:
    seconds = defaultdict[int, list[float]](list)
    for count, taken in timed:
        seconds[count].append(taken)
    return {count: median(taken) for count, taken in sorted(seconds.items())}


def time_parallel_rounds(
    pair: Pair, reference: ReferenceOutput, sampling: SamplingParams
) -> RoundCosts:
    """Returns the costs of PEARL's rounds: the times of passes while both models run at once, and
    an overhead per round.

    The overhead is the mean time by which rounds of a real run are longer than the longer of their
    draft and their target pass. The run has its window as a setting, so that its passes overlap
    also where turns are faster. Raises SpecgenError if PEARL cannot run with this pair, or drafts
    nothing.
    """
    request = pair.request(reference.prompt_ids, "pearl", _endless(sampling))
    passes = pair.models.kept(PassTimes).costs(request.typical_length, request.sampling)
    settings = request.settings.with_value("window", passes.window.size)
    run = pair.prepare(replace(request, settings=settings))
    late = list[float]()
    assert isinstance(run.schedule, Parallel)
    with closing(cast("Generator[Round, None, None]", run.rounds())) as rounds:
        for round_ in islice(rounds, WARM_UP, WARM_UP + PARALLEL_ROUNDS):
            if not round_.draft.tokens:  # the draft model has no room for this context
                break
            late.append(
                sum(round_.seconds.values())
                - max(run.schedule.drafter.seconds, round_.seconds["verify"])
            )
    if not late or passes.draft_pass == math.inf:
        raise _drafts_nothing("pearl")
    drafting = CostTable({passes.context_length: Curve({0: 0.0, 1: passes.draft_pass})})
    verification = CostTable({passes.context_length: passes.target_passes})
    return RoundCosts(drafting, verification, synchronisation_overhead=max(0.0, mean(late)))


def _drafts_nothing(method: str) -> SpecgenError:
    return SpecgenError(
        f"{method} drafts nothing after these prompts", "Take others: --prompts FILE"
    )


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
    """Times rounds of each of `kinds` until the deadline, after a prompt of `references` of median
    length.

    The kinds are `echo` (the target alone), `model` (with the draft model), `exit` (with the exit
    layer) and `parallel` (PEARL). Returns the costs by kind, and the reason for each kind that
    could not be timed, also by kind. `announce` is called with a description of each step. Raises
    SpecgenError if the rounds of the target alone cannot be timed.
    """
    costs = dict[str, RoundCosts]()
    failures = dict[str, str]()
    by_length = sorted(references, key=lambda reference: len(reference.prompt_ids))
    reference = by_length[len(by_length) // 2]
    limits = [model.context_limit for model in (pair.target, pair.draft) if model is not None]
    prompt = reference.prompt_ids[: max(1, min(limits) // 2)]
    seconds = deadline.left / len(kinds)
    token_seconds = reference.seconds / len(reference.token_ids)
    fitting = (sweep for sweep in _SWEEPS if token_seconds * _passes(*sweep) < seconds / 2)
    lengths, copies = next(fitting, _SWEEPS[-1])
    copies = tuple(length for length in copies if _COPIED_SHARE * length <= min(limits))
    for kind in sorted(kinds, key=_ORDER.index):
        announce(f"timing rounds ({_LABELS[kind]})")
        try:
            if kind == "parallel":
                costs[kind] = time_parallel_rounds(pair, reference, sampling)
            else:
                rounds = _time_kind(
                    pair,
                    kind,
                    prompt,
                    sampling,
                    Deadline.after(seconds, deadline.clock),
                    (*lengths, *copies) if kind == "echo" else lengths,
                )
                costs[kind] = costs_of(rounds, costs.get("echo"))
        except SpecgenError as error:
            if kind == "echo":
                raise
            failures[kind] = error.message
    return costs, failures


def _passes(lengths: Sequence[int], copies: Sequence[int]) -> float:
    """Returns how many target passes over one token take about as long as a round with each of
    these drafts."""
    rounds = 4 * (len(lengths) + len(copies))
    return rounds + sum(lengths) + sum(copies) / _ROWS_A_PASS


def _time_kind(
    pair: Pair,
    kind: str,
    prompt: list[int],
    sampling: SamplingParams,
    deadline: Deadline,
    lengths: Sequence[int],
) -> list[TimedRound]:
    if kind == "echo":
        drafter = UnrelatedDrafter(distinct_ids(_UNRELATED, pair.target.files.shape.vocab_size))
        return time_rounds(pair, "ar", prompt, sampling, deadline, (0, *lengths), drafter=drafter)
    method = "sd" if kind == "model" else "eesd"
    return time_rounds(pair, method, prompt, sampling, deadline, lengths, _SIGNALS)
