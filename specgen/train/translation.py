"""Training text for a draft whose tokenizer is not the target's: the target's text in the draft's tokens, with its predictions.

A drafted token can be accepted only if both vocabularies have it (token-level intersection, Timor et al. 2025, arXiv 2502.05202,
Algorithm 4). With p the target's next-token distribution, m its probability on this overlap, and p' and q' the target's and the
draft's distributions restricted to it and renormalized, the chance of acceptance is the sum of min(p, q') over the overlap. It
is at most m, and because p = m p' there, it is at least m (1 - TV(p', q')) >= m (1 - sqrt(KL(p' || q') / 2)). A draft with
KL(p' || q') = 0 therefore reaches the bound m, whatever it predicts off the overlap.

This comparison is sound only where both models have read the same bytes and are about to continue them: after a draft token that
ends at the byte at which a target token ends. There the loss is `divergence`: m KL(p' || q'), and the divergence of the draft's
own probability of the overlap from m. After all other draft tokens, those of the prompt included but for its last, and where m
is small, the loss is cross-entropy with the draft's next token.

Drafting reads a text as `Translation` writes it: the prompt in the draft's own tokenization, then each token of the target's
output as one draft token, or spelled by several. Training uses the same form. In the output, both have a boundary after every
token of the target, even where the draft's tokenizer would have cut the text elsewhere, so that a distilled draft learns the
target's tokenization.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import torch

from specgen.base.errors import SpecgenError
from specgen.engine.text.translation import Translation
from specgen.train.corpus import Corpus
from specgen.train.loop import IGNORED
from specgen.train.texts import PredictedText

MIN_OVERLAP = 0.3  # least share of the training text's tokens that both have: more than this cannot be accepted
_CHECKED = 200  # pieces of text, each of at most _CHECKED_TOKENS tokens
_CHECKED_TOKENS = 100
_READ_CONTEXT = 0.05  # of a corpus text: the share at its beginning that is translated as a prompt
_HINT = "Take a draft with the target's tokenizer, or a method without a draft model: -m lookup"


def check_overlap(translation: Translation, text: Corpus, num_embeddings: int) -> None:
    """Raises SpecgenError if the draft's vocabulary has too little of the training text for distillation to gain anything.

    Also if it has embeddings for `num_embeddings` tokens only, and its tokenizer has more.
    """
    tokens = len(translation.draft.pieces)
    if tokens > num_embeddings:
        raise SpecgenError(f"the draft's tokenizer has {tokens:,} tokens, and its model {num_embeddings:,} embeddings", _HINT)
    rng, ids = Random(0), list[int]()
    for _ in range(_CHECKED):
        ids += text.sample(rng, _CHECKED_TOKENS)
    to_draft = translation.target_to_draft  # a model can have more ids than its tokenizer has tokens
    common = sum(id_ < len(to_draft) and to_draft[id_] >= 0 for id_ in ids) / len(ids)
    if common < MIN_OVERLAP:
        shared = f"{common:.0%} of the training text's tokens"
        raise SpecgenError(f"the draft's vocabulary has only {shared}: more could never be accepted", _HINT)


def off_overlap(translation: Translation | None, vocabulary: int) -> torch.Tensor:
    """Returns the draft's ids of tokens that the target lacks, int64; none without a translation."""
    known = range(vocabulary) if translation is None else translation.target_to_draft
    return torch.tensor(sorted(set(range(vocabulary)).difference(known)), dtype=torch.long)


def translate(translation: Translation, ids: Sequence[int], prompt_length: int) -> tuple[list[int], list[int]]:
    """Returns a text of the target in the draft's tokens, as drafting reads it: the first `prompt_length` tokens are a prompt.

    The second list has, for each of the draft's tokens, the index of the target's token after which both models have read the
    same bytes, or IGNORED.
    """
    of_draft, positions = list[int](), list[int]()
    pieces = [translation.prompt(ids[:prompt_length]), *map(translation.spelling, ids[prompt_length:])]
    for index, piece in enumerate(pieces, prompt_length - 1):
        of_draft += piece
        positions += [*[IGNORED] * (len(piece) - 1), index][: len(piece)]
    return of_draft, positions


class Comparisons(NamedTuple):
    """A text in the draft's tokens, with the target's predictions where the models are compared.

    `ids` [n] are the draft's token ids. The comparisons are after its tokens number `after` [c]. `top_k_ids` [c, k] are the
    draft's ids of the target's most probable tokens there, -1 where it has none; `log_probs` [c, k] their log-probabilities.
    """

    ids: torch.Tensor
    after: torch.Tensor
    top_k_ids: torch.Tensor
    log_probs: torch.Tensor


def comparisons(
    translation: Translation | None, found: PredictedText, min_mass: float, *, only_generated: bool = False
) -> Comparisons:
    """Translates a text and finds where the models are compared: where the target's probability on the overlap is `min_mass`.

    Without a translation (None) this is after each token. `only_generated`: only predictions of tokens that the target generated.
    """
    text, length = found.text, len(found.text.ids)
    if translation is None:
        first = text.prompt_length - 1 if only_generated else 0
        after = torch.arange(first, length - only_generated)
        return Comparisons(torch.tensor(text.ids), after, found.top_k_ids[after], found.top_k_log_probs[after])
    is_read = text.prompt_length >= length  # a corpus text: its beginning is translated as a prompt
    prompt_length = max(1, int(_READ_CONTEXT * length)) if is_read else text.prompt_length
    ids, positions = translate(translation, text.ids, prompt_length)
    chosen = [(after, before) for after, before in enumerate(positions) if 0 <= before < length - 1]
    after, before = torch.tensor(chosen, dtype=torch.long).reshape(-1, 2).T
    of_target, log_probs = found.top_k_ids[before], found.top_k_log_probs[before]
    to_draft = torch.tensor(translation.target_to_draft, dtype=torch.int)
    is_known = of_target < len(to_draft)
    top_k_ids = torch.where(is_known, to_draft[of_target.clamp_max(len(to_draft) - 1)], -1)
    probs = log_probs.exp()
    kept = torch.where(top_k_ids >= 0, probs, 0).sum(dim=-1) >= min_mass * probs.sum(dim=-1)
    return Comparisons(torch.tensor(ids), after[kept], top_k_ids[kept], log_probs[kept])
