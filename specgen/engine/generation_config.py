"""Reads a model's generation_config.json: the tokens that end an output, and the penalties on its logits. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

from specgen.base.errors import SpecgenError

_FILE = "generation_config.json"
_LARGEST = 2.0**126  # factors of logits, which are float32: a larger one, or the inverse of one, would overflow
_NESTED = ("decoder", "generator", "text_config")  # where a config.json may keep the language model's own fields


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The fields of a generation config that change which token is generated or when generation ends; None where not set.

    Sampling defaults such as `temperature` are not among them: `SamplingParams` replaces them. The fields from `num_beams` on are
    not supported, see `has_penalties`; their values are kept as they are in the file.
    """

    eos_token_id: tuple[int, ...] | None = None
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] | None = None
    min_length: int | None = None
    min_new_tokens: int | None = None
    suppress_tokens: tuple[int, ...] | None = None
    begin_suppress_tokens: tuple[int, ...] | None = None
    num_beams: Any = None
    guidance_scale: Any = None
    encoder_repetition_penalty: Any = None
    encoder_no_repeat_ngram_size: Any = None
    forced_bos_token_id: Any = None
    forced_eos_token_id: Any = None
    exponential_decay_length_penalty: Any = None
    watermarking_config: Any = None
    penalty_alpha: Any = None
    dola_layers: Any = None


def read_generation_config(folder: Path, config: Mapping[str, Any]) -> GenerationConfig:
    """Returns the generation config of the model in `folder`, whose config.json holds `config`.

    If there is no generation_config.json, the same fields are taken from `config`, where old models keep them. Otherwise only the
    file counts. Raises SpecgenError for a file that cannot be read, and for a value of the wrong type.
    """
    path = folder / _FILE
    if path.is_file() or path.is_symlink():
        found = _json_object(path)
    else:
        path, found = folder / "config.json", _with_nested(config)
    fields = {name: found[name] for name in GenerationConfig.__slots__ if found.get(name) is not None}
    return GenerationConfig(**{name: _converted(str(path), name, value) for name, value in fields.items()})


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        problem = None if isinstance(found, dict) else "it is no JSON object"
    except OSError as error:
        problem = error.strerror or str(error)
    except (ValueError, RecursionError) as error:
        problem = f"it is not JSON ({' '.join(str(error).split())})"
    if problem is not None:
        raise SpecgenError(f"cannot read {path}: {problem}", "Download or save it again: it may hold penalties")
    return cast(dict[str, Any], found)


def eos_ids(
    config: Mapping[str, Any], generation: GenerationConfig, default_eos: int | list[int] | None, tokenizer_eos: int | None
) -> frozenset[int]:
    """Returns the ids of the tokens that end an output.

    They come from `generation`, else from `config` (a config.json), else they are `default_eos` (of the model's family), else
    `tokenizer_eos`. A null in config.json overrides the family's default. Raises SpecgenError if config.json's are no token ids.
    """
    if generation.eos_token_id is not None:
        return frozenset(generation.eos_token_id)
    configured = _with_nested(config).get("eos_token_id", default_eos)
    found = tokenizer_eos if configured is None else configured
    return frozenset(() if found is None else _converted("config.json", "eos_token_id", found))


def _with_nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `config`; the fields that it leaves unset are those of the language model's config inside it, if there is one."""
    nested: dict[str, Any] = next((config[name] for name in _NESTED if isinstance(config.get(name), dict)), {})
    return {**config, **{name: value for name, value in nested.items() if config.get(name) is None}}


def _converted(file: str, name: str, value: Any) -> Any:
    """Returns the JSON `value` of the field `name` in the type of `GenerationConfig`'s field."""
    if name not in _CONVERSIONS:
        return value
    convert, expected = _CONVERSIONS[name]
    converted = convert(value)
    if converted is None:
        text = " ".join(repr(value).split())
        shown = text if len(text) <= 60 else text[:59] + "…"
        raise SpecgenError(f"{file} sets {name} to {shown}", f"It has to be {expected}")
    return converted


# Conversions of JSON values. Each returns None for a value of the wrong type.


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> float:
    """Returns a number as a float; NaN, which is in no range, for what is no number."""
    try:
        return math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, OverflowError):
        return math.nan


def _count(value: Any) -> int | None:
    return value if _is_count(value) else None


def _penalty(value: Any) -> float | None:
    number = _number(value)
    return number if 1 / _LARGEST < number < _LARGEST else None


def _bias(value: Any) -> float | None:
    number = _number(value)
    return number if number == -math.inf or abs(number) < _LARGEST else None


def _ids(value: Any) -> tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list) and all(map(_is_count, value)) else None


def _id_or_ids(value: Any) -> tuple[int, ...] | None:
    return _ids([value] if isinstance(value, int) else value)


def _words(value: Any) -> tuple[tuple[int, ...], ...] | None:
    words = [_ids(word) for word in value] if isinstance(value, list) else [None]
    return tuple(word for word in words if word) if all(words) else None


def _biases(value: Any) -> tuple[tuple[tuple[int, ...], float], ...] | None:
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return None
    words, biases = _words([pair[0] for pair in value]), [_bias(pair[1]) for pair in value]
    if words is None:
        return None
    pairs = tuple((word, bias) for word, bias in zip(words, biases, strict=True) if bias is not None)
    return pairs if len(pairs) == len(value) else None


_CONVERSIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "eos_token_id": (_id_or_ids, "a token id or a list of token ids"),
    "sequence_bias": (_biases, "a list of pairs [list of token ids, number that float32 can hold]"),
    "repetition_penalty": (_penalty, "a number above 0 that float32 can hold"),
    "no_repeat_ngram_size": (_count, "a whole number of at least 0"),
    "bad_words_ids": (_words, "a list of lists of token ids"),
    "min_length": (_count, "a whole number of at least 0"),
    "min_new_tokens": (_count, "a whole number of at least 0"),
    "suppress_tokens": (_ids, "a list of token ids"),
    "begin_suppress_tokens": (_ids, "a list of token ids"),
}
