"""DFlash2's selector: chooses among a row's likeliest tokens by the token before them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specgen.engine.native.linear import MakeLinear
from specgen.engine.weights import Take

STATE_PROJECTION = "candidate_selector.hidden_projection.weight"
PREDECESSORS = "candidate_selector.predecessor_codebook"
SUCCESSORS = "candidate_selector.successor_codebook"


class CandidateSelector:
    """Scores the `count` likeliest tokens of a row, its candidates. All others cannot be drafted.

    After the token a, candidate b has the score U(b) + sum_r A[a]_r (P h)_r S[b]_r: U are the row's
    logits, h [width] is the LM head's input, P [rank, width] is `STATE_PROJECTION`, and A and S
    [vocabulary, rank] are the codebooks `PREDECESSORS` and `SUCCESSORS`, which `take` returns by
    name. `final_logits` makes U of the LM head's products; it has to be monotone, so that the
    likeliest tokens are those of the largest products.
    """

    def __init__(
        self,
        count: int,
        take: Take,
        make_linear: MakeLinear,
        final_logits: Callable[[Tensor], Tensor],
    ) -> None:
        self._count = count
        self._project = make_linear(take(STATE_PROJECTION))
        self._predecessors = take(PREDECESSORS)
        self._successors = take(SUCCESSORS)
        self._final_logits = final_logits

    def __call__(self, before: Tensor, products: Tensor, states: Tensor) -> Tensor:
        """Returns the logits [n, vocabulary] of n rows, of which only those of the candidates are
        finite.

        `before` [n] are the ids of the tokens before, `products` [n, vocabulary] and `states` [n,
        width] the LM head's outputs and inputs.
        """
        largest, candidates = products.topk(self._count, dim=-1)
        unary = self._final_logits(largest)
        predecessors = self._predecessors.index_select(0, before).to(unary.dtype)
        successors = self._successors[candidates].to(unary.dtype)
        context = predecessors * self._project(states)
        scores = unary + torch.einsum("nr,nkr->nk", context, successors)
        logits = torch.full_like(products, -torch.inf)
        return logits.scatter_(1, candidates, scores)
