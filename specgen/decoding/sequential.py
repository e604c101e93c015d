"""The usual schedule of speculative decoding: draft, then verify. Plain decoding uses it too, with empty drafts."""

from __future__ import annotations

from collections.abc import Iterator

from specgen.base.types import Round
from specgen.decoding.drafters import LearningDrafter
from specgen.decoding.run import Run
from specgen.engine.inference_mode import inference


def sequential(run: Run) -> Iterator[Round]:
    """Yields rounds that each add a draft's accepted tokens and one token of the target (Leviathan et al., Algorithm 1)."""
    yield run.prefill()
    has_drafted = False  # the draft model runs over the prompt in the first draft, whose time is not checked
    try:
        while run.finish_reason is None:
            round_ = _draft_then_verify(run)
            if run.check is not None:
                drafted = round_.draft.levels if round_.draft.entropies else 0  # copied tokens are not the draft model's
                counted = drafted if has_drafted else 0
                run.check.add(counted, round_.drafting_seconds, round_.pass_tokens, round_.verification_seconds)
                has_drafted |= drafted > 0
            yield round_
    finally:
        if run.check is not None:
            run.check.conclude()


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
