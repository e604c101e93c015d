"""MTAD: a beam search drafts, and prefixes are accepted by their joint likelihood (MTAD, sections 2.1 and 3.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specgen.decoding import logits_ops
from specgen.decoding.draft_tree import DraftTree
from specgen.decoding.drafters import DraftSetup, ModelDrafterBase, extend_draft
from specgen.decoding.policies import DraftedToken, LengthPolicy
from specgen.decoding.verifiers import accept_prefix
from specgen.engine.inference_mode import inference
from specgen.errors import nan_logits
from specgen.types import Context, Draft, SamplingParams, Verdict

if TYPE_CHECKING:
    from specgen.engine.model_runner import ModelOutput


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation by its last node (-1: none yet) and its joint log-likelihood under the draft (nats)."""

    node: int
    log_likelihood: float
    finished: bool = False


class BeamSearchDrafter(ModelDrafterBase):
    """The likeliest of `width` beams. The beams are paths of one draft tree: a step is one pass, whatever the width.

    Deterministic beams keep the likeliest continuations; stochastic ones are drawn among all continuations of all beams, without
    replacement, in proportion to their joint likelihoods (MTAD, Eq. 2). A beam that reached an end-of-sequence stays unchanged
    and competes with the others to the end. The draft is a chain, with the joint log-likelihood of each prefix.
    """

    def __init__(self, setup: DraftSetup, *, width: int, stochastic: bool) -> None:
        super().__init__(setup)
        self._warping = logits_ops.likelihood_warping(setup.sampling)
        self._width = width
        self._stochastic = stochastic and not setup.sampling.greedy

    @inference
    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        limit = self._room(context, limit)
        if limit < 1:
            return Draft()
        tree = DraftTree(self._setup, context)
        likelihoods: list[float] = []  # of each node
        beams = [Beam(-1, 0.0)]

        def extend(position: int) -> DraftedToken | str:
            beams[:] = self._step(tree, beams, likelihoods)
            return "eos" if self._is_decided(beams) else DraftedToken(position)

        reason = extend_draft(policy, limit, extend)
        path = tree.path(max(beams, key=lambda beam: beam.log_likelihood).node)
        return tree.path_draft(path, reason, log_likelihoods=[likelihoods[node] for node in path])

    def _is_decided(self, beams: Sequence[Beam]) -> bool:
        """Whether further steps cannot change the choice: a continuation is never likelier than its beginning."""
        if not self._stochastic:
            return max(beams, key=lambda beam: beam.log_likelihood).finished
        return all(beam.finished for beam in beams)

    def _step(self, tree: DraftTree, beams: Sequence[Beam], likelihoods: list[float]) -> list[Beam]:
        """The beams, each extended by one token: chosen on the device, one transfer to the host."""
        growing = [beam for beam in beams if not beam.finished]
        finished = [beam for beam in beams if beam.finished]
        logits = tree.next_logits([beam.node for beam in growing])
        vocabulary = logits.shape[-1]
        best = max(beam.log_likelihood for beam in beams)
        scale = [math.exp(beam.log_likelihood - best) for beam in (*growing, *finished)]
        before = torch.tensor(scale, device=logits.device)  # relative to the best, so that no product of many tokens underflows
        joint = (before[: len(growing), None] * logits_ops.warp(logits, self._warping)).flatten()
        joint = torch.cat((joint, before[len(growing) :])) if finished else joint
        chosen = self._scores(joint).topk(min(self._width, joint.shape[0])).indices
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

    def _scores(self, joint: torch.Tensor) -> torch.Tensor:
        """The scores whose top `width` are kept. The top of likelihoods / exponential noise is a draw without replacement."""
        if not self._stochastic:
            return joint
        return joint / torch.empty_like(joint).exponential_(generator=self._generator).clamp_min_(1e-30)


class JointLikelihoodVerifier:
    """Accept the longest prefix j with min(1, P_j / Q_j) > tau, then one token of the target's own (MTAD, section 3.2).

    P_j and Q_j are the joint likelihoods of the first j tokens under target and draft, both warped. A prefix that fails does not
    stop the search for a longer one that passes; a token of likelihood 0 does. Chains with `log_likelihoods` only. Not lossless:
    the output is likelier under the target than what the target would draw.
    """

    def __init__(self, sampling: SamplingParams, device: torch.device, seed: int, tau: float) -> None:
        self._sampling = sampling
        self._warping = logits_ops.likelihood_warping(sampling)
        self._log_tau = math.log(tau) if tau else -math.inf
        self._generator = logits_ops.make_generator(device, seed)

    @inference
    def verify(self, draft: Draft, output: ModelOutput) -> Verdict:
        count = self._longest(draft, output.logits[: len(draft.tokens)])
        return accept_prefix(draft, output, count, self._sampling, self._generator)

    def _longest(self, draft: Draft, logits: torch.Tensor) -> torch.Tensor:
        """The length of the longest prefix that passes, a scalar on the device; `logits` are the target's before each token."""
        length, device = len(draft.tokens), logits.device
        if not length:
            return torch.zeros((), dtype=torch.long, device=device)
        tokens = torch.tensor(draft.tokens, device=device)
        target_probs = logits_ops.warp(logits, self._warping)
        target_joint = target_probs.gather(1, tokens[:, None])[:, 0].log().cumsum(dim=0)
        draft_joint = torch.tensor(draft.log_likelihoods, device=device)
        passes = (target_joint - draft_joint).clamp_max(0) > self._log_tau  # false for NaN, and for -inf whatever tau is
        return (passes * torch.arange(1, length + 1, device=device)).amax()
