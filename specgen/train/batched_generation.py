"""Batched autoregressive generation: many texts at once, much faster in tokens per second than one text after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from specgen.base.errors import nan_logits
from specgen.engine.batch_pass import BatchPass
from specgen.engine.inference_mode import inference

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

OnProgress = Callable[[float, int], bool]
"""A function that is called with the share of the work that is done (0 to 1) and the number of tokens so far.

It returns False to end the work early.
"""
_COMPACTION_SHARE = 0.7  # finished texts leave the KV cache once fewer than this share of its texts are unfinished


@inference
def continuations(
    target: LoadedModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    greedy: bool,
    seed: int = 0,
    on_progress: OnProgress = lambda *_: True,
) -> list[list[int]]:
    """Returns one text (token ids) per prompt: the prompt, followed by the target's continuation.

    A text ends after an end-of-sequence token, or when it has `max_tokens` tokens. Prompts are left-padded to the longest one,
    and the padding counts. Tokens are chosen greedily or sampled at temperature 1. After each new token of all texts
    `on_progress` is called; if it returns False, generation ends there. Raises RunError if the logits contain NaN.
    """
    batch = _Batch(target, prompts, max_tokens, seed)
    prompt_length = batch.length
    while batch.texts_of_rows and batch.length < max_tokens:
        batch.generate_token(greedy)
        share = (batch.length - prompt_length) / (max_tokens - prompt_length)
        if not on_progress(share, sum(map(len, batch.texts))):
            break
    return batch.texts


class _Batch:
    """Texts that grow by one token at a time and share one KV cache.

    `texts_of_rows` has one entry per row of the cache: the index in `texts` of the text in this row, or -1 if that text is
    finished. The list is empty once all texts are finished. `length` is the number of tokens per row, padding included.
    """

    def __init__(self, target: LoadedModel, prompts: Sequence[Sequence[int]], max_tokens: int, seed: int) -> None:
        self.texts = [list(prompt) for prompt in prompts]
        self._model, self._eos = target.model, target.eos_ids
        self._generator = torch.Generator(target.device).manual_seed(seed)
        self.length = max(map(len, prompts))
        padding = torch.tensor([self.length - len(prompt) for prompt in prompts], device=target.device)[:, None]
        self._new = torch.tensor([[0] * (self.length - len(p)) + list(p) for p in prompts], device=target.device)
        columns = torch.arange(self.length, device=target.device)
        self._visible = columns >= padding
        self._positions = (columns - padding).clamp_min(0)
        self._cache = self._model.batch_cache(len(prompts))
        self._cache.capacity = max_tokens
        self.texts_of_rows = list(range(len(prompts)))

    def generate_token(self, greedy: bool) -> None:
        """Does one forward pass over the tokens that are not in the cache yet, and appends one token to each unfinished text."""
        new, past = self._new.shape[1], self._cache.length
        positions = self._positions[:, past:]
        columns = torch.arange(past + new, device=positions.device)
        visible = self._visible[:, None, :] & (columns[past:, None] >= columns)
        batch = BatchPass(self._new, positions, visible, self._positions, self._cache)
        logits = self._model.batch_logits(batch, logits_to_keep=1)[:, -1].float()
        self._cache.length = past + new
        if logits.isnan().any():
            raise nan_logits("target")
        tokens = logits.argmax(dim=-1) if greedy else logits.softmax(dim=-1).multinomial(1, generator=self._generator)[:, 0]
        for row, (text, token) in enumerate(zip(self.texts_of_rows, tokens.tolist(), strict=True)):
            if text >= 0:
                self.texts[text].append(token)
                if token in self._eos:
                    self.texts_of_rows[row] = -1
        self._new = tokens[:, None]
        self.length += 1
        self._positions = torch.cat((self._positions, self._positions[:, -1:] + 1), dim=1)
        self._visible = torch.cat((self._visible, torch.ones_like(self._visible[:, :1])), dim=1)
        unfinished = [row for row, text in enumerate(self.texts_of_rows) if text >= 0]
        if len(unfinished) < _COMPACTION_SHARE * len(self.texts_of_rows):
            index = torch.tensor(unfinished, dtype=torch.long, device=tokens.device)
            self.texts_of_rows = [self.texts_of_rows[row] for row in unfinished]
            self._new, self._positions, self._visible = self._new[index], self._positions[index], self._visible[index]
            self._cache.keep_sequences(unfinished)
