"""Draft trees of the likeliest continuations (EESD, section 5.7): several candidates a place, judged in one target pass."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from specgen.decoding import logits_ops
from specgen.decoding.draft_tree import DraftTree
from specgen.decoding.drafters import AcceptancePredictor, room
from specgen.decoding.policies import DraftedToken, LengthPolicy
from specgen.engine.inference_mode import inference
from specgen.types import Context, Draft

if TYPE_CHECKING:
    from specgen.engine.model_runner import DraftRunner


class TopKTreeDrafter:
    """A tree of `width` nodes a level: of all continuations of the level before, those whose paths are likeliest together.

    Which nodes these are is no matter of chance, in sampling too: each is judged as a candidate that had all probability to
    itself. The policy is asked once a level, about the level's likeliest node. `depth` None leaves the end to it alone.
    """

    def __init__(
        self,
        runner: DraftRunner,
        eos_ids: Collection[int],
        vocab_size: int,
        *,
        width: int,
        depth: int | None = None,
        keep_logits: bool = False,
        agreement: AcceptancePredictor | None = None,
    ) -> None:
        self._runner = runner
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._width, self._depth = width, depth
        self._keep_logits = keep_logits
        self._agreement = agreement

    @inference
    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        limit = room(self._runner, context, limit)
        if limit < 1:
            return Draft()
        if self._agreement is not None and "agreement" in policy.signals:
            self._agreement.begin(context)
        tree = DraftTree(self._runner, context, self._vocab_size)
        frontier, likelihoods = [-1], [0.0]
        reason = "length"
        for position in range(1, limit + 1):
            step, frontier, likelihoods = self._level(tree, frontier, likelihoods, policy, position)
            if not frontier:
                reason = "eos"
                break
            if not policy.keep_drafting(step):
                reason = policy.reason
                break
            if position == self._depth:
                reason = f"depth {position}"
                break
        nodes = range(len(tree.tokens))
        logits = tree.logits(nodes) if self._keep_logits else None
        return Draft(tree.tokens, tree.parents, None, *tree.figures(nodes), reason, logits=logits)

    def _level(
        self, tree: DraftTree, frontier: list[int], likelihoods: list[float], policy: LengthPolicy, position: int
    ) -> tuple[DraftedToken, list[int], list[float]]:
        """Add a level behind the frontier's nodes, in one pass and one transfer. Returns what the policy is to see, the nodes
        that may go on, and their paths' log-likelihoods."""
        rows = tree.rows(frontier)
        log_probs = rows.float().log_softmax(dim=-1)
        values, tokens = log_probs.topk(min(self._width, rows.shape[-1]), dim=-1)
        joint = values + torch.tensor(likelihoods, device=rows.device)[:, None]
        best, positions = joint.flatten().topk(min(self._width, joint.numel()))
        chosen = tokens.flatten()[positions].masked_fill_(best.isnan(), -1)
        origins = positions // tokens.shape[1]
        extras = [values.flatten()[positions[:1]]]
        if "entropy" in policy.signals:
            extras.append(logits_ops.figures(rows.index_select(0, origins[:1]))[0])
        if "agreement" in policy.signals and self._agreement is not None and tree.hidden is not None:
            extras.append(self._agreement.score(tree.hidden.index_select(0, origins[:1])[0], position)[None])
        size = positions.shape[0]
        on_host = torch.cat((chosen.float(), origins.float(), best, *(extra.float() for extra in extras))).tolist()
        log_prob, *figures = on_host[3 * size :]
        step = DraftedToken(position, prob=math.exp(log_prob))
        if "entropy" in policy.signals:
            step.entropy = abs(figures.pop(0))
        if figures:
            step.agreement = figures.pop(0)
        nodes = [tree.add(frontier[int(at)], int(token)) for token, at in zip(on_host[:size], on_host[size:], strict=False)]
        going_on = [
            (node, value)
            for node, value in zip(nodes, on_host[2 * size :], strict=False)
            if tree.tokens[node] not in self._eos_ids
        ]
        return step, [node for node, _ in going_on], [value for _, value in going_on]
