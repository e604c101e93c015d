"""Signals: the numbers about drafted tokens that length policies read, and how each is computed."""

from __future__ import annotations

import torch

from specgen.decoding import logits_ops
from specgen.decoding.policies import Signals


def compute(
    names: Signals,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    probs: torch.Tensor | None = None,
    predicted_acceptance: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """The signals `names` of `tokens` [...] that were chosen from draft `logits` [..., vocabulary], each [...] on the device.

    `prob` is the token's probability in `probs` [..., vocabulary], which it was drawn from; in greedy decoding (None) in the
    unwarped distribution. `entropy` (nats), `top_prob` (the largest probability) and `margin` (the largest minus the second
    largest) are those of the unwarped distribution. `predicted_acceptance` is EESD's theta_M (Eq. 5); left out if None.
    `entropy` and `top_prob` are included wherever one of them was needed: drafters report both for every token.
    """
    found = {}
    if "entropy" in names or "top_prob" in names or ("prob" in names and probs is None):
        found["entropy"], found["top_prob"] = logits_ops.entropy_and_top_prob(logits)
    if "prob" in names:  # gather: indexing with a tensor would synchronise with the host
        found["prob"] = found["top_prob"] if probs is None else probs.gather(-1, tokens[..., None])[..., 0]
    if "margin" in names:
        top = logits.float().softmax(dim=-1).topk(2, dim=-1).values
        found["margin"] = top[..., 0] - top[..., 1]
    if "predicted_acceptance" in names and predicted_acceptance is not None:
        found["predicted_acceptance"] = predicted_acceptance
    return found
