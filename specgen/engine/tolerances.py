"""Differences between logits that rounding explains, by dtype.

A forward pass over another number of tokens rounds differently: in float32 by less than 1e-3, in narrower dtypes by a share of
the largest logit.
"""

from __future__ import annotations

import torch

FLOAT32_TIE = 1e-3  # logits
_NARROW_TIES = {"bfloat16": 1 / 64, "float16": 1 / 256}  # shares of the largest logit
_FLOAT32_ERROR, _NARROW_ERROR = 1e-3, 0.1  # shares of the largest logit; an error in the computation is larger


def tie_threshold(dtype: str, largest: float) -> float:
    """The gap between two logits below which they tie, where the largest logit of the distribution is `largest`."""
    return _NARROW_TIES[dtype] * abs(largest) if dtype in _NARROW_TIES else FLOAT32_TIE


def logits_agree(logits: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether all logits are the expected ones but for rounding in the model's `dtype`.

    True where NaN are expected: decoding reports damaged weights.
    """
    allowed = (_FLOAT32_ERROR if dtype == torch.float32 else _NARROW_ERROR) * float(expected.abs().max())
    return bool(expected.isnan().any()) or float((logits - expected).abs().max()) <= allowed
