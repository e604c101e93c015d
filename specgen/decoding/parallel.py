"""PEARL: draft and target work at the same time (PEARL, section 3).

The target verifies the first new token before the draft is complete (pre-verify); the draft continues after tokens that are
pending verification (post-verify). The window is the ratio of both models' times, so that both finish together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from specgen.cost_model.pearl_window import Window
from specgen.decoding.components import Components
from specgen.engine.inference_mode import inference
from specgen.setting_parsing import Settings
from specgen.types import Context, Draft, Mode, Round

if TYPE_CHECKING:
    from specgen.decoding.policies import LengthPolicy
    from specgen.decoding.run import Run


class ParallelDrafter(Protocol):
    """A drafter that works while its caller does something else. One draft at a time.

    It owns the run's length policy; the run reads and updates it as `policy`. `seconds` is the duration of the last draft by the
    drafter's own clock.
    """

    policy: LengthPolicy
    seconds: float

    def prefill(self, context: Context) -> None:
        """Begin the forward pass over the prompt."""

    def start(self, context: Context, unverified: Sequence[int], limit: int) -> None:
        """Begin a draft of at most `limit` tokens after the context and the `unverified` tokens."""

    def finish(self) -> Draft:
        """Wait for the draft. Its `probs` are valid until the draft after the next one begins."""

    def close(self) -> None:
        """End the run; a draft that is under way is discarded."""


class DraftWorker(Protocol):
    """Runs a pair's draft model beside its target: in a process of its own, or in a thread with a CUDA stream of its own."""

    kind: str  # `process` or `thread`
    threads: int | None  # how many CPU threads are left to the target; None if they are not divided

    def ready(self) -> object:
        """Wait until it can draft. Raises SpecgenError if it cannot."""

    def drafter(self, settings: Settings, components: Components, window: int) -> ParallelDrafter:
        """The drafter of one run, for drafts of at most `window` tokens."""

    def forget(self) -> None:
        """Clear the KV cache."""

    def close(self) -> None:
        """End the process or thread."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """PEARL's schedule. Without `pre_verify` the target idles until there are tokens to verify; without `post_verify` the draft
    idles while they are verified (the ablations of the paper's Table 3).
    """

    drafter: ParallelDrafter
    window: Window
    pre_verify: bool = True
    post_verify: bool = True

    def __call__(self, run: Run) -> Iterator[Round]:
        with closing(self.drafter):
            self.drafter.prefill(run.context)
            yield run.prefill()
            unverified = Draft()
            while run.finish_reason is None:
                round_, unverified = self._step(run, unverified)
                yield round_

    @inference
    def _step(self, run: Run, unverified: Draft) -> tuple[Round, Draft]:
        """One target pass over the tokens pending verification, while the next ones are drafted. Returns those then pending."""
        run.clock.start()
        if not unverified.tokens and not self.pre_verify:
            unverified = self._finish(self._start(run, unverified, self.window.size))  # the target idles meanwhile
            run.clock.lap("draft")
        mode: Mode = "post-verify" if unverified.tokens else "pre-verify"
        size = self.window.beside(len(unverified.tokens) + 1)
        window = self._start(run, unverified, size) if self.post_verify or not unverified.tokens else 0
        inputs = unverified.part(0, run.remaining - 1)  # the logits after the last possible token are not needed
        output = run.target.logits(run.context, inputs.tokens, inputs.parents)
        run.clock.lap("verify", synchronize=True)
        fresh = self._finish(window) if window else Draft(stop_reason=unverified.stop_reason)
        run.clock.lap("draft")
        both = _joined(unverified, fresh)
        # the last logits verify the first fresh token, so there is never a bonus after pending ones
        pending = max(len(fresh.tokens) - 1, 0)
        verdict = run.verifier.verify(both.part(0, len(both.tokens) - pending), output)
        run.clock.lap("sample")
        round_ = run.commit(mode, both, verdict, pending)
        return round_, fresh.part(1) if verdict.token is None else Draft()

    def _start(self, run: Run, unverified: Draft, window: int) -> int:
        """Begin a draft after the unverified tokens. Returns the window; 0, with no draft, if the output ends with them."""
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
    """Two chains as one, with the stop reason of the second."""
    if not first.tokens:
        return second
    if not second.tokens:
        return replace(first, stop_reason=second.stop_reason)
    return Draft.chain(
        [*first.tokens, *second.tokens],
        probs=None if second.probs is None else torch.cat((first.probs, second.probs[:1])),  # no more are verified
        entropies=[*first.entropies, *second.entropies],
        top_probs=[*first.top_probs, *second.top_probs],
        stop_reason=second.stop_reason,
        logits=None if second.logits is None else torch.cat((first.logits, second.logits[:1])),
    )
