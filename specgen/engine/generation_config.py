"""Reads a model's generation_config.json: the tokens that end an output, and the penalties on its logits. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Lt, MinLen, Predicate

from specgen.base.errors import SpecgenError
from specgen.base.schema import check, parse_json, read_text

_FILE = "generation_config.json"
_LARGEST = 2.0**126  # factors of logits, which are float32: a larger one, or the inverse of one, would overflow
_NESTED = ("decoder", "generator", "text_config")  # where a config.json may keep the language model's own fields


def fits_float32_or_forbids(bias: float) -> bool:
    return bias == -math.inf or abs(bias) < _LARGEST


Count = Annotated[int, Ge(0)]
Ids = tuple[Count, ...]
Word = Annotated[Ids, MinLen(1)]
Bias = Annotated[float, Predicate(fits_float32_or_forbids)]


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The fields of a generation config that change which token is generated or when generation ends; None where not set.

    Sampling defaults such as `temperature` are not among them: `SamplingParams` replaces them. The fields from `num_beams` on are
    not supported, see `has_penalties`; their values are kept as they are in the file.
    """

    eos_token_id: Ids | None = None
    sequence_bias: tuple[tuple[Word, Bias], ...] | None = None
    repetition_penalty: Annotated[float, Gt(1 / _LARGEST), Lt(_LARGEST)] | None = None
    no_repeat_ngram_size: Count | None = None
    bad_words_ids: tuple[Word, ...] | None = None
    min_length: Count | None = None
    min_new_tokens: Count | None = None
    suppress_tokens: Ids | None = None
    begin_suppress_tokens: Ids | None = None
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
    path, found, hint = folder / _FILE, _with_nested(config), "Download or save it again: it may hold penalties"
    if path.is_file() or path.is_symlink():
        found = parse_json(read_text(path, "generation config", hint), str(path), hint, finite=False)
        if not isinstance(found, dict):
            raise SpecgenError(f"{path} is no JSON object", hint)
    else:
        path = folder / "config.json"
    return _checked(found, str(path))


def _checked(fields: Mapping[str, Any], where: str) -> GenerationConfig:
    known = {name: fields[name] for name in GenerationConfig.__slots__ if fields.get(name) is not None}
    if isinstance(ends := known.get("eos_token_id"), int):
        known["eos_token_id"] = [ends]
    return check(json.dumps(known), GenerationConfig, where, "Correct it, or download it again")


def eos_ids(
    config: Mapping[str, Any], generation: GenerationConfig, default_eos: int | list[int] | None, tokenizer_eos: int | None
) -> frozenset[int]:
    """Returns the ids of the tokens that end an output.

    They come from `generation`, else from `config` (a config.json), else they are `default_eos` (of the model's family), else
    `tokenizer_eos`. A null in config.json overrides the family's default. Raises SpecgenError if config.json's are no token ids.
    """
    found: Any = generation.eos_token_id
    if found is None:
        configured = _with_nested(config).get("eos_token_id", default_eos)
        found = _checked({"eos_token_id": tokenizer_eos if configured is None else configured}, "config.json").eos_token_id
    return frozenset(found or ())


def _with_nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `config`; the fields that it leaves unset are those of the language model's config inside it, if there is one."""
    nested: dict[str, Any] = next((config[name] for name in _NESTED if isinstance(config.get(name), dict)), {})
    return {**config, **{name: value for name, value in nested.items() if config.get(name) is None}}
