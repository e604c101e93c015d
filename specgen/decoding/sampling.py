"""From logits to distributions and draws, in float32 whatever the model's dtype."""

from __future__ import annotations

import torch

from specgen.types import SamplingParams


def warp(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """The distributions [..., vocabulary] to sample from: temperature, then top-k, then top-p, as transformers does each.

    Tokens that tie with the k-th are kept. What is cut has probability exactly 0.
    """
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        weakest = scores.topk(sampling.top_k).values[..., -1:]
        scores = scores.masked_fill(scores < weakest, -torch.inf)
    if sampling.top_p < 1:
        ascending, order = scores.sort(descending=False)
        cut = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
        cut[..., -1] = False
        scores = scores.masked_fill(cut.scatter(-1, order, cut), -torch.inf)
    return scores.softmax(dim=-1)


def draw(probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token [...] from each distribution [..., vocabulary]; they need not sum to 1. NaN in, no error: see `is_sound`.

    The exponential race, as torch.multinomial runs it, without that function's checks, which would stop a GPU.
    """
    waiting = torch.empty_like(probs).exponential_(generator=generator)
    return probs.div(waiting.clamp_min_(torch.finfo(probs.dtype).tiny)).argmax(dim=-1)


def best(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token [...] of each row, -1 where the row holds a NaN: the caller learns of it with the ids."""
    values, tokens = logits.max(dim=-1)
    return tokens.masked_fill_(values.isnan(), -1)


def entropy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Entropy [...] in nats and probabilities [..., vocabulary] of the unwarped distributions (temperature 1)."""
    probs = logits.float().softmax(dim=-1)
    return torch.special.entr(probs).sum(dim=-1), probs


def generator(device: torch.device, seed: int) -> torch.Generator:
    made = torch.Generator(device=device)
    made.manual_seed(seed)
    return made
