"""The times of passes while both models run, and what follows from them for a run of PEARL: its
window, and the costs that its length policy decides by. Imports no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from specgen import decoding
from specgen.base.measuring import (
    STEADY,
    PassCheck,
    Sample,
    ThreadTimes,
    distinct_ids,
    spread,
    undisturbed,
)
from specgen.base.types import Context
from specgen.decoding.parallel_costs import (
    LONGEST_WINDOW,
    Overlapping,
    ParallelCosts,
    RunOverlapping,
    Window,
    usual_window,
)
from specgen.decoding.policy_base import LengthPolicy
from specgen.methods.base import drafting_case
from specgen.methods.drafting_knowledge import AUTO, DraftingCase, draft_cost

if TYPE_CHECKING:
    from specgen.base.settings import Settings
    from specgen.base.types import SamplingParams
    from specgen.decoding.drafting import Setup
    from specgen.decoding.parallel import ParallelDrafter
    from specgen.engine.devices import DeviceTimer
    from specgen.engine.model_runner import TargetRunner
    from specgen.methods.base import Request
    from specgen.models.models import Models, Worker

PASSES = "passes"  # the kind of measurements: `ParallelCosts`
_ROUGH_WIDTH = 8  # tokens of the target passes from which the window is first estimated
_TURNS = 2  # estimates of the window after the first
# timed steps, as in PEARL's reference implementation: first those that do not count
_WARM_UP = 5
_STEPS = 30
_FEWEST = 3  # steps that are timed even after the time limit
_TIME_LIMIT = 2.0  # seconds for all steps
_ROUGH_STEPS = 5
_SHORTEST = 1e-9  # seconds; the least time of a pass, also where the clock shows none
_TIMES = [own.name for own in fields(ParallelCosts)]  # of which each has to be stored


@dataclass(frozen=True, slots=True)
class RunTimes:
    """What a run of PEARL has from the times of passes.

    `costs` are the times, None where nothing in the run follows from them. `window` is the run's
    window, and `settings` are the request's with the window's size. `check` compares the run's
    passes with `costs`; None where the window does not follow from them. If the models should take
    turns, `length_in_turn` is the length of drafts then, and `settings` have it as the window; None
    if their passes should overlap. `overlapping` has decided so, and decides again by the run's
    rounds; None where the user has named what overlaps, where the measured passes already say that
    turns are faster, and where the run must not depend on times.
    """

    costs: ParallelCosts | None
    window: Window
    settings: Settings
    check: PassCheck | None
    length_in_turn: int | None = None
    overlapping: RunOverlapping | None = None

    @classmethod
    def of(cls, models: Models, request: Request, worker: Worker) -> RunTimes:
        """Returns what a run of the request has. Measures passes at the first call that needs
        their times."""
        values = request.settings.values
        costs = _costs_for(models, request)
        window = _window(models, request, worker, costs)
        length = None
        overlapping = None
        if values["window"] == AUTO and values["pre_verify"] and values["post_verify"]:
            deciding = costs or _tuned_costs(models, request)
            if deciding is not None and not deciding.overlaps:
                length = deciding.length_in_turn
            elif costs is not None and costs.expected_gain is not None:
                overlapping = models.kept(PassTimes).overlapping(
                    costs, window.longest, request.sampling, record=request.record
                )
                length = overlapping.length_in_turn

        if length is not None:
            settings = request.settings.with_value("window", length)
            return cls(costs, window, settings, None, length, overlapping)
        if values["window"] != AUTO or costs is None:
            return cls(costs, window, request.settings.with_value("window", window.size), None)
        check = models.kept(PassTimes).check(
            request.typical_length, request.sampling, record=request.record
        )
        settings = request.settings.with_value("window", costs.window.size)
        return cls(costs, window, settings, check, overlapping=overlapping)

    @property
    def checked_costs(self) -> ParallelCosts | None:
        """The times that the window follows from; None if it follows from none."""
        return None if self.check is None else self.costs

    def drafting_case(self, models: Models, request: Request, setup: Setup) -> DraftingCase:
        """Returns what the costs of the run's drafts depend on: the draft model makes them, during
        the target's passes."""
        return replace(
            drafting_case(models, request, setup),
            cost_kind=request.method.tuning.cost_kind,
            has_model=True,
            in_blocks=models.draft is not None and models.draft.drafts_blocks,
            in_parallel=True,
            parallel_costs=self.costs,
        )


def _costs_for(models: Models, request: Request) -> ParallelCosts | None:
    """Returns the times of passes if the request's window or its length policy follows from them,
    else None. In a repeatable request nothing does."""
    values = request.settings.values
    policy = request.policy
    reads_costs = policy is not None and policy.reads_costs and values["verify_cost"] == AUTO
    if request.is_repeatable or not (values["window"] == AUTO or reads_costs):
        return None
    return models.kept(PassTimes).costs(
        request.typical_length, request.sampling, record=request.record
    )


def _tuned_costs(models: Models, request: Request) -> ParallelCosts | None:
    """Returns the times of passes by the profile; None if it has none of overlapping passes, or of
    passes in turn."""
    costs = request.tuned_costs
    if costs is None:
        costs = models.measurements.tuned_costs
    tuning = request.method.tuning
    overlapping = costs.get(tuning.cost_kind)
    in_turn = costs.get(tuning.drafts)
    if overlapping is None or in_turn is None:
        return None
    return ParallelCosts.of_rounds(overlapping, in_turn, request.typical_length)


def _window(
    models: Models, request: Request, worker: Worker, costs: ParallelCosts | None
) -> Window:
    """Returns the window that the settings name; if they name none, the one that follows from the
    times of passes, and without times from the models' sizes."""
    size = request.settings.values["window"]
    if size == AUTO and costs is not None:
        return costs.run_window(is_flexible=request.sampling.greedy and worker.is_process)
    if size == AUTO:
        size = usual_window(draft_cost(models))
    return Window(int(size), int(size))


class PassTimes:
    """Measures the seconds of forward passes of target and draft while both run at once."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._overlapping: dict[tuple[Any, ...], Overlapping] = {}

    def overlapping(
        self, costs: ParallelCosts, longest: int, sampling: SamplingParams, *, record: bool
    ) -> RunOverlapping:
        """Returns what decides in a run with these costs, with drafts in turn of at most `longest`
        tokens, whether passes overlap. Runs of a kind (see `_kind`) decide together."""
        runs = self._overlapping.setdefault(self._kind(sampling, record=record), Overlapping())
        return RunOverlapping(runs, costs, longest)

    def costs(
        self, context_length: int, sampling: SamplingParams, *, record: bool = False
    ) -> ParallelCosts:
        """Returns the seconds of passes after a context of so many tokens. There must be a draft
        model.

        They are measured once for each combination of what changes them: the length rounded up to a
        power of two; whether tokens are drawn, and whether top-k, top-p or min-p and penalties are
        on; whether the draft model runs in another process, and how many threads that leaves to the
        target; and whether the draft's logits are passed on (`record`, see `Request`). If the draft
        model cannot read a context of this length, the seconds of its passes are infinite.
        """

        def measure() -> Sample[dict[str, float]]:
            sample = self._measure(context_length, sampling, record=record)
            return sample.holding(asdict(sample.value))

        key = self._key(context_length, sampling, record=record)
        return self._models.measurements.get(
            PASSES, key, measure, lambda stored: ParallelCosts(*(stored[name] for name in _TIMES))
        )

    def check(self, context_length: int, sampling: SamplingParams, *, record: bool) -> PassCheck:
        """Returns what compares a run's passes with those that `costs` has measured for the same
        arguments, and puts these in doubt if they are far apart."""
        key = self._key(context_length, sampling, record=record)
        return PassCheck(lambda: self._models.measurements.doubt(PASSES, key))

    def forget(self) -> None:
        """Forgets which share of tokens was accepted. Times, and by how much rounds take longer, do
        not depend on earlier outputs."""
        for runs in self._overlapping.values():
            runs.forget_acceptance()

    def save(self) -> None:
        """Stores nothing: times are stored when they are measured."""

    def _measure(
        self, context_length: int, sampling: SamplingParams, *, record: bool
    ) -> Sample[ParallelCosts]:
        models = self._models
        draft = models.draft
        worker = models.worker()
        assert draft is not None
        assert worker is not None
        worker.ready()
        shortest = min(models.target.max_tokens(context_length), draft.context_limit)
        length = max(1, min(context_length, max(shortest - LONGEST_WINDOW, shortest // 2)))
        widest = max(1, min(LONGEST_WINDOW, shortest - length))

        runners = models.plain()
        capacity = models.capacity(context_length + LONGEST_WINDOW)
        runners.reserve(capacity)
        target = runners.target
        setup = decoding.Setup(
            None,
            sampling,
            vocab_size=target.vocab_size,
            target=target,
            record=record,
            capacity=capacity,
        )
        drafter = worker.drafter(LengthPolicy(), setup, LONGEST_WINDOW)
        from specgen.engine.devices import device_timer

        timer = device_timer(models.target.device)
        return time_parallel_passes(target, drafter, Context([1] * length), timer, widest)

    def _key(
        self, context_length: int, sampling: SamplingParams, *, record: bool
    ) -> tuple[Any, ...]:
        """Returns what distinguishes measurements."""
        length = 1 << (context_length - 1).bit_length()
        return length, *self._kind(sampling, record=record)

    def _kind(self, sampling: SamplingParams, *, record: bool) -> tuple[Any, ...]:
        """Returns what distinguishes measurements with a context of the same length."""
        worker = self._models.worker()
        assert worker is not None
        filters = sampling.active_filters.keys()
        return (
            not sampling.greedy,
            "top_k" in filters,
            bool(filters - {"top_k"}),
            self._models.target.has_penalties or sampling.penalties is not None,
            worker.is_process,
            worker.threads,
            record,
        )


def time_parallel_passes(
    target: TargetRunner,
    drafter: ParallelDrafter,
    context: Context,
    timer: DeviceTimer | None = None,
    widest: int = LONGEST_WINDOW,
) -> Sample[ParallelCosts]:
    """Measures the seconds of draft and target passes after `context`, for a target pass as wide as
    the resulting window.

    The window depends on the time of a target pass, and this time on the number of tokens, which is
    the window. So a few rough steps estimate the window first. Then passes over that many tokens
    are measured, and if the window changes by more than one token, once more. `timer` times the
    target's device; None if it computes synchronously. No target pass covers more than `widest`
    tokens. Closes the drafter.
    """
    with closing(drafter):
        drafter.prefill(context)
        target.logits(context)
        deadline = time.perf_counter() + _TIME_LIMIT
        draft = distinct_ids(widest, target.num_embeddings)
        stopwatch = _ParallelPasses(target, drafter, context, draft, timer)
        sample = stopwatch.steps(min(_ROUGH_WIDTH, widest), _ROUGH_STEPS, deadline)
        for _ in range(_TURNS):
            width = min(sample.value.window.size, widest)
            sample = stopwatch.steps(width, _WARM_UP + _STEPS, deadline)
            if abs(sample.value.window.size - width) <= 1:
                break
        return sample


@dataclass(frozen=True, slots=True)
class _ParallelPasses:
    """Times target passes after `context`, over its last token and the first tokens of `draft`,
    while `drafter` drafts. `timer` times the target's device, None if it computes synchronously."""

    target: TargetRunner
    drafter: ParallelDrafter
    context: Context
    draft: Sequence[int]
    timer: DeviceTimer | None

    def steps(self, width: int, count: int, deadline: float) -> Sample[ParallelCosts]:
        """Times `count` steps, or fewer after the deadline: the target runs over `width` tokens
        while `width` are drafted.

        Every third step is followed by ones with target passes over one token and over two, so that
        a slow phase of the machine affects all.
        """
        drafts = ThreadTimes()  # of a draft pass
        passes = {tokens: ThreadTimes() for tokens in (width, 1, 2)}  # of target passes
        drafts_alone = ThreadTimes()
        passes_alone = {tokens: ThreadTimes() for tokens in (width, 1)}
        for number in range(count):
            if number >= _FEWEST and time.perf_counter() >= deadline:
                break
            is_third = number % 3 == 0
            for tokens in (width, 1, 2) if is_third else (width,):
                drafted = self.step(tokens, width, passes[tokens])
                self._add_draft(drafts, drafted)
            for tokens in (width, 1) if is_third else ():
                self._target_pass(tokens, passes_alone[tokens])()
                self.drafter.start(self.context, (), width)
                self._add_draft(drafts_alone, len(self.drafter.finish().tokens))
        return self._sample(width, drafts, passes, drafts_alone, passes_alone)

    def _add_draft(self, drafts: ThreadTimes, drafted: int) -> None:
        """Adds the time of a draft pass in the last draft, of `drafted` tokens; infinite if the
        draft model cannot follow this context: the window is 1 then."""
        if drafted:
            drafts.add(self.drafter.seconds / drafted, self.drafter.own_seconds / drafted)
        else:
            drafts.add(math.inf, math.inf)

    def _sample(
        self,
        width: int,
        drafts: ThreadTimes,
        passes: Mapping[int, ThreadTimes],
        drafts_alone: ThreadTimes,
        passes_alone: Mapping[int, ThreadTimes],
    ) -> Sample[ParallelCosts]:
        """Returns the costs that follow from the times of draft passes, and from those of target
        passes by their number of tokens, with `width` as a window; and from those of passes of one
        model alone."""
        wait = passes[width].wait if self.target.device.type == "cpu" else 1.0

        def after_warm_up(times: ThreadTimes) -> list[float]:
            seconds = times.own if wait > STEADY else times.seconds
            return seconds[min(_WARM_UP, len(seconds) // 2) :]

        def pass_seconds(seconds: Sequence[float]) -> float:
            return max(undisturbed(seconds), _SHORTEST)

        drafting = after_warm_up(drafts)
        whole = after_warm_up(passes[width])
        costs = ParallelCosts(
            pass_seconds(drafting),
            pass_seconds(whole),
            pass_seconds(after_warm_up(passes[1])),
            pass_seconds(after_warm_up(passes[2])),
            width,
            len(self.context),
            pass_seconds(after_warm_up(drafts_alone)),
            pass_seconds(after_warm_up(passes_alone[width])),
            pass_seconds(after_warm_up(passes_alone[1])),
        )
        scatter = max(spread(whole), spread(drafting))
        return Sample(costs, len(whole), max(scatter, wait))

    def step(self, tokens: int, window: int, times: ThreadTimes) -> int:
        """Adds the time of a target pass over `tokens` tokens to `times`. Returns how many tokens
        (at most `window`) were drafted meanwhile."""
        self.drafter.start(self.context, (), window)
        wait = self._target_pass(tokens, times)
        drafted = len(self.drafter.finish().tokens)
        wait()
        return drafted

    def _target_pass(self, tokens: int, times: ThreadTimes) -> Callable[[], None]:
        """Begins a target pass over `tokens` tokens. Returns a function that waits for it and adds
        its time to `times`; a device that computes synchronously has then done so already."""

        def run() -> None:
            self.target.logits(self.context, self.draft[: tokens - 1]).logits.argmax(dim=-1)

        if self.timer is None:
            times.time(run)
            return lambda: None
        self.timer.start()
        start = time.perf_counter()
        run()
        end = self.timer.mark()

        def wait() -> None:
            seconds = end() - start
            times.add(seconds, seconds)

        return wait
