"""Verifiers that are not lossless: MTAD's joint likelihoods (section 3.2), BiLD's rollback and
FLy's loose match."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from specgen.base.types import Draft, Verdict
from specgen.decoding import token_sampling
from specgen.decoding.beam_search import likelihood_warping
from specgen.decoding.verification import accept_prefix
from specgen.engine.devices import inference, upload

if TYPE_CHECKING:
    from specgen.decoding.drafting import Setup
    from specgen.engine.forward_pass import ModelOutput


class JointLikelihoodVerifier:
    """Accepts the longest prefix with min(1, P_j / Q_j) > tau; the target then chooses the next
    token (MTAD, section 3.2).

    P_j and Q_j are the joint likelihoods of the first j tokens under target and draft, after
    temperature and filters (at temperature 1 in greedy decoding). A longer prefix may pass where a
    shorter one fails, unless a token has likelihood 0. Only for chains with `log_likelihoods`. Not
    lossless: the output is likelier under the target than samples of the target.
    """

    def __init__(self, setup: Setup, *, tau: float) -> None:
        self._sampling, device, seed = setup.for_verifier
        self._generator = token_sampling.make_generator(device, seed)
        self._warping = likelihood_warping(self._sampling)
        self._log_tau = math.log(tau) if tau else -math.inf

    @inference
    def verify(self, draft: Draft, output: ModelOutput) -> Verdict:
        count = self._longest(draft, output.logits[: len(draft.tokens)])
        return accept_prefix(draft, output, count, self._sampling, self._generator)

    def _longest(self, draft: Draft, logits: torch.Tensor) -> torch.Tensor:
        """Returns the length of the longest prefix that passes the test, as a scalar on the device.

        `logits` [tokens, vocabulary] are the target's, from which it would choose each of the
        draft's tokens.
        """
        length = len(draft.tokens)
        device = logits.device
        if not length:
            return torch.zeros((), dtype=torch.long, device=device)
        tokens = upload(torch.tensor(draft.tokens), device)
        target_probs = token_sampling.warp(logits, self._warping)
        target_joint = target_probs.gather(1, tokens[:, None])[:, 0].log().cumsum(dim=0)
        draft_joint = upload(torch.tensor(draft.log_likelihoods), device)
        # false for NaN, and for -inf whatever tau is
        passes = (target_joint - draft_joint).clamp_max(0) > self._log_tau
        return (passes * torch.arange(1, length + 1, device=device)).amax()


class BildVerifier:
    """Rejects the first token with -ln p > `rollback` (nats) that is not the target's likeliest,
    and all tokens after it.

    p is the token's probability under the target at temperature 1. The target then chooses the next
    token from its own distribution (after temperature and filters), not from a residual. Not
    lossless. Chains only.
    """

    def __init__(self, setup: Setup, *, rollback: float) -> None:
        self._sampling, device, seed = setup.for_verifier
        self._generator = token_sampling.make_generator(device, seed)
        self._rollback = rollback

    def verify(self, draft: Draft, output: ModelOutput) -> Verdict:
        tokens = upload(torch.tensor(draft.tokens, dtype=torch.long), output.logits.device)
        logits = output.logits[: len(draft.tokens)].float()
        log_probs = logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
        # false for NaN
        accepted = (log_probs >= -self._rollback) | (logits.argmax(dim=-1) == tokens)
        count = accepted.long().cumprod(dim=0).sum()
        return accept_prefix(draft, output, count, self._sampling, self._generator)


class FlyVerifier:
    """Accepts a token that is not the target's argmax if the text continues as before (FLy, arXiv
    2511.22972). Greedy chains.

    Such a token is accepted if at least `window` drafted tokens follow it, the first `window` - 1
    of these are the target's argmax, and the target was unsure at the token: -sum p ln p over its
    three likeliest tokens (nats, temperature 1) is at least `entropy`. Not lossless.
    """

    def __init__(self, setup: Setup, *, window: int, entropy: float) -> None:
        self._sampling, device, seed = setup.for_verifier
        self._generator = token_sampling.make_generator(device, seed)
        self._window = window
        self._entropy = entropy

    def verify(self, draft: Draft, output: ModelOutput) -> Verdict:
        count = len(draft.tokens)
        tokens = upload(torch.tensor(draft.tokens, dtype=torch.long), output.logits.device)
        logits = output.logits[:count].float()
        accepted = token_sampling.argmax_token(logits) == tokens  # -1 for NaN
        judged = count - self._window  # those that at least `window` tokens follow
        if judged > 0:
            # [judged, window - 1]: whether the tokens after each are the target's
            following = accepted[1:].unfold(0, self._window - 1, 1).all(dim=-1)[:judged]
            probs = logits[:judged].softmax(dim=-1).topk(min(3, logits.shape[-1])).values
            entropies = torch.special.entr(probs).sum(dim=-1)
            possible = logits[:judged].gather(1, tokens[:judged, None])[:, 0] > -torch.inf
            accepted[:judged] |= following & possible & (entropies >= self._entropy)
        kept = accepted.long().cumprod(0).sum()
        return accept_prefix(draft, output, kept, self._sampling, self._generator)
