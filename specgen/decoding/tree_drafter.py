"""Draft trees of the likeliest continuations (EESD, section 5.7, and EAGLE-2): several candidates at each position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from specgen.base.types import Context, Draft
from specgen.decoding import signals
from specgen.decoding.draft_tree import DraftTree
from specgen.decoding.drafters import AcceptanceScores, DraftSetup, ModelDrafterBase, extend_draft
from specgen.decoding.length_policy import DraftedToken, LengthPolicy, Signals
from specgen.engine.devices import upload
from specgen.engine.inference_mode import inference


class Level(NamedTuple):
    """The candidates for a level of a tree, the likeliest path's first, with numbers on the host.

    `origins` are the rows of the logits that each candidate was chosen from, `log_likelihoods` (nats) are those of the paths.
    `signals` are the likeliest candidate's, by name.
    """

    tokens: Sequence[int]
    origins: Sequence[int]
    log_likelihoods: Sequence[float]
    signals: dict[str, float]


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
        grown = _GrowingTree(DraftTree(self._setup, context), self._width, self._nodes, self._eos_ids)

        def extend(position: int) -> DraftedToken | str:
            token = grown.add(self._level(grown, policy.signals, scores), grown.alive)
            return token if grown.alive else "eos"

        reason = extend_draft(policy, limit, extend)
        reason = self._reason(reason, limit) if grown.alive else "eos"
        return grown.draft(reason)

    def _level(self, grown: _GrowingTree, read: Signals, scores: AcceptanceScores | None) -> Level:
        """Finds the candidates for the next level, with one forward pass and one transfer to the host.

        `read` names the signals to compute; `scores` are the acceptance predictor's, None if the policy reads none.
        """
        tree = grown.tree
        logits = tree.next_logits(grown.alive)
        log_probs = logits.float().log_softmax(dim=-1)
        values, tokens = log_probs.topk(min(self._width, logits.shape[-1]), dim=-1)
        joint = values.clamp_max_(0.0) + upload(torch.tensor(grown.log_likelihoods), logits.device)[:, None]  # <= the parent's
        best, positions = joint.flatten().sort(descending=True, stable=True)
        if self._nodes is None:
            best, positions = best[: self._width], positions[: self._width]
        chosen = tokens.flatten()[positions].masked_fill_(best.isnan(), -1)
        origins = positions // tokens.shape[1]
        computed = self._signals(tree, logits, chosen, origins, read, scores, grown.levels + 1)
        size = positions.shape[0]
        on_host = torch.cat((chosen.float(), origins.float(), best, *(value.float() for value in computed.values()))).tolist()
        found = dict(zip(computed, on_host[3 * size :], strict=True))
        ids, rows = (list(map(int, on_host[start : start + size])) for start in (0, size))
        return Level(ids, rows, on_host[2 * size : 3 * size], {name: found[name] for name in read if name in found})

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


class _GrowingTree:
    """The tokens that may be in a draft, and the tree of those that the draft model runs.

    `alive` are the nodes that the next level continues (-1: the context), `log_likelihoods` (nats) those of their paths, and
    `last` are all nodes of the last level, also those that end the output. The other arguments are those of `TopKTreeDrafter`.
    """

    def __init__(self, tree: DraftTree, width: int, nodes: int | None, eos_ids: frozenset[int]) -> None:
        self.tree, self.levels = tree, 0
        self.alive, self.last, self.log_likelihoods = [-1], [-1], [0.0]
        self._width, self._nodes, self._eos_ids = width, nodes, eos_ids
        self._candidates: list[_Candidate] = []

    def add(self, level: Level, nodes: Sequence[int]) -> DraftedToken:
        """Adds a level, and returns its likeliest node.

        `nodes` are those after which the rows of logits come that the candidates were chosen from.
        """
        before = len(self._candidates)
        self.levels += 1
        alive, self.last = list[tuple[int, float]](), []
        for token, origin, value in zip(level.tokens, level.origins, level.log_likelihoods, strict=True):
            if value == -math.inf:
                break
            parent, node = nodes[origin], None
            if len(self.last) < self._width:
                node = self.tree.add(parent, token)
                self.last.append(node)
                if token not in self._eos_ids:
                    alive.append((node, value))
            self._candidates.append(_Candidate(parent, token, value, node))
        self.alive, self.log_likelihoods = [node for node, _ in alive], [value for _, value in alive]
        added = self._in_draft(len(self._candidates)) - self._in_draft(before)
        return DraftedToken(self.levels, level.signals, added)

    def draft(self, reason: str) -> Draft:
        """Returns the draft, which ended for this reason."""
        candidates = self._candidates
        if self._nodes is None:
            return self.tree.draft(reason)
        by_likelihood = sorted(range(len(candidates)), key=lambda number: -candidates[number].log_likelihood)  # stable
        return self.tree.part([self._node(candidates[number]) for number in sorted(by_likelihood[: self._nodes])], reason)

    def _in_draft(self, candidates: int) -> int:
        """Returns how many tokens the draft has if its levels have this number of candidates."""
        return candidates if self._nodes is None else min(candidates, self._nodes)

    def _node(self, candidate: _Candidate) -> int:
        """Returns the candidate's node of the tree; adds one if it has none."""
        return self.tree.add(candidate.parent, candidate.token) if candidate.node is None else candidate.node
