"""The notation for the layers that Self-SD skips in drafting. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from specgen.base.errors import SpecgenError

_SKIPPED = re.compile(r"(\d{1,9})([am]?)")


@dataclass(frozen=True, slots=True)
class SkippedLayers:
    """The layers (indices from 0) whose attention is skipped, and those whose MLP is skipped.
    Called z in the Self-SD paper."""

    attention: frozenset[int]
    mlp: frozenset[int]

    @classmethod
    def parse(cls, text: str, layers: int) -> Self:
        """Reads the notation of the `skip` setting: `3+5a+7m` skips layer 3, the attention of layer
        5 and the MLP of layer 7.

        `layers` is the model's number of layers. Raises SpecgenError for another notation, and for
        layers that do not exist.
        """
        skipped: dict[str, set[int]] = {"a": set(), "m": set()}
        for part in text.split("+"):
            match = _SKIPPED.fullmatch(part.strip())
            if match is None:
                raise SpecgenError(
                    f"skip is {text!r}",
                    "Write layers as 3+5a+7m (a: its attention alone, m: its MLP alone), or auto",
                )
            layer = int(match[1])
            if layer >= layers:
                raise SpecgenError(
                    f"skip names layer {layer}",
                    f"The target has the layers 0 to {layers - 1}",
                )
            for block in match[2] or "am":
                skipped[block].add(layer)
        return cls(frozenset(skipped["a"]), frozenset(skipped["m"]))

    def __str__(self) -> str:
        kinds = (
            (self.attention & self.mlp, ""),
            (self.attention - self.mlp, "a"),
            (self.mlp - self.attention, "m"),
        )
        return "+".join(f"{index}{mark}" for indices, mark in kinds for index in sorted(indices))
