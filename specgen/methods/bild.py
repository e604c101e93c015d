"""BiLD: the draft model falls back to the target where it is unsure, the target rolls back bad tokens (Kim et al. 2023).

Not lossless. The authors use fallback 0.6 and rollback 5, MTAD's paper 0.9 and 2. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specgen.base.settings import Setting, Settings
from specgen.base.types import Draft, SamplingParams, Verdict
from specgen.decoding.policy import DRAFT_SIGNALS
from specgen.methods.method import DRAFT_MODEL, Method

if TYPE_CHECKING:
    import torch

    from specgen.decoding.drafting import Drafter, Setup
    from specgen.engine.forward_pass import ModelOutput


class BildVerifier:
    """Rejects the first token with -ln p > `rollback` (nats) that is not the target's likeliest, and all tokens after it.

    p is the token's probability under the target at temperature 1. The target then chooses the next token from its own
    distribution (after temperature, top-k and top-p), not from a residual. Not lossless. Chains only.
    """

    def __init__(self, sampling: SamplingParams, device: torch.device, seed: int, rollback: float) -> None:
        from specgen.decoding.logits_ops import make_generator

        self._sampling, self._generator, self._rollback = sampling, make_generator(device, seed), rollback

    def verify(self, draft: Draft, output: ModelOutput) -> Verdict:
        import torch

        from specgen.decoding.verification import accept_prefix
        from specgen.engine.devices import upload

        tokens = upload(torch.tensor(draft.tokens, dtype=torch.long), output.logits.device)
        logits = output.logits[: len(draft.tokens)].float()
        log_probs = logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
        accepted = (log_probs >= -self._rollback) | (logits.argmax(dim=-1) == tokens)  # false for NaN
        count = accepted.long().cumprod(dim=0).sum()
        return accept_prefix(draft, output, count, self._sampling, self._generator)


def _drafter(setup: Setup, settings: Settings) -> Drafter:
    from specgen.decoding.chain import ModelDrafter

    return ModelDrafter(setup, fallback=float(settings.values["fallback"]))


def _verifier(setup: Setup, settings: Settings) -> BildVerifier:
    return BildVerifier(*setup.for_verifier, rollback=float(settings.values["rollback"]))


BILD = Method(
    "bild",
    "BiLD, Kim et al. 2023",
    DRAFT_MODEL,
    _drafter,
    _verifier,
    policy="fixed",
    any_policy=True,
    signals=DRAFT_SIGNALS,
    settings={
        "fallback": Setting(0.9, "end the draft where its top probability is below this", 0, 1),
        "rollback": Setting(2.0, "reject tokens whose -log probability under the target is above this", 0, 1000),
    },
    defaults={"fixed": {"k": 10}},
    lossless=False,
    drafts="fallback",
    grids=({"k": (3, 5, 10), "fallback": (0.3, 0.5, 0.7, 0.9), "rollback": (0.5, 1.0, 2.0, 4.0)},),
)
