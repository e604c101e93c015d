"""Rotary position embeddings (RoPE): a config's settings, the inverse frequencies of each variant,
and tables of rotations.

Settings are in `rope_scaling` of older files, in `rope_parameters` of newer ones. Frequencies and
angles are computed in float32, operation by operation as transformers does it, so that the angles
of far positions agree too: there, one unit in the last place of a frequency is a visible angle.
Transformers' own functions are taken but for the two commonest variants, because importing them
takes half a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from specgen.engine.devices import release, upload
from specgen.engine.native.architecture import Fields, Rotary, UnsupportedConfig

ALL_LAYERS = "all"  # the key in `Architecture.rotary` of models that rotate all their layers alike
# the keys of models that rotate layers with a sliding window differently
FULL = "full_attention"
SLIDING = "sliding_attention"
_ORIGINAL = "original_max_position_embeddings"
_NUMBERS = ["factor", "attention_factor", "beta_fast", "beta_slow"]
_NUMBERS += ["low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim"]
_OTHER_KEYS = (
    f"rope_type type rope_theta partial_rotary_factor short_factor long_factor truncate {_ORIGINAL}"
).split()
_PROPORTIONAL = "proportional"
_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RotaryDefaults:
    """A family's rotary settings where config.json is silent.

    `theta` is the base of the frequencies. `local_theta` is that of layers with a sliding window,
    in families that rotate these differently. `partial` is the share of each head that is rotated;
    None: the family always rotates whole heads. `original` is the context length in pre-training;
    None: the family has no such field of its own. `aliases` maps other names of types to the usual
    ones. `settings` replace missing `rope_parameters`. `ignored` are keys that have no effect.
    """

    theta: float = 10_000.0
    local_theta: float | None = None
    partial: float | None = None
    original: int | None = None
    aliases: Mapping[str, str] | None = None
    settings: Mapping[str, Any] | None = None
    ignored: tuple[str, ...] = ()


def read_rotary(
    fields: Fields, defaults: RotaryDefaults, head_size: int, length: int
) -> tuple[dict[str, Rotary], int, int]:
    """Reads a config's rotary settings. `length` is its `max_position_embeddings`, `head_size` the
    size of a head.

    Returns the sets of frequencies by their keys in `Architecture.rotary`, how many elements of
    each head are rotated, and the longest context in tokens. Raises UnsupportedConfig for an
    unknown type or key, and for an impossible value.
    """
    rotary = {}
    size = head_size
    limit = length
    for key, section, theta in _sections(fields, defaults):
        section.ignore(*defaults.ignored)
        size = _rotated(fields, section, defaults, head_size)
        original = fields.integer(
            _ORIGINAL, defaults.original or section.integer(_ORIGINAL, length)
        )
        kind, rotary[key] = _rotary(
            section, defaults.aliases, section.positive("rope_theta", theta), size, original, length
        )
        # Dynamic RoPE changes the frequencies with every token beyond this length; cached keys
        # would keep the old ones.
        limit = min(limit, original) if kind == "dynamic" else limit
    return rotary, size, limit


def _sections(fields: Fields, defaults: RotaryDefaults) -> list[tuple[str, Fields, float]]:
    """Returns the key, the settings and the default theta of each set of frequencies.

    Older files of families that rotate layers with a sliding window differently scale only the
    layers without.
    """
    scaling = fields.section("rope_scaling")
    parameters = fields.section("rope_parameters")
    theta = fields.positive("rope_theta", defaults.theta)
    if defaults.local_theta is None:
        return [
            (
                ALL_LAYERS,
                scaling or parameters or Fields(defaults.settings or {}, "rope_parameters."),
                theta,
            )
        ]
    if scaling is not None and (parameters is not None or "rope_type" not in scaling):
        raise fields.refuse("rope_scaling")
    nested = parameters or Fields(defaults.settings or {})
    full, sliding = (
        nested.section(key) or Fields({}, f"rope_parameters.{key}.") for key in (FULL, SLIDING)
    )
    nested.refuse_unknown()
    full = scaling or full
    for section in (full, sliding):
        if "truncate" in section:  # transformers looks for it in another place
            raise section.refuse("truncate")
    return [
        (FULL, full, theta),
        (SLIDING, sliding, fields.positive("rope_local_base_freq", defaults.local_theta)),
    ]


def _rotated(fields: Fields, section: Fields, defaults: RotaryDefaults, head_size: int) -> int:
    """Returns how many elements of each head are rotated, those by an angle of 0 included (Gemma
    4)."""
    if section.raw("rope_type") == _PROPORTIONAL:
        share = section.positive("partial_rotary_factor", 1.0)
        if head_size % 2 or not 1 <= int(share * head_size // 2) <= head_size // 2:
            raise section.refuse("partial_rotary_factor")
        return head_size
    default = defaults.partial or 1.0
    if defaults.partial is not None and "rotary_dim" in fields:  # MiniMax
        default = fields.integer("rotary_dim") / head_size
    share = section.positive(
        "partial_rotary_factor", fields.positive("partial_rotary_factor", default)
    )
    if share > 1 or (share != 1 and defaults.partial is None):
        raise UnsupportedConfig("partial_rotary_factor", share)
    size = int(head_size * share)
    if size < 2 or size % 2:
        raise UnsupportedConfig(
            "head_dim" if share == 1 else "partial_rotary_factor",
            head_size if share == 1 else share,
        )
    return size


def _rotary(
    section: Fields,
    aliases: Mapping[str, str] | None,
    theta: float,
    size: int,
    original: int,
    length: int,
) -> tuple[str, Rotary]:
    """Returns the type of the rotary embedding and its frequencies, for `size` rotated elements per
    head.

    `original` is the context length in pre-training, `length` is `max_position_embeddings`.
    """
    section.ignore(*_NUMBERS, *_OTHER_KEYS)  # a type ignores the keys of other types
    section.refuse_unknown()
    kind = section.raw("rope_type", section.raw("type", "default"))
    if aliases is not None:
        kind = aliases.get(kind, "") if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in (_TYPES if aliases is None else aliases.values()):
        raise section.refuse("rope_type" if "rope_type" in section else "type")
    settings: dict[str, Any] = {name: section.optional(section.positive, name) for name in _NUMBERS}
    settings |= {
        "rope_theta": theta,
        _ORIGINAL: original,
        "truncate": section.flag("truncate", True),
    }
    settings["share"] = section.positive("partial_rotary_factor", 1.0)
    is_long = kind == "longrope"
    if is_long:
        settings |= {
            name: section.numbers(name, size // 2) for name in ("short_factor", "long_factor")
        }
    try:
        frequencies, factor = _frequencies(kind, settings, size, length)
        long = (
            tuple(_frequencies(kind, settings, size, length, original + 1)[0]) if is_long else None
        )
    # TypeError: a number that the type needs is missing
    except (ArithmeticError, TypeError) as error:
        raise section.refuse("factor" if settings["factor"] is None else "rope_type") from error
    if not all(map(math.isfinite, (factor, *frequencies, *(long or ())))):
        raise section.refuse("rope_type")
    return kind, Rotary(tuple(frequencies), factor, long, original if is_long else None)


def _frequencies(
    kind: str, settings: Mapping[str, Any], size: int, length: int, tokens: int | None = None
) -> tuple[list[float], float]:
    """Returns the inverse frequencies [`size` / 2] for a run of `tokens` tokens (None: a short
    run), and the factor of cos and sin."""
    # arXiv:2104.09864
    plain = 1.0 / settings["rope_theta"] ** (
        torch.arange(0, size, 2, dtype=torch.int64).float() / size
    )
    if kind == "default":
        return plain.tolist(), 1.0
    if kind == _PROPORTIONAL:  # the pairs after these are not rotated
        return (
            plain[: int(settings["share"] * size // 2)] / (settings["factor"] or 1.0)
        ).tolist(), 1.0
    if kind == "llama3":
        return _llama3(plain, settings).tolist(), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    of_whole_heads = {"head_dim": size, "hidden_size": size, "num_attention_heads": 1}
    config = SimpleNamespace(
        rope_parameters=settings,
        max_position_embeddings=length,
        standardize_rope_params=lambda: None,
        **of_whole_heads,
    )
    divided, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), tokens)
    return divided.tolist(), factor


def _llama3(frequencies: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
    """Returns the frequencies of Llama 3.1: wavelengths above original / `low` tokens are stretched
    by `factor`, those below original / `high` stay as they are, and those between are blended.
    `original` is the context length in pre-training.
    """
    low, high, factor = (
        settings[name] for name in ("low_freq_factor", "high_freq_factor", "factor")
    )
    original = settings[_ORIGINAL]
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    share = (original / wavelengths - low) / (high - low)
    blended = (1 - share) * stretched / factor + share * stretched
    between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return torch.where(between, blended, stretched)


class RotaryTable:
    """The rotations of all positions for one `Rotary`, as complex numbers factor * (cos + i sin),
    computed when first needed.

    `round_to` is the dtype that cos and sin are rounded to, as transformers does in models of that
    dtype; None leaves them in float32. The tables are ordinary tensors, even if they are first
    needed in torch's inference mode. The methods' argument `long` selects LongRoPE's frequencies
    for long runs.
    """

    def __init__(
        self, rotary: Rotary, device: torch.device | str, round_to: torch.dtype | None = None
    ) -> None:
        self._rotary = rotary
        self._device = torch.device(device)
        self._round_to = round_to
        self.long_boundary = rotary.long_boundary
        width = len(rotary.inverse_frequencies)
        with torch.inference_mode(False):
            self._tables = {
                long: torch.empty((0, width), dtype=torch.complex64, device=device)
                for long in (False, True)
            }

    def rows(self, first: int, last: int, long: bool = False) -> torch.Tensor:
        """Returns the rotations [last - first, R / 2], complex64, of positions `first` to `last -
        1`, as a view; see `gather` for R."""
        return self._table(last, long)[first:last]

    def gather(self, positions: torch.Tensor, long: bool, end: int) -> torch.Tensor:
        """Returns the rotations [n, R / 2], complex64, of `positions` [n], a tensor on the table's
        device; R elements of a head are rotated.

        `end` is a number above all positions; it is given because finding it would make the host
        wait for a GPU.
        """
        return self._table(end, long).index_select(0, positions)

    def _table(self, length: int, long: bool) -> torch.Tensor:
        """Returns a table of at least `length` positions. Its size is doubled, so that one token at
        a time costs little."""
        table = self._tables[long]
        if length > table.shape[0]:
            with torch.inference_mode(False), torch.no_grad():
                longer = torch.cat(
                    (
                        table,
                        self._rotations(table.shape[0], max(length, 2 * table.shape[0], 256), long),
                    )
                )
            release(table)
            self._tables[long] = table = longer
        return table

    def _rotations(self, first: int, last: int, long: bool) -> torch.Tensor:
        frequencies = (
            self._rotary.long_inverse_frequencies if long else None
        ) or self._rotary.inverse_frequencies
        positions = torch.arange(first, last, device=self._device).float()
        angles = positions[:, None] * upload(
            torch.tensor(frequencies, dtype=torch.float32), self._device
        )
        cos = angles.cos() * self._rotary.factor
        sin = angles.sin() * self._rotary.factor
        if self._round_to is not None:
            cos = cos.to(self._round_to).float()
            sin = sin.to(self._round_to).float()
        return torch.complex(cos, sin)


def rotate(heads: torch.Tensor, rotation: torch.Tensor) -> None:
    """Rotates the first R elements of each head in `heads` [rows, heads, head size], as R/2 pairs
    of neighbours, in place.

    `rotation` [rows, 1, R/2] holds complex numbers, by which the pairs are multiplied.
    """
    size = 2 * rotation.shape[-1]
    part = heads if size == heads.shape[2] else heads.narrow(2, 0, size)
    pairs = part.view(*part.shape[:2], size // 2, 2)
    if part.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotation)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(rotation)))
