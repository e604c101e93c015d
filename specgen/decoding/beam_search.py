"""MTAD's drafter: a beam search over the draft model (MTAD, section 2.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from specgen.base.errors import nan_logits
from specgen.base.types import Context, Draft, SamplingParams
from specgen.decoding import token_sampling
from specgen.decoding.drafting import NO_CANDIDATES, DraftModelUser, Setup
from specgen.decoding.policy_base import (
    NO_SIGNALS,
    DraftedToken,
    LengthPolicy,
    Signals,
    extend_draft,
)
from specgen.decoding.tree import DraftTree
from specgen.engine.devices import inference, upload


class Beam(NamedTuple):
    """A candidate continuation of the context: its last node in the draft tree and its joint
    log-likelihood (nats).

    `node` is -1 for the empty continuation. The likelihood is the draft model's. `finished`: the
    continuation ends with an end-of-sequence token. `signals` are numbers about its last token for
    the length policy.
    """

    node: int
    log_likelihood: float
    finished: bool = False
    signals: Mapping[str, float] = NO_SIGNALS


def likelihood_warping(sampling: SamplingParams) -> SamplingParams:
    """Returns the sampling parameters for joint likelihoods: `sampling`, with temperature 1 in
    place of 0 (greedy).

    At temperature 0 every likelihood would be 0 or 1, and MTAD would only compare tokens with the
    target's argmax.
    """
    return replace(sampling, temperature=1.0) if sampling.greedy else sampling


class BeamSearchDrafter(DraftModelUser):
    """Drafts by beam search with `width` beams, and proposes the likeliest beam as a chain with its
    joint log-likelihoods.

    The beams are paths of one draft tree, so each step is one forward pass. By default a step keeps
    the likeliest continuations. If `is_stochastic`, it draws them among all continuations of all
    beams, without replacement, in proportion to their joint likelihoods (MTAD, Eq. 2); greedy
    decoding ignores this. A beam with an end-of-sequence is not extended any more, but
    still competes with the other beams. The length policy sees the last token of the likeliest
    unfinished beam; the signal `prob` is this token's factor in the beam's joint likelihood.
    """

    def __init__(self, setup: Setup, *, width: int, is_stochastic: bool) -> None:
        super().__init__(setup)
        self._warping = likelihood_warping(setup.sampling)
        self._width = width
        self._stochastic = is_stochastic and not setup.sampling.greedy

    @inference
    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        limit = self._room(context, limit)
        if limit < 1:
            return Draft()
        tree = DraftTree(self._setup, context)
        likelihoods: list[float] = []  # of each node
        beams = [Beam(-1, 0.0)]

        def extend(position: int) -> DraftedToken | str:
            after = self._step(tree, beams, likelihoods, policy.signals)
            if after is None:
                return NO_CANDIDATES
            beams[:] = after
            if self._is_decided(beams):
                return "eos"
            likeliest = max(beams, key=lambda beam: (not beam.finished, beam.log_likelihood))
            return DraftedToken(position, likeliest.signals)

        reason = extend_draft(policy, limit, extend)
        path = tree.path(max(beams, key=lambda beam: beam.log_likelihood).node)
        return tree.draft(reason, path, log_likelihoods=[likelihoods[node] for node in path])

    def _is_decided(self, beams: Sequence[Beam]) -> bool:
        """Whether the search can end: the likeliest beam is finished (other beams only get less
        likely), or all beams are.

        Stochastic beams always need all to be finished.
        """
        if not self._stochastic:
            return max(beams, key=lambda beam: beam.log_likelihood).finished
        return all(beam.finished for beam in beams)

    def _step(
        self, tree: DraftTree, beams: Sequence[Beam], likelihoods: list[float], read: Signals
    ) -> list[Beam] | None:
        """Extends the unfinished beams by one token, with one transfer to the host. Returns the
        beams that are kept; None where penalties forbid all tokens.

        `likelihoods` gets the joint log-likelihood (nats) of each new node of the tree. `read` are
        the signals that the length policy reads.
        """
        growing = [beam for beam in beams if not beam.finished]
        finished = [beam for beam in beams if beam.finished]
        logits = tree.next_logits([beam.node for beam in growing])
        if logits is None:
            return None

        best = max(beam.log_likelihood for beam in beams)
        probs = token_sampling.warp(logits, self._warping)
        joint = _joint_likelihoods(growing, finished, best, probs)
        chosen = self._ranked(joint).topk(min(self._width, joint.shape[0])).indices

        vocabulary = logits.shape[-1]
        parents = chosen // vocabulary
        tokens = chosen % vocabulary
        # A finished beam has no row of logits: it reads the last one, and the result is not used.
        rows = parents.clamp_max(len(growing) - 1)
        computed = tree.signals(read, logits, rows, tokens, probs)
        columns = (
            parents.float(),
            tokens.float(),
            joint[chosen],
            *(value.float() for value in computed.values()),
        )
        on_host = torch.stack(columns).tolist()  # ids stay exact up to 2^24

        after = []
        for parent, token, relative, *values in zip(*on_host, strict=True):
            if math.isnan(relative):
                raise nan_logits("draft")
            if not relative:  # fewer continuations are possible than there are beams
                continue
            if parent >= len(growing):
                after.append(finished[int(token)])
                continue
            log_likelihood = best + math.log(relative)
            node = tree.add(growing[int(parent)].node, int(token))
            likelihoods.append(log_likelihood)
            signals = dict(zip(computed, values, strict=True))
            signals = {name: value for name, value in signals.items() if name in read}
            after.append(Beam(node, log_likelihood, int(token) in self._eos_ids, signals))
        return after

    def _ranked(self, joint: torch.Tensor) -> torch.Tensor:
        """Returns the scores of all continuations, of which the `width` highest are kept. `joint`
        are their joint likelihoods.

        The highest values of likelihood / exponential noise are a draw without replacement, used
        for stochastic beams.
        """
        if not self._stochastic:
            return joint
        noise = torch.empty_like(joint).exponential_(generator=self._generator)
        return joint / noise.clamp_min_(1e-30)


def _joint_likelihoods(
    growing: Sequence[Beam], finished: Sequence[Beam], best: float, probs: torch.Tensor
) -> torch.Tensor:
    """Returns the joint likelihoods of all continuations of the beams `growing`, beam by beam, and
    of the `finished` beams.

    `probs` [growing beams, vocabulary] are the distributions of the next token. The likelihoods are
    divided by exp(`best`), so that no product of many tokens underflows.
    """
    relative = [math.exp(beam.log_likelihood - best) for beam in (*growing, *finished)]
    before = upload(torch.tensor(relative), probs.device)
    joint = (before[: len(growing), None] * probs).flatten()
    return torch.cat((joint, before[len(growing) :])) if finished else joint
