"""MTAD: a beam search drafts, and prefixes are accepted by their joint likelihood (MTAD, sections 2.1 and 3.2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from specgen.base.errors import nan_logits
from specgen.base.types import Context, Draft, SamplingParams, Verdict
from specgen.decoding import logits_ops
from specgen.decoding.drafting import NO_CANDIDATES, DraftModelUser, Setup
from specgen.decoding.policy import DraftedToken, LengthPolicy, Signals, extend_draft
from specgen.decoding.tree import DraftTree
from specgen.decoding.verification import accept_prefix
from specgen.engine.devices import upload
from specgen.engine.inference_mode import inference

if TYPE_CHECKING:
    from specgen.engine.forward_pass import ModelOutput


@dataclass(frozen=True, slots=True)
class Beam:
    """A candidate continuation of the context: its last node in the draft tree and its joint log-likelihood (nats).

    `node` is -1 for the empty continuation. The likelihood is the draft model's. `finished` beams end with an end-of-sequence.
    `signals` are numbers about its last token for the length policy.
    """

    node: int
    log_likelihood: float
    finished: bool = False
    signals: Mapping[str, float] = field(default_factory=dict)


def _unfinished(beams: Iterable[Beam]) -> list[Beam]:
    return [beam for beam in beams if not beam.finished]


class BeamSearchDrafter(DraftModelUser):
    """Drafts by beam search with `width` beams, and proposes the likeliest beam as a chain with its joint log-likelihoods.

    The beams are paths of one draft tree, so each step is one forward pass. By default a step keeps the likeliest continuations.
    With `stochastic` it draws them among all continuations of all beams, without replacement, in proportion to their joint
    likelihoods (MTAD, Eq. 2); greedy decoding ignores `stochastic`. A beam with an end-of-sequence is not extended any more, but
    still competes with the other beams. The length policy sees the last token of the likeliest unfinished beam; its `prob` is the
    one that the joint likelihood counts.
    """

    def __init__(self, setup: Setup, *, width: int, stochastic: bool) -> None:
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
            after = self._step(tree, beams, likelihoods, policy.signals)
            if after is None:
                return NO_CANDIDATES
            beams[:] = after
            if self._is_decided(beams):
                return "eos"
            return DraftedToken(position, max(_unfinished(beams), key=lambda beam: beam.log_likelihood).signals)

        reason = extend_draft(policy, limit, extend)
        path = tree.path(max(beams, key=lambda beam: beam.log_likelihood).node)
        return tree.draft(reason, path, log_likelihoods=[likelihoods[node] for node in path])

    def _is_decided(self, beams: Sequence[Beam]) -> bool:
        """Whether the search can end: the likeliest beam is finished (other beams only get less likely), or all beams are.

        Stochastic beams always need all to be finished.
        """
        if not self._stochastic:
            return max(beams, key=lambda beam: beam.log_likelihood).finished
        return all(beam.finished for beam in beams)

    def _step(self, tree: DraftTree, beams: Sequence[Beam], likelihoods: list[float], read: Signals) -> list[Beam] | None:
        """Extends the unfinished beams by one token, and returns the beams that are kept. One transfer to the host.

        None where penalties forbid all tokens.

        `likelihoods` gets the joint log-likelihood (nats) of each new node of the tree. `read` are the signals that the length
        policy reads.
        """
        growing = _unfinished(beams)
        finished = [beam for beam in beams if beam.finished]
        logits = tree.next_logits([beam.node for beam in growing])
        if logits is None:
            return None
        vocabulary = logits.shape[-1]
        best = max(beam.log_likelihood for beam in beams)
        scale = [math.exp(beam.log_likelihood - best) for beam in (*growing, *finished)]
        before = upload(torch.tensor(scale), logits.device)  # relative to the best, so that no product of many tokens underflows
        probs = logits_ops.warp(logits, self._warping)
        joint = (before[: len(growing), None] * probs).flatten()
        joint = torch.cat((joint, before[len(growing) :])) if finished else joint
        chosen = self._ranked(joint).topk(min(self._width, joint.shape[0])).indices
        parents, tokens = chosen // vocabulary, chosen % vocabulary
        rows = parents.clamp_max(len(growing) - 1)  # of a finished beam, which has no logits any more, those of another
        computed = tree.signals(read, logits, rows, tokens, probs)
        numbers = (parents.float(), tokens.float(), joint[chosen], *(value.float() for value in computed.values()))
        after = []
        for parent, token, relative, *values in zip(*torch.stack(numbers).tolist(), strict=True):  # ids stay exact up to 2^24
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
            found = {name: number for name, number in zip(computed, values, strict=True) if name in read}
            after.append(Beam(node, value, int(token) in self._eos_ids, found))
        return after

    def _ranked(self, joint: torch.Tensor) -> torch.Tensor:
        """Returns the scores of all continuations, of which the `width` highest are kept. `joint` are their joint likelihoods.

        The highest values of likelihood / exponential noise are a draw without replacement, used for stochastic beams.
        """
        if not self._stochastic:
            return joint
        return joint / torch.empty_like(joint).exponential_(generator=self._generator).clamp_min_(1e-30)


class JointLikelihoodVerifier:
    """Accepts the longest prefix with min(1, P_j / Q_j) > tau; the target then chooses the next token (MTAD, section 3.2).

    P_j and Q_j are the joint likelihoods of the first j tokens under target and draft, after temperature, top-k and top-p (at
    temperature 1 in greedy decoding). A longer prefix may pass where a shorter one fails, unless a token has likelihood 0.
    Only for chains with `log_likelihoods`. Not lossless: the output is likelier under the target than samples of the target.
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
        """Returns the length of the longest prefix that passes the test, as a scalar on the device.

        `logits` [tokens, vocabulary] are the target's, from which it would choose each of the draft's tokens.
        """
        length, device = len(draft.tokens), logits.device
        if not length:
            return torch.zeros((), dtype=torch.long, device=device)
        tokens = upload(torch.tensor(draft.tokens), device)
        target_probs = logits_ops.warp(logits, self._warping)
        target_joint = target_probs.gather(1, tokens[:, None])[:, 0].log().cumsum(dim=0)
        draft_joint = upload(torch.tensor(draft.log_likelihoods), device)
        passes = (target_joint - draft_joint).clamp_max(0) > self._log_tau  # false for NaN, and for -inf whatever tau is
        return (passes * torch.arange(1, length + 1, device=device)).amax()
