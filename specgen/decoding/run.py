"""A run generates one output with one method. `Run` holds the models, the method's parts and the
state of the output.

The usual schedule of speculative decoding (`sequential`: draft, then verify) is here too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import TYPE_CHECKING

from specgen.base.settings import Settings
from specgen.base.types import PHASES, Context, Draft, FinishReason, Mode, Round, Verdict
from specgen.decoding.drafting import Drafter, LearningDrafter
from specgen.decoding.policy_base import LengthPolicy
from specgen.decoding.verification import Verifier, with_agreement, with_log_probs
from specgen.engine.devices import device_timer, inference
from specgen.engine.text.stop_strings import StopStrings

if TYPE_CHECKING:
    import torch

    from specgen.decoding.forced_tokens import ForcedTokens
    from specgen.decoding.parallel_costs import ParallelCosts
    from specgen.decoding.predicted_output import PredictedOutput
    from specgen.engine.devices import DeviceTimer
    from specgen.engine.forward_pass import ModelOutput
    from specgen.engine.model_runner import VerifyingRunner
    from specgen.engine.text.tokenizer import Tokenizer

NO_SETTINGS = Settings(None, {})
Schedule = Callable[["Run"], Iterator[Round]]


class StopTexts:
    """Finds `stop` strings in the generated text, token by token. `detokenize` returns the text
    that a token adds."""

    def __init__(self, stop: StopStrings, detokenize: Callable[[int], str]) -> None:
        self._stop = stop
        self._detokenize = detokenize
        self._tail = ""
        self._kept = max(map(len, stop.texts), default=1) - 1

    @classmethod
    def of(
        cls, texts: Sequence[str], tokenizer: Tokenizer, prompt_ids: Sequence[int]
    ) -> StopTexts | None:
        """Returns the search for the stop strings `texts` in the output after a prompt; None if
        there are no texts."""
        if not texts:
            return None
        return cls(StopStrings.of(texts, tokenizer), tokenizer.detokenizer(prompt_ids).push)

    def completed_by(self, token: int) -> bool:
        """Adds this token to the generated text. Returns whether the output ends with it: whether
        the text now contains a stop string."""
        self._tail += self._detokenize(token) + self._stop.mark(token)
        is_complete = self._stop.start(self._tail) is not None
        self._tail = self._tail[-self._kept :] if self._kept else ""
        return is_complete


class Clock:
    """Measures how long each phase of a round takes, in seconds. Phases are the names in `PHASES`;
    `other` takes the rest.

    Time between rounds is not counted. `timer` notes when the device finishes the work of a phase;
    None if the device computes synchronously. The host never waits for the device in a lap, only in
    `seconds`, after the round.
    """

    def __init__(self, timer: DeviceTimer | None) -> None:
        self._timer = timer
        self.start()

    @classmethod
    def of_device(cls, device: torch.device) -> Clock:
        """Returns a clock for passes on this device."""
        return cls(device_timer(device))

    def start(self) -> None:
        self._laps: list[tuple[str, Callable[[], float] | float]] = []
        self._moves: list[tuple[float, str, str]] = []
        if self._timer is not None:
            self._timer.start()
        self._start = time.perf_counter()

    def lap(self, phase: str, *, on_device: bool = False) -> None:
        """Adds the time since the previous lap (or `start`) to `phase`.

        With `on_device`, the lap ends when the device has finished the work queued so far; the next
        lap begins there. The host does not wait for that.
        """
        timer = self._timer if on_device else None
        end = time.perf_counter() if timer is None else timer.mark()
        self._laps.append((phase, end))

    def move(self, seconds: float, source: str, phase: str) -> None:
        """Counts `seconds` of the phase `source` in `phase` instead."""
        self._moves.append((seconds, source, phase))

    def seconds(self) -> dict[str, float]:
        self.lap("other")
        phases = dict.fromkeys(PHASES, 0.0)
        last = self._start
        for phase, end in self._laps:
            now = end() if callable(end) else end
            if now > last:
                phases[phase] += now - last
                last = now
        for seconds, source, phase in self._moves:
            phases[source] -= seconds
            phases[phase] += seconds
        return phases


class Turns:
    """The lock of runs that share models. A thread holds it in a `with` block, and may nest such
    blocks."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._depth = 0
        self._unclosed: list[Generator[Round]] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            while self._unclosed:
                self._unclosed.pop().close()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._lock.release()

    def close(self, rounds: Generator[Round]) -> None:
        """Closes unfinished rounds: now, or if another thread has the present turn, in the next
        one.

        The garbage collector calls this in any thread, also in one that the holder of the turn
        waits for, so it must not wait.
        """
        if not self._lock.acquire(blocking=False):
            self._unclosed.append(rounds)
            return
        try:
            rounds.close()
        finally:
            self._lock.release()


@dataclass(slots=True)
class Run:
    """The state of a run: the generation of one output.

    `schedule` yields the run's rounds: it decides in which order drafter and target work. After
    `limit` new tokens the run ends with reason `length`. `finish_reason` is None until the output
    has ended. `stop_texts` is None without stop strings. `settings` are the method's, with measured
    values in place of `auto`. `seed` is the seed of all random numbers of the run. `costs` are the
    pass times from which PEARL's window was computed (`ParallelCosts`); None for other methods, and
    if the user gave the window. `lock` is held while a round is made, and not between rounds: runs
    that share models have the same one. `prediction` drafts what the user expects the output to be,
    before the drafter is asked; None if nothing is expected. `forced` drafts tokens that have to
    follow, if they are not always part of the drafter's drafts. `log_probs` is
    `SamplingParams.logprobs`.
    """

    context: Context
    target: VerifyingRunner
    drafter: Drafter
    policy: LengthPolicy
    verifier: Verifier
    schedule: Schedule
    limit: int
    eos_ids: Collection[int]
    stop_texts: StopTexts | None
    clock: Clock
    settings: Settings = NO_SETTINGS
    seed: int = 0
    costs: ParallelCosts | None = None
    lock: Turns = field(default_factory=Turns)
    prediction: PredictedOutput | None = None
    forced: ForcedTokens | None = None
    log_probs: int | None = None
    finish_reason: FinishReason | None = None
    _index: int = field(default=0, init=False)

    def rounds(self) -> Iterator[Round]:
        return _in_turns(self.schedule(self), self.lock)

    @property
    def remaining(self) -> int:
        return self.limit - (len(self.context) - self.context.prompt_length)

    @property
    def uncached_tokens(self) -> int | None:
        """How many tokens of the context the target's next pass runs, because its KV cache does not
        hold them. None if it holds all but the last one, which is always run."""
        missing = len(self.context) - self.target.cached_tokens(self.context)
        return missing if missing > 1 else None

    def prefill(self) -> Round:
        """Runs round 0: the target's pass over the prompt, which gives the first token."""
        self.clock.start()
        output = self.target.logits(self.context)
        self.clock.lap("prefill", on_device=True)
        return self.commit("prefill", Draft(), self.verify(Draft(), output))

    def verify(
        self, draft: Draft, output: ModelOutput, verifier: Verifier | None = None
    ) -> Verdict:
        """Verifies a draft by the target's `output`, with another `verifier` than the run's if one
        is given. Raises RunError as `Verifier.verify` does.

        If the draft has its logits, the verdict's `agreement` compares both models' distributions.
        """
        verdict = (self.verifier if verifier is None else verifier).verify(draft, output)
        verdict = with_agreement(verdict, draft, output)
        if self.log_probs is not None:
            verdict = with_log_probs(verdict, draft, output, self.log_probs)
        self.clock.lap("sample")
        return verdict

    def with_forced(self, draft: Draft) -> Draft:
        """Returns the chain `draft` with the tokens that have to follow it."""
        if self.forced is None:
            return draft
        return self.forced.after(self.context, draft, self.remaining - 1)

    def round_without_drafter(self, *, has_forced: bool = True) -> Round | None:
        """Verifies the next tokens of the output that the user expects, else (if `has_forced`)
        those that have to follow, and returns the round. None if there are none of either. The
        clock runs already."""
        draft = Draft()
        verifier = self.verifier
        for source in (self.prediction, self.forced if has_forced else None):
            if source is not None and not draft.tokens:
                # room for the target's own token
                draft = source.propose(self.context, self.remaining - 1)
                verifier = source.verifier
        if not draft.tokens:
            return None
        self.clock.lap("draft")
        output = self.target.logits(self.context, draft.tokens, draft.parents)
        self.clock.lap("verify", on_device=True)
        verdict = self.verify(draft, output, verifier)
        return self.commit("sequential", draft, verdict, is_without_drafter=True)

    def commit(
        self,
        mode: Mode,
        draft: Draft,
        verdict: Verdict,
        unverified: int = 0,
        *,
        target_passes: int = 1,
        unjudged: int = 0,
        is_without_drafter: bool = False,
    ) -> Round:
        """Appends the verdict's tokens to the context, up to the end of the output, and returns the
        finished round.

        Tells the length policy how many tokens were accepted, and sets `finish_reason` if the
        output has ended. In PEARL, the last `unverified` tokens of the draft (a chain) are not
        judged by this verdict. If all tokens before them were accepted and the output has not
        ended, they are left out of the round, because the next round verifies and reports them.
        `unjudged` is the number of nodes that the target's pass ran besides the draft. The policy
        learns nothing from a draft that the drafter did not make.
        """
        accepted = sum(node not in draft.forced for node in verdict.path)
        verdict = self._cut(draft, verdict)
        tokens = [draft.tokens[node] for node in verdict.path]
        if verdict.token is not None:
            tokens.append(verdict.token)
        self.context.extend(tokens)
        self.clock.lap("other")
        if mode != "prefill" and not is_without_drafter:
            drafted = draft.drafted_levels - unverified
            self.policy.observe(drafted, accepted)
        self.clock.lap("policy")

        if self.finish_reason is None and self.remaining <= 0:
            self.finish_reason = "length"
        are_reported_later = unverified and verdict.token is None and self.finish_reason is None
        round_ = Round(
            self._index,
            mode,
            _reported(draft, unverified if are_reported_later else 0),
            verdict,
            self.clock.seconds(),
            self.policy.state(),
            target_passes,
            unjudged,
        )
        self._index += 1
        return round_

    def _cut(self, draft: Draft, verdict: Verdict) -> Verdict:
        """Returns the verdict without the tokens after the end of the output, and sets
        `finish_reason` if the output ends.

        The output ends with an end-of-sequence token, a token that completes a stop string, or one
        after which a grammar allows nothing.
        """
        tokens: list[int] = []
        for position, node in enumerate(verdict.path):
            tokens.append(draft.tokens[node])
            if self._ends(tokens):
                return replace(
                    verdict,
                    path=verdict.path[: position + 1],
                    token=None,
                    source=None,
                    log_probs=verdict.log_probs[: position + 1],
                )
        if verdict.token is not None:
            self._ends([*tokens, verdict.token])
        return verdict

    def _ends(self, tokens: Sequence[int]) -> bool:
        """Whether the output ends with the last of the `tokens` that follow the context. Called
        once for each token of the output, in order."""
        if tokens[-1] in self.eos_ids:
            self.finish_reason = "eos"
        elif self._is_stopped_by(tokens[-1]) or self._is_complete(tokens):
            self.finish_reason = "stop"
        return self.finish_reason is not None

    def _is_stopped_by(self, token: int) -> bool:
        return self.stop_texts is not None and self.stop_texts.completed_by(token)

    def _is_complete(self, tokens: Sequence[int]) -> bool:
        """Whether a grammar allows nothing after the context and these tokens."""
        constraint = self.context.constraint
        return constraint is not None and constraint.is_complete(self.context, tokens)


def _reported(draft: Draft, later: int) -> Draft:
    """Returns what a round reports of its draft: all but the last tokens, of which `later` are
    reported by the next round, and no tensors, so that a stored round keeps none alive."""
    if later:
        reason = f"{draft.stop_reason}, {later} ahead"
        draft = replace(draft.part(0, len(draft.tokens) - later), stop_reason=reason)
    if draft.probs is not None or draft.logits is not None:
        draft = replace(draft, probs=None, logits=None)
    return draft


def _in_turns(rounds: Iterator[Round], lock: Turns) -> Iterator[Round]:
    """Yields the rounds, each made while `lock` is held, so that an unfinished run of one thread
    keeps no other one waiting."""
    try:
        while True:
            with lock:
                round_ = next(rounds, None)
            if round_ is None:
                return
            yield round_
    finally:
        if isinstance(rounds, Generator):
            lock.close(rounds)


def sequential(run: Run) -> Iterator[Round]:
    """Yields rounds that each add a draft's accepted tokens and one token of the target (Leviathan
    et al., Algorithm 1).

    Plain decoding has empty drafts.
    """
    yield run.prefill()
    has_drafted = False
    while run.finish_reason is None:
        round_ = _draft_then_verify(run)
        # copied tokens are not the draft model's
        drafted = round_.draft.drafted_levels if round_.draft.entropies else 0
        if has_drafted or not drafted:  # the draft model's first draft also runs the prompt
            run.policy.observe_seconds(
                drafted,
                round_.drafting_seconds,
                round_.pass_tokens - 1,
                round_.verification_seconds,
            )
        has_drafted |= drafted > 0
        yield round_


@inference
def _draft_then_verify(run: Run) -> Round:
    run.clock.start()
    undrafted = run.round_without_drafter()
    if undrafted is not None:
        return undrafted
    limit = run.remaining - 1  # room for the target's own token
    draft = run.drafter.propose(run.context, run.policy, limit)
    draft = draft.with_predictions(run.policy.predictions)
    run.clock.lap("draft")
    run.clock.move(run.policy.take_seconds(), "draft", "policy")

    output = run.target.logits(run.context, draft.tokens, draft.parents)
    run.clock.lap("verify", on_device=True)

    candidates = draft.candidates
    unjudged = len(draft.tokens) - len(candidates.tokens)
    judged_output = output.first(len(candidates.tokens) + 1) if unjudged else output
    verdict = run.verify(candidates, judged_output)
    if isinstance(run.drafter, LearningDrafter):
        run.drafter.learn(draft, output, verdict)
        run.clock.lap("draft")
    return run.commit("sequential", candidates, verdict, unjudged=unjudged)
