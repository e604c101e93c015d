"""Rotary position embeddings (RoPE): a config's settings, the inverse frequencies of each variant, and tables of rotations.

Settings are in `rope_scaling` of older files, in `rope_parameters` of newer ones. Frequencies and angles are computed in float32,
operation by operation as transformers does it, so that the angles of far positions agree too: there, one unit in the last place
of a frequency is a visible angle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specgen.engine.devices import release, upload
from specgen.engine.native.architecture import Fields, Rotary, UnsupportedConfig

_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
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
    if not isinstance(kind, str) or kind not in _TYPES:
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
    section, theta, size, original, length = settings
    if kind == "linear":
        return _linear(theta, size, section.positive("factor"))
    if kind == "dynamic":
        return _dynamic(theta, size, section.positive("factor"), length)
    if kind == "llama3":
        low, high = section.positive("low_freq_factor"), section.positive("high_freq_factor")
        return _llama3(theta, size, section.positive("factor"), low, high, original)
    if kind == "yarn":
        factor = section.optional_positive("factor") or length / original
        both = section.raw("mscale") and section.raw("mscale_all_dim")
        mscales = (section.positive("mscale"), section.positive("mscale_all_dim")) if both else None
        betas = section.optional_positive("beta_fast") or 32, section.optional_positive("beta_slow") or 1
        attention_factor, truncate = section.optional_positive("attention_factor"), section.flag("truncate", True)
        return _yarn(theta, size, factor, original, attention_factor, mscales, betas, truncate)
    if kind == "longrope":
        factor = section.optional_positive("factor") or length / original
        short, long = (section.numbers(name, size // 2) for name in ("short_factor", "long_factor"))
        return _longrope(theta, size, factor, original, short, long, section.optional_positive("attention_factor"))
    return _default(theta, size)


def _denominators(theta: float, size: int) -> torch.Tensor:
    """Returns theta^(2i / size) for i = 0 to size / 2 - 1, [size / 2] float32."""
    return theta ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)


def _default(theta: float, size: int) -> Rotary:
    """The frequencies of RoFormer (arXiv:2104.09864) for `size` rotated numbers per head."""
    return Rotary(_tuple(1.0 / _denominators(theta, size)))


def _linear(theta: float, size: int, factor: float) -> Rotary:
    """Position interpolation (arXiv:2306.15595): all frequencies divided by `factor`."""
    return Rotary(_tuple((1.0 / _denominators(theta, size)) / factor))


def _dynamic(theta: float, size: int, factor: float, length: int) -> Rotary:
    """Dynamic NTK scaling in runs of at most `length` tokens, the length from which on theta grows.

    Until then the frequencies are those of `default`, but for the rounding of theta.
    """
    growth: float = ((factor * length / length) - (factor - 1)) ** (size / (size - 2))
    return Rotary(_tuple(1.0 / _denominators(theta * growth, size)))


def _llama3(theta: float, size: int, factor: float, low: float, high: float, original: int) -> Rotary:
    """The frequencies of Llama 3.1: wavelengths above original / `low` tokens are stretched by `factor`, those below
    original / `high` stay as they are, and those between are blended. `original` is the context length in pre-training.
    """
    frequencies = 1.0 / _denominators(theta, size)
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    share = (original / wavelengths - low) / (high - low)
    blended = (1 - share) * stretched / factor + share * stretched
    between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return Rotary(_tuple(torch.where(between, blended, stretched)))


def _yarn(
    theta: float,
    size: int,
    factor: float,
    original: int,
    attention_factor: float | None = None,
    mscales: tuple[float, float] | None = None,
    betas: tuple[float, float] = (32, 1),
    truncate: bool = True,
) -> Rotary:
    """YaRN (arXiv:2309.00071): high frequencies stay as they are, low ones are divided by `factor`, with a ramp between.

    The ramp goes from the frequency with `betas[0]` rotations in `original` tokens to the one with `betas[1]`; `truncate` rounds
    these bounds outward. cos and sin are multiplied by `attention_factor`. If it is None, the factor follows from `mscales`
    (`mscale` and `mscale_all_dim` in config.json); if these are None too, it is 0.1 ln(factor) + 1.
    """

    def bound(rotations: float) -> float:
        return (size * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    first, last = bound(betas[0]), bound(betas[1])
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    if first == last:
        last += 0.001
    denominators = _denominators(theta, size)
    kept = 1 - torch.clamp((torch.arange(size // 2, dtype=torch.float32) - first) / (last - first), 0, 1)
    frequencies = 1.0 / (factor * denominators) * (1 - kept) + 1.0 / denominators * kept
    if attention_factor is None:
        attention_factor = scale(1) if mscales is None else scale(mscales[0]) / scale(mscales[1])
    return Rotary(_tuple(frequencies), attention_factor)


def _longrope(
    theta: float,
    size: int,
    factor: float,
    original: int,
    short: Sequence[float],
    long: Sequence[float],
    attention_factor: float | None = None,
) -> Rotary:
    """LongRoPE (arXiv:2402.13753): each frequency is divided by its number in `short`, or in `long` if a run is longer than
    `original` tokens. cos and sin are multiplied by `attention_factor`, by default sqrt(1 + ln(factor) / ln(original)).
    """
    denominators = _denominators(theta, size)
    frequencies, long_frequencies = (
        1.0 / (torch.tensor(divisors, dtype=torch.float32) * denominators) for divisors in (short, long)
    )
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return Rotary(_tuple(frequencies), attention_factor, _tuple(long_frequencies), original)


def _tuple(frequencies: torch.Tensor) -> tuple[float, ...]:
    return tuple(frequencies.tolist())


class RotaryTable:
    """The rotations of all positions for one `Rotary`, as complex numbers factor (cos + i sin), computed when first needed.

    `round_to` is the dtype that cos and sin are rounded to, as transformers does in models of that dtype; None leaves them in
    float32. The tables are ordinary tensors, also if they are first needed in torch's inference mode. `long` in the methods
    selects LongRoPE's frequencies for long runs.
    """

    def __init__(self, rotary: Rotary, device: torch.device | str, round_to: torch.dtype | None = None) -> None:
        self._rotary, self._device, self._round_to = rotary, torch.device(device), round_to
        self.long_boundary = rotary.long_boundary
        width = len(rotary.inverse_frequencies)
        with torch.inference_mode(False):
            self._tables = {long: torch.empty((0, width), dtype=torch.complex64, device=device) for long in (False, True)}

    def rows(self, first: int, last: int, long: bool = False) -> torch.Tensor:
        """Returns the rotations [last - first, R / 2], complex64, of positions `first` to `last - 1`: a view."""
        return self._table(last, long)[first:last]

    def gather(self, positions: torch.Tensor, long: bool = False, end: int | None = None) -> torch.Tensor:
        """Returns the rotations [n, R / 2], complex64, of `positions` [n], which is on the table's device.

        `end` is a number above all positions. Without it, a GPU has to be waited for, because the table has to be long enough.
        """
        if end is None:
            end = int(positions.max()) + 1 if positions.numel() else 0
        return self._table(end, long).index_select(0, positions)

    def _table(self, length: int, long: bool) -> torch.Tensor:
        """Returns a table of at least `length` positions. Its size is doubled, so that one token at a time costs little."""
        table = self._tables[long]
        if length > table.shape[0]:
            with torch.inference_mode(False), torch.no_grad():
                longer = torch.cat((table, self._rotations(table.shape[0], max(length, 2 * table.shape[0], 256), long)))
            release(table)
            self._tables[long] = table = longer
        return table

    def _rotations(self, first: int, last: int, long: bool) -> torch.Tensor:
        frequencies = self._rotary.long_inverse_frequencies if long else self._rotary.inverse_frequencies
        if frequencies is None:
            raise ValueError("only LongRoPE has frequencies for long runs")
        positions = torch.arange(first, last, device=self._device).float()
        angles = positions[:, None] * upload(torch.tensor(frequencies, dtype=torch.float32), self._device)
        cos, sin = angles.cos() * self._rotary.factor, angles.sin() * self._rotary.factor
        if self._round_to is not None:
            cos, sin = cos.to(self._round_to).float(), sin.to(self._round_to).float()
        return torch.complex(cos, sin)


def rotate(heads: torch.Tensor, rotation: torch.Tensor) -> None:
    """Multiplies the first R numbers of heads [rows, heads, head size], as pairs of neighbours, with `rotation`, in place.

    `rotation` [rows, 1, R/2] holds complex numbers.
    """
    size = 2 * rotation.shape[-1]
    part = heads if size == heads.shape[2] else heads.narrow(2, 0, size)
    pairs = part.view(*part.shape[:2], size // 2, 2)
    if part.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotation)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(rotation)))
