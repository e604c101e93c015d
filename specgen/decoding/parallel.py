"""PEARL: the draft goes on while the target judges, and the target judges while the draft goes on (PEARL, section 3).

Neither waits for the other: the target looks at the first new token before the draft is done (pre-verify), the draft writes on
behind tokens that are not judged yet (post-verify). The window is the ratio of both models' times, so that both end together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from specgen.cost_model import Window
from specgen.decoding.drafters import Drafter
from specgen.engine.inference_mode import inference
from specgen.types import Context, Draft, Mode, Round

if TYPE_CHECKING:
    from specgen.decoding.policies import LengthPolicy
    from specgen.decoding.run import Run


class ParallelDrafter(Drafter, Protocol):
    """A drafter that works while its caller does something else. One draft at a time.

    It holds the run's length policy; `policy` is what the run may ask and tell of it. `seconds` are those that the last draft
    took by the drafter's own clock.
    """

    policy: LengthPolicy
    seconds: float

    def prefill(self, context: Context) -> None:
        """Begin to run the prompt."""
        ...

    def start(self, context: Context, pending: Sequence[int], limit: int) -> None:
        """Begin a draft of at most `limit` tokens behind the context and the `pending` tokens."""
        ...

    def finish(self) -> Draft:
        """Wait for the draft. Its `probs` are valid until the next but one draft is begun."""
        ...

    def close(self) -> None:
        """Give up what is under way. The run is over."""
        ...


@dataclass(frozen=True, slots=True)
class Parallel:
    """PEARL's schedule. Without `pre_verify` the target idles until there are tokens to judge; without `post_verify` the draft
    idles while they are judged (the ablations of the paper's Table 3).
    """

    drafter: ParallelDrafter
    window: Window
    pre_verify: bool = True
    post_verify: bool = True

    def __call__(self, run: Run) -> Iterator[Round]:
        with closing(self.drafter):
            self.drafter.prefill(run.context)
            yield run.prefill()
            pending = Draft()
            while run.finish_reason is None:
                round_, pending = self._step(run, pending)
                yield round_

    @inference
    def _step(self, run: Run, pending: Draft) -> tuple[Round, Draft]:
        """One pass of the target over the pending tokens, one draft beside it. Returns the tokens that are pending then."""
        run.clock.start()
        if not pending.tokens and not self.pre_verify:
            pending = self._finish(self._start(run, pending, self.window.size))  # the target idles: there is time for all
            run.clock.lap("draft")
        mode: Mode = "post-verify" if pending.tokens else "pre-verify"
        beside = self.window.beside(len(pending.tokens) + 1)
        window = self._start(run, pending, beside) if self.post_verify or not pending.tokens else 0
        run_through = pending.part(0, run.remaining - 1)  # what the last possible token would say next, nobody asks
        rows = run.target.logits(run.context, run_through.tokens, run_through.parents)
        run.clock.lap("verify", synchronize=True)
        fresh = self._finish(window) if window else Draft(stop_reason=pending.stop_reason)
        run.clock.lap("draft")
        both = _joined(pending, fresh)
        ahead = max(
            len(fresh.tokens) - 1, 0
        )  # the last row judges the first of the new tokens: never a bonus behind pending ones
        judged = both.part(0, len(both.tokens) - ahead)
        verdict = run.verifier.verify(judged, rows)
        run.clock.lap("sample")
        round_ = run.commit(mode, both, verdict, ahead)
        return round_, fresh.part(1) if verdict.token is None else Draft()

    def _start(self, run: Run, pending: Draft, window: int) -> int:
        """Begin to draft behind what is pending. Returns the window, 0 where a draft is pointless: the output ends there."""
        room = run.remaining - len(pending.tokens)
        if room < 1 or (pending.tokens and pending.tokens[-1] in run.eos_ids):
            return 0
        self.drafter.start(run.context, pending.tokens, min(window, room))
        return window

    def _finish(self, window: int) -> Draft:
        draft = self.drafter.finish()
        filled = draft.stop_reason == "length" and len(draft.tokens) == window
        return replace(draft, stop_reason=f"window {window}") if filled else draft


def _joined(first: Draft, second: Draft) -> Draft:
    """Two chains as one; what ended the second ended both."""
    if not first.tokens:
        return second
    if not second.tokens:
        return replace(first, stop_reason=second.stop_reason)
    tokens = [*first.tokens, *second.tokens]
    probs = None if second.probs is None else torch.cat((first.probs, second.probs[:1]))  # no more are judged
    logits = None if second.logits is None else torch.cat((first.logits, second.logits[:1]))
    figures = [*first.entropies, *second.entropies], [*first.top_probs, *second.top_probs]
    return Draft(tokens, range(-1, len(tokens) - 1), probs, *figures, second.stop_reason, logits=logits)
