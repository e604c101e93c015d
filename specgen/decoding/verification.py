"""Verifiers decide which drafted tokens are accepted, and choose the correction or bonus token that
follows them.

A verifier works on the device, and copies token ids and a few probabilities to the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

from specgen.base.types import (
    DistributionOverlap,
    Draft,
    SamplingParams,
    Source,
    TokenLogProbs,
    Verdict,
)
from specgen.decoding import token_sampling
from specgen.engine.devices import inference, move, upload

if TYPE_CHECKING:
    from specgen.engine.forward_pass import ModelOutput


_SMALLEST = 1e-38  # about the smallest float32


class Verifier(Protocol):
    def verify(self, draft: Draft, output: ModelOutput) -> Verdict:
        """Verifies a draft. `output` holds the target's logits [nodes + 1, vocabulary] after the
        context and after each node.

        The logits after a chain's last token may be missing; a fully accepted draft then gets no
        bonus token. Raises RunError if the logits hold a NaN.
        """


class GreedyVerifier:
    """Accepts drafted tokens as long as each is the target's argmax: greedy decoding, for chains
    and trees."""

    @inference
    def verify(self, draft: Draft, output: ModelOutput) -> Verdict:
        choices, tied = token_sampling.argmax_and_ties(output.logits)
        verdict = match_path(draft, choices.__getitem__, len(choices))
        if not any(tied):
            return verdict
        rows = [0, *(node + 1 for node in verdict.path)]
        if verdict.token is None:  # the target chose no token after the path
            rows.pop()
        return replace(verdict, ties=sum(tied[row] for row in rows))


class RejectionSampling:
    """Verifies drawn tokens together, by block verification (Sun et al. 2024, Algorithm 2), and all
    other drafted tokens by whether the target draws the same. Lossless.

    For chains and trees. p are the target's probabilities and q the draft model's, after
    temperature and filters. The first n nodes, as many as the draft has `probs` for, are a chain
    drawn from q. Its first i tokens or more are accepted with probability c_i, where c_0 = 1 and
    c_i = min(1, c_(i-1) p_i / q_i). Token by token (Leviathan et al. 2023) the probability is the
    product of min(1, p_i / q_i), which is never larger. After i tokens the target draws a token
    from norm(max(c_i p - q, 0)); after the whole chain, from p. Whether the chain went on after a
    token may depend on this token and on those before it. The other nodes were not drawn at random.
    If one of them follows the last accepted node and has the token that the target has drawn, it is
    accepted, and the target draws a token after it from p. This is repeated until no node has the
    target's token.
    """

    def __init__(self, sampling: SamplingParams, device: torch.device, seed: int) -> None:
        self._sampling = sampling
        self._generator = token_sampling.make_generator(device, seed)

    @inference
    def verify(self, draft: Draft, output: ModelOutput) -> Verdict:
        logits = output.logits
        drawn = 0 if draft.probs is None else len(draft.probs)
        rows = logits.shape[0]
        after = own_tokens(logits, self._sampling, self._generator)
        if not drawn:
            return match_path(draft, after, rows)
        accepted, token = self._accept_drawn(draft.tokens[:drawn], draft.probs, logits[: drawn + 1])

        def choice(row: int) -> int:
            return token if row == accepted else after(row)

        return match_path(draft, choice, rows, drawn, accepted)

    def _accept_drawn(
        self, drafted: Sequence[int], probs: torch.Tensor, logits: torch.Tensor
    ) -> tuple[int, int]:
        """Verifies a chain drawn from `probs`. Returns the number of accepted tokens and the
        target's token after them: -1 if there are no logits for it, or if a NaN decides."""
        length = len(drafted)
        target = token_sampling.warp(logits, self._sampling)
        draft_probs = move(probs, logits.device)
        chain = upload(torch.tensor(drafted), logits.device)[:, None]
        rows = torch.stack(
            (target[:length].gather(1, chain), draft_probs[:length].gather(1, chain))
        )
        p, q = rows[..., 0].tolist()
        if math.isnan(sum(p)):
            return 0, -1

        reached = survival(p, q)
        accepted = self._end(target, draft_probs, reached)
        if accepted == len(logits):
            return accepted, -1
        weights = target[accepted]
        if accepted < length:
            residual = _residual(weights, draft_probs[accepted], reached[accepted])
            # all zero through rounding: p equals q
            weights = torch.where(residual.sum() > 0, residual, weights)
        return accepted, int(token_sampling.draw(weights, self._generator))

    def _end(
        self, target: torch.Tensor, draft_probs: torch.Tensor, reached: Sequence[float]
    ) -> int:
        """Draws how many tokens of a chain are accepted, so that each number i or more has the
        probability `reached[i]`.

        The largest i is taken for which a random number is below h_i = R / (R + 1 - c_i), where R
        is the sum of max(c_i p - q, 0) after i tokens; after all tokens h_i = c_i.
        """
        length = len(reached) - 1
        fresh = torch.rand(length, generator=self._generator, device=target.device)
        # h_i is never above c_i, so that R is computed for few i
        may_end = (fresh < upload(torch.tensor(reached[1:]), target.device)).tolist()
        for end in range(length, 0, -1):
            if not may_end[end - 1]:
                continue
            if end == length:
                return end
            excess = _residual(target[end], draft_probs[end], reached[end]).sum()
            if fresh[end - 1] * (excess + 1 - reached[end]) < excess:
                return end
        return 0


def survival(p: Sequence[float], q: Sequence[float], before: float = 1.0) -> list[float]:
    """Returns the probabilities with which block verification accepts at least 0, 1, 2, ... tokens
    of a chain. `p` and `q` are its tokens' probabilities under the target and the draft model.
    `before` is the probability with which the tokens before the chain are accepted."""
    reached = [before]
    for of_target, of_draft in zip(p, q, strict=True):
        # rounding may draw a token of probability 0
        reached.append(min(1.0, reached[-1] * of_target / max(of_draft, _SMALLEST)))
    return reached


def _residual(target: torch.Tensor, draft: torch.Tensor, reached: float) -> torch.Tensor:
    """Returns max(c p - q, 0) [vocabulary] for the probability c with which so many tokens are
    `reached`."""
    return torch.sub(target * reached, draft).clamp_min_(0)


def with_agreement(verdict: Verdict, draft: Draft, output: ModelOutput) -> Verdict:
    """Returns the verdict with `agreement`: how close target's and draft model's distributions are
    at each drafted token.

    They are the models' own distributions: at temperature 1, without penalties and filters. A draft
    without logits (of a drafter without a model, or if nothing is recorded) gets the verdict back
    unchanged.
    """
    if draft.logits is None:
        return verdict
    before = output.model_logits
    if draft.is_chain:
        before = before[: len(draft.tokens)]
    else:
        rows = torch.tensor([parent + 1 for parent in draft.parents])
        before = before[upload(rows, before.device)]
    agreement = DistributionOverlap(*token_sampling.overlap_and_kl(before, draft.logits))
    return replace(verdict, agreement=agreement)


@inference
def with_log_probs(verdict: Verdict, draft: Draft, output: ModelOutput, count: int) -> Verdict:
    """Returns the verdict with `log_probs`: those of its tokens, and of the `count` likeliest
    tokens at each of their positions."""
    tokens = [draft.tokens[node] for node in verdict.path]
    if verdict.token is not None:
        tokens.append(verdict.token)
    rows = [0, *(node + 1 for node in verdict.path)][: len(tokens)]
    logits = output.model_logits
    chosen = upload(torch.tensor([rows, tokens], dtype=torch.int64), logits.device)
    log_probs = logits.index_select(0, chosen[0]).float().log_softmax(dim=-1)
    values, top = log_probs.topk(min(count, log_probs.shape[-1]), dim=-1)
    # the ids are exact: a float64 holds integers up to 2^53
    own = log_probs.gather(1, chosen[1][:, None])
    exact = torch.float32 if logits.device.type == "mps" else torch.float64
    numbers = torch.cat((own.to(exact), values.to(exact), top.to(exact)), dim=1).tolist()
    width = values.shape[1]
    entries = [
        TokenLogProbs(row[0], [int(token) for token in row[1 + width :]], row[1 : 1 + width])
        for row in numbers
    ]
    return replace(verdict, log_probs=entries)


def own_tokens(
    logits: torch.Tensor, sampling: SamplingParams, generator: torch.Generator
) -> Callable[[int], int]:
    """Returns a function from a row number to a token drawn from this row of `logits` [rows,
    vocabulary]; -1 if the row holds a NaN.

    The token is drawn after temperature and filters. The function may be called once for each row.
    On a CPU each call draws one token; on a GPU the first call draws the tokens of all rows, for a
    single transfer.
    """

    def draw_one(row: int) -> int:
        return int(token_sampling.draw(token_sampling.warp(logits[row], sampling), generator))

    tokens: list[int] = []

    def draw_all(row: int) -> int:
        if not tokens:
            probs = token_sampling.warp(logits, sampling)
            tokens.extend(token_sampling.draw(probs, generator).tolist())
        return tokens[row]

    return draw_one if logits.is_cpu else draw_all


def accept_prefix(
    draft: Draft,
    output: ModelOutput,
    count: torch.Tensor,
    sampling: SamplingParams,
    generator: torch.Generator,
) -> Verdict:
    """Returns the verdict that accepts a chain's first `count` tokens and lets the target choose
    the token after them.

    `count` is an integer scalar on the device. `output` holds the target's logits after the context
    and after each token. Raises RunError as `make_verdict` does.
    """
    logits = output.logits.index_select(0, count[None])[0]
    if sampling.greedy:
        token = token_sampling.argmax_token(logits)
    else:
        token = token_sampling.draw(token_sampling.warp(logits, sampling), generator)
    accepted, own = torch.stack((count, token)).tolist()
    return make_verdict(draft, range(accepted), own)


def match_path(
    draft: Draft, choice: Callable[[int], int], rows: int, drawn: int = 0, accepted: int = 0
) -> Verdict:
    """Returns the verdict that accepts the path of drafted tokens on which each token equals the
    target's choice.

    `choice(row)` is the token that the target chooses after the context (row 0) or after node `row`
    - 1. It is called once for each row on the accepted path. `rows` is the number of rows: the one
    after a chain's last node may be missing, and then a fully accepted chain gets no token after
    it. The first `drawn` nodes, a chain, have been verified already: the first `accepted` of them
    are accepted, the others are not. Raises RunError if a choice is -1, which means that the
    target's logits held a NaN.
    """
    path = list(range(accepted))
    if accepted == rows:
        return Verdict(tuple(path))
    node = accepted - 1
    token = token_sampling.valid_token(choice(accepted), "target")
    # parents precede their children, so one loop follows the path
    for child in range(drawn, len(draft.tokens)):
        if draft.parents[child] == node and draft.tokens[child] == token:
            path.append(child)
            node = child
            if child + 1 == rows:
                return Verdict(tuple(path))
            token = token_sampling.valid_token(choice(child + 1), "target")
    return make_verdict(draft, path, token)


def make_verdict(draft: Draft, path: Sequence[int], token: int) -> Verdict:
    """Returns the verdict that accepts the nodes of `path`, followed by the target's `token`.

    The token is a bonus if the path ends at a leaf, otherwise a correction; neither for an empty
    draft. Raises RunError if the token is -1, which means that the target's logits held a NaN.
    """
    last = path[-1] if path else -1
    source: Source | None = None
    if draft.tokens:
        source = "correction" if last in draft.parents else "bonus"
    return Verdict(tuple(path), token_sampling.valid_token(token, "target"), source)
