"""Training text for a draft whose tokenizer is not the target's: the target's text in the draft's tokens, with its predictions.

A drafted token can be accepted only if both vocabularies have it (token-level intersection, Timor et al. 2025, arXiv 2502.05202,
Algorithm 4). With p the target's next-token distribution, m its probability on this overlap, and p' and q' the target's and the
draft's distributions restricted to it and renormalized, the chance of acceptance is the sum of min(p, q') over the overlap. It
is at most m, and because p = m p' there, it is at least m (1 - TV(p', q')) >= m (1 - sqrt(KL(p' || q') / 2)). A draft with
KL(p' || q') = 0 therefore reaches the bound m, whatever it predicts off the overlap.

This comparison is sound only where both models have read the same bytes and are about to continue them: after a draft token that
ends at the byte at which a target token ends. There the loss is `overlap_divergence`: m KL(p' || q'), and the divergence of the
draft's own probability of the overlap from m. After all other draft tokens, and where m is small, the loss is cross-entropy with
the draft's next token.

Drafting reads a text as `Translation` writes it: the prompt in the draft's own tokenization, then each token of the target's
output as one draft token, or spelled by several. Training uses the same form. In the output, both have a boundary after every
token of the target, even where the draft's tokenizer would have cut the text elsewhere, so that a distilled draft learns the
target's tokenization.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from random import Random
from typing import Any, NamedTuple

import torch

from specgen.base.errors import SpecgenError
from specgen.engine.text.translation import Translation, covered_tokens
from specgen.train.corpus import NOT_HELD_OUT, Corpus, Part
from specgen.train.divergence import overlap_divergence
from specgen.train.loop import TrainingBatches, greedy_matches
from specgen.train.packing import IGNORED
from specgen.train.task import Recipe, TrainingTask
from specgen.train.texts import GeneratedText

MIN_OVERLAP = 0.3  # least share of the training text's tokens that both have: more than this cannot be accepted
_MIN_MASS = 0.05  # least probability of the target on the overlap for a comparison there
_MAX_UNWRITABLE = 0.01  # of the training text's tokens
_CHECKED_TOKENS = 20_000
_READ_CONTEXT = 0.25  # of a corpus text: the share at its beginning that is translated as a prompt
_SPECIAL = b"\xff"  # in place of a special token; no text in UTF-8 has this byte
_HINT = "Take a draft with the target's tokenizer, or a method without a draft model: -m lookup"


def check_overlap(translation: Translation, task: TrainingTask, num_embeddings: int) -> None:
    """Raises SpecgenError if the draft can write too little of the task's prompts or corpus for distillation to be sound.

    Also if it has embeddings for `num_embeddings` tokens only, and its tokenizer has more.
    """
    tokens = len(translation.draft.pieces)
    if tokens > num_embeddings:
        raise SpecgenError(f"the draft's tokenizer has {tokens:,} tokens, and its model {num_embeddings:,} embeddings", _HINT)
    ids = _text_to_check(task)
    written = sum(_is_written(translation, id_) for id_ in ids)
    if written < (1 - _MAX_UNWRITABLE) * len(ids):
        share = 1 - written / len(ids)
        message = f"the draft's tokenizer cannot write {share:.0%} of the training text's tokens, so it would learn another text"
        raise SpecgenError(message, _HINT)
    common = _common(translation, ids) / len(ids)
    if common < MIN_OVERLAP:
        message = f"the draft's vocabulary has only {common:.0%} of the training text's tokens: more could never be accepted"
        raise SpecgenError(message, _HINT)


def _common(translation: Translation, ids: Sequence[int]) -> int:
    """Returns how many of some target tokens the draft has too. A model can have more ids than its tokenizer has tokens."""
    to_draft = translation.target_to_draft
    return sum(id_ < len(to_draft) and to_draft[id_] >= 0 for id_ in ids)


def _is_written(translation: Translation, id_: int) -> bool:
    """Whether the draft can write a target token: its spelling has the same bytes."""
    piece = translation.target.pieces[id_] if id_ < len(translation.target.pieces) else None
    return piece is None or translation.draft.of_ids(translation.spelling(id_)) == piece


def _text_to_check(task: TrainingTask) -> list[int]:
    if task.corpus is None:
        return list(chain.from_iterable(task.prompts))[:_CHECKED_TOKENS]
    rng, ids = Random(0), list[int]()
    for _ in range(_CHECKED_TOKENS // 100):
        ids += task.corpus.sample(rng, 100)
    return ids


def shared_ends(source: Sequence[bytes], other: Sequence[bytes]) -> list[int]:
    """Returns for each piece of `other` the index of the piece of `source` that ends at the same byte, or IGNORED.

    Both divide the same text. Where several pieces end at the same byte, because some are empty, it is the last one.
    """
    last = {end: index for index, end in enumerate(accumulate(map(len, source)))}
    ends = list(accumulate(map(len, other)))
    return [last.get(end, IGNORED) if end != after else IGNORED for end, after in zip(ends, [*ends[1:], None], strict=True)]


@dataclass(frozen=True, slots=True)
class TranslatedText:
    """A text in the draft's tokens.

    `ids` are the draft's token ids. `positions` has for each of them the index of the target's token after which both models have
    read the same bytes, or IGNORED.
    """

    ids: list[int]
    positions: list[int]


def translate(translation: Translation, ids: Sequence[int], prompt_length: int) -> TranslatedText:
    """Returns a text of the target in the draft's tokens, as drafting reads it: the first `prompt_length` tokens are a prompt."""
    prompt, rest = ids[:prompt_length], ids[prompt_length:]
    of_draft = translation.prompt(prompt)
    positions = _prompt_positions(translation, prompt, of_draft)
    for index, id_ in enumerate(rest, prompt_length):
        spelled = translation.spelling(id_)
        of_draft += spelled
        positions += [*[IGNORED] * (len(spelled) - 1), index][: len(spelled)]
    return TranslatedText(of_draft, positions)


def _prompt_positions(translation: Translation, prompt: Sequence[int], of_draft: Sequence[int]) -> list[int]:
    pieces = _without_start([_bytes_of(translation, id_) for id_ in prompt])
    others = _without_start([translation.draft.pieces[id_] or _SPECIAL for id_ in of_draft])
    for changed, reference in ((others, pieces), (pieces, others)):  # one may have put a space before the text
        if b"".join(changed) == b" " + b"".join(reference):
            first = next(index for index, piece in enumerate(changed) if piece)
            changed[first] = changed[first][1:]
    if b"".join(pieces) != b"".join(others):
        return [*[IGNORED] * (len(of_draft) - 1), len(prompt) - 1][: len(of_draft)]
    return shared_ends(pieces, others)


def _without_start(pieces: list[bytes]) -> list[bytes]:
    """Returns the pieces of a prompt with empty ones for the special tokens before its text, which the models may differ in."""
    start = next((index for index, piece in enumerate(pieces) if piece != _SPECIAL), len(pieces))
    return [b""] * start + pieces[start:]


def _bytes_of(translation: Translation, id_: int) -> bytes:
    """Returns a target token's bytes; for a special token _SPECIAL if the draft has it too, otherwise its name's bytes."""
    pieces = translation.target.pieces
    piece = pieces[id_] if id_ < len(pieces) else None
    if piece is not None:
        return piece
    spelled = translation.spelling(id_)
    return translation.draft.of_ids(spelled) or _SPECIAL * len(spelled)


class TranslatedBatches(TrainingBatches):
    """Batches in the draft's tokens of corpus text and of texts for which the target's predictions are stored.

    `off_overlap` [m] are the draft's ids of tokens that the target lacks. The field `teacher` of a batch has, for each
    token after which the models are compared, its row in `top_k_ids` and `top_k_log_probs`, each [tokens, k]: the draft's ids of
    the target's k most probable next tokens, -1 where the draft lacks one, and their log-probabilities.
    """

    def __init__(
        self,
        corpus: Corpus | None,
        texts: Sequence[GeneratedText],
        recipe: Recipe,
        translation: Translation,
        vocabulary: int,
        context_limit: int,
    ) -> None:
        self._translation, self._context_limit = translation, context_limit
        self.off_overlap = torch.tensor(sorted(set(range(vocabulary)) - set(translation.target_to_draft)), dtype=torch.long)
        used = [text for text in texts if text.part == Part.TRAIN]
        compared = [_comparisons(translation, text, _MIN_MASS) for text in used]
        starts = accumulate((len(one.after) for one in compared), initial=0)
        taught = []
        for one, start in zip(compared, starts, strict=False):
            teacher = torch.full_like(one.ids, IGNORED)
            teacher[one.after] = torch.arange(start, start + len(one.after))
            taught.append((one.ids.tolist(), teacher.tolist()))
        self.top_k_ids = torch.cat([one.top_k_ids for one in compared]) if compared else torch.empty(0, 1).long()
        self.top_k_log_probs = torch.cat([one.log_probs for one in compared]) if compared else torch.empty(0, 1)
        longer = sum(len(ids) for ids, _ in taught) / max(1, sum(len(text.ids) for text in used))
        length = min(context_limit, math.ceil(recipe.training_length * max(1.0, longer)))  # as many of the target's tokens
        super().__init__(corpus, taught, replace(recipe, training_length=length), NOT_HELD_OUT)

    def _sample_corpus(self, rng: Random, max_tokens: int) -> tuple[list[int], list[int]]:
        ids, _ = super()._sample_corpus(rng, max_tokens)
        of_draft = self._translation.prompt(ids)[:max_tokens]
        return of_draft, [IGNORED] * len(of_draft)

    def compare(self, logits: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sum of the losses of some draft logits [n, vocabulary], and the numbers of `greedy_matches`.

        `rows` [n] are those of the target's predictions.
        """
        off_overlap = self.off_overlap.to(logits.device)
        rows = rows.to(self.top_k_ids.device)
        top_k_ids = self.top_k_ids[rows].long().to(logits.device)
        loss = overlap_divergence(logits, off_overlap, top_k_ids, self.top_k_log_probs[rows].to(logits.device)).sum()
        return loss, greedy_matches(logits.detach().index_fill(-1, off_overlap, -torch.inf), top_k_ids[:, 0])

    def measure(self, logits_of: Callable[[torch.Tensor], torch.Tensor], texts: Sequence[GeneratedText]) -> dict[str, Any]:
        """Returns the draft's figures on the generated tokens of held-out texts. Its context is what drafting makes it.

        `agreement` has the share of tokens for which draft and target have the same most probable token, in greedy and in sampled
        text; None where there are no such tokens. `acceptance` is the mean sum of min(p, q') over the target's stored
        probabilities in sampled text: the expected acceptance of a drafted token at temperature 1; None without such text.
        """
        counts = {"greedy": [0, 0], "sampled": [0, 0]}
        accepted = 0.0
        for text in (text for text in texts if text.prompt_length < len(text.ids)):
            compared = _comparisons(self._translation, text, 0.0, only_generated=True)
            inside = compared.after < self._context_limit
            logits = logits_of(compared.ids[: self._context_limit])[compared.after[inside]].cpu()
            logits, top_k_ids, log_probs = (
                logits.index_fill(-1, self.off_overlap, -torch.inf),
                compared.top_k_ids[inside],
                compared.log_probs[inside],
            )
            found = counts["greedy" if text.greedy else "sampled"]
            found[0] += int((logits.argmax(dim=-1) == top_k_ids[:, 0]).sum())
            found[1] += len(logits)
            if not text.greedy:
                q = logits.softmax(dim=-1).gather(-1, top_k_ids.clamp_min(0))
                p = torch.where(top_k_ids >= 0, log_probs.exp(), 0)
                accepted += torch.minimum(p, q).sum().item()
        agreement = {kind: matches / tokens if tokens else None for kind, (matches, tokens) in counts.items()}
        sampled = counts["sampled"][1]
        return {"agreement": agreement, "acceptance": accepted / sampled if sampled else None}


class _Comparisons(NamedTuple):
    """A text in the draft's tokens, with the target's predictions where the models are compared.

    `ids` [n] are the draft's token ids. The comparisons are after its tokens number `after` [c]. `top_k_ids` [c, k] are the
    draft's ids of the target's most probable tokens there, -1 where it has none; `log_probs` [c, k] their log-probabilities.
    """

    ids: torch.Tensor
    after: torch.Tensor
    top_k_ids: torch.Tensor
    log_probs: torch.Tensor


def _comparisons(translation: Translation, text: GeneratedText, min_mass: float, *, only_generated: bool = False) -> _Comparisons:
    """Translates a text and finds where the models are compared: where the target's probability on the overlap is `min_mass`.

    `only_generated`: only predictions of tokens that the target generated.
    """
    assert text.top_k_ids is not None
    assert text.top_k_log_probs is not None
    is_read = text.prompt_length >= len(text.ids)  # a corpus text: its beginning is translated as a prompt
    prompt_length = max(1, int(_READ_CONTEXT * len(text.ids))) if is_read else text.prompt_length
    found = translate(translation, text.ids.tolist(), prompt_length)
    first = prompt_length - 1 if only_generated else 0
    chosen = [(after, before) for after, before in enumerate(found.positions) if first <= before < len(text.ids) - 1]
    after, before = torch.tensor(chosen, dtype=torch.long).reshape(-1, 2).T
    of_target, log_probs = text.top_k_ids[before].long(), text.top_k_log_probs[before]
    to_draft = torch.tensor(translation.target_to_draft)
    is_known = of_target < len(to_draft)
    top_k_ids = torch.where(is_known, to_draft[of_target.clamp_max(len(to_draft) - 1)], -1)
    probs = log_probs.exp()
    kept = torch.where(top_k_ids >= 0, probs, 0).sum(dim=-1) >= min_mass * probs.sum(dim=-1)
    return _Comparisons(torch.tensor(found.ids), after[kept], top_k_ids[kept], log_probs[kept])


def overlap_shares(translation: Translation, texts: Sequence[GeneratedText]) -> dict[str, float | None]:
    """Returns two shares of the tokens that the target generated in some texts; None if there are none.

    `kappa`: see `translation.covered_tokens`. `common`: tokens that are in the draft's vocabulary, which bounds the acceptance
    of a draft that has learned the target's tokenization.
    """
    generated = common = covered = tokens = 0
    for text in texts:
        if text.prompt_length < len(text.ids):
            ids = text.ids.tolist()
            generated += len(ids) - text.prompt_length
            common += _common(translation, ids[text.prompt_length :])
            of_text = covered_tokens(translation.target, translation.draft, ids, text.prompt_length)
            covered, tokens = covered + of_text[0], tokens + of_text[1]
    return {"kappa": covered / tokens if tokens else None, "common": common / generated if generated else None}
