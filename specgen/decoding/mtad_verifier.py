"""MTAD's verification: prefixes of a draft are accepted by their joint likelihood."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch

from specgen.decoding import logits_ops
from specgen.decoding.verifiers import accept_prefix
from specgen.engine.inference_mode import inference
from specgen.types import Draft, SamplingParams, Verdict

if TYPE_CHECKING:
    from specgen.engine.model_runner import ModelOutput


class JointLikelihoodVerifier:
    """Accept the longest prefix j with min(1, P_j / Q_j) > tau, then one token of the target's own (MTAD, section 3.2).

    P_j and Q_j are the joint likelihoods of the first j tokens under target and draft, both warped. A prefix that fails does not
    stop the search for a longer one that passes; a token of likelihood 0 does. Chains with `log_likelihoods` only. Not lossless:
    the output is likelier under the target than what the target would draw.
    """

    lossless: ClassVar[bool] = False

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
