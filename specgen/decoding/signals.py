"""Signals: the numbers about a drafted token that length policies read, each with how it is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from specgen.decoding import logits_ops
from specgen.decoding.policies import Signals


@dataclass
class ChosenTokens:
    """Rows of draft logits [..., vocabulary] and the token [...] that was chosen from each.

    `probs` [..., vocabulary] are the distributions that the tokens were drawn from; None where each token is the likeliest of its
    row. `predicted_acceptance` [...] is the score of an early-exit predictor; None without one.
    """

    logits: torch.Tensor
    tokens: torch.Tensor
    probs: torch.Tensor | None = None
    predicted_acceptance: torch.Tensor | None = None

    @cached_property
    def entropy_and_top_prob(self) -> tuple[torch.Tensor, torch.Tensor]:
        return logits_ops.entropy_and_top_prob(self.logits)


def _prob(chosen: ChosenTokens) -> torch.Tensor:
    if chosen.probs is None:
        return chosen.entropy_and_top_prob[1]
    return chosen.probs.gather(-1, chosen.tokens[..., None])[..., 0]  # indexing with a tensor would synchronise with the host


def _margin(chosen: ChosenTokens) -> torch.Tensor:
    top = chosen.logits.float().softmax(dim=-1).topk(2, dim=-1).values
    return top[..., 0] - top[..., 1]


# `prob` is the drafted token's probability in the distribution that it was drawn from (the unwarped one in greedy decoding). All
# others are of the unwarped distribution: `entropy` in nats, `top_prob` the largest probability, `margin` the largest minus the
# second largest. `predicted_acceptance` is EESD's theta_M (Eq. 5), None without a predictor.
SIGNALS: Mapping[str, Callable[[ChosenTokens], torch.Tensor | None]] = {
    "entropy": lambda chosen: chosen.entropy_and_top_prob[0],
    "prob": _prob,
    "top_prob": lambda chosen: chosen.entropy_and_top_prob[1],
    "margin": _margin,
    "predicted_acceptance": lambda chosen: chosen.predicted_acceptance,
}


def compute(signals: Signals, chosen: ChosenTokens) -> dict[str, torch.Tensor]:
    """Each of `signals` that can be computed here, as a tensor [...] on the device.

    Holds `entropy` and `top_prob` as well if one of the others needed them: the drafter reports both for every token.
    """
    found = {name: SIGNALS[name](chosen) for name in sorted(signals)}
    if "entropy_and_top_prob" in vars(chosen):
        found["entropy"], found["top_prob"] = chosen.entropy_and_top_prob
    return {name: value for name, value in found.items() if value is not None}
