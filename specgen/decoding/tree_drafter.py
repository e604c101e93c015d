"""Draft trees of the likeliest continuations (EESD, section 5.7, and EAGLE-2): several candidates at each position."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from specgen.decoding import signals
from specgen.decoding.draft_tree import DraftTree
from specgen.decoding.drafters import AcceptanceScores, DraftSetup, ModelDrafterBase, extend_draft
from specgen.decoding.length_policy import DraftedToken, LengthPolicy, Signals
from specgen.engine.devices import upload
from specgen.engine.inference_mode import inference
from specgen.types import Context, Draft

Frontier = list[tuple[int, float]]  # nodes that the next level continues (-1: the context), log-likelihoods of their paths (nats)


class _Candidate(NamedTuple):
    """A token that may be in the draft, after `parent`, and the log-likelihood (nats) of the path to it.

    `parent` is a node of the tree that the draft model runs (-1: the context), and so is `node`, the candidate's own; None: the
    tree does not have the candidate.
    """

    parent: int
    token: int
    log_likelihood: float
    node: int | None


class TopKTreeDrafter(ModelDrafterBase):
    """Drafts a tree. Each level has the `width` likeliest continuations of the previous level, by the whole path's probability.

    Without `nodes`, these are the draft. With `nodes`, the tree is EAGLE-2's dynamic tree (sections 4.1 and 4.2): the draft has
    the `nodes` likeliest of all tokens that were candidates for a level, the `width` likeliest after each node that was
    continued; of equally likely ones, the earlier level's, then the likelier node's. Fewer, if the draft ends early.
    Probabilities are those at temperature 1. No node is drawn at random, even if the target samples. The length policy sees only
    the likeliest node of each level, after the whole level is in the tree.
    """

    def __init__(self, setup: DraftSetup, *, width: int, depth: int | None = None, nodes: int | None = None) -> None:
        super().__init__(setup, depth=depth)
        self._width, self._nodes = width, nodes

    @inference
    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        limit = self._room(context, limit)
        if limit < 1:
            return Draft()
        scores = AcceptanceScores.wanted(self._setup, policy, context)
        tree = DraftTree(self._setup, context)
        frontier: Frontier = [(-1, 0.0)]
        candidates: list[_Candidate] = []

        def extend(position: int) -> DraftedToken | str:
            token = self._add_level(tree, frontier, candidates, policy.signals, scores, position)
            return token if frontier else "eos"

        reason = self._reason(extend_draft(policy, limit, extend), limit)
        if self._nodes is None:
            return tree.draft(reason)
        by_likelihood = sorted(range(len(candidates)), key=lambda number: -candidates[number].log_likelihood)  # stable
        return tree.part([_node(tree, candidates[number]) for number in sorted(by_likelihood[: self._nodes])], reason)

    def _add_level(
        self,
        tree: DraftTree,
        frontier: Frontier,
        candidates: list[_Candidate],
        read: Signals,
        scores: AcceptanceScores | None,
        position: int,
    ) -> DraftedToken:
        """Adds a level of nodes after those of `frontier`, with one forward pass and one transfer to the host.

        Replaces the content of `frontier` with the new nodes, except those with an end-of-sequence token. Adds the tokens that
        may be in the draft to `candidates`, likeliest first. Returns the level's likeliest node with its signals named in `read`;
        `scores` are the acceptance predictor's, None if the policy reads none. `position` is the level's number, from 1.
        """
        nodes, log_likelihoods = zip(*frontier, strict=True)
        logits = tree.next_logits(nodes)
        log_probs = logits.float().log_softmax(dim=-1)
        values, tokens = log_probs.topk(min(self._width, logits.shape[-1]), dim=-1)
        joint = values.clamp_max_(0.0) + upload(torch.tensor(log_likelihoods), logits.device)[:, None]  # never above the parent's
        best, positions = joint.flatten().sort(descending=True, stable=True)
        if self._nodes is None:
            best, positions = best[: self._width], positions[: self._width]
        chosen = tokens.flatten()[positions].masked_fill_(best.isnan(), -1)
        origins = positions // tokens.shape[1]
        computed = self._signals(tree, logits, chosen, origins, read, scores, position)
        size = positions.shape[0]
        on_host = torch.cat((chosen.float(), origins.float(), best, *(value.float() for value in computed.values()))).tolist()
        frontier.clear()
        before = len(candidates)
        for token, origin, value in zip(map(int, on_host[:size]), on_host[size:], on_host[2 * size :], strict=False):
            if value == -math.inf:
                break
            parent, node = nodes[int(origin)], None
            if len(candidates) < before + self._width:
                node = tree.add(parent, token)
                if token not in self._eos_ids:
                    frontier.append((node, value))
            candidates.append(_Candidate(parent, token, value, node))
        found = dict(zip(computed, on_host[3 * size :], strict=True))
        return DraftedToken(
            position,
            {name: found[name] for name in read if name in found},
            self._in_draft(len(candidates)) - self._in_draft(before),
        )

    def _in_draft(self, candidates: int) -> int:
        """Returns how many tokens the draft has if its levels have this number of candidates."""
        return candidates if self._nodes is None else min(candidates, self._nodes)

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


def _node(tree: DraftTree, candidate: _Candidate) -> int:
    """Returns the candidate's node of the tree; adds one if it has none."""
    return tree.add(candidate.parent, candidate.token) if candidate.node is None else candidate.node
