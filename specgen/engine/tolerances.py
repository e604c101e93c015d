"""Compares logits: which differences rounding explains, by dtype.

A forward pass over another number of tokens rounds differently: in float32 by less than 1e-3, in narrower dtypes by a share of
the largest logit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from specgen.errors import is_out_of_memory

FLOAT32_TIE = 1e-3  # logits
_NARROW_TIES = {"bfloat16": 1 / 64, "float16": 1 / 256}  # shares of the largest logit
_FLOAT32_ERROR, _NARROW_ERROR = 1e-3, 0.1  # shares of the largest logit; an error in the computation is larger


def tie_threshold(dtype: str, largest: float) -> float:
    """The gap between two logits below which they tie, where the largest logit of the distribution is `largest`."""
    return _NARROW_TIES[dtype] * abs(largest) if dtype in _NARROW_TIES else FLOAT32_TIE


def logits_error(compute: Callable[[], torch.Tensor], model: Any, ids: Sequence[int]) -> str | None:
    """Why `compute()` is not the logits [n, vocabulary] that the model itself gives after the last n of `ids`; None if it is.

    Rounding is allowed for. NaN in the model's own logits is no error here: decoding reports damaged weights.
    """
    try:
        logits = compute().float()
        own = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0, -len(logits) :].float()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"end in {type(error).__name__}"
    allowed = (_FLOAT32_ERROR if model.dtype == torch.float32 else _NARROW_ERROR) * float(own.abs().max())
    agree = bool(own.isnan().any()) or float((logits - own).abs().max()) <= allowed
    return None if agree else "do not give its own logits"
