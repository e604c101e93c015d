"""Draft trees of the likeliest continuations (EESD, section 5.7): several candidates at each position, one target pass."""

from __future__ import annotations

import torch

from specgen.decoding import signals
from specgen.decoding.draft_tree import DraftTree
from specgen.decoding.drafters import DraftSetup, ModelDrafterBase, extend_draft
from specgen.decoding.policies import DraftedToken, LengthPolicy, Signals
from specgen.engine.inference_mode import inference
from specgen.types import Context, Draft

Frontier = list[tuple[int, float]]  # nodes that the next level continues (-1: the context), log-likelihoods of their paths (nats)


class TopKTreeDrafter(ModelDrafterBase):
    """A tree with at most `width` nodes at each level: the continuations of the last level with the likeliest paths.

    The nodes are chosen deterministically, in sampling too, and verified as deterministic candidates. The policy sees the
    likeliest node of each level. With `depth` None the policy alone ends the tree.
    """

    def __init__(self, setup: DraftSetup, *, width: int, depth: int | None = None) -> None:
        super().__init__(setup)
        self._width, self._depth = width, depth

    @inference
    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        limit = self._room(context, limit)
        if limit < 1:
            return Draft()
        predictor = self._setup.acceptance_predictor
        if predictor is not None and "predicted_acceptance" in policy.signals:
            predictor.begin(context)
        tree = DraftTree(self._setup, context)
        frontier: Frontier = [(-1, 0.0)]

        def extend(position: int) -> DraftedToken | str:
            token = self._add_level(tree, frontier, policy.signals, position)
            return token if frontier else "eos"

        deepest = limit if self._depth is None else min(limit, self._depth)
        reason = extend_draft(policy, deepest, extend)
        return tree.draft(f"depth {self._depth}" if reason == "length" and deepest == self._depth else reason)

    def _add_level(self, tree: DraftTree, frontier: Frontier, read: Signals, position: int) -> DraftedToken:
        """Add a level after the frontier's nodes, in one pass and one transfer, and move the frontier to it.

        Nodes with an end-of-sequence leave the frontier. Returns the level's likeliest node.
        """
        nodes, log_likelihoods = zip(*frontier, strict=True)
        logits = tree.next_logits(nodes)
        log_probs = logits.float().log_softmax(dim=-1)
        values, tokens = log_probs.topk(min(self._width, logits.shape[-1]), dim=-1)
        joint = values + torch.tensor(log_likelihoods, device=logits.device)[:, None]
        best, positions = joint.flatten().topk(min(self._width, joint.numel()))
        chosen = tokens.flatten()[positions].masked_fill_(best.isnan(), -1)
        origins = positions // tokens.shape[1]
        computed = self._signals(tree, logits, chosen, origins, read, position)
        size = positions.shape[0]
        on_host = torch.cat((chosen.float(), origins.float(), best, *(value.float() for value in computed.values()))).tolist()
        added = [
            (tree.add(nodes[int(origin)], int(token)), value)
            for token, origin, value in zip(on_host[:size], on_host[size : 2 * size], on_host[2 * size : 3 * size], strict=True)
        ]
        frontier[:] = [(node, value) for node, value in added if tree.tokens[node] not in self._eos_ids]
        found = dict(zip(computed, on_host[3 * size :], strict=True))
        return DraftedToken(position, {name: found[name] for name in read if name in found})

    def _signals(
        self, tree: DraftTree, logits: torch.Tensor, chosen: torch.Tensor, origins: torch.Tensor, read: Signals, position: int
    ) -> dict[str, torch.Tensor]:
        """The signals [1] of the level's likeliest node."""
        if not read:
            return {}
        predictor, score = self._setup.acceptance_predictor, None
        if predictor is not None and tree.hidden is not None and "predicted_acceptance" in read:
            score = predictor.score(tree.hidden.index_select(0, origins[:1])[0], position)[None]
        return signals.compute(read, logits.index_select(0, origins[:1]), chosen[:1], predicted_acceptance=score)
