"""The divergence of a draft's predictions from the target's, of which only the most probable tokens are known."""

from __future__ import annotations

import torch

TOP_K = 16  # tokens whose log-probabilities are used; the probability of all others is one number
_LOGITS_AT_ONCE = 256  # positions whose logits are normalized in one piece
_NONE = torch.empty(0, dtype=torch.long)


def most_probable(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the most probable tokens for logits [n, vocabulary], and their log-probabilities in float32.

    Both results are [n, TOP_K], or [n, vocabulary] for a smaller vocabulary, in descending order of probability.
    """
    top = logits.topk(min(TOP_K, logits.shape[-1]), dim=-1)
    totals = torch.cat([piece.float().logsumexp(dim=-1) for piece in torch.split(logits, _LOGITS_AT_ONCE)])
    return top.indices, top.values.float() - totals[:, None]


def divergence(
    logits: torch.Tensor, top_k_ids: torch.Tensor, top_k_log_probs: torch.Tensor, off_overlap: torch.Tensor = _NONE
) -> torch.Tensor:
    """Computes KL(target || draft) [n] in nats at n positions.

    `logits` [n, vocabulary] are the draft's. `top_k_ids` and `top_k_log_probs`, each [n, k], are the target's k most probable
    tokens and their log-probabilities. All tokens outside the k are merged into one outcome, so the result is a lower bound of
    the divergence over the whole vocabulary.

    For a draft with another vocabulary, `off_overlap` [m] are the ids of its tokens that the target does not have, and
    `top_k_ids` are the draft's ids, -1 where it lacks a token; in each row it has at least one. The outcomes are then each of the
    k tokens that the draft has, all other tokens on the overlap, and all tokens off it. The target's probability outside the k is
    divided between the last two like that of the k. With m the target's probability on the overlap, this is m KL(p' || q') +
    KL(m || the draft's probability on the overlap), in which p' and q' are the two distributions restricted to the overlap and
    renormalized. Without tokens off the draft's overlap the second part is left out.
    """
    is_common, tiny = top_k_ids >= 0, torch.finfo(torch.float32).eps
    ids = torch.where(is_common, top_k_ids, top_k_ids.amax(dim=-1, keepdim=True))  # gather and scatter need ids
    common_logits, target_probs = logits.gather(-1, ids), top_k_log_probs.exp()
    common_probs, total = torch.where(is_common, target_probs, 0), target_probs.sum(dim=-1)
    on_overlap = common_probs.sum(dim=-1) / total  # m
    # The sum over all other tokens, not 1 minus a sum: for a confident draft that and its gradient would vanish.
    others = torch.cat((ids, off_overlap.to(ids.device).expand(len(ids), -1)), dim=-1)
    overlap_total = common_logits.masked_fill(~is_common, -torch.inf).logsumexp(dim=-1)
    if has_rest := logits.shape[-1] - len(off_overlap) > top_k_ids.shape[-1]:  # there are other tokens on the overlap
        rest_total = logits.scatter(-1, others, -torch.inf).logsumexp(dim=-1)
        overlap_total = torch.logaddexp(overlap_total, rest_total)
    else:
        overlap_total = logits.index_fill(-1, off_overlap.to(ids.device), -torch.inf).logsumexp(dim=-1)
    log_q = common_logits - overlap_total[:, None]
    result = (common_probs * (top_k_log_probs - on_overlap.log()[:, None] - log_q)).sum(dim=-1)
    if has_rest:
        rest = ((1 - total) * on_overlap).clamp_min(tiny)
        result = result + rest * (rest.log() - on_overlap.log() - rest_total + overlap_total)
    if len(off_overlap):
        outside_total = logits.index_select(-1, off_overlap.to(ids.device)).logsumexp(dim=-1)
        all_total, outside = torch.logaddexp(overlap_total, outside_total), (1 - on_overlap).clamp_min(tiny)
        result = result + on_overlap * (on_overlap.log() - overlap_total + all_total)
        result = result + outside * (outside.log() - outside_total + all_total)
    return result
