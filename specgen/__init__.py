"""Speculative decoding on your own models: faster tokens, the target's own output, and a view of what happened.

import specgen
pair = specgen.load()
print(pair.generate("def fibonacci(n):").text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specgen.base.errors import SpecgenError
from specgen.base.machine import __version__
from specgen.base.types import Round, SamplingParams
from specgen.methods import METHODS

if TYPE_CHECKING:
    from specgen.pair.loading import load
    from specgen.pair.pair import Pair
    from specgen.pair.request import Result

__all__ = ["METHODS", "Pair", "Result", "Round", "SamplingParams", "SpecgenError", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """Imports `load`, `Pair` and `Result` at their first use, because their modules import torch, which takes seconds."""
    if name in ("load", "Pair", "Result"):
        from specgen.pair import loading, pair
        from specgen.pair import request as plan

        return getattr({"load": loading, "Pair": pair, "Result": plan}[name], name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
