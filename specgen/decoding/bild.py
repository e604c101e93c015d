"""BiLD: the draft model falls back to the target where it is unsure, the target rolls back what is bad (Kim et al. 2023)."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar

import torch

from specgen.decoding import logits_ops
from specgen.decoding.drafters import ModelDrafterBase, room
from specgen.decoding.policies import DraftedToken, LengthPolicy
from specgen.decoding.verifiers import accept_prefix
from specgen.engine.inference_mode import inference
from specgen.errors import nan_logits
from specgen.types import Context, Draft, SamplingParams, Verdict

if TYPE_CHECKING:
    from specgen.engine.model_runner import DraftRunner, ModelOutput


class BildDrafter(ModelDrafterBase):
    """A draft model that hands over to the target where its top probability is under `fallback` (temperature 1, unwarped).

    The token that it was unsure of is dropped, so a draft may be empty; the policy says when one is long enough.
    """

    def __init__(
        self,
        runner: DraftRunner,
        sampling: SamplingParams,
        eos_ids: Collection[int],
        vocab_size: int,
        seed: int,
        *,
        fallback: float,
        keep_logits: bool = False,
    ) -> None:
        super().__init__(runner, sampling, eos_ids, vocab_size, seed, keep_logits=keep_logits)
        self._fallback = fallback

    @inference
    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        limit = room(self._runner, context, limit)
        tokens: list[int] = []
        figures: list[tuple[float, float]] = []
        rows: list[torch.Tensor] = []
        reason = "length"
        while len(tokens) < limit:
            row = self._runner.logits(context, tokens, start=len(tokens)).logits[0, : self._vocab_size]
            negative, top, token = logits_ops.to_host(
                *logits_ops.figures(row), logits_ops.select_token(row, self._sampling, self._generator)
            )
            if math.isnan(negative) or token < 0:
                raise nan_logits("draft")
            if math.exp(top) < self._fallback:
                reason = f"unsure {math.exp(top):.2f} < {self._fallback:g}"
                break
            tokens.append(int(token))
            rows.append(row)
            figures.append((abs(negative), math.exp(top)))
            if tokens[-1] in self._eos_ids:
                reason = "eos"
                break
            if not policy.keep_drafting(DraftedToken(len(tokens), *figures[-1])):
                reason = policy.reason
                break
        entropies, top_probs = zip(*figures, strict=True) if figures else ((), ())
        logits = torch.stack(rows) if self._keep_logits and rows else None
        parents = range(-1, len(tokens) - 1)
        return Draft(tokens, parents, None, entropies, top_probs, reason if limit > 0 else None, logits=logits)


class BildVerifier:
    """Refuse the first token with -ln p > `rollback` (nats, temperature 1) that is not the target's likeliest.

    Then comes the target's own. Not lossless: what it finds good enough stands, and there is no residual.
    """

    lossless: ClassVar[bool] = False

    def __init__(self, sampling: SamplingParams, device: torch.device, seed: int, rollback: float) -> None:
        self._sampling = sampling
        self._generator = logits_ops.make_generator(device, seed)
        self._rollback = rollback

    @inference
    def verify(self, draft: Draft, rows: ModelOutput) -> Verdict:
        length = len(draft.tokens)
        tokens = torch.tensor(draft.tokens, dtype=torch.long, device=rows.logits.device)
        judged = rows.logits[:length].float()
        log_probs = judged.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
        stands = (log_probs >= -self._rollback) | (judged.argmax(dim=-1) == tokens)  # a NaN does not
        count = stands.long().cumprod(dim=0).sum()
        return accept_prefix(draft, rows, count, self._sampling, self._generator)
