"""Applies the penalties of a model's generation config to logits: repetition penalty, suppressed tokens and the like.

They change the logits depending on the tokens before. transformers' processors do this for one position; here they are applied
to every position of a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import generation as rules

from specgen.errors import SpecgenError
from specgen.types import Context

# Settings that change the logits and are not supported, with the values that mean "off".
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "guidance_scale": (None, 1, 1.0),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "watermarking_config": (None,),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
}


class PenaltyProcessor:
    """Applies the penalties of the generation config `config` to logits.

    A position's penalties depend on all tokens before it: the context and the drafted tokens from the tree's root on. `width` is
    the target's vocabulary size.
    """

    def __init__(self, config: Any, eos_ids: Sequence[int], width: int, device: torch.device) -> None:
        self._config, self._eos, self._width, self._device = config, list(eos_ids), width, device
        self._context: Context | None = None

    def __call__(
        self, logits: torch.Tensor, context: Context, tokens: Sequence[int], parents: Sequence[int], start: int
    ) -> torch.Tensor:
        """Returns `logits` [n, vocabulary] with the penalties applied, as float32 [n, width].

        The rows are the logits at indices `start`, `start + 1`, ...: index 0 follows the context, index i + 1 draft token i.
        `tokens` and `parents` are the draft, as for `ModelRunner.logits`. If the model is a draft model with another vocabulary
        size than the target's `width`, its logits are cut, or padded with -inf.
        """
        missing = self._width - logits.shape[-1]
        logits = torch.nn.functional.pad(logits.float(), (0, missing), value=-torch.inf)
        self._update_ids(context)
        committed = self._ids[: len(context)]
        processed = []
        for index in range(start, len(tokens) + 1):
            path: list[int] = []
            node = index - 1
            while node >= 0:
                path.append(tokens[node])
                node = parents[node]
            ids = torch.cat((committed, torch.tensor(path[::-1], dtype=torch.long, device=self._device)))
            processed.append(self._processors(ids[None], logits[index - start][None])[0])
        return torch.stack(processed)

    def _update_ids(self, context: Context) -> None:
        """Copies the context's new token ids to a buffer on the device, so that each call transfers only the new ones."""
        if context is not self._context:
            self._context, self._length = context, 0
            self._ids = torch.empty(max(256, 2 * len(context)), dtype=torch.long, device=self._device)
            self._processors = _processors(self._config, self._eos, context.prompt_length, self._device)
        if len(context) > self._ids.shape[0]:
            self._ids = torch.cat((self._ids, torch.empty_like(self._ids)))
        new = context.ids[self._length :]
        self._ids[self._length : len(context)] = torch.tensor(new, dtype=torch.long, device=self._device)
        self._length = len(context)


def has_penalties(config: Any, eos_ids: Sequence[int], name: str) -> bool:
    """Whether a model's generation config sets penalties, such as a repetition penalty or suppressed tokens.

    `name` is the model's name for the message. Raises SpecgenError for a setting that changes logits and is not supported.
    """
    for field, off in _UNSUPPORTED.items():
        value = getattr(config, field, None)
        if value not in off:
            raise SpecgenError(
                f"{name}'s generation_config.json sets {field}={value!r}, which specgen does not support",
                f"Remove {field} from that file",
            )
    return len(_processors(config, list(eos_ids), 0, torch.device("cpu"))) > 0


def _processors(config: Any, eos: list[int], prompt_length: int, device: torch.device) -> Any:
    """Returns transformers' logits processors for the penalties in `config`.

    They are in the order of transformers' `GenerationMixin._get_logits_processor`.
    """
    made = rules.LogitsProcessorList()
    if config.sequence_bias is not None:
        made.append(rules.SequenceBiasLogitsProcessor(config.sequence_bias))
    if config.repetition_penalty not in (None, 1.0):
        made.append(rules.RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    if config.no_repeat_ngram_size:
        made.append(rules.NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    if config.bad_words_ids is not None:
        made.append(rules.NoBadWordsLogitsProcessor(config.bad_words_ids, eos or None))
    if config.min_length and eos:
        made.append(rules.MinLengthLogitsProcessor(config.min_length, eos, device=str(device)))
    if config.min_new_tokens and eos:
        made.append(rules.MinNewTokensLengthLogitsProcessor(prompt_length, config.min_new_tokens, eos, device=str(device)))
    if config.suppress_tokens:
        made.append(rules.SuppressTokensLogitsProcessor(config.suppress_tokens, device=str(device)))
    if config.begin_suppress_tokens:
        made.append(rules.SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, prompt_length, device=str(device)))
    return made
