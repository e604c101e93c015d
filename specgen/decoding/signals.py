"""Computes signals: numbers about drafted tokens, such as entropy, by which length policies decide when a draft ends."""

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
    """Computes the signals in `names` of drafted `tokens` [...]. Returns each by name as a tensor [...] on the device.

    `logits` [..., vocabulary] of the draft give the unwarped distribution (temperature 1, no top-k or top-p). `probs` [...,
    vocabulary] are the distributions that the tokens were drawn from; None in greedy decoding.
    `prob` is the token's probability in `probs`, or the largest unwarped one if `probs` is None. `entropy` (nats), `top_prob`
    (largest probability) and `margin` (largest minus second largest) are of the unwarped distribution. `predicted_acceptance`
    is the given argument (EESD's theta_M, Eq. 5), left out if None. `entropy` and `top_prob` always come together.
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
