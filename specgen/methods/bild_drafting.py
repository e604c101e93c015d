"""BiLD: the draft model falls back to the target where it is unsure, the target rolls back bad tokens (Kim et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch

from specgen.base.types import Draft, SamplingParams, Verdict
from specgen.decoding import logits_ops
from specgen.decoding.drafting import ModelDrafter, Setup
from specgen.decoding.policy import Signals, comparison
from specgen.decoding.verification import accept_prefix
from specgen.engine.devices import upload
from specgen.engine.inference_mode import inference

if TYPE_CHECKING:
    from specgen.engine.forward_pass import ModelOutput


class BildDrafter(ModelDrafter):
    """Drafts token by token until the draft's largest probability is below `fallback` (temperature 1, no top-k or top-p).

    The token with this low probability is dropped, so a draft may be empty. The length policy sees the tokens that are not
    dropped, and ends a draft after one of them.
    """

    _own_signals: ClassVar[Signals] = frozenset({"top_prob"})
    _keeps_probs: ClassVar[bool] = False

    def __init__(self, setup: Setup, fallback: float) -> None:
        super().__init__(setup)
        self._fallback = fallback

    def _refusal(self, values: Mapping[str, float]) -> str | None:
        top_prob = values["top_prob"]
        return f"unsure {comparison(top_prob, '<', self._fallback)}" if top_prob < self._fallback else None


class BildVerifier:
    """Rejects the first token with -ln p > `rollback` (nats) that is not the target's likeliest, and all tokens after it.

    p is the token's probability under the target at temperature 1. The target then chooses the next token from its own
    distribution (after temperature, top-k and top-p), not from a residual. Not lossless. Chains only.
    """

    def __init__(self, sampling: SamplingParams, device: torch.device, seed: int, rollback: float) -> None:
        self._sampling = sampling
        self._generator = logits_ops.make_generator(device, seed)
        self._rollback = rollback

    @inference
    def verify(self, draft: Draft, output: ModelOutput) -> Verdict:
        length = len(draft.tokens)
        tokens = upload(torch.tensor(draft.tokens, dtype=torch.long), output.logits.device)
        logits = output.logits[:length].float()
        log_probs = logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
        accepted = (log_probs >= -self._rollback) | (logits.argmax(dim=-1) == tokens)  # false for NaN
        count = accepted.long().cumprod(dim=0).sum()
        return accept_prefix(draft, output, count, self._sampling, self._generator)
