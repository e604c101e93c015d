"""PEARL's schedule: draft and target work at the same time (PEARL, section 3).

Pre-verify: the target verifies a draft's first token while the rest is drafted. Post-verify: the
draft model continues to draft while the target verifies the tokens before. The window is the number
of tokens drafted during one target pass.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, cast

import torch

from specgen.base.types import Context, Draft, Mode, Round
from specgen.decoding.drafting import reason_in_turn
from specgen.decoding.forced_tokens import certain, with_count
from specgen.decoding.parallel_costs import Window
from specgen.engine.devices import inference, synchronizer

if TYPE_CHECKING:
    from specgen.base.measuring import PassCheck
    from specgen.decoding.parallel_costs import ParallelCosts, RunOverlapping
    from specgen.decoding.policy_base import LengthPolicy
    from specgen.decoding.run import Run, Schedule
    from specgen.engine.forward_pass import ModelOutput


class ParallelDrafter(Protocol):
    """Drafts for one run (the generation of one output) while its caller does something else. One
    draft at a time. The methods, except for `cut` and `close`, raise SpecgenError if the model
    cannot be loaded or drafting has failed.

    `policy` is the run's length policy (it decides when drafts end); the run tells it how many
    tokens were accepted. `seconds` is how long the last draft took, measured where it was drafted,
    and `own_seconds` how long of this its thread ran.
    """

    policy: LengthPolicy
    seconds: float
    own_seconds: float

    def ready(self) -> None:
        """Waits until drafts can be started without a wait for the draft model's weights."""

    def prefill(self, context: Context) -> None:
        """Starts the draft model's forward pass over the prompt, and does not wait for it."""

    def start(self, context: Context, unverified: Sequence[int], limit: int) -> None:
        """Starts a draft of at most `limit` tokens after the context and after `unverified`, and
        does not wait for it.

        `unverified` are tokens drafted earlier that the target is still verifying.
        """

    def first(self, count: int) -> list[int]:
        """Waits until the draft that was started has `count` tokens or is complete, and returns its
        first `count` tokens; fewer if it has fewer."""

    def cut(self) -> None:
        """Ends the draft that was started as soon as the token that is being drafted is complete.
        The draft has at least one token."""

    def finish(self) -> Draft:
        """Waits for the draft that was started, and returns it. Does not wait for the target's
        pass.

        The draft's `probs` stay valid until the draft after the next one is started.
        """

    def close(self) -> None:
        """Ends the run. A draft that was started but not finished is discarded."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """PEARL's schedule. `window` is the number of tokens to draft during one target pass.

    Without `pre_verify` the target waits until there are tokens to verify. Without `post_verify`
    the draft model waits while they are verified. Both are ablations in the paper's Table 3.
    `costs` are the pass times that the window was computed from, None if the user gave the window;
    `check` compares the run's passes with them, None: nothing is compared. `overlapping` decides
    before each round whether the models take turns instead, None: they never do. `joins_forced`:
    tokens that have to follow are verified with the draft before them, else in rounds of their own.
    `is_in_turn`: `overlapping` has decided so, and a draft's reason to end says it.
    """

    drafter: ParallelDrafter
    window: Window
    pre_verify: bool = True
    post_verify: bool = True
    costs: ParallelCosts | None = None
    check: PassCheck | None = None
    overlapping: RunOverlapping | None = None
    joins_forced: bool = True
    is_in_turn: bool = False

    def ready(self) -> None:
        """Waits until the first round need not wait for the draft model's weights."""
        self.drafter.ready()

    def __call__(self, run: Run) -> Iterator[Round]:
        schedule = self
        with closing(self.drafter):
            self.drafter.prefill(run.context)
            yield run.prefill()
            unverified = Draft()
            try:
                while run.finish_reason is None:
                    round_, unverified = schedule._step(run, unverified)
                    yield round_
                    schedule = self._after(round_, in_turn=schedule.is_in_turn)
            finally:
                if self.check is not None:
                    self.check.end()

    def _after(self, round_: Round, *, in_turn: bool) -> Parallel:
        """Returns the schedule of the round after this one: with drafts and target passes in turn,
        if that is faster."""
        if self.overlapping is None:
            return self
        self.overlapping.add(round_, in_turn=in_turn)
        length = self.overlapping.length_of_next
        if length is None:
            return self
        return replace(
            self,
            window=Window(length, length),
            pre_verify=False,
            post_verify=False,
            check=None,
            is_in_turn=True,
        )

    @property
    def _takes_turns(self) -> bool:
        """Whether nothing is drafted during the target's passes."""
        return not (self.pre_verify or self.post_verify)

    @inference
    def _step(self, run: Run, unverified: Draft) -> tuple[Round, Draft]:
        """Runs one step in its mode (PEARL, Algorithm 1): pre-verify, or post-verify if there are
        `unverified` drafted tokens.

        Returns the finished round, and the drafted tokens that the next step has to verify.
        """
        run.clock.start()
        run.policy.in_turn = self._takes_turns
        if not unverified.tokens:
            undrafted = run.round_without_drafter(has_forced=not self.joins_forced)
            if undrafted is not None:
                return undrafted, Draft()
        if self.joins_forced:
            unverified = run.with_forced(unverified)
        if not unverified.tokens and not self.pre_verify:
            # the target idles meanwhile
            unverified = self._finish(self._start(run, unverified, self.window.size))
            run.clock.lap("draft")
        return self._post_verify(run, unverified) if unverified.tokens else self._pre_verify(run)

    def _pre_verify(self, run: Run) -> tuple[Round, Draft]:
        """Verifies a draft's first token while the rest is drafted (PEARL, section 3.2).

        With a `lead`, the target waits for so many tokens, and verifies them too.
        """
        lead = min(self.window.lead, run.remaining - 1)
        window = self._start(run, Draft(), lead + self.window.beside(1))
        known: Sequence[int] = ()
        if lead:
            known = self.drafter.first(lead)
            run.clock.lap("draft")

        output, width = _target_pass(run, known)
        draft = self._finish_beside(run, window)
        run.clock.lap("draft")

        first = draft.part(0, len(known))
        round_, unverified = _verify(run, "pre-verify", first, draft.part(len(known)), output)
        self._compare(width, round_.seconds["verify"], len(draft.tokens))
        return round_, unverified

    def _post_verify(self, run: Run, unverified: Draft) -> tuple[Round, Draft]:
        """Verifies the `unverified` tokens while further ones are drafted after them (PEARL,
        section 3.3)."""
        window = 0
        if self.post_verify:
            window = self._start(run, unverified, self.window.beside(len(unverified.tokens) + 1))

        output, width = _target_pass(run, unverified.tokens)
        fresh = Draft(stop_reason=unverified.stop_reason)
        if window:
            fresh = self._finish_beside(run, window)
        run.clock.lap("draft")

        round_, following = _verify(run, "post-verify", unverified, fresh, output)
        self._compare(width, round_.seconds["verify"], len(fresh.tokens))
        return round_, following

    def _compare(self, width: int, seconds: float, drafted: int) -> None:
        """Has a target pass over `width` tokens checked, and the draft of `drafted` tokens, 0 if
        there is none."""
        if self.check is None or self.costs is None:
            return
        self.check.add("target", seconds, self.costs.target_passes.at(width))
        if drafted:
            self.check.add("draft", self.drafter.seconds, drafted * self.costs.draft_pass)

    def _start(self, run: Run, unverified: Draft, window: int) -> int:
        """Starts a draft of at most `window` tokens after the unverified tokens. Returns `window`.

        Starts none and returns 0 if the output ends with the unverified tokens.
        """
        room = run.remaining - len(unverified.tokens)
        if room < 1 or (unverified.tokens and unverified.tokens[-1] in run.eos_ids):
            return 0
        self.drafter.start(run.context, unverified.tokens, min(window, room))
        return window

    def _finish_beside(self, run: Run, window: int) -> Draft:
        """Returns the draft that was started before the target's pass. In a flexible window, it
        ends with the pass."""
        if self.window.is_flexible:
            wait = synchronizer(run.target.device)
            if wait is not None:
                wait()
            self.drafter.cut()
        return self._finish(window)

    def _finish(self, window: int) -> Draft:
        draft = self.drafter.finish()
        is_filled = draft.stop_reason == "length" and len(draft.tokens) == window
        reason = f"window {window}" if is_filled else draft.stop_reason
        if self.is_in_turn and draft.stop_reason is not None:
            reason = reason_in_turn(draft.stop_reason, window if is_filled else None)
        return replace(draft, stop_reason=reason)


def counted_in_turn(schedule: Schedule, overlapping: RunOverlapping) -> Schedule:
    """Returns the schedule of a run of PEARL whose models take turns, with its rounds counted: they
    decide whether passes overlap in later runs."""

    def rounds(run: Run) -> Iterator[Round]:
        with closing(cast("Generator[Round]", schedule(run))) as made:
            for round_ in made:
                if round_.mode != "prefill":
                    overlapping.add(round_, in_turn=True)
                yield round_

    return rounds


def _target_pass(run: Run, drafted: Sequence[int]) -> tuple[ModelOutput, int]:
    """Returns the target's logits after the context and after each of the drafted tokens, but after
    none that can only be the output's last; and the number of tokens that the pass was over."""
    inputs = drafted[: run.remaining - 1]
    output = run.target.logits(run.context, inputs, range(-1, len(inputs) - 1))
    run.clock.lap("verify", on_device=True)
    return output, 1 + len(inputs)


def _verify(
    run: Run, mode: Mode, unverified: Draft, fresh: Draft, output: ModelOutput
) -> tuple[Round, Draft]:
    """Verifies the `unverified` tokens, which the target's pass has run, and by the last logits the
    first of the `fresh` ones after them, so that no bonus token is drawn.

    Returns the round, and the tokens that are left for post-verify: the rest of the fresh ones if
    all were accepted, otherwise none, and pre-verify follows.
    """
    both = _joined(unverified, fresh)
    pending = max(len(fresh.tokens) - 1, 0)
    verdict = run.verify(both.part(0, len(both.tokens) - pending), output)
    round_ = run.commit(mode, both, verdict, pending)
    if verdict.token is None:
        return round_, fresh.part(1)
    return round_, Draft()


def _joined(first: Draft, second: Draft) -> Draft:
    """Joins two chains to one, with the stop reason of the second.

    If both have tokens, `probs` and `logits` end after the first token of the second chain: no more
    are verified.
    """
    if not first.tokens:
        return second
    predicted: list[float] = []
    if first.predicted or second.predicted:
        for part in (first, second):
            predicted += part.predicted or [math.nan] * len(part.tokens)
    if not second.tokens:
        return replace(first, stop_reason=second.stop_reason or first.stop_reason)
    return Draft.chain(
        [*first.tokens, *second.tokens],
        probs=None if second.probs is None else _drawn(first, second.probs[:1]),
        entropies=[*first.entropies, *second.entropies],
        top_probs=[*first.top_probs, *second.top_probs],
        stop_reason=with_count(second.stop_reason, len(first.forced)),
        forced=first.forced,  # a worker drafts none
        logits=None if second.logits is None else torch.cat((first.logits, second.logits[:1])),
        predicted=predicted,
    )


def _drawn(first: Draft, last: torch.Tensor) -> torch.Tensor:
    """Returns what a chain's tokens, of which the last ones may be forced, and one token after them
    were drawn from; `last` [1, vocabulary] is this token's distribution."""
    rows = [] if first.probs is None else [first.probs]
    drawn = sum(map(len, rows))
    return torch.cat((*rows, certain(first.tokens[drawn:], last), last))
