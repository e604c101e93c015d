"""Reads the rotary embedding's settings from config.json: `rope_scaling` of older files, `rope_parameters` of newer ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from specgen.engine.native.description import Rotary, UnsupportedConfig
from specgen.engine.native.fields import Fields

TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
ALL_LAYERS = "all"  # the key in `Architecture.rotary` of models that rotate all their layers alike
FULL, SLIDING = "full_attention", "sliding_attention"  # the keys of models that do not
_ORIGINAL = "original_max_position_embeddings"
_KEYS = (
    "rope_type type rope_theta partial_rotary_factor factor attention_factor beta_fast beta_slow short_factor long_factor"
    " low_freq_factor high_freq_factor mscale mscale_all_dim truncate " + _ORIGINAL
).split()  # a type ignores the keys of other types


@dataclass(frozen=True, slots=True)
class RotaryDefaults:
    """A family's settings where config.json is silent.

    `theta` is the base of the frequencies; `local_theta` that of layers with a sliding window, in families that rotate these
    differently. `partial` is the share of each head that is rotated; None: the family knows no other share than 1. `original` is
    the context length in pre-training; None: the family has no such field of its own. `aliases` are other names for types.
    """

    theta: float = 10_000.0
    local_theta: float | None = None
    partial: float | None = None
    original: int | None = None
    aliases: Mapping[str, str] | None = None


class RotaryReading(NamedTuple):
    """The sets of frequencies by key, how many numbers of each head are rotated, and the longest context in tokens."""

    rotary: dict[str, Rotary]
    size: int
    limit: int


class _Set(NamedTuple):
    """What one set of frequencies is computed from. `length` is `max_position_embeddings`."""

    section: Fields
    theta: float
    size: int
    original: int
    length: int


def read_rotary(fields: Fields, defaults: RotaryDefaults, head_size: int, length: int) -> RotaryReading:
    """Reads a config's rotary settings. `length` is its `max_position_embeddings`.

    Raises UnsupportedConfig for types that are not known, for keys that are not known and for impossible values.
    """
    if defaults.local_theta is not None:
        return _per_layer(fields, defaults, head_size, length)
    section, parameters = fields.section("rope_scaling"), fields.section("rope_parameters")
    section = section or parameters or Fields({}, "rope_parameters.")
    theta = section.positive("rope_theta", fields.positive("rope_theta", defaults.theta))
    size = _rotated(fields, section, defaults, head_size)
    original = fields.integer(_ORIGINAL, defaults.original or section.integer(_ORIGINAL, length))
    kind, rotary = _rotary(_Set(section, theta, size, original, length), defaults)
    # Dynamic RoPE changes the frequencies with every token beyond this length; cached keys would keep the old ones.
    return RotaryReading({ALL_LAYERS: rotary}, size, original if kind == "dynamic" else length)


def _per_layer(fields: Fields, defaults: RotaryDefaults, head_size: int, length: int) -> RotaryReading:
    """Reads the settings of layers with and without a sliding window. Older files scale only the layers without."""
    scaling, nested = fields.section("rope_scaling"), fields.section("rope_parameters")
    if scaling is not None and (nested is not None or "rope_type" not in scaling):
        raise fields.refuse("rope_scaling")
    nested = nested or Fields({})
    thetas = {
        FULL: fields.positive("rope_theta", defaults.theta),
        SLIDING: fields.positive("rope_local_base_freq", defaults.local_theta),
    }
    sections = {key: nested.section(key) or Fields({}, f"rope_parameters.{key}.") for key in (FULL, SLIDING)}
    nested.refuse_unknown()
    sections[FULL] = scaling or sections[FULL]
    rotary, limit = {}, length
    for key, section in sections.items():
        if "truncate" in section:  # transformers looks for it in another place
            raise section.refuse("truncate")
        size = _rotated(fields, section, defaults, head_size)
        original = section.integer(_ORIGINAL, length)
        theta = section.positive("rope_theta", thetas[key])
        kind, rotary[key] = _rotary(_Set(section, theta, size, original, length), defaults)
        limit = min(limit, original) if kind == "dynamic" else limit
    return RotaryReading(rotary, size, limit)


def _rotated(fields: Fields, section: Fields, defaults: RotaryDefaults, head_size: int) -> int:
    """Returns how many numbers of each head are rotated."""
    share = section.positive("partial_rotary_factor", fields.positive("partial_rotary_factor", defaults.partial or 1.0))
    if share > 1 or (share != 1 and defaults.partial is None):
        raise UnsupportedConfig("partial_rotary_factor", share)
    size = int(head_size * share)
    if size < 2 or size % 2:
        raise UnsupportedConfig("head_dim" if share == 1 else "partial_rotary_factor", head_size if share == 1 else share)
    return size


def _rotary(settings: _Set, defaults: RotaryDefaults) -> tuple[str, Rotary]:
    """Returns the type of the frequencies and the frequencies."""
    section = settings.section
    section.ignore(*_KEYS)
    section.refuse_unknown()
    kind = section.raw("rope_type", section.raw("type", "default"))
    if defaults.aliases is not None:
        kind = defaults.aliases.get(kind, "") if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in TYPES:
        raise section.refuse("rope_type" if "rope_type" in section else "type")
    try:
        rotary = _frequencies(kind, settings)
    except ArithmeticError as error:
        raise section.refuse("rope_type") from error
    if not all(map(math.isfinite, (rotary.factor, *rotary.inverse_frequencies, *(rotary.long_inverse_frequencies or ())))):
        raise section.refuse("rope_type")
    return kind, rotary


def _frequencies(kind: str, settings: _Set) -> Rotary:
    """Reads the settings of type `kind` and computes its frequencies. Raises ArithmeticError for some impossible values."""
    from specgen.engine.native import rotary  # imports torch, which takes a second

    section, theta, size, original, length = settings
    if kind == "linear":
        return rotary.linear(theta, size, section.positive("factor"))
    if kind == "dynamic":
        return rotary.dynamic(theta, size, section.positive("factor"), length)
    if kind == "llama3":
        low, high = section.positive("low_freq_factor"), section.positive("high_freq_factor")
        return rotary.llama3(theta, size, section.positive("factor"), low, high, original)
    if kind == "yarn":
        factor = section.optional_positive("factor") or length / original
        both = section.raw("mscale") and section.raw("mscale_all_dim")
        mscales = (section.positive("mscale"), section.positive("mscale_all_dim")) if both else None
        betas = section.optional_positive("beta_fast") or 32, section.optional_positive("beta_slow") or 1
        attention_factor, truncate = section.optional_positive("attention_factor"), section.flag("truncate", True)
        return rotary.yarn(theta, size, factor, original, attention_factor, mscales, betas, truncate)
    if kind == "longrope":
        factor = section.optional_positive("factor") or length / original
        short, long = (section.numbers(name, size // 2) for name in ("short_factor", "long_factor"))
        return rotary.longrope(theta, size, factor, original, short, long, section.optional_positive("attention_factor"))
    return rotary.default(theta, size)
