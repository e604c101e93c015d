"""PEARL: draft and target work at the same time (PEARL, section 3). Imports no torch.

Pre-verify: the target verifies a draft's first token while the rest is drafted. Post-verify: the draft model continues to draft
while the target verifies the tokens before. The window is the number of tokens drafted during one target pass. A fixed window is
the ratio of both models' pass times (section 4.1), so that both finish together; in a flexible window, drafting ends when the
target pass does.

A PARD model drafts token by token here, as a plain model does. Its rows would follow masks in place of the tokens that are being
verified: measured with one that was trained for the bundled target, 0.93 to 1.02 times plain decoding, against 1.50 to 1.56.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Protocol

from specgen.base.measuring import STEADY, Sample, distinct_ids, spread, undisturbed
from specgen.base.settings import Setting, Settings
from specgen.base.types import Context, Draft, Mode, Round
from specgen.decoding.costs import Curve
from specgen.decoding.policy_base import DRAFT_SIGNALS
from specgen.methods.method import DRAFT_MODEL, Method

if TYPE_CHECKING:
    from specgen.decoding.drafting import Setup
    from specgen.decoding.policy_base import LengthPolicy
    from specgen.decoding.run import Run, Schedule
    from specgen.engine.devices import DeviceTimer
    from specgen.engine.model_runner import ModelRunner

LONGEST_WINDOW = 64
_ROUGH_WIDTH = 8  # tokens of the target passes from which the window is first estimated
_TURNS = 2  # estimates of the window after the first
_ACCEPTANCE = 0.7  # assumed probability that a drafted token is accepted
_MARGIN = 1.5  # how far the draft model may get ahead of its expected number of tokens, if a target pass takes longer
_WARM_UP, _STEPS = 5, 30  # timed steps; the numbers of PEARL's reference implementation
_FEWEST = 3  # steps that are timed even after the time limit
_TIME_LIMIT = 2.0  # seconds for all steps
_ROUGH_STEPS = 5
_SHORTEST = 1e-9  # seconds of a pass, also on a clock that stands
_FEWEST_CHECKED = 8  # passes of a run, from which on slow ones mean something
_LARGEST_FACTOR = 1.5  # between measured passes and those of a run, above which they are measured again


@dataclass(frozen=True, slots=True)
class Window:
    """PEARL's window: the number of tokens that the draft model drafts during one target pass.

    `size` (PEARL's gamma) is this number while the target verifies a whole window, which has `size` tokens too. `first` is this
    number while the target passes over one token (PEARL's pre-verify); it is smaller than `size` if such a pass is shorter, as on
    a CPU. `second` is that for two tokens (None: on the line between the others). If `is_flexible`, a draft ends with the target
    pass, and `size` only limits its length. In this case `lead` is the number of new tokens that the target waits for after a
    rejection, and verifies in its next pass; in the paper it waits for none.
    """

    size: int
    first: int
    lead: int = 0
    is_flexible: bool = False
    second: int | None = None

    @property
    def longest(self) -> int:
        """The largest number of tokens in one draft."""
        return self.lead + self.size

    def beside(self, width: int) -> int:
        """Returns how many tokens to draft during a target pass over `width` tokens, so that both models finish together."""
        if width >= self.size:
            return self.size
        known = {1: self.first, self.size: self.size} | ({} if self.second is None else {2: self.second})
        return round(Curve(known).at(width))


@dataclass(frozen=True, slots=True)
class ParallelCosts:
    """Seconds of forward passes while target and draft model run at the same time, with `context_length` tokens in the caches.

    `draft_pass` is one draft pass, `target_pass` a target pass over `width` tokens, `single_pass` and `double_pass` are target
    passes over one token and over two.
    """

    draft_pass: float
    target_pass: float
    single_pass: float
    double_pass: float
    width: int
    context_length: int

    @property
    def ratio(self) -> float:
        """c = time of a target pass over `width` tokens / time of a draft pass."""
        return self.target_pass / self.draft_pass

    @property
    def window(self) -> Window:
        """The window with which neither model waits for the other: c, rounded, from 1 to `LONGEST_WINDOW` (PEARL, Theorem 1)."""
        size = _rounded(self.ratio)
        first, second = (min(size, _rounded(seconds / self.draft_pass)) for seconds in (self.single_pass, self.double_pass))
        return Window(size, first, second=second)

    @property
    def flexible_window(self) -> Window:
        """The window for drafts that end with the target pass. Its `lead` has the shortest expected time between two rejections.

        In this time about the same number of tokens is generated whatever `lead` is. With a lead of n, the time is n draft
        passes, a target pass that verifies n + 1 drafted tokens, and, if all of them are accepted, further passes that verify a
        whole window each.
        """
        window = self.window
        further = self.target_pass / (1 - _ACCEPTANCE**window.size)

        def seconds(lead: int) -> float:
            return lead * self.draft_pass + self.target_passes.at(lead + 1) + _ACCEPTANCE ** (lead + 1) * further

        longest = min(LONGEST_WINDOW, round(_MARGIN * window.size))
        return Window(longest, longest, min(range(window.size), key=seconds), is_flexible=True)

    def run_window(self, *, is_flexible: bool) -> Window:
        """The window of a run: if `is_flexible`, the one for drafts that end with the target pass, otherwise the fixed one."""
        return self.flexible_window if is_flexible else self.window

    @property
    def target_passes(self) -> Curve:
        """Seconds of a target pass by its number of tokens."""
        return Curve({2: self.double_pass, self.width: self.target_pass, 1: self.single_pass})

    def as_dict(self) -> dict[str, float]:
        """The measured times, c (`ratio`) and the window sizes by name. The first line of a trace file has them under `costs`."""
        return {**asdict(self), "ratio": self.ratio, "window": self.window.size, "first_window": self.window.first}


def usual_window(draft_cost: float) -> int:
    """Returns the window where nothing may be measured, for a draft pass that costs `draft_cost` target passes."""
    return _rounded(1 / draft_cost)


class PassCheck:
    """Compares the times of a run's passes with the measured `costs`, and calls `doubt` at its end if they are far from them."""

    def __init__(self, costs: ParallelCosts, doubt: Callable[[], None]) -> None:
        self._costs = costs
        self._doubt = doubt
        self._targets: list[float] = []  # seconds of each pass, divided by the measured ones
        self._drafts: list[float] = []

    def add(self, width: int, verification: float, drafted: int, drafting: float) -> None:
        """Adds a target pass over `width` tokens, and a draft of `drafted` tokens, 0 if there is none. Times are in seconds."""
        self._targets.append(verification / self._costs.target_passes.at(width))
        if drafted:
            self._drafts.append(drafting / drafted / self._costs.draft_pass)

    def end(self) -> None:
        for factors in (self._targets, self._drafts):
            if len(factors) < 2:
                continue
            factor = undisturbed(factors)
            is_slower = factor > _LARGEST_FACTOR and len(factors) >= _FEWEST_CHECKED
            is_faster = factor * _LARGEST_FACTOR < 1  # nothing makes a pass shorter: a few are enough
            if is_slower or is_faster:
                self._doubt()
                return


def _rounded(ratio: float) -> int:
    return min(max(1, round(ratio)), LONGEST_WINDOW)


class ParallelDrafter(Protocol):
    """Drafts for one run (the generation of one output) while its caller does something else. One draft at a time.

    `policy` is the run's length policy (it decides when drafts end); the run tells it how many tokens were accepted. `seconds` is
    how long the last draft took, measured where it was drafted, and `own_seconds` how long of this its thread ran.
    """

    policy: LengthPolicy
    seconds: float
    own_seconds: float

    def prefill(self, context: Context) -> None:
        """Starts the draft model's forward pass over the prompt, and does not wait for it."""

    def start(self, context: Context, unverified: Sequence[int], limit: int) -> None:
        """Starts a draft of at most `limit` tokens after the context and after `unverified`, and does not wait for it.

        `unverified` are tokens drafted earlier that the target is still verifying.
        """

    def first(self, count: int) -> list[int]:
        """Waits until the draft that was started has `count` tokens or is complete, and returns its first `count` tokens."""

    def cut(self) -> None:
        """Ends the draft that was started as soon as the token that is being drafted is complete. The draft has at least one
        token."""

    def finish(self) -> Draft:
        """Waits for the draft that was started, and returns it. Does not wait for the target's pass.

        The draft's `probs` stay valid until the draft after the next one is started.
        """

    def close(self) -> None:
        """Ends the run. A draft that was started but not finished is discarded."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """PEARL's schedule. `window` is the number of tokens to draft during one target pass.

    Without `pre_verify` the target waits until there are tokens to verify. Without `post_verify` the draft model waits while they
    are verified. Both are ablations in the paper's Table 3. `check` compares the run's passes with those that the window was
    computed from; None if it was given.
    """

    drafter: ParallelDrafter
    window: Window
    pre_verify: bool = True
    post_verify: bool = True
    check: PassCheck | None = None

    def __call__(self, run: Run) -> Iterator[Round]:
        from specgen.engine.devices import inference

        step = inference(self._step)
        with closing(self.drafter):
            self.drafter.prefill(run.context)
            yield run.prefill()
            unverified = Draft()
            try:
                while run.finish_reason is None:
                    round_, unverified = step(run, unverified)
                    yield round_
            finally:
                if self.check is not None:
                    self.check.end()

    def _step(self, run: Run, unverified: Draft) -> tuple[Round, Draft]:
        """Runs one target pass over the `unverified` drafted tokens, while further tokens are drafted after them.

        Returns the finished round, and the drafted tokens that the next step has to verify.
        """
        run.clock.start()
        if not unverified.tokens and not self.pre_verify:
            unverified = self._finish(self._start(run, unverified, self.window.size))  # the target idles meanwhile
            run.clock.lap("draft")
        mode: Mode = "post-verify" if unverified.tokens else "pre-verify"
        lead = 0 if unverified.tokens else min(self.window.lead, run.remaining - 1)
        size = self.window.beside(len(unverified.tokens) + 1)
        window = self._start(run, unverified, lead + size) if self.post_verify or not unverified.tokens else 0
        known: Sequence[int] = unverified.tokens
        if lead:
            known = self.drafter.first(lead)
            run.clock.lap("draft")
        # the logits after the last possible token are not needed
        inputs = known[: run.remaining - 1]
        output = run.target.logits(run.context, inputs, range(-1, len(inputs) - 1))
        run.clock.lap("verify", on_device=True)
        if window and self.window.is_flexible:  # the draft ends with the target's pass
            from specgen.engine.devices import synchronizer

            if (wait := synchronizer(run.target.device)) is not None:
                wait()
            self.drafter.cut()
        fresh = self._finish(window) if window else Draft(stop_reason=unverified.stop_reason)
        drafted = len(fresh.tokens)
        run.clock.lap("draft")
        both = _joined(unverified, fresh)
        if lead:
            fresh = fresh.part(len(known))
        # the last logits verify the first fresh token, so no bonus token is drawn
        pending = max(len(fresh.tokens) - 1, 0)
        verdict = run.verify(both.part(0, len(both.tokens) - pending), output)
        round_ = run.commit(mode, both, verdict, pending)
        if self.check is not None:
            self.check.add(len(inputs) + 1, round_.seconds["verify"], drafted, self.drafter.seconds)
        return round_, fresh.part(1) if verdict.token is None else Draft()

    def _start(self, run: Run, unverified: Draft, window: int) -> int:
        """Starts a draft of at most `window` tokens after the unverified tokens. Returns `window`.

        Starts none and returns 0 if the output ends with the unverified tokens.
        """
        room = run.remaining - len(unverified.tokens)
        if room < 1 or (unverified.tokens and unverified.tokens[-1] in run.eos_ids):
            return 0
        self.drafter.start(run.context, unverified.tokens, min(window, room))
        return window

    def _finish(self, window: int) -> Draft:
        draft = self.drafter.finish()
        filled = draft.stop_reason == "length" and len(draft.tokens) == window
        return replace(draft, stop_reason=f"window {window}") if filled else draft


def _joined(first: Draft, second: Draft) -> Draft:
    """Joins two chains to one, with the stop reason of the second.

    If both have tokens, `probs` and `logits` end after the first token of the second chain: no more are verified.
    """
    import torch

    if not first.tokens:
        return second
    predicted: list[float] = []
    if first.predicted or second.predicted:
        for part in (first, second):
            predicted += part.predicted or [math.nan] * len(part.tokens)
    if not second.tokens:
        return replace(first, stop_reason=second.stop_reason)
    return Draft.chain(
        [*first.tokens, *second.tokens],
        probs=None if second.probs is None else torch.cat((first.probs, second.probs[:1])),  # no more are verified
        entropies=[*first.entropies, *second.entropies],
        top_probs=[*first.top_probs, *second.top_probs],
        stop_reason=second.stop_reason,
        logits=None if second.logits is None else torch.cat((first.logits, second.logits[:1])),
        predicted=predicted,
    )


def time_parallel_passes(
    target: ModelRunner,
    drafter: ParallelDrafter,
    context: Context,
    timer: DeviceTimer | None = None,
    widest: int = LONGEST_WINDOW,
) -> Sample[ParallelCosts]:
    """Measures the seconds of draft and target passes after `context`, for a target pass as wide as the resulting window.

    The window depends on the time of a target pass, and this time on the number of tokens, which is the window. So a few rough
    steps estimate the window first. Then passes over that many tokens are measured, and if the window changes by more than one
    token, once more.
    `timer` times the target's device; None if it computes synchronously. No target pass covers more than `widest` tokens. Closes
    the drafter.
    """
    with closing(drafter):
        drafter.prefill(context)
        target.logits(context)
        deadline = time.perf_counter() + _TIME_LIMIT
        timed = _Timed(target, drafter, context, distinct_ids(widest, target.num_embeddings), timer)
        sample = timed.steps(min(_ROUGH_WIDTH, widest), _ROUGH_STEPS, deadline)
        for _ in range(_TURNS):
            width = min(sample.value.window.size, widest)
            sample = timed.steps(width, _WARM_UP + _STEPS, deadline)
            if abs(sample.value.window.size - width) <= 1:
                break
        return sample


@dataclass(frozen=True, slots=True)
class _Timed:
    """What `time_parallel_passes` times."""

    target: ModelRunner
    drafter: ParallelDrafter
    context: Context
    draft: Sequence[int]
    timer: DeviceTimer | None

    def steps(self, width: int, count: int, deadline: float) -> Sample[ParallelCosts]:
        """Times `count` steps, or fewer after the deadline: the target runs over `width` tokens while `width` are drafted.

        Every third step is followed by ones with target passes over one token and over two, so that a slow phase of the machine
        affects all.
        """
        drafts: list[float] = []  # seconds of a draft pass
        own_drafts: list[float] = []  # those in which its thread ran
        passes: dict[int, list[float]] = {width: [], 1: [], 2: []}  # seconds of target passes by the number of tokens
        own: dict[int, list[float]] = {width: [], 1: [], 2: []}  # those in which this thread ran
        for number in range(count):
            if number >= _FEWEST and time.perf_counter() >= deadline:
                break
            for tokens in (width, 1, 2) if number % 3 == 0 else (width,):
                seconds, own_seconds, drafted = self.step(tokens, width)
                passes[tokens].append(seconds)
                own[tokens].append(own_seconds)
                # Infinite where the draft model cannot follow this context: the window is 1 then.
                drafts.append(self.drafter.seconds / drafted if drafted else math.inf)
                own_drafts.append(self.drafter.own_seconds / drafted if drafted else math.inf)
        # Beside busy programs all passes may take long, and evenly, but this thread waits for a processor then.
        wait = 1.0
        if self.target.device.type == "cpu" and sum(own[width]) > 0:
            wait = sum(passes[width]) / sum(own[width])
        if wait > STEADY:
            passes = own
            drafts = own_drafts
        warm = {tokens: _warm(seconds) for tokens, seconds in passes.items()}
        times = (_warm(drafts), warm[width], warm[1], warm[2])
        draft, whole, single, double = (max(undisturbed(seconds), _SHORTEST) for seconds in times)
        costs = ParallelCosts(draft, whole, single, double, width, len(self.context))
        scatter = max(spread(warm[width]), spread(_warm(drafts)))
        return Sample(costs, len(warm[width]), max(scatter, wait))

    def step(self, tokens: int, window: int) -> tuple[float, float, int]:
        """Returns the seconds of a target pass over `tokens` tokens, those in which this thread ran, and how many tokens (at
        most `window`) were drafted meanwhile."""
        self.drafter.start(self.context, (), window)
        if self.timer is not None:
            self.timer.start()
        own_start = time.thread_time()
        start = time.perf_counter()
        self.target.logits(self.context, self.draft[: tokens - 1]).logits.argmax(dim=-1)
        end = time.perf_counter() if self.timer is None else self.timer.mark()
        own_seconds = time.thread_time() - own_start
        drafted = len(self.drafter.finish().tokens)
        return (end() if callable(end) else end) - start, own_seconds, drafted


def _warm(seconds: list[float]) -> list[float]:
    """The times without the first few, during which the machine warms up."""
    return seconds[min(_WARM_UP, len(seconds) // 2) :]


def _schedule(setup: Setup, settings: Settings) -> Schedule:
    """Makes the schedule, with the drafter of the setup's worker, and for `window=auto` the measured window of the setup."""
    if setup.worker is None:
        raise PEARL.without_part(None)
    size = settings.values["window"]
    window = setup.window or Window(int(size), int(size))
    drafter = setup.worker.drafter(settings, setup, window.longest)
    return Parallel(drafter, window, bool(settings.values["pre_verify"]), bool(settings.values["post_verify"]))


PEARL = Method(
    "pearl",
    "PEARL",
    DRAFT_MODEL,
    schedule=_schedule,
    any_policy=True,
    signals=DRAFT_SIGNALS,
    settings={
        "window": Setting("auto", "tokens drafted during a target pass; auto: the measured ratio of times", 1, 1000, "auto"),
        "pre_verify": Setting(True, "verify a draft's first token while the rest is drafted"),
        "post_verify": Setting(True, "continue drafting while tokens are verified"),
    },
    is_parallel=True,
    drafts="model",
    recorded=True,
    own_cost_kind="parallel",
    grids=({"window": ("auto", *range(1, 17))},),
)
