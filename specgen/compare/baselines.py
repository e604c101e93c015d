"""The baselines of `specgen compare`: transformers' own `generate`, plain and assisted (with a
draft model). `compare.transformers_generate` runs them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from specgen.base.errors import SpecgenError
from specgen.base.settings import Setting, Settings
from specgen.base.types import SamplingParams
from specgen.methods.base import DraftModelMethod, Method

_DTYPE = {
    "dtype": Setting(
        "",
        (
            "of weights and computations; where empty, that of the target's computations. On a "
            "CPU in float32, a target that is stored in 16 bits is measured in its dtype, too"
        ),
        choices=("", "float32", "bfloat16", "float16"),
    )
}
_SETTINGS = {
    "k": Setting(
        0,
        (
            "tokens in a draft (with a heuristic schedule, in the first one); 0: "
            "transformers' own choice"
        ),
        0,
        1000,
    ),
    "schedule": Setting(
        "",
        "transformers' own choice where empty",
        choices=("", "constant", "heuristic", "heuristic_transient"),
    ),
    "threshold": Setting(
        -1.0, "a draft ends at a probability below it; -1: transformers' own choice, 0: off", -1, 1
    ),
    **_DTYPE,
}


class _Baseline(Method):
    """One of transformers' own methods, whose answers cannot be kept to a grammar."""

    def check_request(self, settings: Settings, sampling: SamplingParams) -> None:
        super().check_request(settings, sampling)
        if sampling.grammar is not None:
            raise SpecgenError(
                f"{self.name} cannot keep its answers to a schema, an expression or a grammar",
                "Leave it out of --methods",
            )


class TransformersGenerate(_Baseline):
    name = "transformers"
    paper = "transformers' generate"
    settings: ClassVar = _DTYPE


class TransformersAssisted(_Baseline, DraftModelMethod):
    name = "transformers-assisted"
    paper = "transformers' generate"
    settings: ClassVar = _SETTINGS


BASELINES: Mapping[str, Method] = {
    method.name: method for method in (TransformersGenerate(), TransformersAssisted())
}
