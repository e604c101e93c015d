"""Beam drafting: the draft is what a beam search finds likely as a whole (MTAD, sections 2.1 and 3.2)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specgen.decoding import logits_ops
from specgen.decoding.draft_tree import DraftTree
from specgen.decoding.drafters import ModelDrafterBase, room
from specgen.decoding.policies import DraftedToken, LengthPolicy
from specgen.engine.inference_mode import inference
from specgen.errors import nan_logits
from specgen.types import Context, Draft, SamplingParams

if TYPE_CHECKING:
    from specgen.engine.model_runner import DraftRunner


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation by its last node (-1: none yet) and its joint log-likelihood under the draft (nats)."""

    node: int
    log_likelihood: float
    finished: bool = False


class BeamSearchDrafter(ModelDrafterBase):
    """The likeliest of `width` beams, which live in one session as a draft tree: a step is one pass whatever the width.

    Deterministic beams keep the likeliest continuations; stochastic ones are drawn among all continuations of all beams, without
    replacement, in proportion to their joint likelihoods (MTAD, Eq. 2). A beam that reached an end-of-sequence stays as it is,
    and competes with the others to the end. The draft is a chain, with the joint log-likelihood of each prefix.
    """

    def __init__(
        self,
        runner: DraftRunner,
        sampling: SamplingParams,
        eos_ids: Collection[int],
        vocab_size: int,
        seed: int,
        *,
        width: int,
        stochastic: bool,
        keep_logits: bool = False,
    ) -> None:
        super().__init__(runner, sampling, eos_ids, vocab_size, seed, keep_logits=keep_logits)
        self._warping = logits_ops.likelihood_warping(sampling)
        self._width = width
        self._stochastic = stochastic and not sampling.greedy

    @inference
    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        limit = room(self._runner, context, limit)
        if limit < 1:
            return Draft()
        tree = DraftTree(self._runner, context, self._vocab_size)
        likelihoods: list[float] = []  # of each node
        beams = [Beam(-1, 0.0)]
        reason = "length"
        for position in range(1, limit + 1):
            beams = self._step(tree, beams, likelihoods)
            if self._is_settled(beams):
                reason = "eos"
                break
            if not policy.keep_drafting(DraftedToken(position)):
                reason = policy.reason
                break
        return self._draft(tree, max(beams, key=lambda beam: beam.log_likelihood).node, likelihoods, reason)

    def _is_settled(self, beams: Sequence[Beam]) -> bool:
        """Whether nothing that is still to come can be chosen. A continuation is never likelier than its beginning."""
        if not self._stochastic:
            return max(beams, key=lambda beam: beam.log_likelihood).finished
        return all(beam.finished for beam in beams)

    def _step(self, tree: DraftTree, beams: Sequence[Beam], likelihoods: list[float]) -> list[Beam]:
        """The beams with one token more each, chosen on the device and brought to the host in one transfer."""
        growing = [beam for beam in beams if not beam.finished]
        finished = [beam for beam in beams if beam.finished]
        logits = tree.rows([beam.node for beam in growing])
        vocabulary = logits.shape[-1]
        best = max(beam.log_likelihood for beam in beams)
        scale = [math.exp(beam.log_likelihood - best) for beam in (*growing, *finished)]
        before = torch.tensor(scale, device=logits.device)  # relative to the best, so that no product of many tokens underflows
        joint = (before[: len(growing), None] * logits_ops.warp(logits, self._warping)).flatten()
        joint = torch.cat((joint, before[len(growing) :])) if finished else joint
        chosen = self._keys(joint).topk(min(self._width, joint.shape[0])).indices
        found = torch.stack(((chosen // vocabulary).float(), (chosen % vocabulary).float(), joint[chosen])).tolist()
        after = []
        for parent, token, relative in zip(*found, strict=True):  # ids stay exact up to 2^24
            if math.isnan(relative):
                raise nan_logits("draft")
            if not relative:  # fewer continuations are possible than there are beams
                continue
            value = best + math.log(relative)
            if parent >= len(growing):
                after.append(finished[int(token)])
                continue
            node = tree.add(growing[int(parent)].node, int(token))
            likelihoods.append(value)
            after.append(Beam(node, value, int(token) in self._eos_ids))
        return after

    def _keys(self, joint: torch.Tensor) -> torch.Tensor:
        """What the largest are kept of. Likelihoods divided by exponential noise are beams drawn without replacement."""
        if not self._stochastic:
            return joint
        return joint / torch.empty_like(joint).exponential_(generator=self._generator).clamp_min_(1e-30)

    def _draft(self, tree: DraftTree, node: int, likelihoods: Sequence[float], reason: str) -> Draft:
        path: list[int] = []
        while node >= 0:
            path.insert(0, node)
            node = tree.parents[node]
        entropies, top_probs = tree.figures(path)
        return Draft(
            [tree.tokens[step] for step in path],
            range(-1, len(path) - 1),
            entropies=entropies,
            top_probs=top_probs,
            stop_reason=reason,
            log_likelihoods=[likelihoods[step] for step in path],
            logits=tree.logits(path) if self._keep_logits else None,
        )
