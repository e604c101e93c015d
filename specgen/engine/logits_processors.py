"""Applies the penalties of a model's generation config to logits: repetition penalty, suppressed tokens and the like.

They change a position's logits depending on the tokens before it. The formulas and their order are those of transformers'
logits processors, but all positions of a draft are computed at once, and the context's part is kept between calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from specgen.base.errors import SpecgenError
from specgen.base.types import Context
from specgen.engine.devices import upload
from specgen.engine.generation_config import GenerationConfig

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

# Continuations of token sequences: prefix length -> prefix -> the next tokens with their biases.
_Continuations = dict[int, dict[tuple[int, ...], list[tuple[int, float]]]]


def has_penalties(config: GenerationConfig, eos_ids: Collection[int], name: str) -> bool:
    """Whether a model's generation config sets penalties, such as a repetition penalty or suppressed tokens.

    `name` is the model's name for the message. Raises SpecgenError for a setting that changes logits and is not supported.
    """
    for field, off in _UNSUPPORTED.items():
        value = getattr(config, field)
        if value not in off:
            raise SpecgenError(
                f"{name}'s generation_config.json sets {field}={value!r}, which specgen does not support",
                f"Remove {field} from that file (from config.json if there is no such file)",
            )
    lists = config.sequence_bias, config.bad_words_ids, config.suppress_tokens, config.begin_suppress_tokens
    numbers = config.no_repeat_ngram_size, eos_ids and config.min_length, eos_ids and config.min_new_tokens
    return config.repetition_penalty not in (None, 1.0) or any(lists) or any(numbers)


class PenaltyProcessor:
    """Applies the penalties of the generation config `config` to logits.

    A position's penalties depend on all tokens before it: the context and the drafted tokens from the tree's root on. `eos_ids`
    are the tokens that end an output, `width` is the target's vocabulary size. Raises SpecgenError if the config biases or
    forbids a sequence with a token that the vocabulary lacks, or forbids all tokens.
    """

    def __init__(self, config: GenerationConfig, eos_ids: Collection[int], width: int, device: torch.device) -> None:
        self._config, self._width, self._device = config, width, device
        self._eos, self._penalty = sorted(eos_ids), config.repetition_penalty or 1.0
        biases = dict(config.sequence_bias or ())
        single_ends = {(end,) for end in eos_ids}  # an output can always end
        forbidden = dict.fromkeys((word for word in config.bad_words_ids or () if word not in single_ends), -torch.inf)
        for field, sequences in ("sequence_bias", biases), ("bad_words_ids", forbidden):
            if unknown := [token for sequence in sequences for token in sequence if token >= width]:
                raise SpecgenError(
                    f"the generation config's {field} names token {unknown[0]}, but the vocabulary has {width:,} tokens",
                    f"Correct {field} in generation_config.json",
                )
        self._bias = torch.zeros(width, device=device)
        for sequence, bias in biases.items():
            if len(sequence) == 1:
                self._bias[sequence[0]] = bias
        self._longer_biases, self._longer_forbidden = _continuations(biases), _continuations(forbidden)
        self._ngram = config.no_repeat_ngram_size or 0
        self._reach = max((0, self._ngram - 1, *self._longer_biases, *self._longer_forbidden))  # tokens before a row that matter
        self._always = {word[0] for word in forbidden if len(word) == 1} | {*(config.suppress_tokens or ())}
        places = [token for token in self._always if token < width]
        if len(places) == width:
            raise SpecgenError("the generation config forbids all tokens", "Correct suppress_tokens in generation_config.json")
        self._forbidden = torch.zeros(width, dtype=torch.bool, device=device).index_fill_(0, self._indices(places), True)
        self._factors = torch.ones(width, device=device)
        self._ngrams: dict[tuple[int, ...], set[int]] = {}  # the context's: all but the last token -> last tokens
        self._context: Context | None = None
        self._known = 0  # the context's tokens that are in `_factors` and `_ngrams`

    def forbids_all(self, tokens: Iterable[int]) -> bool:
        """Whether none of these tokens can ever follow."""
        return self._always.issuperset(tokens)

    def __call__(
        self, logits: torch.Tensor, context: Context, tokens: Sequence[int], parents: Sequence[int], start: int
    ) -> torch.Tensor:
        """Returns `logits` [n, vocabulary] with the penalties applied, as float32 [n, width]. `logits` stays unchanged.

        The rows are the logits at indices `start`, `start + 1`, ...: index 0 follows the context, index i + 1 draft token i.
        `tokens` and `parents` are the draft, as for `ModelRunner.logits`. If the model is a draft model with another vocabulary
        size than the target's `width`, its logits are cut, or padded with -inf.
        """
        self._follow(context)
        missing = self._width - logits.shape[-1]
        logits = logits.float() if missing == 0 else torch.nn.functional.pad(logits.float(), (0, missing), value=-torch.inf)
        paths = [_path(tokens, parents, index - 1) for index in range(start, len(tokens) + 1)]
        tail = context.ids[max(0, len(context) - self._reach) :]
        if self._config.sequence_bias:
            logits = logits + self._biases(paths, tail)
        if self._penalty != 1:
            logits = self._repetition(logits, paths)
        if self._always:
            logits = logits.masked_fill(self._forbidden, -torch.inf)
        banned = self._places((row, token) for row, path in enumerate(paths) for token in self._row_bans(context, path, tail))
        if banned:
            logits = logits.reshape(-1).index_fill(0, self._indices(banned), -torch.inf).view(-1, self._width)
        return logits

    def _follow(self, context: Context) -> None:
        """Updates the kept state with the context's new tokens; rebuilds it for another or a shorter context."""
        ids, size = context.ids, self._ngram
        if context is not self._context or len(ids) < self._known:
            self._context, self._known = None, 0  # an interrupted call begins anew next time
            self._ngrams.clear()
            self._factors.fill_(1.0)
            self._context = context
        new = ids[self._known :]
        if new and self._penalty != 1:
            self._factors.index_fill_(0, self._indices(self._places((0, token) for token in new)), self._penalty)
        if size:
            for end in range(max(self._known + 1, size), len(ids) + 1):
                self._ngrams.setdefault(tuple(ids[end - size : end - 1]), set()).add(ids[end - 1])
        self._known = len(ids)

    def _biases(self, paths: list[list[int]], tail: list[int]) -> torch.Tensor:
        """Returns the sequence biases [rows, width] or, if they are the same for all rows, [width]."""
        found = [(row, *entry) for row, path in enumerate(paths) for entry in _matches(self._longer_biases, tail + path)]
        if not found:
            return self._bias
        values = upload(torch.tensor([bias for _, _, bias in found]), self._device)
        places = self._indices(self._places((row, token) for row, token, _ in found))
        return self._bias.repeat(len(paths)).index_add_(0, places, values).view(-1, self._width)

    def _repetition(self, logits: torch.Tensor, paths: list[list[int]]) -> torch.Tensor:
        """Returns `logits` times the penalty where they are negative and divided by it elsewhere, at the tokens before each row.

        Of product and quotient that is the lower for a penalty above 1, otherwise the higher, which is cheaper than comparing
        with 0.
        """
        factors = self._factors
        if drafted := self._places((row, token) for row, path in enumerate(paths) for token in path):
            factors = factors.repeat(len(paths)).index_fill_(0, self._indices(drafted), self._penalty).view(-1, self._width)
        choose = torch.minimum if self._penalty > 1 else torch.maximum
        return choose(logits * factors, logits / factors)

    def _row_bans(self, context: Context, path: list[int], tail: list[int]) -> list[int]:
        """Returns the tokens that may not follow the context and the drafted tokens `path`, besides those in `_banned`."""
        config, new_tokens = self._config, len(context) - context.prompt_length + len(path)
        banned: list[int] = []
        if len(context) + len(path) < (config.min_length or 0) or new_tokens < (config.min_new_tokens or 0):
            banned += self._eos
        if new_tokens == 0:
            banned += config.begin_suppress_tokens or ()
        recent = tail + path
        banned += (token for token, _ in _matches(self._longer_forbidden, recent))
        if self._ngram:
            banned += self._ngram_bans(recent)
        return banned

    def _ngram_bans(self, recent: list[int]) -> Iterable[int]:
        """Returns the tokens that would repeat an n-gram of the context, or one that ends in the drafted part of `recent`.

        `recent` ends with the whole path of drafted tokens, after at least the n - 1 tokens before it.
        """
        length = self._ngram - 1
        if len(recent) < length:
            return ()
        prefix = recent[len(recent) - length :]
        ends = (end for end in range(length, len(recent)) if recent[end - length : end] == prefix)
        return {*self._ngrams.get(tuple(prefix), ()), *(recent[end] for end in ends)}

    def _places(self, entries: Iterable[tuple[int, int]]) -> list[int]:
        """Returns the indices of (row, token) pairs in flattened [rows, width], without tokens that the target lacks."""
        return [row * self._width + token for row, token in entries if token < self._width]

    def _indices(self, places: list[int]) -> torch.Tensor:
        return upload(torch.tensor(places, dtype=torch.int64), self._device)


def _path(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """Returns the drafted tokens from the tree's root to `node`, in order; none for node -1."""
    path: list[int] = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def _continuations(sequences: Mapping[tuple[int, ...], float]) -> _Continuations:
    """Returns a lookup of the sequences of at least two tokens by their prefix, which is all but their last token."""
    lookup: _Continuations = {}
    for (*prefix, last), value in sequences.items():
        if prefix:
            lookup.setdefault(len(prefix), {}).setdefault(tuple(prefix), []).append((last, value))
    return lookup


def _matches(lookup: _Continuations, recent: list[int]) -> list[tuple[int, float]]:
    """Returns the (last token, bias) of all sequences whose prefix `recent` ends with."""
    return [
        entry
        for length, prefixes in lookup.items()
        if len(recent) >= length
        for entry in prefixes.get(tuple(recent[len(recent) - length :]), ())
    ]
