"""CaPE (Du et al. 2024, GliDe with a CaPE): further candidates at each position of a drafted chain, more where it is unsure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from specgen.base.types import Draft
from specgen.decoding.drafting import ModelDrafter
from specgen.engine.devices import upload

MOST_CANDIDATES = 7
_BY_TOP_PROB = ((0.3, MOST_CANDIDATES), (0.6, 5), (0.8, 3))  # largest top probability, number of further candidates


def further_candidates(top_prob: float) -> int:
    """Returns how many candidates join a drafted token whose distribution has this largest probability (temperature 1)."""
    return next((number for limit, number in _BY_TOP_PROB if top_prob <= limit), 1)


def with_candidates(chain: Draft, likeliest: Iterable[Sequence[int]]) -> Draft:
    """Returns the chain with further candidates at each position: the likeliest tokens there besides the chain's own.

    `likeliest` has the most likely tokens at each position, likeliest first; -1 for none. The candidates come after all tokens of
    the chain, so `probs` belong to the chain's tokens alone. Each is a leaf: a sibling that is verified after the chain's token.
    """
    tokens, origins = list(chain.tokens), list(range(len(chain.tokens)))
    for position, (top_prob, found) in enumerate(zip(chain.top_probs, likeliest, strict=True)):
        others = [token for token in found if token not in (-1, chain.tokens[position])][: further_candidates(top_prob)]
        tokens += others
        origins += [position] * len(others)
    return replace(
        chain,
        tokens=tokens,
        parents=[origin - 1 for origin in origins],
        entropies=[chain.entropies[origin] for origin in origins],
        top_probs=[chain.top_probs[origin] for origin in origins],
        logits=None if chain.logits is None else chain.logits[upload(torch.tensor(origins), chain.logits.device)],
    )


class CapeDrafter(ModelDrafter):
    """Drafts a chain as `ModelDrafter` does, with further candidates at each position and no further forward pass.

    Their number depends on the top probability of the draft's own distribution at the position (7, 5, 3 or 1). In sampling, the
    chain's token is drawn from its distribution and verified first; the other candidates are fixed tokens, verified against what
    its rejection leaves of the target's distribution. Verification is lossless, because that holds for any fixed tokens.
    The length policy sees the chain's tokens.
    """

    _likeliest: ClassVar[int] = MOST_CANDIDATES + 1

    def _nodes(self, values: Mapping[str, float]) -> int:
        return 1 + further_candidates(values.get("top_prob", 1.0))  # a policy that reads no signals does not count nodes

    def _completed(self, draft: Draft, likeliest: Sequence[Sequence[int]]) -> Draft:
        return with_candidates(draft, likeliest)
