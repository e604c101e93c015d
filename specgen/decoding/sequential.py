"""The usual schedule of speculative decoding: draft, then verify. Plain decoding uses it too, with empty drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specgen.base.types import Round
from specgen.decoding.costs.cost_check import CostCheck
from specgen.decoding.drafters import LearningDrafter
from specgen.decoding.run import Run
from specgen.engine.inference_mode import inference


def sequential(run: Run) -> Iterator[Round]:
    """Yields rounds that each add a draft's accepted tokens and one token of the target (Leviathan et al., Algorithm 1)."""
    yield run.prefill()
    while run.finish_reason is None:
        yield _draft_then_verify(run)


@dataclass(frozen=True, slots=True)
class Checked:
    """The same schedule, which compares the times of its rounds with those that the length policy decides by."""

    check: CostCheck

    def __call__(self, run: Run) -> Iterator[Round]:
        is_first = True  # the draft model runs over the prompt in the first draft
        try:
            for round_ in sequential(run):
                draft = round_.draft
                drafted = draft.levels if draft.entropies else 0  # copied tokens are not the draft model's
                if round_.mode != "prefill":
                    counted = 0 if is_first else drafted
                    self.check.add(counted, round_.drafting_seconds, round_.pass_tokens, round_.verification_seconds)
                    is_first = is_first and not drafted
                yield round_
        finally:
            self.check.conclude()


@inference
def _draft_then_verify(run: Run) -> Round:
    run.clock.start()
    draft = run.drafter.propose(run.context, run.policy, run.remaining - 1)  # room for the target's own token
    draft = draft.with_predictions(run.policy.predictions)
    run.clock.lap("draft")
    run.clock.move(run.policy.take_seconds(), "draft", "policy")
    output = run.target.logits(run.context, draft.tokens, draft.parents)
    run.clock.lap("verify", on_device=True)
    candidates = draft.candidates
    unjudged = len(draft.tokens) - len(candidates.tokens)
    verdict = run.verifier.verify(candidates, output.first(len(candidates.tokens) + 1) if unjudged else output)
    run.clock.lap("sample")
    if isinstance(run.drafter, LearningDrafter):
        run.drafter.learn(draft, output, verdict)
        run.clock.lap("draft")
    return run.commit("sequential", candidates, verdict, unjudged=unjudged)
