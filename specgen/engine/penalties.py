"""A model's generation config: the tokens that end an output, and the penalties on its logits
(repetition penalty and the like). What a grammar forbids is masked here too.

Penalties change a position's logits depending on the tokens before it. Those that look for
sequences of tokens are transformers' own logits processors, which are imported only for a model
that has such penalties.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt, MinLen, Predicate

from specgen.base.errors import SpecgenError
from specgen.base.schema import check, parse_json, read_text
from specgen.base.types import Context, TokenPenalties
from specgen.engine.devices import upload
from specgen.engine.forward_pass import path_to

_FILE = "generation_config.json"
_NOTHING_ASKED = TokenPenalties()
# factors of logits, which are float32: a larger one, or the inverse of one, would overflow
_LARGEST = 2.0**126
# where a config.json may keep the language model's own fields
_NESTED = ("decoder", "generator", "text_config")
_ONES = ("num_beams", "guidance_scale", "encoder_repetition_penalty")
_ZEROS = ("encoder_no_repeat_ngram_size", "penalty_alpha")
_OTHERS = """
    forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty watermarking_config
    dola_layers
    """
# Fields that are not supported, with the values that change nothing.
_UNSUPPORTED = dict.fromkeys(_ONES, 1) | dict.fromkeys(_ZEROS, 0) | dict.fromkeys(_OTHERS.split())


def fits_float32_or_forbids(bias: float) -> bool:
    return bias == -math.inf or abs(bias) < _LARGEST


Count = Annotated[int, Ge(0)]
Ids = tuple[Count, ...]
Word = Annotated[Ids, MinLen(1)]
Text = Annotated[str, MinLen(1)]
Bias = Annotated[float, Predicate(fits_float32_or_forbids)]


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The fields of a generation config that change which token is generated or when generation
    ends; None where not set.

    Sampling defaults such as `temperature` are left out, because `SamplingParams` replaces them.
    `unsupported` has the fields that change logits in ways that are not supported (see
    `has_penalties`), with their values in the file.
    """

    eos_token_id: Ids | None = None
    stop_strings: tuple[Text, ...] | None = None
    sequence_bias: tuple[tuple[Word, Bias], ...] | None = None
    repetition_penalty: Annotated[float, Gt(1 / _LARGEST), Lt(_LARGEST)] | None = None
    no_repeat_ngram_size: Count | None = None
    bad_words_ids: tuple[Word, ...] | None = None
    min_length: Count | None = None
    min_new_tokens: Count | None = None
    suppress_tokens: Ids | None = None
    begin_suppress_tokens: Ids | None = None
    unsupported: Mapping[str, Any] = field(default_factory=dict)


def read_generation_config(folder: Path, config: Mapping[str, Any]) -> GenerationConfig:
    """Returns the generation config of the model in `folder`: the content of its
    generation_config.json.

    If there is no such file, the same fields are taken from `config`, the content of config.json,
    where old models keep them. Raises SpecgenError for a file that cannot be read, and for a value
    of the wrong type.
    """
    path = folder / _FILE
    values = _with_nested(config)
    hint = "Download or save it again: it may hold penalties"
    if path.is_file() or path.is_symlink():
        values = parse_json(
            read_text(path, "generation config", hint), str(path), hint, finite=False
        )
        if not isinstance(values, dict):
            raise SpecgenError(f"{path} is no JSON object", hint)
    else:
        path = folder / "config.json"
    return _checked(values, str(path))


def _checked(fields: Mapping[str, Any], where: str) -> GenerationConfig:
    known = {
        name: fields[name] for name in GenerationConfig.__slots__ if fields.get(name) is not None
    }
    known["unsupported"] = {
        name: fields[name]
        for name, neutral in _UNSUPPORTED.items()
        if fields.get(name) not in (None, neutral)
    }
    for name, kind in (("eos_token_id", int), ("stop_strings", str)):
        if isinstance(known.get(name), kind):  # one alone
            known[name] = [known[name]]
    return check(json.dumps(known), GenerationConfig, where, "Correct it, or download it again")


def eos_ids(
    config: Mapping[str, Any],
    generation: GenerationConfig,
    default_eos: int | list[int] | None,
    tokenizer_eos: int | None,
) -> frozenset[int]:
    """Returns the ids of the tokens that end an output.

    The first source that names any counts: `generation`, then `config` (a config.json), then
    `default_eos` (of the model's family), then `tokenizer_eos`. A null in config.json overrides the
    family's default. Raises SpecgenError if config.json's are no token ids.
    """
    ids: Any = generation.eos_token_id
    if ids is None:
        configured = _with_nested(config).get("eos_token_id", default_eos)
        ids = _checked(
            {"eos_token_id": tokenizer_eos if configured is None else configured}, "config.json"
        ).eos_token_id
    return frozenset(ids or ())


def _with_nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `config`, in which fields that are unset are taken from the language model's config
    inside it, if there is one."""
    nested: dict[str, Any] = next(
        (config[name] for name in _NESTED if isinstance(config.get(name), dict)), {}
    )
    return {**config, **{name: value for name, value in nested.items() if config.get(name) is None}}


def has_penalties(config: GenerationConfig, eos_ids: Collection[int], name: str) -> bool:
    """Whether a model's generation config sets penalties, such as a repetition penalty or
    suppressed tokens.

    A minimum length counts only if the model has end-of-sequence tokens (`eos_ids`). `name` is the
    model's name for the message. Raises SpecgenError for a setting that changes logits and is not
    supported.
    """
    for setting, value in config.unsupported.items():
        problem = (
            f"{name}'s generation_config.json sets {setting}={value!r}, which "
            "specgen does not support"
        )
        raise SpecgenError(
            problem, f"Remove {setting} from that file (from config.json if there is no such file)"
        )
    lists = (
        config.sequence_bias,
        config.bad_words_ids,
        config.suppress_tokens,
        config.begin_suppress_tokens,
    )
    numbers = (
        config.no_repeat_ngram_size,
        eos_ids and config.min_length,
        eos_ids and config.min_new_tokens,
    )
    return config.repetition_penalty not in (None, 1.0) or any(lists) or any(numbers)


class PenaltyProcessor:
    """Applies the penalties of the generation config `config`, and those of the context, to logits,
    with transformers' formulas and in transformers' order.

    A position's penalties depend on all tokens before it: the context and the drafted tokens from
    the tree's root on. `eos_ids` are the tokens that end an output, `width` is the target's
    vocabulary size. Raises SpecgenError if the config biases or forbids a sequence with a token
    that the vocabulary lacks, or forbids all tokens.
    """

    def __init__(
        self, config: GenerationConfig, eos_ids: Collection[int], width: int, device: torch.device
    ) -> None:
        self._config = config
        self._eos = eos_ids
        self._width = width
        self._device = device
        forbidden = [
            word for word in config.bad_words_ids or () if word not in {(end,) for end in eos_ids}
        ]
        for setting, sequences in (
            ("sequence_bias", dict(config.sequence_bias or ())),
            ("bad_words_ids", forbidden),
        ):
            if unknown := [token for sequence in sequences for token in sequence if token >= width]:
                raise SpecgenError(
                    (
                        f"the generation config's {setting} names token {unknown[0]}, but the "
                        f"vocabulary has {width:,} tokens"
                    ),
                    f"Correct {setting} in generation_config.json",
                )
        self._always = {word[0] for word in forbidden if len(word) == 1} | {
            *(config.suppress_tokens or ())
        }
        if self._always.issuperset(range(width)):
            raise SpecgenError(
                "the generation config forbids all tokens",
                "Correct suppress_tokens in generation_config.json",
            )
        # transformers' processors before and after the repetition penalty
        self._biases: list[Any] = []
        self._bans: list[Any] = []
        longer = [word for word in forbidden if len(word) > 1]
        if config.sequence_bias or longer or config.no_repeat_ngram_size:
            from transformers.generation import logits_process as rules

            if config.sequence_bias:
                self._biases.append(rules.SequenceBiasLogitsProcessor(dict(config.sequence_bias)))
            if longer:
                self._bans.append(
                    rules.SequenceBiasLogitsProcessor(dict.fromkeys(longer, -math.inf))
                )
            if config.no_repeat_ngram_size:
                self._bans.append(rules.NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))

    def __call__(
        self,
        logits: torch.Tensor,
        context: Context,
        tokens: Sequence[int],
        parents: Sequence[int],
        start: int,
    ) -> torch.Tensor:
        """Returns `logits` [n, vocabulary] with the penalties applied, as float32 [n, width].
        `logits` stays unchanged.

        The rows are the logits at indices `start`, `start + 1`, ...: index 0 follows the context,
        index i + 1 draft token i. `tokens` and `parents` are the draft, as for
        `ModelRunner.logits`. If the model is a draft model with another vocabulary size than the
        target's `width`, its logits are cut, or padded with -inf.
        """
        missing = self._width - logits.shape[-1]
        config = self._config
        paths = [path_to(tokens, parents, index - 1) for index in range(start, len(tokens) + 1)]
        if missing:
            logits = torch.nn.functional.pad(logits.float(), (0, missing), value=-torch.inf)
        else:
            logits = logits.to(torch.float32, copy=True)
        logits = self._processed(logits, self._biases, context, paths)
        asked = context.penalties or _NOTHING_ASKED
        repetition = asked.repetition or config.repetition_penalty
        if repetition not in (None, 1.0):
            seen = set(context.ids)
            flat = logits.view(-1)
            columns = self._places((0, token) for token in seen)
            drafted = self._places(
                (row, token) for row, path in enumerate(paths) for token in {*path} - seen
            )
            logits.index_copy_(1, columns, _repeated(logits.index_select(1, columns), repetition))
            flat.index_copy_(0, drafted, _repeated(flat.index_select(0, drafted), repetition))
        if asked.presence or asked.frequency:
            self._subtract(logits, context, paths, asked)
        logits = self._processed(logits, self._bans, context, paths)
        banned = [
            (row, token)
            for row, path in enumerate(paths)
            for token in self._row_bans(context, path)
        ]
        logits.view(-1)[self._places(banned)] = -torch.inf
        return logits

    def _processed(
        self, logits: torch.Tensor, rules: list[Any], context: Context, paths: list[list[int]]
    ) -> torch.Tensor:
        """Returns the logits after transformers' processors, which are called for one row at a
        time: paths differ in length."""
        if not rules:
            return logits
        rows = []
        for row, path in zip(torch.split(logits, 1), paths, strict=True):
            ids = upload(torch.tensor([context.ids + path]), self._device)
            for rule in rules:
                row = rule(ids, row)
            rows.append(row)
        return torch.cat(rows)

    def _subtract(
        self,
        logits: torch.Tensor,
        context: Context,
        paths: list[list[int]],
        asked: TokenPenalties,
    ) -> None:
        """Subtracts the presence and the frequency penalty from the logits of the output's tokens,
        those drafted on the path to a row included.

        Each logit is subtracted from once, so that it is rounded as in plain decoding, where the
        drafted tokens are part of the output already.
        """
        counts = Counter(context.ids[context.prompt_length :])
        drafted = {
            (row, token): counts[token] + number
            for row, path in enumerate(paths)
            for token, number in Counter(path).items()
        }

        def amounts(numbers: Iterable[int]) -> torch.Tensor:
            subtracted = [asked.presence + asked.frequency * number for number in numbers]
            return upload(torch.tensor(subtracted, dtype=torch.float32), self._device)

        width = self._width
        of_drafted = {place: number for place, number in drafted.items() if place[1] < width}
        of_output = {token: number for token, number in counts.items() if token < width}
        flat = logits.view(-1)
        places = self._places(of_drafted)
        lowered = flat.index_select(0, places) - amounts(of_drafted.values())
        columns = self._places((0, token) for token in of_output)
        logits.index_add_(1, columns, -amounts(of_output.values()).expand(len(logits), -1))
        flat.index_copy_(0, places, lowered)

    def _row_bans(self, context: Context, path: list[int]) -> set[int]:
        """Returns the tokens that are forbidden after the context and the drafted tokens `path`, by
        rules that only count tokens."""
        config = self._config
        new_tokens = len(context) - context.prompt_length + len(path)
        banned = {*self._always}
        if len(context) + len(path) < (config.min_length or 0) or new_tokens < (
            config.min_new_tokens or 0
        ):
            banned.update(self._eos)
        if new_tokens == 0:
            banned.update(config.begin_suppress_tokens or ())
        return banned

    def _places(self, entries: Iterable[tuple[int, int]]) -> torch.Tensor:
        """Returns the indices of (row, token) pairs in flattened [rows, width], without tokens that
        the target lacks."""
        places = [row * self._width + token for row, token in entries if token < self._width]
        return upload(torch.tensor(places, dtype=torch.int64), self._device)


def penalised_logits(
    processor: PenaltyProcessor | None,
    logits: torch.Tensor,
    context: Context,
    tokens: Sequence[int],
    parents: Sequence[int],
    start: int,
) -> torch.Tensor | None:
    """Returns `logits` with the penalties of the generation config, which the `processor` applies
    (None: it has none), and of the context, and with -inf for tokens that the context's constraint
    forbids; None if there is none of these. The other arguments are those of `PenaltyProcessor`.

    Where penalties forbid all tokens that the constraint allows, the constraint alone counts.
    """
    penalised = None
    if processor is None and context.penalties is not None:
        processor = _plain_processor(logits.shape[-1], logits.device)
    if processor is not None:
        penalised = processor(logits, context, tokens, parents, start)
    if context.constraint is None:
        return penalised

    forbidden = context.constraint.forbidden(context, tokens, parents, start)
    if penalised is None:
        return _masked(logits, forbidden)
    allowed = _masked(penalised, forbidden)
    is_empty = allowed.amax(dim=-1, keepdim=True) == -torch.inf
    width = penalised.shape[-1]
    alone = torch.nn.functional.pad(logits.float(), (0, width - logits.shape[-1]), value=-torch.inf)
    return torch.where(is_empty, _masked(alone, forbidden), allowed)


def _masked(logits: torch.Tensor, forbidden: torch.Tensor) -> torch.Tensor:
    """Returns `logits` [n, width] with -inf for tokens that are `forbidden` [n, the tokenizer's
    vocabulary], and for those that the tokenizer lacks."""
    fitting = torch.nn.functional.pad(
        forbidden, (0, logits.shape[-1] - forbidden.shape[-1]), value=True
    )
    return logits.masked_fill(upload(fitting, logits.device), -torch.inf)


@lru_cache(maxsize=8)
def _plain_processor(width: int, device: torch.device) -> PenaltyProcessor:
    return PenaltyProcessor(GenerationConfig(), (), width, device)


def _repeated(logits: torch.Tensor, penalty: float) -> torch.Tensor:
    """Returns logits of tokens that occurred before, with the repetition penalty: times the penalty
    if negative, else divided by it."""
    return torch.where(logits < 0, logits * penalty, logits / penalty)
