"""How near a draft's predictions are to the target's: the divergence, which is a loss, and the agreement on held-out text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specgen.train.corpus import Part
from specgen.train.texts import Text

RANKS = 10  # ranks that are counted: as many as the published trees of Medusa use
_NONE = torch.empty(0, dtype=torch.long)


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
    tiny = torch.finfo(torch.float32).eps
    off_overlap = off_overlap.to(logits.device)
    is_common = top_k_ids >= 0
    ids = torch.where(is_common, top_k_ids, top_k_ids.amax(dim=-1, keepdim=True))  # gather and scatter need ids
    common_logits = logits.gather(-1, ids)
    target_probs = top_k_log_probs.exp()
    common_probs, total = torch.where(is_common, target_probs, 0), target_probs.sum(dim=-1)
    on_overlap = common_probs.sum(dim=-1) / total  # m
    has_rest = logits.shape[-1] - len(off_overlap) > top_k_ids.shape[-1]  # there are other tokens on the overlap
    if has_rest:
        # The sum over all other tokens, not 1 minus a sum: for a confident draft that and its gradient would vanish.
        others = torch.cat((ids, off_overlap.expand(len(ids), -1)), dim=-1)
        rest_total = logits.scatter(-1, others, -torch.inf).logsumexp(dim=-1)
        common_total = common_logits.masked_fill(~is_common, -torch.inf).logsumexp(dim=-1)
        overlap_total = torch.logaddexp(common_total, rest_total)
    else:
        overlap_total = logits.index_fill(-1, off_overlap, -torch.inf).logsumexp(dim=-1)
    log_q = common_logits - overlap_total[:, None]
    result = (common_probs * (top_k_log_probs - on_overlap.log()[:, None] - log_q)).sum(dim=-1)
    if has_rest:
        rest = ((1 - total) * on_overlap).clamp_min(tiny)
        result = result + rest * (rest.log() - on_overlap.log() - rest_total + overlap_total)
    if len(off_overlap):
        outside_total = logits.index_select(-1, off_overlap).logsumexp(dim=-1)
        all_total, outside = torch.logaddexp(overlap_total, outside_total), (1 - on_overlap).clamp_min(tiny)
        result = result + on_overlap * (on_overlap.log() - overlap_total + all_total)
        result = result + outside * (outside.log() - outside_total + all_total)
    return result


def held_out_agreement(
    texts: Sequence[Text], ranks_of: Callable[[Text], torch.Tensor]
) -> tuple[dict[str, list[float] | None], list[list[float]]]:
    """Measures how often the target's most probable token is predicted: on the generated tokens of the held-out texts.

    `ranks_of(text)` [rows, depths], int64, has for the drafts that begin after each generated token the ranks that they give to
    the target's tokens, 0 for a right prediction, and -1 where nothing was predicted.

    Returns two things. `agreement` has, for texts that the target generated greedily (`greedy`) and for all other texts
    (`sampled`), the share of right predictions by depth: the n-th number is that of the n-th drafted token, where all tokens
    before it were right (EAGLE's n-alpha), up to the last that was ever reached. It is None if there are no such texts.
    `ranks[n][r]` is the share of the n-th tokens to which rank r was given, whatever was predicted before; the mean of both
    kinds of text, empty without texts.
    """
    agreement: dict[str, list[float] | None] = {"greedy": None, "sampled": None}
    tables: list[torch.Tensor] = []
    own = [text for text in texts if text.part == Part.HELD_OUT and text.prompt_length < len(text.ids)]
    for name, is_greedy in (("greedy", True), ("sampled", False)):
        if found := [ranks_of(text).cpu() for text in own if text.greedy == is_greedy]:
            table = torch.cat(found)
            is_right = (table == 0).cumprod(dim=1)
            is_reached = torch.nn.functional.pad(is_right[:, :-1], (1, 0), value=1) * (table >= 0)
            counts = zip(is_right.sum(dim=0).tolist(), is_reached.sum(dim=0).tolist(), strict=True)
            agreement[name] = [right / reached for right, reached in counts if reached]
            columns = [column[column >= 0].clamp_max(RANKS) for column in table.T]
            by_rank = torch.stack([torch.bincount(column, minlength=RANKS + 1) for column in columns])
            tables.append(by_rank / by_rank.sum(dim=1, keepdim=True).clamp_min(1))
    return agreement, torch.stack(tables).mean(dim=0)[:, :RANKS].tolist() if tables else []


def first_shares(agreement: dict[str, list[float] | None]) -> dict[str, float | None]:
    """Returns the shares of right first tokens from the agreement of `held_out_agreement`."""
    return {name: shares[0] if shares else None for name, shares in agreement.items()}
