"""The divergence of a draft's predictions from the target's, of which only the most probable tokens are known."""

from __future__ import annotations

import torch

TOP_K = 16  # tokens whose log-probabilities are used; the probability of all others is one number
_LOGITS_AT_ONCE = 256  # positions whose logits are normalized in one piece


def most_probable(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the most probable tokens for logits [n, vocabulary], and their log-probabilities in float32.

    Both results are [n, TOP_K], or [n, vocabulary] for a smaller vocabulary, in descending order of probability.
    """
    top = logits.topk(min(TOP_K, logits.shape[-1]), dim=-1)
    totals = torch.cat([piece.float().logsumexp(dim=-1) for piece in torch.split(logits, _LOGITS_AT_ONCE)])
    return top.indices, top.values.float() - totals[:, None]


def divergence(logits: torch.Tensor, top_k_ids: torch.Tensor, top_k_log_probs: torch.Tensor) -> torch.Tensor:
    """Computes KL(target || draft) [n] in nats at n positions.

    `logits` [n, vocabulary] are the draft's. `top_k_ids` and `top_k_log_probs`, each [n, k], are the target's k most probable
    tokens and their log-probabilities. All tokens outside the k are merged into one outcome, so the result is a lower bound of
    the divergence over the whole vocabulary.
    """
    top_k_logits = logits.gather(-1, top_k_ids)
    top_k_total = top_k_logits.logsumexp(dim=-1, keepdim=True)
    if top_k_ids.shape[-1] == logits.shape[-1]:
        return (top_k_log_probs.exp() * (top_k_log_probs - top_k_logits + top_k_total)).sum(dim=-1)
    # The sum over all other tokens, not 1 minus a sum: for a confident draft that and its gradient would vanish.
    rest_total = logits.scatter(-1, top_k_ids, -torch.inf).logsumexp(dim=-1, keepdim=True)
    total = torch.logaddexp(top_k_total, rest_total)
    target_probs = top_k_log_probs.exp()
    top_k = (target_probs * (top_k_log_probs - top_k_logits + total)).sum(dim=-1)
    target_rest = (1 - target_probs.sum(dim=-1)).clamp_min(torch.finfo(torch.float32).eps)
    return top_k + target_rest * (target_rest.log() - (rest_total - total)[:, 0])
