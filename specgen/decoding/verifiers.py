"""Verifiers decide which drafted tokens are accepted, and choose the correction or bonus token that follows them.

A verifier works on the device. It copies the result (token ids and counts) to the host once for each draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

from specgen.decoding import logits_ops
from specgen.engine.devices import upload
from specgen.engine.inference_mode import inference
from specgen.types import DistributionOverlap, Draft, SamplingParams, Source, Verdict

if TYPE_CHECKING:
    from specgen.engine.forward_pass import ModelOutput


class Verifier(Protocol):
    def verify(self, draft: Draft, output: ModelOutput) -> Verdict:
        """Verifies a draft. `output` holds the target's logits [nodes + 1, vocabulary] after the context and after each node.

        The logits after a chain's last token may be missing; a fully accepted draft then gets no bonus token.
        """


class GreedyVerifier:
    """Accepts drafted tokens as long as each is the target's argmax: greedy decoding, for chains and trees."""

    @inference
    def verify(self, draft: Draft, output: ModelOutput) -> Verdict:
        choices, tied = logits_ops.argmax_and_ties(output.logits)
        verdict = match_argmax_path(draft, choices)
        if not any(tied):
            return verdict
        rows = [0, *(node + 1 for node in verdict.path)][: len(verdict.path) + (verdict.token is not None)]
        return replace(verdict, ties=sum(tied[row] for row in rows))


class RejectionSampling:
    """Accepts token i with probability min(1, p_i / q_i); otherwise draws from norm(max(p_i - q_i, 0)) (Leviathan et al. 2023).

    p are the target's probabilities and q the draft's, after temperature, top-k and top-p. A draft without probabilities (not
    sampled) has q = 1 for its own tokens. Chains only.
    """

    def __init__(self, sampling: SamplingParams, device: torch.device, seed: int) -> None:
        self._sampling = sampling
        self._generator = logits_ops.make_generator(device, seed)

    @inference
    def verify(self, draft: Draft, output: ModelOutput) -> Verdict:
        target_probs = logits_ops.warp(output.logits, self._sampling)
        length = len(draft.tokens)
        if not length:
            return make_verdict(draft, (), int(logits_ops.draw(target_probs[0], self._generator)))
        device = target_probs.device
        tokens = upload(torch.tensor(draft.tokens), device)
        draft_probs = None if draft.probs is None else draft.probs.to(device)
        p = target_probs[:length].gather(1, tokens[:, None])[:, 0]
        q = 1.0 if draft_probs is None else draft_probs.gather(1, tokens[:, None])[:, 0]
        fresh = torch.rand(length, generator=self._generator, device=device)
        accepted = (fresh * q < p).cumprod(dim=0).sum()
        probs = target_probs.index_select(0, accepted.clamp_max(target_probs.shape[0] - 1)[None])[0]
        rejected = accepted.clamp_max(length - 1)[None]
        if draft_probs is None:
            drawn_from = torch.zeros_like(probs).scatter_(0, tokens.index_select(0, rejected), 1.0)
        else:
            drawn_from = draft_probs.index_select(0, rejected)[0]
        # after the last token no draft was rejected, so that the residual there is p: the bonus
        residual = (probs - drawn_from * (accepted < length)).clamp_min_(0)
        residual = torch.where(residual.sum() > 0, residual, probs)  # all zero through rounding: p equals q
        token = logits_ops.draw(residual, self._generator)  # a NaN rejects its token, so it is noticed here
        count, own = torch.stack((accepted, token)).tolist()
        if count == target_probs.shape[0]:
            return Verdict(tuple(range(count)))
        return make_verdict(draft, range(count), own)


class RecordingVerifier:
    """Wraps a verifier and adds to its verdict how close target's and draft's distributions are at each drafted token.

    They are the models' own distributions: without penalties, at temperature 1, without top-k and top-p. Adds nothing to drafts
    without logits, such as those of prompt lookup.
    """

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    @inference
    def verify(self, draft: Draft, output: ModelOutput) -> Verdict:
        verdict = self._verifier.verify(draft, output)
        if draft.logits is None:
            return verdict
        logits = output.model_logits
        before = logits[: len(draft.tokens)]
        if not draft.is_chain:
            before = logits[upload(torch.tensor([parent + 1 for parent in draft.parents]), logits.device)]
        overlap, kl = logits_ops.overlap_and_kl(before, draft.logits)
        return replace(verdict, agreement=DistributionOverlap(overlap, kl))


def accept_prefix(
    draft: Draft, output: ModelOutput, count: torch.Tensor, sampling: SamplingParams, generator: torch.Generator
) -> Verdict:
    """Returns the verdict that accepts a chain's first `count` tokens and lets the target choose the token after them.

    `count` is an integer scalar on the device. `output` holds the target's logits after the context and after each token.
    """
    logits = output.logits.index_select(0, count[None])[0]
    accepted, own = torch.stack((count, logits_ops.select_token(logits, sampling, generator))).tolist()
    return make_verdict(draft, range(accepted), own)


def match_argmax_path(draft: Draft, choices: Sequence[int]) -> Verdict:
    """Returns the verdict that accepts the path of drafted tokens on which each equals the target's choice.

    `choices` are the tokens that the target chooses after the context and after each node. The one after the last node may be
    missing.
    """
    path: list[int] = []
    node = -1
    token = logits_ops.valid_token(choices[0], "target")
    for child in range(len(draft.tokens)):  # parents precede their children, so one loop follows the path
        if draft.parents[child] == node and draft.tokens[child] == token:
            path.append(child)
            node = child
            if child + 1 == len(choices):
                return Verdict(tuple(path))
            token = logits_ops.valid_token(choices[child + 1], "target")
    return make_verdict(draft, path, token)


def make_verdict(draft: Draft, path: Sequence[int], token: int) -> Verdict:
    """Returns the verdict that accepts the nodes of `path`, followed by the target's `token`.

    The token is a bonus if the path ends at a leaf, otherwise a correction; neither for an empty draft. Raises RunError if the
    token is -1, which means that the target's logits held a NaN.
    """
    last = path[-1] if path else -1
    source: Source | None = None if not draft.tokens else "correction" if last in draft.parents else "bonus"
    return Verdict(tuple(path), logits_ops.valid_token(token, "target"), source)
