"""Operations on logits: warping, sampling, entropies and overlaps. Computes in float32, whatever
the model's dtype."""

from __future__ import annotations

import math

import numpy as np
import torch

from specgen.base.errors import nan_logits
from specgen.base.types import SamplingParams
from specgen.decoding.policy_base import Signals
from specgen.engine.devices import move
from specgen.engine.kernels.operators import Kernels, own_kernels

# so many of the likeliest tokens are searched for the nucleus, before all tokens are sorted
_HEAD = 256


def warp(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Computes the float32 distributions to sample from, [..., vocabulary] as the logits:
    temperature (above 0), top-k, top-p and min-p in this order, as in transformers.

    Tokens whose logit equals the k-th largest are kept. Tokens that are cut have probability
    exactly 0.
    """
    scores = logits.float() if sampling.temperature == 1 else logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        weakest = scores.topk(sampling.top_k).values[..., -1:]
        scores = scores.masked_fill(scores < weakest, -torch.inf)
    probs = scores.softmax(dim=-1)
    probs = _nucleus(probs, sampling.top_p) if sampling.top_p < 1 else probs
    if not sampling.min_p:
        return probs
    kept = probs.masked_fill(probs < sampling.min_p * probs.amax(dim=-1, keepdim=True), 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def _nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keeps the fewest likeliest tokens whose total probability reaches `top_p`, and renormalises.

    A GPU sorts the whole vocabulary in less time than the host takes to learn whether it has to.
    """
    is_part = probs.is_cpu and probs.shape[-1] > _HEAD
    values, order = probs.topk(_HEAD) if is_part else probs.sort(dim=-1, descending=True)
    is_cut = values.cumsum(dim=-1) - values >= top_p
    if is_part and not is_cut[..., -1].all():
        values, order = probs.sort(dim=-1, descending=True)
        is_cut = values.cumsum(dim=-1) - values >= top_p
    is_cut[..., 0].fill_(False)  # the likeliest token stays, even if `top_p` is 0 in float32
    kept = torch.zeros_like(probs).scatter_(-1, order, values.masked_fill_(is_cut, 0.0))
    return kept.div_(kept.sum(dim=-1, keepdim=True))


def draw(probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draws one token from each distribution in `probs` [..., vocabulary], which need not sum to 1.
    Returns token ids [...].

    The token is -1 where a distribution holds a NaN or only zeros. Draws by inversion, in float64
    where the device supports it, so that rounding over a large vocabulary does not bias the draws.
    torch.multinomial draws one random number per token of the vocabulary, and its checks would
    synchronise a GPU.
    """
    exact = torch.float32 if probs.device.type == "mps" else torch.float64
    points = torch.rand(*probs.shape[:-1], 1, dtype=exact, device=probs.device, generator=generator)
    return draw_at(probs, points)


def draw_at(probs: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Draws one token from each distribution in `probs` [..., vocabulary] by inversion of the
    cumulative sum. Returns ids [...].

    `points` [..., 1] in [0, 1) are the random numbers: the token is the one at this share of the
    total. It is -1 where a distribution holds a NaN or only zeros.
    """
    cumulative = probs.cumsum(dim=-1, dtype=points.dtype)
    total = cumulative[..., -1:]
    token = torch.searchsorted(cumulative, points * total, right=True).clamp_max_(
        probs.shape[-1] - 1
    )
    return token.masked_fill_(~(total > 0), -1)[..., 0]


def _kernels_for(logits: torch.Tensor) -> Kernels | None:
    """Returns the kernels, if they can read these logits on the CPU."""
    is_readable = logits.dtype is torch.float32 and logits.stride(-1) == 1
    return own_kernels() if is_readable else None


def argmax_token(logits: torch.Tensor) -> torch.Tensor:
    """Returns the likeliest token of logits [..., vocabulary]; -1 where they hold a NaN."""
    values, tokens = logits.max(dim=-1)
    return tokens.masked_fill_(values.isnan(), -1)


def argmax_tokens(logits: torch.Tensor) -> list[int]:
    """Returns the likeliest token of each row of logits [n, vocabulary], as Python ints; -1 if the
    row holds a NaN."""
    if not logits.is_cpu:
        on_host: list[int] = argmax_token(logits).tolist()
        return on_host
    kernels = _kernels_for(logits)
    if kernels is not None:
        return kernels.likeliest(logits)
    tokens: list[int] = []
    # NumPy's argmax takes a tenth of torch's time; one by one, which is faster there
    for scores in logits.float().numpy():
        token = int(scores.argmax())  # if the row has a NaN, argmax returns the first one's index
        tokens.append(-1 if math.isnan(scores[token]) else token)
    return tokens


def argmax_and_ties(logits: torch.Tensor) -> tuple[list[int], list[bool]]:
    """Returns `argmax_tokens(logits)`, and for each row whether a second token has the largest
    logit, with one transfer to the host.

    Ties are only looked for in half precision, where rounding makes them: a forward pass over
    another number of tokens may break them differently. In float32 no row counts as tied.
    """
    if logits.dtype == torch.float32:
        return argmax_tokens(logits), [False] * logits.shape[0]
    is_tied = (logits == logits.amax(dim=-1, keepdim=True)).sum(dim=-1) > 1
    tokens, ties = torch.stack((argmax_token(logits), is_tied)).tolist()
    return tokens, [bool(tied) for tied in ties]


def pad_probs(probs: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Pads draft distributions [..., draft vocabulary] with zeros to the target's `vocab_size`, if
    they are narrower."""
    missing = vocab_size - probs.shape[-1]
    return torch.nn.functional.pad(probs, (0, missing)) if missing > 0 else probs


def entropy_and_top_prob(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the entropy (nats) and the largest probability of distributions, each [...], from
    logits [..., vocabulary].

    The distributions are taken at temperature 1, without filters.
    """
    log_probs = logits.float().log_softmax(dim=-1)
    log_probs.clamp_min_(-1e30)  # 0 * -inf would be NaN; 0 * -1e30 is the 0 that it should be
    probs = log_probs.exp()
    # abs: rounding may leave either sign
    return torch.linalg.vecdot(probs, log_probs).abs_(), probs.amax(dim=-1)


def greedy_statistics(logits: torch.Tensor) -> tuple[int, float, float]:
    """Returns the likeliest token of logits [vocabulary], and entropy (nats) and largest
    probability of their softmax, for the host.

    On a CPU they are computed by our own kernels, or by NumPy, which takes a quarter of torch's
    time for one row. The entropy is NaN if the logits hold a NaN or no finite maximum.
    """
    if not logits.is_cpu:
        # the token's id is exact up to 2^24
        columns = (argmax_token(logits).float(), *entropy_and_top_prob(logits))
        token, entropy, top_prob = torch.stack(columns).tolist()
        return int(token), entropy, top_prob
    kernels = _kernels_for(logits)
    if kernels is not None:
        return kernels.statistics(logits)
    scores = logits.float().numpy()
    likeliest = int(scores.argmax())
    top = scores[likeliest]
    if not math.isfinite(top):
        return -1, math.nan, math.nan
    shifted = scores - top
    weights = np.exp(shifted)
    total = float(weights.sum())
    weighted = float(np.vdot(weights, shifted))  # unlike dot, it does not warn of a NaN
    # impossible tokens: 0 * -inf is NaN, 0 * -1e30 is the 0 that it should be
    if math.isnan(weighted):
        weighted = float(np.vdot(weights, shifted.clip(-1e30)))
    # abs: rounding may leave either sign
    return likeliest, abs(math.log(total) - weighted / total), 1 / total


def signals(
    names: Signals,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    probs: torch.Tensor | None = None,
    predicted_acceptance: torch.Tensor | None = None,
    unpenalised: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Computes the signals in `names` of drafted `tokens` [...]. Returns each by name as a tensor
    [...] on the device; `entropy` and `top_prob` come together if either is asked for.

    `logits` [..., vocabulary] are the draft model's, from which the tokens were chosen.
    `unpenalised` are its logits without penalties (such as a repetition penalty); None if `logits`
    have none. `probs` [..., vocabulary] are the distributions that the tokens were drawn from; None
    in greedy decoding.

    - `entropy` (nats), `top_prob` (largest probability) and `margin` (largest minus second largest)
      are of the draft model's own distribution: at temperature 1, without penalties and filters.
    - `prob` is the token's probability in the distribution that it was chosen from: `probs`, or in
      greedy decoding the softmax of `logits`, penalties included, as in transformers' assisted
      generation. If `unpenalised` has more columns than `logits`, for tokens that cannot be
      drafted, `prob` is multiplied by the probability of those that can.
    - `predicted_acceptance` is the argument of this name (EESD's theta_M, Eq. 5), left out if None.
    """
    own = logits if unpenalised is None else unpenalised
    computed = {}
    if "entropy" in names or "top_prob" in names:
        computed["entropy"], computed["top_prob"] = entropy_and_top_prob(own)
    if "prob" in names:
        if probs is None:
            prob = logits.float().softmax(dim=-1).amax(dim=-1)
        else:  # gather: indexing with a tensor would synchronise with the host
            prob = probs.gather(-1, tokens[..., None].clamp_min(0))[..., 0]
        width = logits.shape[-1]
        if width < own.shape[-1]:
            prob = prob * own.float().softmax(dim=-1)[..., :width].sum(dim=-1)
        computed["prob"] = prob
    if "margin" in names:
        top = own.float().softmax(dim=-1).topk(2, dim=-1).values
        computed["margin"] = top[..., 0] - top[..., 1]
    if "predicted_acceptance" in names and predicted_acceptance is not None:
        computed["predicted_acceptance"] = predicted_acceptance
    return computed


def is_forbidden(logits: torch.Tensor) -> bool:
    """Whether some row of `logits` [..., vocabulary] has only -inf, because penalties forbid all
    tokens."""
    return bool((logits.amax(dim=-1) == -torch.inf).any())


def valid_token(token: int, model: str) -> int:
    """Returns the token. Raises RunError if it is -1, which means that logits held a NaN.

    `model` is `draft` or `target`: the model that the error message names.
    """
    if token < 0:
        raise nan_logits(model)
    return token


def overlap_and_kl(target: torch.Tensor, draft: torch.Tensor) -> tuple[list[float], list[float]]:
    """Computes the sum of min(p, q) over the vocabulary and KL(q||p) in nats (SVIP, Eq. 2 and 4)
    for each drafted token.

    p are the target's probabilities and q the draft's, from logits [tokens, vocabulary] at
    temperature 1, without filters. Vocabulary entries that the draft model lacks have q = 0. KL is
    limited to 1e30; it is infinite where p = 0 and q > 0.
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
