"""One run: a method's parts, the context that they extend, and where it has to end."""

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
    """Watches the text for stop strings, token by token. `detokenize` turns one more token into its text."""

    def __init__(self, texts: Sequence[str], detokenize: Callable[[int], str]) -> None:
        self._texts = texts
        self._detokenize = detokenize
        self._tail = ""
        self._kept = max(map(len, texts), default=1) - 1

    def completed_by(self, token: int) -> bool:
        """Whether the text with this token holds a stop string."""
        self._tail += self._detokenize(token)
        found = any(text in self._tail for text in self._texts)
        self._tail = self._tail[-self._kept :] if self._kept else ""
        return found


class Clock:
    """Seconds by phase of the present round. What no phase claims is `other`; time between rounds counts nowhere."""

    def __init__(self, synchronize: Callable[[], None] | None) -> None:
        self._synchronize = synchronize
        self.start()

    def start(self) -> None:
        self._last = time.perf_counter()
        self._phases = dict.fromkeys(PHASES, 0.0)

    def lap(self, phase: str, *, synchronize: bool = False) -> None:
        """Book the time since the last lap on `phase`; `synchronize` waits first for what runs on the device."""
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
    """What a schedule needs. `limit` is the number of new tokens at which the run ends with reason `length`."""

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
        """Round 0: the prompt's pass and the target's first token."""
        self.clock.start()
        rows = self.target.logits(self.context)
        self.clock.lap("prefill", synchronize=True)
        verdict = self.verifier.verify(Draft(), rows)
        self.clock.lap("sample")
        return self.commit("prefill", Draft(), verdict)

    def commit(self, mode: Mode, draft: Draft, verdict: Verdict, ahead: int = 0) -> Round:
        """Append what the verdict accepts, up to where the output ends; tell the policy; close the round.

        The last `ahead` tokens of a chain were not judged yet: where all others stand and the run goes on, they are left out of
        the round, since a later one tells what became of them.
        """
        accepted = len(verdict.path)
        verdict = self._cut(draft, verdict)
        tokens = [draft.tokens[node] for node in verdict.path]
        if verdict.token is not None:
            tokens.append(verdict.token)
        self.context.extend(tokens)
        self.policy.observe(draft.levels - ahead, accepted)
        if self.finish_reason is None and self.remaining <= 0:
            self.finish_reason = "length"
        if ahead and verdict.token is None and self.finish_reason is None:
            draft = replace(draft.part(0, len(draft.tokens) - ahead), stop_reason=f"{draft.stop_reason}, {ahead} ahead")
        held = draft.probs is not None or draft.logits is not None
        shown = replace(draft, probs=None, logits=None) if held else draft  # a kept round keeps no tensors alive
        round_ = Round(self._index, mode, shown, verdict, self.clock.seconds(), self.policy.state())
        self._index += 1
        return round_

    def _cut(self, draft: Draft, verdict: Verdict) -> Verdict:
        """The verdict up to the token that ends the output: an end-of-sequence, or the last one of a stop text."""
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
