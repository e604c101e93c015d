"""Says which differences between logits can be due to rounding, depending on the dtype.

Two forward passes that compute the same logits over different numbers of tokens round differently. The difference is below 1e-3
in float32. In 16-bit dtypes it is proportional to the largest logit.
"""

from __future__ import annotations

from collections.abc import Callable
from textwrap import shorten

import torch

from specgen.base.errors import is_out_of_memory

FLOAT32_TIE = 1e-3  # logits
_NARROW_TIES = {"bfloat16": 1 / 64, "float16": 1 / 256}  # as fractions of the largest logit
_FLOAT32_ERROR, _NARROW_ERROR = 1e-3, 0.1  # as fractions of the largest logit; a larger difference is a wrong computation


def tie_threshold(dtype: str, largest: float) -> float:
    """Returns the difference below which two logits of one token position count as equal, because rounding may have swapped them.

    `largest` is the largest logit of the position.
    """
    return _NARROW_TIES[dtype] * abs(largest) if dtype in _NARROW_TIES else FLOAT32_TIE


def logits_error(compute: Callable[[], torch.Tensor], reference: Callable[[], torch.Tensor]) -> str | None:
    """Compares logits with those of the model's own forward pass. Returns None if they agree.

    `compute()` returns the logits [n, vocabulary] to check, `reference()` those of the model's own pass, [n or more, vocabulary],
    of which the last n are compared. If they differ by more than rounding explains, or if computing them fails, returns the end
    of a message, such as "do not give its own logits". NaN in the model's own logits is ignored here, because decoding reports
    damaged weights.
    """
    try:
        logits = compute().float()
        own = reference()
        is_float32 = own.dtype == torch.float32
        own = own[-len(logits) :].float()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"fail ({shorten(str(error), 100, placeholder=' …')})"
    impossible = own == -torch.inf  # tokens that a head's vocabulary lacks
    same = torch.equal(impossible, logits == -torch.inf)
    logits, own = logits.masked_fill(impossible, 0.0), own.masked_fill(impossible, 0.0)
    allowed = (_FLOAT32_ERROR if is_float32 else _NARROW_ERROR) * float(own.abs().max())
    agree = bool(own.isnan().any()) or (same and float((logits - own).abs().max()) <= allowed)
    return None if agree else "do not give its own logits"
