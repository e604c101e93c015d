"""One run of a method on one context: its components, and the checks that end its output."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from specgen.types import PHASES, Context, Draft, FinishReason, Mode, Round, Verdict

if TYPE_CHECKING:
    from specgen.decoding.drafters import Drafter
    from specgen.decoding.policies import LengthPolicy
    from specgen.decoding.verifiers import Verifier
    from specgen.engine.model_runner import ModelRunner

Schedule = Callable[["Run"], Iterator[Round]]


class StopTexts:
    """Finds stop strings in the generated text, token by token. `detokenize` returns the text that one more token adds."""

    def __init__(self, texts: Sequence[str], detokenize: Callable[[int], str]) -> None:
        self._texts = texts
        self._detokenize = detokenize
        self._tail = ""
        self._kept = max(map(len, texts), default=1) - 1

    def completed_by(self, token: int) -> bool:
        """Whether this token completes a stop string."""
        self._tail += self._detokenize(token)
        found = any(text in self._tail for text in self._texts)
        self._tail = self._tail[-self._kept :] if self._kept else ""
        return found


class Clock:
    """Measures the seconds of a round by phase; the rest is `other`. Time between rounds is not counted."""

    def __init__(self, synchronize: Callable[[], None] | None) -> None:
        self._synchronize = synchronize
        self.start()

    def start(self) -> None:
        self._last = time.perf_counter()
        self._phases = dict.fromkeys(PHASES, 0.0)

    def lap(self, phase: str, *, synchronize: bool = False) -> None:
        """Add the time since the last lap to `phase`; `synchronize` waits for the device first."""
        if synchronize and self._synchronize is not None:
            self._synchronize()
        now = time.perf_counter()
        self._phases[phase] += now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        self.lap("other")
        return self._phases


@dataclass(slots=True)
class Run:
    """The state of a run. `limit` is the number of new tokens at which it ends with reason `length`."""

    context: Context
    target: ModelRunner
    drafter: Drafter
    policy: LengthPolicy
    verifier: Verifier
    schedule: Schedule
    limit: int
    eos_ids: Collection[int]
    stop_texts: StopTexts | None
    clock: Clock
    finish_reason: FinishReason | None = None
    _index: int = field(default=0, init=False)

    def rounds(self) -> Iterator[Round]:
        return self.schedule(self)

    @property
    def remaining(self) -> int:
        return self.limit - (len(self.context) - self.context.prompt_length)

    def prefill(self) -> Round:
        """Round 0: the forward pass over the prompt, and the target's first token."""
        self.clock.start()
        output = self.target.logits(self.context)
        self.clock.lap("prefill", synchronize=True)
        verdict = self.verifier.verify(Draft(), output)
        self.clock.lap("sample")
        return self.commit("prefill", Draft(), verdict)

    def commit(self, mode: Mode, draft: Draft, verdict: Verdict, unverified: int = 0) -> Round:
        """Append the accepted tokens up to the end of the output, update the policy and close the round.

        The last `unverified` tokens of a chain are pending verification. If all others were accepted and the run continues, they
        are left out of this round: a later one verifies and reports them.
        """
        accepted = len(verdict.path)
        verdict = self._cut(draft, verdict)
        tokens = [draft.tokens[node] for node in verdict.path]
        if verdict.token is not None:
            tokens.append(verdict.token)
        self.context.extend(tokens)
        self.policy.observe(draft.levels - unverified, accepted)
        if self.finish_reason is None and self.remaining <= 0:
            self.finish_reason = "length"
        if unverified and verdict.token is None and self.finish_reason is None:
            reason = f"{draft.stop_reason}, {unverified} ahead"
            draft = replace(draft.part(0, len(draft.tokens) - unverified), stop_reason=reason)
        if draft.probs is not None or draft.logits is not None:
            draft = replace(draft, probs=None, logits=None)  # so that a stored round keeps no tensors alive
        round_ = Round(self._index, mode, draft, verdict, self.clock.seconds(), self.policy.state())
        self._index += 1
        return round_

    def _cut(self, draft: Draft, verdict: Verdict) -> Verdict:
        """The verdict up to the token that ends the output: an end-of-sequence, or one that completes a stop string."""
        for position, node in enumerate(verdict.path):
            if self._ends(draft.tokens[node]):
                return Verdict(verdict.path[: position + 1], None, None, verdict.agreement)
        if verdict.token is not None:
            self._ends(verdict.token)
        return verdict

    def _ends(self, token: int) -> bool:
        if token in self.eos_ids:
            self.finish_reason = "eos"
        elif self.stop_texts is not None and self.stop_texts.completed_by(token):
            self.finish_reason = "stop"
        return self.finish_reason is not None
