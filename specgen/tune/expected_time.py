"""The expected time of a simulated run: a clock to which the run's target and drafter add the
measured seconds of passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from specgen.base.types import PHASES, Context, Draft, Verdict
from specgen.decoding.chain import ModelDrafter
from specgen.decoding.drafting import LearningDrafter
from specgen.decoding.run import Clock
from specgen.decoding.verification import match_path
from specgen.engine.forward_pass import ModelOutput, depths

if TYPE_CHECKING:
    from specgen.decoding.costs import RoundCosts
    from specgen.decoding.drafting import Drafter
    from specgen.decoding.policy_base import LengthPolicy
    from specgen.engine.model_runner import DraftRunner
    from specgen.tune.remembered import MemoisedRunner
    from specgen.tune.round_timing import ReferenceOutput

# the id of the target's tokens after the end of its output: no drafted token equals it
_NO_TOKEN = 1 << 40


class SimulatedClock(Clock):
    """A clock that does not measure: `PricedTarget` and the priced drafters add to it the seconds
    that their passes are expected to take, from `costs`."""

    def __init__(self, costs: RoundCosts) -> None:
        super().__init__(None)
        self.costs = costs

    def start(self) -> None:
        self._phases = dict.fromkeys(PHASES, 0.0)

    def add(self, phase: str, seconds: float) -> None:
        self._phases[phase] += seconds

    def draft_seconds(self, length: int, policy: LengthPolicy, context: Context) -> float:
        """Returns the expected seconds of a draft of `length` tokens (levels, for a tree) after the
        context.

        They include the computation of signals if the policy reads any.
        """
        if not length:
            return 0.0
        signal_seconds = self.costs.signal_cost * length if policy.signals else 0.0
        return self.costs.draft_cost.at(length, len(context)) + signal_seconds

    def lap(self, phase: str, *, on_device: bool = False) -> None:
        """Does nothing: time advances by `add` only."""

    def move(self, seconds: float, source: str, phase: str) -> None:
        """Does nothing: the expected seconds of drafting include the length policy's."""

    def seconds(self) -> dict[str, float]:
        return self._phases


class PricedTarget:
    """The target of a simulated run: adds the expected seconds of each pass to the clock.

    With `runner` None no model is run. Then this is the run's verifier too, which accepts drafted
    tokens as long as they equal those of the `reference`, plain decoding's output. `pass_seconds`
    are the expected seconds of the last pass that was not the prefill.
    """

    def __init__(self, reference: ReferenceOutput, clock: SimulatedClock) -> None:
        self._reference = reference
        self._clock = clock
        self.pass_seconds = 0.0
        self.runner: DraftRunner | None = None
        self.device = torch.device("cpu")  # nothing waits for it

    def logits(
        self,
        context: Context,
        draft: Sequence[int] = (),
        parents: Sequence[int] | None = (),
        *,
        start: int = 0,
    ) -> Any:
        self._generated = len(context) - context.prompt_length
        self._rows = len(draft) + 1
        if self._generated == 0:
            self._clock.add("prefill", self._reference.prefill_seconds)
        else:
            self.pass_seconds = self._clock.costs.verification_cost.at(len(draft) + 1, len(context))
            self._clock.add("verify", self.pass_seconds)
        return None if self.runner is None else self.runner.logits(context, draft, parents)

    def cached_tokens(self, context: Context) -> int:
        return 0

    def verify(self, draft: Draft, output: Any) -> Verdict:
        following = self._reference.token_ids[self._generated :]
        following = [*following, *[_NO_TOKEN] * (len(draft.tokens) + 1)]
        choices = [following[0], *(following[depth + 1] for depth in depths(draft.parents))]
        return match_path(draft, choices.__getitem__, self._rows)


class PricedDrafter(LearningDrafter):
    """Runs a method's drafter and adds the expected seconds of each draft to the clock.

    `runner` runs the model that drafts and counts its passes; n passes cost what a draft of n
    levels does. It is None if no model drafts. Then a draft costs nothing, unless the drafter
    learns from the target's logits: its drafts cost what others with as many levels do.
    `prefill_seconds`, of the draft model's pass over the prompt, are added to the first draft.
    """

    def __init__(
        self,
        drafter: Drafter,
        runner: MemoisedRunner | None,
        clock: SimulatedClock,
        prefill_seconds: float,
    ) -> None:
        self._drafter = drafter
        self._runner = runner
        self._clock = clock
        self._prefill_seconds = prefill_seconds
        self.learns = isinstance(drafter, LearningDrafter)

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        before = 0 if self._runner is None else self._runner.calls
        draft = self._drafter.propose(context, policy, limit)
        passes = 0
        if self._runner is not None:
            passes = self._runner.calls - before
        elif self.learns:
            passes = draft.levels
        if passes:
            seconds = self._clock.draft_seconds(passes, policy, context)
            self._clock.add("draft", self._prefill_seconds + seconds)
            self._prefill_seconds = 0.0
        return draft

    def learn(self, draft: Draft, output: ModelOutput, verdict: Verdict) -> None:
        if isinstance(self._drafter, LearningDrafter):
            self._drafter.learn(draft, output, verdict)


class PricedParallelDrafter:
    """PEARL's drafter in a simulated run: drafting and the target's pass happen at the same time.

    A round takes as long as the longer of the two, plus the measured overhead. The draft model's
    pass over the prompt adds no time to the target's. `seconds` are the expected seconds of the
    last draft.
    """

    def __init__(
        self,
        drafter: ModelDrafter,
        policy: LengthPolicy,
        target: PricedTarget,
        clock: SimulatedClock,
    ) -> None:
        self._drafter = drafter
        self.policy = policy
        self._target = target
        self._clock = clock
        self.seconds = 0.0
        self.own_seconds = 0.0

    def ready(self) -> None: ...

    def prefill(self, context: Context) -> None: ...

    def close(self) -> None: ...

    def start(self, context: Context, unverified: Sequence[int], limit: int) -> None:
        self._draft = self._drafter.propose(context, self.policy, limit, unverified)
        self._context = context
        self._lead_seconds = 0.0
        self._target.pass_seconds = 0.0

    def first(self, count: int) -> list[int]:
        """Returns the draft's first `count` tokens. The target waits for them, so their expected
        seconds are added to the clock."""
        tokens = list(self._draft.tokens[:count])
        self._lead_seconds = self._seconds(len(tokens))
        self._clock.add("draft", self._lead_seconds)
        return tokens

    def cut(self) -> None:
        """Ends the draft after the token that is being drafted when the target's pass ends."""
        end = self._lead_seconds + self._target.pass_seconds
        drafted = len(self._draft.tokens)
        for length in range(1, drafted):
            if self._seconds(length) >= end:
                self._draft = replace(self._draft.part(0, length), stop_reason="pass ended")
                return

    def finish(self) -> Draft:
        self.seconds = self._seconds(len(self._draft.tokens))
        waiting = max(0.0, self.seconds - self._lead_seconds - self._target.pass_seconds)
        self._clock.add("draft", waiting + self._clock.costs.synchronisation_overhead)
        return self._draft

    def _seconds(self, length: int) -> float:
        return self._clock.draft_seconds(length, self.policy, self._context)
