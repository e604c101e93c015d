"""Medusa's fixed tree of candidates (Cai et al. 2024, sections 2.1.2 and 2.3.3): which of each head's likeliest tokens it has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import torch

from specgen.base.errors import nan_logits
from specgen.base.types import Context, Draft
from specgen.decoding import token_sampling
from specgen.decoding.drafting import NO_CANDIDATES, DraftModelUser, Setup
from specgen.decoding.policy_base import DraftedToken, LengthPolicy, Signals, extend_draft
from specgen.decoding.tree import Tree
from specgen.engine.inference_mode import inference

RankPath = tuple[int, ...]  # a node of the tree: entry m is the rank (0: likeliest) among head m's predictions

DEFAULT_HEADS = 4
_DEFAULT_RANKS = 10
# The paper says that the first head's likeliest token is right in about 60 % of cases, and one of its 5 likeliest in over 80 %
# (2.1.2): with accuracies that fall as a power of the rank, the power is 2.35. Later heads: 0.7 times the accuracy of the one
# before, with which a chain of four tokens gets as many accepted as in EESD's Table 9 (0.8 to 1.0 a pass).
_FIRST_ACCURACY, _NEXT_HEAD, _RANK_POWER = 0.6, 0.7, 2.35


def default_rank_accuracies(heads: int = DEFAULT_HEADS) -> list[list[float]]:
    """Returns for each head and rank how often the token of this rank is assumed to be right. For heads without measured
    accuracies."""
    return [
        [_FIRST_ACCURACY * _NEXT_HEAD**head / (rank + 1) ** _RANK_POWER for rank in range(_DEFAULT_RANKS)]
        for head in range(heads)
    ]


def candidate_tree(rank_accuracies: Sequence[Sequence[float]], nodes: int) -> list[RankPath]:
    """Returns the `nodes` rank paths that are likeliest to be right, level by level. The parent of each path is among them.

    `rank_accuracies[m][r]` is the share of tokens that head m predicts with rank r. A path's value is the product of its ranks'
    accuracies. Of equal values the shorter path comes first, then the one of lower ranks.
    """
    chosen: list[RankPath] = []
    candidates: list[tuple[float, int, RankPath]] = [(-value, 1, (rank,)) for rank, value in enumerate(rank_accuracies[0])]
    heapify(candidates)
    while candidates and len(chosen) < nodes:  # a path's value is at most its parent's, which was taken before
        negative, length, path = heappop(candidates)
        chosen.append(path)
        if length < len(rank_accuracies):
            for rank, value in enumerate(rank_accuracies[length]):
                heappush(candidates, (negative * value, length + 1, (*path, rank)))
    return sorted(chosen, key=lambda path: (len(path), path))


class MedusaTreeDrafter(DraftModelUser):
    """Drafts a tree of fixed shape with `nodes` nodes from Medusa heads. No node is drawn at random, even if the target samples.

    A node stands for a path of ranks (see `candidate_tree`); its token is the one that the head for its level predicts with the
    last rank of the path. The paths are those that are likeliest by the `rank_accuracies` of the heads' runner (`MedusaRunner`),
    or by `default_rank_accuracies` if these were not measured. The length policy sees the likeliest token of each level, and may
    end the draft after it. If there are penalties, all nodes of a level have those that apply after the likeliest path.
    """

    def __init__(self, setup: Setup, *, nodes: int) -> None:
        super().__init__(setup)
        measured = getattr(setup.draft, "rank_accuracies", ())
        paths = candidate_tree(measured or default_rank_accuracies(self._longest or DEFAULT_HEADS), nodes)
        self._levels = [[path for path in paths if len(path) == depth] for depth in range(1, len(paths[-1]) + 1)]
        self._ranks = 1 + max(map(max, paths))

    @inference
    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        limit = min(self._room(context, limit), len(self._levels))
        if limit < 1:
            return Draft()
        tree = Tree()
        nodes: dict[RankPath, int] = {(): -1}  # the nodes of rank paths that may have children
        origins: list[_Head] = []  # the head that each node was chosen from
        heads = self._read(context, [0] * (limit - 1), 0, policy.signals)  # without penalties, no token changes the logits

        def extend(position: int) -> DraftedToken | str:
            if position > 1 and heads[0].is_penalised:
                likeliest = [head.tokens[0] for head in heads[: position - 1]]
                heads[position - 1 :] = self._read(context, likeliest, position - 1, policy.signals)
            head, before = heads[position - 1], len(tree)
            if not head.tokens:
                return NO_CANDIDATES
            for path in self._levels[position - 1]:
                if path[:-1] in nodes and path[-1] < len(head.tokens):
                    token = head.tokens[path[-1]]
                    node = tree.add(nodes[path[:-1]], token)
                    origins.append(head)
                    if token not in self._eos_ids:
                        nodes[path] = node
            if position < len(self._levels) and not any(path[:-1] in nodes for path in self._levels[position]):
                return "eos"
            values = {name: head.signals[name] for name in policy.signals if name in head.signals}
            return DraftedToken(position, values, len(tree) - before)

        reason = extend_draft(policy, limit, extend)
        return Draft(
            tree.tokens,
            tree.parents,
            entropies=[head.signals["entropy"] for head in origins],
            top_probs=[head.signals["top_prob"] for head in origins],
            stop_reason=f"depth {limit}" if reason == "length" and limit == len(self._levels) else reason,
            logits=torch.stack([head.logits for head in origins]) if origins and self._setup.record else None,
        )

    def _read(self, context: Context, draft: Sequence[int], start: int, names: Signals) -> list[_Head]:
        """Returns the heads from number `start` on that predict the tokens after a chain, with one transfer to the host.

        `names` are the signals that the policy reads. Raises RunError if the logits hold a NaN.
        """
        output = self._runner.logits(context, draft, start=start)
        logits, unpenalised = output.logits[:, : self._vocab_size], output.unpenalised_part(self._vocab_size)
        ranks = min(self._ranks, logits.shape[1])
        values, tokens = logits.float().topk(ranks, dim=-1)
        possible = tokens.masked_fill(values == -torch.inf, -1)
        computed = token_sampling.signals(names | {"entropy"}, logits, tokens[:, 0], unpenalised=unpenalised)
        found = torch.cat((possible.float(), torch.stack(list(computed.values()), dim=1)), dim=1)
        heads = []
        for row, kept in zip(found.tolist(), logits if unpenalised is None else unpenalised, strict=True):
            of_first = dict(zip(computed, row[ranks:], strict=True))
            if math.isnan(of_first["entropy"]):
                raise nan_logits("draft")
            likely = [int(token) for token in row[:ranks] if token >= 0]
            heads.append(_Head(likely, of_first, kept.clone() if self._setup.record else kept, unpenalised is not None))
        return heads


class _Head(NamedTuple):
    """A head's likeliest possible tokens, the signals of the first by name, and its logits [vocabulary] without penalties.

    The signals are those that the policy reads, and always entropy and top probability.
    """

    tokens: list[int]
    signals: dict[str, float]
    logits: torch.Tensor
    is_penalised: bool
