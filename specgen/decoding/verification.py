"""Verifiers decide which drafted tokens are accepted, and choose the correction or bonus token that
follows them.

A verifier works on the device. It copies the result (token ids and counts) to the host once for
each draft.
"""

from __future__ import annotations

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
    """Verifies drawn tokens by rejection sampling, and all other drafted tokens by whether the
    target draws the same. Lossless.

    For chains and trees. p are the target's probabilities and q the draft model's, after
    temperature and filters. The first n nodes, as many as the draft has `probs` for, are a chain
    drawn from q. Token i of this chain is accepted with probability min(1, p_i / q_i). After the
    first rejection the target draws a token from norm(max(p_i - q_i, 0)) (Leviathan et al. 2023);
    after a chain without rejection, from p. The other nodes were not drawn at random. If one of
    them follows the last accepted node and has the token that the target has drawn, it is accepted,
    and the target draws a token after it from p. This is repeated until no node has the target's
    token.
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
        target's token after them."""
        target = token_sampling.warp(logits, self._sampling)
        length = len(drafted)
        tokens = upload(torch.tensor(drafted), logits.device)
        draft_probs = move(probs, logits.device)
        p = target[:length].gather(1, tokens[:, None])[:, 0]
        q = draft_probs[:length].gather(1, tokens[:, None])[:, 0]
        fresh = torch.rand(length, generator=self._generator, device=logits.device)
        accepted = (fresh * q < p).cumprod(dim=0).sum()
        after = target.index_select(0, accepted.clamp_max(len(logits) - 1)[None])
        # if all tokens were accepted, the next one is drawn from p
        drawn_from = draft_probs.index_select(0, accepted.clamp_max(length - 1)[None])
        residual = (after - drawn_from * (accepted < length)).clamp_min_(0)
        # all zero through rounding: p equals q
        residual = torch.where(residual.sum() > 0, residual, after)
        # a NaN in p rejects a token, so that `draw` gets it and returns -1
        token = token_sampling.draw(residual, self._generator)
        count, own = torch.cat((accepted[None], token)).tolist()
        return count, own


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
