"""Draft trees of the likeliest continuations (EESD, section 5.7): several candidates at each position, one target pass."""

from __future__ import annotations

import torch

from specgen.decoding import signals
from specgen.decoding.draft_tree import DraftTree
from specgen.decoding.drafters import AcceptanceScores, DraftSetup, ModelDrafterBase, extend_draft
from specgen.decoding.length_policy import DraftedToken, LengthPolicy, Signals
from specgen.engine.devices import upload
from specgen.engine.inference_mode import inference
from specgen.types import Context, Draft

Frontier = list[tuple[int, float]]  # nodes that the next level continues (-1: the context), log-likelihoods of their paths (nats)


class TopKTreeDrafter(ModelDrafterBase):
    """Drafts a tree. Each level has the `width` likeliest continuations of the previous level, by the whole path's probability.

    No node is drawn at random, even if the target samples. The length policy sees only the likeliest node of each level, after
    the whole level is in the tree. `depth` is the largest number of levels, which the policy may stay below; with None the policy
    alone decides.
    """

    def __init__(self, setup: DraftSetup, *, width: int, depth: int | None = None) -> None:
        super().__init__(setup)
        self._width, self._depth = width, depth

    @inference
    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        limit = self._room(context, limit)
        if limit < 1:
            return Draft()
        scores = AcceptanceScores.wanted(self._setup, policy, context)
        tree = DraftTree(self._setup, context)
        frontier: Frontier = [(-1, 0.0)]

        def extend(position: int) -> DraftedToken | str:
            token = self._add_level(tree, frontier, policy.signals, scores, position)
            return token if frontier else "eos"

        deepest = limit if self._depth is None else min(limit, self._depth)
        reason = extend_draft(policy, deepest, extend)
        return tree.draft(f"depth {self._depth}" if reason == "length" and deepest == self._depth else reason)

    def _add_level(
        self, tree: DraftTree, frontier: Frontier, read: Signals, scores: AcceptanceScores | None, position: int
    ) -> DraftedToken:
        """Adds a level of nodes after those of `frontier`, with one forward pass and one transfer to the host.

        Replaces the content of `frontier` with the new nodes, except those with an end-of-sequence token. Returns the level's
        likeliest node with its signals named in `read`; `scores` are the acceptance predictor's, None if the policy reads none.
        `position` is the level's number, from 1.
        """
        nodes, log_likelihoods = zip(*frontier, strict=True)
        logits = tree.next_logits(nodes)
        log_probs = logits.float().log_softmax(dim=-1)
        values, tokens = log_probs.topk(min(self._width, logits.shape[-1]), dim=-1)
        joint = values + upload(torch.tensor(log_likelihoods), logits.device)[:, None]
        best, positions = joint.flatten().topk(min(self._width, joint.numel()))
        chosen = tokens.flatten()[positions].masked_fill_(best.isnan(), -1)
        origins = positions // tokens.shape[1]
        computed = self._signals(tree, logits, chosen, origins, read, scores, position)
        size = positions.shape[0]
        on_host = torch.cat((chosen.float(), origins.float(), best, *(value.float() for value in computed.values()))).tolist()
        added = [
            (tree.add(nodes[int(origin)], int(token)), value)
            for token, origin, value in zip(on_host[:size], on_host[size : 2 * size], on_host[2 * size : 3 * size], strict=True)
        ]
        frontier[:] = [(node, value) for node, value in added if tree.tokens[node] not in self._eos_ids]
        found = dict(zip(computed, on_host[3 * size :], strict=True))
        return DraftedToken(position, {name: found[name] for name in read if name in found}, size)

    def _signals(
        self,
        tree: DraftTree,
        logits: torch.Tensor,
        chosen: torch.Tensor,
        origins: torch.Tensor,
        read: Signals,
        scores: AcceptanceScores | None,
        position: int,
    ) -> dict[str, torch.Tensor]:
        """Computes the signals named in `read` (such as entropy) for the level's likeliest node, each a tensor [1].

        `logits` [frontier nodes, vocabulary] are those that the level was chosen from. `chosen` are the level's tokens, likeliest
        path first, and `origins` the row of `logits` that each came from. `position` is the level's number, from 1.
        """
        if not read:
            return {}
        score = None
        if scores is not None and tree.hidden is not None:
            score = scores.score(tree.hidden.index_select(0, origins[:1])[0], position)[None]
        unpenalised = None if tree.unpenalised is None else tree.unpenalised.index_select(0, origins[:1])
        row = logits.index_select(0, origins[:1])
        return signals.compute(read, row, chosen[:1], predicted_acceptance=score, unpenalised=unpenalised)
