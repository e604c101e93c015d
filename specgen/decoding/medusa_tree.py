"""Medusa's fixed tree of candidates (Cai et al. 2024, sections 2.1.2 and 2.3.3): which ranks of which heads it joins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import torch

from specgen.base.errors import nan_logits
from specgen.base.types import Context, Draft
from specgen.decoding import signals
from specgen.decoding.drafters import DraftSetup, ModelDrafterBase, extend_draft
from specgen.decoding.length_policy import DraftedToken, LengthPolicy, Signals
from specgen.engine.inference_mode import inference

RankPath = tuple[int, ...]  # a node of the tree: entry m is the rank (0: likeliest) among head m's predictions

DEFAULT_HEADS = 4
_DEFAULT_RANKS = 10
# The paper says that the first head's likeliest token is right in about 60 % of cases, and one of its 5 likeliest in over 80 %
# (2.1.2): with accuracies that fall as a power of the rank, the power is 2.35. Later heads: 0.7 times the accuracy of the one
# before, with which a chain of four tokens gets as many accepted as in EESD's Table 9 (0.8 to 1.0 a pass).
_FIRST_ACCURACY, _NEXT_HEAD, _RANK_POWER = 0.6, 0.7, 2.35


def default_rank_accuracies(heads: int = DEFAULT_HEADS) -> list[list[float]]:
    """Returns how often each rank of each head is assumed to be right, where it was not measured."""
    return [
        [_FIRST_ACCURACY * _NEXT_HEAD**head / (rank + 1) ** _RANK_POWER for rank in range(_DEFAULT_RANKS)]
        for head in range(heads)
    ]


def candidate_tree(rank_accuracies: Sequence[Sequence[float]], nodes: int) -> list[RankPath]:
    """Returns the `nodes` rank paths that are likeliest to be right, level by level. Each one's parent is among them.

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


class MedusaTreeDrafter(ModelDrafterBase):
    """Drafts a tree of fixed shape from Medusa heads: the node of a rank path is the token of its last rank.

    No node is drawn at random, even if the target samples. `nodes` is the number of nodes. Which these are is decided by the
    `rank_accuracies` of the heads' runner (`MedusaRunner`), or by `default_rank_accuracies`. The length policy sees the likeliest
    token of each level, and may leave the further levels out. With penalties, all nodes of a level have those of the likeliest
    path.
    """

    def __init__(self, setup: DraftSetup, *, nodes: int) -> None:
        super().__init__(setup)
        measured = getattr(setup.runner, "rank_accuracies", ())
        paths = candidate_tree(measured or default_rank_accuracies(self._longest or DEFAULT_HEADS), nodes)
        self._levels = [[path for path in paths if len(path) == depth] for depth in range(1, len(paths[-1]) + 1)]
        self._ranks = 1 + max(map(max, paths))

    @inference
    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        limit = min(self._room(context, limit), len(self._levels))
        if limit < 1:
            return Draft()
        tree = _Nodes(self._setup)
        likeliest: list[int] = []
        heads = self._read(context, [0] * (limit - 1), 0, policy.signals)  # without penalties, no token changes the logits

        def extend(position: int) -> DraftedToken | str:
            if position > 1 and heads[0].is_penalised:
                heads[position - 1 :] = self._read(context, likeliest, position - 1, policy.signals)
            paths, (tokens, found, own, _) = self._levels[position - 1], heads[position - 1]
            if not tokens:
                return "no candidates"
            likeliest.append(tokens[0])
            added = tree.add(paths, tokens, found, own)
            if position < len(self._levels) and not tree.continues_with(self._levels[position]):
                return "eos"
            return DraftedToken(position, {name: found[name] for name in policy.signals if name in found}, added)

        reason = extend_draft(policy, limit, extend)
        return tree.draft(f"depth {limit}" if reason == "length" and limit == len(self._levels) else reason)

    def _read(self, context: Context, draft: Sequence[int], start: int, names: Signals) -> list[_Head]:
        """Returns the heads from number `start` on that predict the tokens after a chain, with one transfer to the host.

        `names` are the signals that the policy reads. Raises RunError if the logits hold a NaN.
        """
        output = self._runner.logits(context, draft, start=start)
        logits, unpenalised = output.logits[:, : self._vocab_size], output.unpenalised_part(self._vocab_size)
        own, ranks = logits if unpenalised is None else unpenalised, min(self._ranks, logits.shape[1])
        values, tokens = logits.float().topk(ranks, dim=-1)
        computed = signals.compute(names | {"entropy"}, logits, tokens[:, 0], unpenalised=unpenalised)
        found = torch.cat((tokens.float(), values, torch.stack(list(computed.values()), dim=1)), dim=1)
        heads = []
        for row, kept in zip(found.tolist(), own, strict=True):
            of_first = dict(zip(computed, row[2 * ranks :], strict=True))
            if math.isnan(of_first["entropy"]):
                raise nan_logits("draft")
            likely = zip(row[:ranks], row[ranks : 2 * ranks], strict=True)
            possible = [int(token) for token, value in likely if value > -math.inf]
            heads.append(_Head(possible, of_first, kept, unpenalised is not None))
        return heads


class _Head(NamedTuple):
    """A head's likeliest possible tokens, the signals of the first by name, and its logits [vocabulary] without penalties.

    The signals are those that the policy reads, and always entropy and top probability.
    """

    tokens: list[int]
    signals: dict[str, float]
    logits: torch.Tensor
    is_penalised: bool


class _Nodes:
    """The nodes of a tree that grows level by level."""

    def __init__(self, setup: DraftSetup) -> None:
        self._setup = setup
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._entropies: list[float] = []
        self._top_probs: list[float] = []
        self._logits: list[torch.Tensor] = []  # of each node, without penalties; empty unless the setup keeps logits
        self._nodes: dict[RankPath, int] = {(): -1}  # those that may have children

    def add(self, paths: Sequence[RankPath], tokens: Sequence[int], values: dict[str, float], logits: torch.Tensor) -> int:
        """Adds a level. `tokens` are those of its head by rank, `values` its entropy and top probability by name.

        Leaves out paths whose parent was left out or ends the output, and ranks that `tokens` lacks. Returns how many were added.
        """
        added = 0
        kept = logits.clone() if self._setup.keep_logits else None
        for path in paths:
            if path[:-1] not in self._nodes or path[-1] >= len(tokens):
                continue
            token = tokens[path[-1]]
            if token not in self._setup.eos_ids:
                self._nodes[path] = len(self._tokens)
            self._tokens.append(token)
            self._parents.append(self._nodes[path[:-1]])
            self._entropies.append(values["entropy"])
            self._top_probs.append(values["top_prob"])
            if kept is not None:
                self._logits.append(kept)
            added += 1
        return added

    def continues_with(self, paths: Sequence[RankPath]) -> bool:
        """Whether the parent of any of these paths was added and does not end the output."""
        return any(path[:-1] in self._nodes for path in paths)

    def draft(self, reason: str) -> Draft:
        """Returns all nodes as a draft. `reason` says why it ended."""
        return Draft(
            self._tokens,
            self._parents,
            entropies=self._entropies,
            top_probs=self._top_probs,
            stop_reason=reason,
            logits=torch.stack(self._logits) if self._logits else None,
        )
