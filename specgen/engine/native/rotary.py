"""Rotary position embeddings (RoPE): the inverse frequencies of each variant, and tables of rotations.

Frequencies and angles are computed in float32, operation by operation as transformers does it, so that the angles of far
positions agree too: there, one unit in the last place of a frequency is a visible angle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from specgen.engine.devices import release, upload
from specgen.engine.native.description import Rotary


def _denominators(theta: float, size: int) -> torch.Tensor:
    """Returns theta^(2i / size) for i = 0 to size / 2 - 1, [size / 2] float32."""
    return theta ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)


def default(theta: float, size: int) -> Rotary:
    """The frequencies of RoFormer (arXiv:2104.09864) for `size` rotated numbers per head."""
    return Rotary(_tuple(1.0 / _denominators(theta, size)))


def linear(theta: float, size: int, factor: float) -> Rotary:
    """Position interpolation (arXiv:2306.15595): all frequencies divided by `factor`."""
    return Rotary(_tuple((1.0 / _denominators(theta, size)) / factor))


def dynamic(theta: float, size: int, factor: float, length: int) -> Rotary:
    """Dynamic NTK scaling in runs of at most `length` tokens, the length from which on theta grows.

    Until then the frequencies are those of `default`, but for the rounding of theta.
    """
    growth: float = ((factor * length / length) - (factor - 1)) ** (size / (size - 2))
    return Rotary(_tuple(1.0 / _denominators(theta * growth, size)))


def llama3(theta: float, size: int, factor: float, low: float, high: float, original: int) -> Rotary:
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


def yarn(
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


def longrope(
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
