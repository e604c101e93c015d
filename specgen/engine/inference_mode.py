"""A decorator that runs a function in torch's inference mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def inference(function: Callable[P, T]) -> Callable[P, T]:
    """Run `function` in inference mode: no gradients, no autograd bookkeeping.

    Unlike torch's own decorator it costs nothing where the mode is on already, as in a draft model's forward passes.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode():
            return function(*args, **kwargs)

    return run
