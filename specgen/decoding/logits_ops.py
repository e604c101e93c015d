"""Operations on logits: warping, sampling, entropies and overlaps. Computes in float32, whatever the model's dtype."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite, isnan, log, nan

import numpy as np
import torch

from specgen.base.errors import nan_logits
from specgen.base.types import SamplingParams
from specgen.decoding.policy import Signals
from specgen.engine.devices import move

_TIES = 64  # further tokens that may have the k-th largest logit, too, and are sorted with the top k
_HEAD = 256  # the nucleus is looked for among this many of the likeliest tokens before the whole vocabulary is sorted


def warp(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Computes the distributions [..., vocabulary] to sample from: temperature, then top-k, then top-p, as in transformers.

    Tokens whose logit equals the k-th largest are kept. Tokens cut by top-k or top-p have probability exactly 0.
    """
    scores = logits.float() if sampling.temperature == 1 else logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        weakest = scores.topk(sampling.top_k).values[..., -1:]
        scores = scores.masked_fill(scores < weakest, -torch.inf)
    probs = scores.softmax(dim=-1)
    return _nucleus(probs, sampling.top_p, sampling.top_k) if sampling.top_p < 1 else probs


def _nucleus(probs: torch.Tensor, top_p: float, top_k: int = 0) -> torch.Tensor:
    """Keeps the fewest likeliest tokens whose total probability reaches `top_p`, and renormalises.

    If at most `top_k` tokens and ties with the last of them have probabilities (0: all have), no others are sorted.
    """
    vocabulary = probs.shape[-1]
    if not probs.is_cpu:  # where a full sort takes less time than the check whether it is needed
        values, order = probs.sort(dim=-1, descending=True)
        values[..., 1:].masked_fill_(values.cumsum(dim=-1)[..., :-1] >= top_p, 0.0)
        return probs.scatter_(-1, order, values.div_(values.sum(dim=-1, keepdim=True)))
    if 0 < top_k < vocabulary - _TIES:
        values, order = probs.topk(top_k + _TIES)
        return _cut(probs, values, order, values.cumsum(dim=-1) - values >= top_p)
    for width in (_HEAD, vocabulary) if vocabulary > _HEAD else (vocabulary,):  # a full sort dominates the time of sampling
        values, order = probs.topk(width)
        is_cut = values.cumsum(dim=-1) - values >= top_p
        if width == vocabulary or bool(is_cut[..., -1].all()):
            break
    return _cut(probs, values, order, is_cut)


def _cut(probs: torch.Tensor, values: torch.Tensor, order: torch.Tensor, is_cut: torch.Tensor) -> torch.Tensor:
    """Returns `probs` without the tokens in `is_cut`, renormalised. `values` are the largest of them, `order` their indices."""
    is_cut[..., 0].fill_(False)  # the likeliest token stays, even if `top_p` is 0 in float32
    kept = torch.zeros_like(probs).scatter_(-1, order, values.masked_fill_(is_cut, 0.0))
    return kept.div_(kept.sum(dim=-1, keepdim=True))


def draw(probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draws one token from each distribution [..., vocabulary], which need not sum to 1; -1 if it holds a NaN or only zeros.

    Uses inversion, in float64 where the device supports it, so that rounding over a large vocabulary does not bias the draws.
    torch.multinomial draws one random number per token of the vocabulary, and its checks would synchronise a GPU.
    """
    if probs.is_cpu and probs.shape[:-1].numel() == 1:
        return torch.tensor(draw_on_cpu(probs.flatten(), generator)).view(probs.shape[:-1])
    exact = torch.float32 if probs.device.type == "mps" else torch.float64
    points = torch.rand(*probs.shape[:-1], 1, dtype=exact, device=probs.device, generator=generator)
    return draw_at(probs, points)


def draw_at(probs: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Returns the token of each distribution [..., vocabulary] at the `points` [..., 1] in [0, 1): `draw` with random numbers."""
    cumulative = probs.cumsum(dim=-1, dtype=points.dtype)
    total = cumulative[..., -1:]
    token = torch.searchsorted(cumulative, points * total, right=True).clamp_max_(probs.shape[-1] - 1)
    return token.masked_fill_(~(total > 0), -1)[..., 0]


def draw_on_cpu(probs: torch.Tensor, generator: torch.Generator) -> int:
    """Draws the token that `draw` would draw from a single distribution [vocabulary] on a CPU, in half of its time."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64).numpy()
    point = torch.rand(1, dtype=torch.float64, generator=generator).item() * cumulative[-1]
    if not cumulative[-1] > 0:  # NaN too
        return -1
    return min(int(cumulative.searchsorted(point, side="right")), probs.shape[0] - 1)


def select_token(logits: torch.Tensor, sampling: SamplingParams, generator: torch.Generator) -> torch.Tensor:
    """Chooses one token from the logits [vocabulary]: the likeliest in greedy decoding, otherwise drawn after `warp`.

    Returns -1 if the logits hold a NaN.
    """
    if not sampling.greedy:
        return draw(warp(logits, sampling), generator)
    return argmax_token(logits)


def argmax_token(logits: torch.Tensor) -> torch.Tensor:
    """Returns the likeliest token of logits [..., vocabulary]; -1 where they hold a NaN."""
    values, tokens = logits.max(dim=-1)
    return tokens.masked_fill_(values.isnan(), -1)


def likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the `count` likeliest tokens of logits [..., vocabulary], likeliest first; -1 in place of an impossible token."""
    values, tokens = logits.topk(min(count, logits.shape[-1]), dim=-1)
    return tokens.masked_fill_(values == -torch.inf, -1)


def pad_probs(probs: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Pads draft distributions [..., draft vocabulary] with zeros to the target's `vocab_size`, if they are narrower."""
    missing = vocab_size - probs.shape[-1]
    return torch.nn.functional.pad(probs, (0, missing)) if missing > 0 else probs


def likelihood_warping(sampling: SamplingParams) -> SamplingParams:
    """Returns the sampling parameters for MTAD's joint likelihoods: `sampling`, with temperature 1 in place of 0 (greedy).

    At temperature 0 every likelihood would be 0 or 1, and MTAD would only compare tokens with the target's argmax.
    """
    return replace(sampling, temperature=1.0) if sampling.greedy else sampling


def argmax_tokens(logits: torch.Tensor) -> list[int]:
    """Returns the likeliest token of each row of logits [n, vocabulary], as Python ints; -1 if the row holds a NaN."""
    if logits.is_cpu:  # NumPy's argmax is an order of magnitude faster there than torch's
        chosen: list[int] = []
        for scores in logits.float().numpy():  # one by one: NumPy is slower along an axis
            token = int(scores.argmax())  # the first NaN of a row that has one
            chosen.append(-1 if isnan(scores[token]) else token)
        return chosen
    on_host: list[int] = argmax_token(logits).tolist()
    return on_host


def argmax_and_ties(logits: torch.Tensor) -> tuple[list[int], list[bool]]:
    """Returns `argmax_tokens`, and for each row whether another token has the same logit. One transfer to the host.

    Ties are only looked for in half precision, where rounding makes them: they may be decided otherwise in a pass of other width.
    """
    if logits.dtype == torch.float32:
        return argmax_tokens(logits), [False] * logits.shape[0]
    if logits.is_cpu:
        tokens = argmax_tokens(logits)
        best = logits.gather(1, torch.tensor(tokens)[:, None].clamp_min(0))
        return tokens, ((logits == best).sum(dim=-1) > 1).tolist()
    values, found = logits.max(dim=-1, keepdim=True)
    found = found.masked_fill_(values.isnan(), -1)[:, 0]
    is_tied = (logits == values).sum(dim=-1) > 1
    on_host: list[list[int]] = torch.stack((found, is_tied)).tolist()
    return on_host[0], [bool(tied) for tied in on_host[1]]


def entropy_and_top_prob(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes entropy (nats) and largest probability, each [...], from logits [..., vocabulary].

    The distributions are taken at temperature 1, without top-k and top-p.
    """
    log_probs = logits.float().log_softmax(dim=-1)
    log_probs.clamp_min_(-1e30)  # 0 * -inf would be NaN; 0 * -1e30 is the 0 that it should be
    probs = log_probs.exp()
    return torch.linalg.vecdot(probs, log_probs).abs_(), probs.amax(dim=-1)  # abs: rounding may leave either sign


def greedy_statistics(logits: torch.Tensor) -> tuple[int, float, float]:
    """Computes the likeliest token of logits [vocabulary] on a CPU, with entropy (nats) and largest probability.

    Token and numbers are those of `argmax_tokens` and `entropy_and_top_prob`. NumPy takes a quarter of torch's time for one row,
    and needs no transfers of scalars. Returns (-1, NaN, NaN) if the logits hold a NaN or no finite maximum.
    """
    scores = logits.float().numpy()
    token = int(scores.argmax())
    top = scores[token]
    if not isfinite(top):
        return -1, nan, nan
    shifted = scores - top
    weights = np.exp(shifted)
    total, weighted = float(weights.sum()), float(np.vdot(weights, shifted))  # unlike dot, vdot does not warn of a NaN
    if isnan(weighted):  # impossible tokens: 0 * -inf is NaN, 0 * -1e30 is the 0 that it should be
        weighted = float(np.vdot(weights, shifted.clip(-1e30)))
    return token, abs(log(total) - weighted / total), 1 / total  # abs: rounding may leave either sign


def signals(
    names: Signals,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    probs: torch.Tensor | None = None,
    predicted_acceptance: torch.Tensor | None = None,
    unpenalised: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Computes the signals in `names` of drafted `tokens` [...]. Returns each by name as a tensor [...] on the device.

    `logits` [..., vocabulary] are the draft's, from which the tokens were chosen. `unpenalised` are its logits without penalties
    (such as a repetition penalty); None if `logits` have none. `probs` [..., vocabulary] are the distributions that the tokens
    were drawn from; None in greedy decoding.
    `entropy` (nats), `top_prob` (largest probability) and `margin` (largest minus second largest) are of the draft model's own
    distribution: without penalties, at temperature 1, without top-k and top-p. `prob` is the token's probability in the
    distribution it was chosen from: `probs`, or in greedy decoding `logits` at temperature 1, penalties included, as for
    transformers' assisted generation. If `unpenalised` has further columns, for tokens that cannot be drafted, it is the token's
    share of all of them. `predicted_acceptance` is the given argument (EESD's theta_M, Eq. 5), left out if None.
    `entropy` and `top_prob` always come together.
    """
    found = {}
    own = logits if unpenalised is None else unpenalised
    if "entropy" in names or "top_prob" in names or ("prob" in names and probs is None and unpenalised is None):
        found["entropy"], found["top_prob"] = entropy_and_top_prob(own)
    if "prob" in names:
        if probs is not None:  # gather: indexing with a tensor would synchronise with the host
            found["prob"] = probs.gather(-1, tokens[..., None].clamp_min(0))[..., 0]
        else:
            found["prob"] = found["top_prob"] if unpenalised is None else entropy_and_top_prob(logits)[1]
        if unpenalised is not None and (width := logits.shape[-1]) < unpenalised.shape[-1]:
            found["prob"] = found["prob"] * unpenalised.float().softmax(dim=-1)[..., :width].sum(dim=-1)
    if "margin" in names:
        top = own.float().softmax(dim=-1).topk(2, dim=-1).values
        found["margin"] = top[..., 0] - top[..., 1]
    if "predicted_acceptance" in names and predicted_acceptance is not None:
        found["predicted_acceptance"] = predicted_acceptance
    return found


def is_forbidden(logits: torch.Tensor) -> bool:
    """Whether a row of logits [..., vocabulary] leaves no token: penalties forbid all."""
    return bool((logits.amax(dim=-1) == -torch.inf).any())


def bernoulli(probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draws independent booleans that are true with these probabilities; false where a probability is NaN."""
    return torch.rand(probs.shape, dtype=probs.dtype, device=probs.device, generator=generator) < probs


def valid_token(token: int, model: str) -> int:
    """Returns the token. Raises RunError if it is -1, which means that logits held a NaN.

    `model` is `draft` or `target`: the model that the error message names.
    """
    if token < 0:
        raise nan_logits(model)
    return token


def overlap_and_kl(target: torch.Tensor, draft: torch.Tensor) -> tuple[list[float], list[float]]:
    """Computes the sum of min(p, q) over the vocabulary and KL(q||p) in nats (SVIP, Eq. 2 and 4) for each drafted token.

    p are the target's probabilities and q the draft's, from logits [tokens, vocabulary] at temperature 1 (no top-k or top-p).
    Vocabulary entries that the draft model lacks have q = 0. KL is limited to 1e30; it is infinite where p = 0 and q > 0.
    """
    p = target.float().log_softmax(dim=-1)
    q = move(draft, target.device).float().log_softmax(dim=-1)
    q = torch.nn.functional.pad(q, (0, p.shape[-1] - q.shape[-1]), value=-torch.inf)
    overlap = torch.minimum(p, q).exp().sum(dim=-1)
    kl = (q.exp() * (q.clamp_min(-1e30) - p.clamp_min(-1e30))).sum(dim=-1)
    both: list[list[float]] = torch.stack((overlap.clamp(0, 1), kl.clamp(0, 1e30))).tolist()
    return both[0], both[1]


def make_generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)
