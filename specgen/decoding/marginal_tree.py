"""Trees of the likeliest paths over independent rows: Medusa's fixed one (Cai et al. 2024, sections
2.1.2 and 2.3.3), and those that each round's probabilities ask for (best first, as DDTree)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import torch

from specgen.base.errors import nan_logits
from specgen.base.types import Context, Draft
from specgen.decoding import token_sampling
from specgen.decoding.drafting import NO_CANDIDATES, DraftModelUser, Setup
from specgen.decoding.policy_base import (
    DraftedToken,
    LengthPolicy,
    Signals,
    begins_draft,
    continue_draft,
)
from specgen.decoding.tree import Tree
from specgen.engine.devices import inference

# a node of the tree: entry m is the rank (0: likeliest) among head m's predictions
RankPath = tuple[int, ...]

DEFAULT_HEADS = 4
_DEFAULT_RANKS = 10
# The paper says that the first head's likeliest token is right in about 60 % of cases, and one of
# its 5 likeliest in over 80 % (2.1.2): with accuracies that fall as a power of the rank, the power
# is 2.35. Later heads: 0.7 times the accuracy of the one before, with which a chain of four tokens
# gets as many accepted as in EESD's Table 9 (0.8 to 1.0 a pass).
_FIRST_ACCURACY = 0.6
_NEXT_HEAD = 0.7
_RANK_POWER = 2.35


def default_rank_accuracies(heads: int = DEFAULT_HEADS) -> list[list[float]]:
    """Returns the accuracies assumed of heads without measured ones: `[head][rank]` is the share of
    tokens that the head predicts with this rank."""
    return [
        [
            _FIRST_ACCURACY * _NEXT_HEAD**head / (rank + 1) ** _RANK_POWER
            for rank in range(_DEFAULT_RANKS)
        ]
        for head in range(heads)
    ]


def candidate_tree(rank_accuracies: Sequence[Sequence[float]], nodes: int) -> list[RankPath]:
    """Returns the `nodes` rank paths that are likeliest to be right, level by level. The parent of
    each path is among them.

    `rank_accuracies[m][r]` is the share of tokens that head m predicts with rank r. A path's value
    is the product of its ranks' accuracies. Of equal values the shorter path comes first, then the
    one of lower ranks.
    """
    # of each level (rank, accuracy), the most accurate first; sorting keeps equal ones in order
    ranked = [sorted(enumerate(row), key=lambda item: -item[1]) for row in rank_accuracies]
    chosen: list[RankPath] = []
    # of each path: -value, length, the path, the place of its last rank, -value of its parent
    candidates: list[tuple[float, int, RankPath, int, float]] = []

    def push(parent: float, path: RankPath, place: int) -> None:
        """Adds the continuation of `path` (its value: -`parent`) by the rank at this place of the
        next level, if there is one."""
        level = len(path)
        if level < len(ranked) and place < len(ranked[level]):
            rank, value = ranked[level][place]
            heappush(candidates, (parent * value, level + 1, (*path, rank), place, parent))

    push(-1.0, (), 0)
    # a path's value is at most its parent's and its likelier sibling's
    while candidates and len(chosen) < nodes:
        negative, _, path, place, parent = heappop(candidates)
        chosen.append(path)
        push(parent, path[:-1], place + 1)
        push(negative, path, 0)
    return sorted(chosen, key=lambda path: (len(path), path))


def _by_level(paths: Sequence[RankPath]) -> list[list[RankPath]]:
    return [
        [path for path in paths if len(path) == depth]
        for depth in range(1, 1 + max(map(len, paths), default=0))
    ]


class MarginalTreeDrafter(DraftModelUser):
    """Drafts a tree from rows that do not depend on each other: the node of a rank path is the
    token of its last rank.

    The tree has the `nodes` paths of highest value. A path's value is a product over its ranks: of
    the probabilities of their tokens at temperature 1 (DDTree), or where `is_fixed`, of the ranks'
    accuracies in training (Medusa; `DraftTraits.rank_accuracies`, or `default_rank_accuracies`).
    `depth` is the most levels; None: no such limit. No node is drawn at random, even if the target
    samples. No path has more than the length policy's `most_levels`. The policy sees the likeliest
    token of each level, and may leave the further levels out. Penalties of all nodes of a level are
    those that follow from the likeliest path.
    """

    def __init__(
        self, setup: Setup, *, nodes: int, depth: int | None = None, is_fixed: bool = False
    ) -> None:
        super().__init__(setup, depth=depth)
        self._nodes = nodes
        self._ranks = nodes
        self._accuracies: Sequence[Sequence[float]] = ()
        self._fixed: dict[int, list[list[RankPath]]] = {}  # by the most levels
        if is_fixed:
            measured = () if setup.draft is None else setup.draft.traits.rank_accuracies
            self._accuracies = measured or default_rank_accuracies(self._longest or DEFAULT_HEADS)
            self._ranks = min(nodes, max(map(len, self._accuracies)))

    @inference
    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        limit = min(self._room(context, limit), policy.most_levels)
        if limit < 1:
            return Draft()
        if not begins_draft(policy):
            return Draft(stop_reason=policy.reason)

        levels = self._fixed_levels(limit)
        limit = len(levels) or limit
        # any tokens do for the first call: without penalties, no token changes the logits
        heads = self._read(context, [0] * (limit - 1), 0, policy.signals)
        levels = levels or _by_level(candidate_tree([head.probs for head in heads], self._nodes))
        limit = min(limit, max(len(levels), 1))

        tree = Tree()
        nodes: dict[RankPath, int] = {(): -1}  # the nodes of rank paths that may have children
        origins: list[_Head] = []  # the head that each node was chosen from

        def extend(position: int) -> DraftedToken | str:
            if position > 1 and heads[0].is_penalised:
                likeliest = [head.tokens[0] for head in heads[: position - 1]]
                heads[position - 1 :] = self._read(context, likeliest, position - 1, policy.signals)
            head = heads[position - 1]
            if not head.tokens:
                return NO_CANDIDATES

            before = len(tree)
            for path in levels[position - 1]:
                if path[:-1] in nodes and path[-1] < len(head.tokens):
                    token = head.tokens[path[-1]]
                    node = tree.add(nodes[path[:-1]], token)
                    origins.append(head)
                    if token not in self._eos_ids:
                        nodes[path] = node
            if position < len(levels) and not any(path[:-1] in nodes for path in levels[position]):
                return "eos"
            values = {name: head.signals[name] for name in policy.signals if name in head.signals}
            return DraftedToken(position, values, len(tree) - before)

        reason = continue_draft(policy, limit, extend)
        if reason == "length" and limit == len(levels):
            reason = f"depth {limit}"
        logits = None
        if origins and self._setup.record:
            logits = torch.stack([head.logits for head in origins])
        return Draft(
            tree.tokens,
            tree.parents,
            entropies=[head.signals["entropy"] for head in origins],
            top_probs=[head.signals["top_prob"] for head in origins],
            stop_reason=reason,
            logits=logits,
        )

    def _fixed_levels(self, limit: int) -> list[list[RankPath]]:
        """Returns the fixed tree's rank paths of at most `limit` levels, level by level; none where
        the tree is not fixed."""
        if not self._accuracies:
            return []
        if limit not in self._fixed:
            self._fixed[limit] = _by_level(candidate_tree(self._accuracies[:limit], self._nodes))
        return self._fixed[limit]

    def _read(
        self, context: Context, draft: Sequence[int], start: int, names: Signals
    ) -> list[_Head]:
        """Returns the heads from number `start` on that predict the tokens after a chain, with one
        transfer to the host.

        `names` are the signals that the policy reads. Raises RunError if the logits hold a NaN.
        """
        output = self._runner.logits(context, draft, start=start)
        logits = output.logits[:, : self._vocab_size]
        unpenalised = output.unpenalised_part(self._vocab_size)
        ranks = min(self._ranks, logits.shape[1])
        values, tokens = logits.float().topk(ranks, dim=-1)
        possible = tokens.masked_fill(values == -torch.inf, -1)
        computed = token_sampling.signals(
            names | {"entropy"}, logits, tokens[:, 0], unpenalised=unpenalised
        )
        if not self._accuracies:
            values = values - logits.float().logsumexp(dim=-1, keepdim=True)
        columns = (possible.float(), values.exp(), torch.stack(list(computed.values()), dim=1))
        on_host = torch.cat(columns, dim=1).tolist()

        heads = []
        own = logits if unpenalised is None else unpenalised
        for row, head_logits in zip(on_host, own, strict=True):
            signals = dict(zip(computed, row[2 * ranks :], strict=True))
            if math.isnan(signals["entropy"]):
                raise nan_logits("draft")
            likeliest = [int(token) for token in row[:ranks] if token >= 0]
            probs = row[ranks : ranks + len(likeliest)]
            if self._setup.record:
                head_logits = head_logits.clone()
            heads.append(_Head(likeliest, probs, signals, head_logits, unpenalised is not None))
        return heads


class _Head(NamedTuple):
    """A row's likeliest possible tokens, their probabilities unless the tree is fixed, the signals
    of the first by name, and the logits [vocabulary] without penalties.

    The signals are those that the policy reads, and always entropy and top probability.
    """

    tokens: list[int]
    probs: list[float]
    signals: dict[str, float]
    logits: torch.Tensor
    is_penalised: bool
