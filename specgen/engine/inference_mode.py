"""No gradients, and no bookkeeping for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def inference(function: Callable[P, T]) -> Callable[P, T]:
    """Run `function` in inference mode. Unlike torch's own decorator it costs nothing where that mode is on already, as it is
    for a draft model's passes; and unlike a `with` around a generator's body, it never leaks the mode into the caller."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode():
            return function(*args, **kwargs)

    return run
