"""The usual schedule of speculative decoding: draft, then verify. Plain decoding uses it too, with empty drafts."""

from __future__ import annotations

from collections.abc import Iterator

from specgen.decoding.run import Run
from specgen.engine.inference_mode import inference
from specgen.types import Round


def sequential(run: Run) -> Iterator[Round]:
    """Yields rounds that each add a draft's accepted tokens and one token of the target (Leviathan et al., Algorithm 1)."""
    yield run.prefill()
    while run.finish_reason is None:
        yield _draft_then_verify(run)


@inference
def _draft_then_verify(run: Run) -> Round:
    run.clock.start()
    draft = run.drafter.propose(run.context, run.policy, run.remaining - 1)  # room for the target's own token
    run.clock.lap("draft")
    run.clock.move(run.policy.take_seconds(), "draft", "policy")
    output = run.target.logits(run.context, draft.tokens, draft.parents)
    run.clock.lap("verify", on_device=True)
    verdict = run.verifier.verify(draft, output)
    run.clock.lap("sample")
    return run.commit("sequential", draft, verdict)
