"""Speculative decoding on your own models: faster tokens, the target's own output, and a view of
what happened.

    import specgen

    pair = specgen.load()
    print(pair.generate("def fibonacci(n):").text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specgen.base.errors import SpecgenError
from specgen.base.grammars import Grammar
from specgen.base.machine import __version__
from specgen.base.types import Round, SamplingParams

if TYPE_CHECKING:
    from specgen.methods import METHODS
    from specgen.pair.loading import load
    from specgen.pair.pair import Pair
    from specgen.pair.prompts import Result

__all__ = [
    "METHODS",
    "Grammar",
    "Pair",
    "Result",
    "Round",
    "SamplingParams",
    "SpecgenError",
    "__version__",
    "load",
]


_LATER = {
    "load": "pair.loading",
    "Pair": "pair.pair",
    "Result": "pair.prompts",
    "METHODS": "methods",
}


def __getattr__(name: str) -> Any:
    """Imports the names in `_LATER` at their first use, because their modules, some with torch,
    take long to import."""
    if name in _LATER:
        return getattr(import_module(f"specgen.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
