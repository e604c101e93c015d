"""Computes signals: numbers about drafted tokens, such as entropy, by which length policies decide when a draft ends."""

from __future__ import annotations

import torch

from specgen.decoding import logits_ops
from specgen.decoding.length_policy import Signals


def compute(
    names: Signals,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    probs: torch.Tensor | None = None,
    predicted_acceptance: torch.Tensor | None = None,
    unpenalised: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Computes the signals in `names` of drafted `tokens` [...]. Returns each by name as a tensor [...] on the device.

    `logits` [..., vocabulary] are the draft's, from which the tokens were chosen. `unpenalised` are its logits without penalties
    (such as a repetition penalty); None if `logits` have none. `probs` [..., vocabulary] are the distributions that the tokens
    were drawn from; None in greedy decoding.
    `entropy` (nats), `top_prob` (largest probability) and `margin` (largest minus second largest) are of the draft model's own
    distribution: without penalties, at temperature 1, without top-k and top-p. `prob` is the token's probability in the
    distribution it was chosen from: `probs`, or in greedy decoding `logits` at temperature 1, penalties included, as for
    transformers' assisted generation. If `unpenalised` has further columns, for tokens that cannot be drafted, it is the token's
    share of all of them. `predicted_acceptance` is the given argument (EESD's theta_M, Eq. 5), left out if None.
    `entropy` and `top_prob` always come together.
    """
    found = {}
    own = logits if unpenalised is None else unpenalised
    if "entropy" in names or "top_prob" in names or ("prob" in names and probs is None and unpenalised is None):
        found["entropy"], found["top_prob"] = logits_ops.entropy_and_top_prob(own)
    if "prob" in names:
        if probs is not None:  # gather: indexing with a tensor would synchronise with the host
            found["prob"] = probs.gather(-1, tokens[..., None].clamp_min(0))[..., 0]
        else:
            found["prob"] = found["top_prob"] if unpenalised is None else logits_ops.entropy_and_top_prob(logits)[1]
        if unpenalised is not None and (width := logits.shape[-1]) < unpenalised.shape[-1]:
            found["prob"] = found["prob"] * unpenalised.float().softmax(dim=-1)[..., :width].sum(dim=-1)
    if "margin" in names:
        top = own.float().softmax(dim=-1).topk(2, dim=-1).values
        found["margin"] = top[..., 0] - top[..., 1]
    if "predicted_acceptance" in names and predicted_acceptance is not None:
        found["predicted_acceptance"] = predicted_acceptance
    return found
