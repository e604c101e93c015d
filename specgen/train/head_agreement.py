"""How often a head predicts the target's most probable token, on text that the target generated and no head was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specgen.train.frozen_target import FrozenTarget
from specgen.train.generated_text import GeneratedText
from specgen.train.head_objective import Objective
from specgen.train.head_training import predictions, rows_at_once
from specgen.train.packing import single
from specgen.train.training_loop import autocast_for

RANKS = 10  # ranks that are counted: as many as the published trees of Medusa use


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Measurements on held-out text.

    `agreement` has, for texts that the target generated greedily (`greedy`) and for all other texts (`sampled`), the share of
    right predictions by depth: the n-th number is that of the n-th drafted token, where all tokens before it were right (EAGLE's
    n-alpha), up to the last that was ever reached. It is None if there are no such texts. `ranks[n][r]` is the share of the n-th
    tokens to which the head gives rank r, whatever was predicted before; the mean of both kinds of text, empty without texts.
    """

    agreement: dict[str, list[float] | None]
    ranks: list[list[float]]


@torch.no_grad()
def held_out(objective: Objective, target: FrozenTarget, texts: Sequence[GeneratedText]) -> HeldOut:
    """Measures a head on the generated tokens of `texts`, each of which is predicted from the text before it."""
    shares: dict[str, list[float] | None] = {}
    tables: list[torch.Tensor] = []
    for name, greedy in (("greedy", True), ("sampled", False)):
        used = [text for text in texts if text.greedy == greedy and text.prompt_length < len(text.ids)]
        counts = [_counts(objective, target, text) for text in used]
        shares[name] = None
        if counts:
            reached, right, by_rank = (sum(parts[1:], parts[0]) for parts in zip(*counts, strict=True))
            tries = [count for count in reached.tolist() if count]  # none after a token that was never right
            shares[name] = [matches / count for matches, count in zip(right.tolist(), tries, strict=False)]
            tables.append(by_rank / by_rank.sum(dim=1, keepdim=True).clamp_min(1))
    ranks = torch.stack(tables).mean(dim=0)[:, :RANKS].tolist() if tables else []
    return HeldOut(shares, ranks)


def _counts(objective: Objective, target: FrozenTarget, text: GeneratedText) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts the predictions for one text: two lists [depths] and a table [depths, RANKS + 1].

    They are the tokens before which all of a draft was right, those of them that are right too, and the ranks of all tokens.
    """
    batch = single(text.ids).part(slice(None), target.device)
    predicted, (depths, _, top_k_ids, *_) = predictions(objective, target, batch, None)
    pieces = []
    for piece in torch.split(torch.arange(len(depths), device=depths.device), rows_at_once(target)):
        with autocast_for(target.device, target.dtype):
            logits = objective.logits(predicted.outputs[piece], depths[piece])
        pieces.append((logits > logits.gather(1, top_k_ids[piece, :1].long())).sum(dim=1))
    starts = predicted.sources - depths  # the last tokens that are not drafted
    chosen = (starts >= text.prompt_length - 1) & (depths < objective.depths)
    table = torch.full((len(text.ids), objective.depths), -1, device=depths.device)  # -1: nothing was predicted
    table[starts[chosen], depths[chosen]] = torch.cat(pieces)[chosen].clamp_max(RANKS)
    table = table.cpu()
    is_right = (table == 0).cumprod(dim=1)
    reached = torch.cat((torch.ones(len(table), 1, dtype=torch.long), is_right[:, :-1]), dim=1) * (table >= 0)
    by_rank = torch.stack([torch.bincount(column[column >= 0], minlength=RANKS + 1) for column in table.T])
    return reached.sum(dim=0), is_right.sum(dim=0), by_rank
