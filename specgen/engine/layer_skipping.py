"""Layer skipping (Self-SD, Zhang et al. 2023): the target drafts for itself with some attention blocks and MLPs left out.

Drafting uses the target's KV cache: it reads the keys and values of the committed tokens, and writes those of drafted tokens
after them. The drafted tokens' keys and values are reused while the draft grows, and dropped when the target itself runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from specgen.base.errors import SpecgenError
from specgen.base.types import Context
from specgen.engine.forward_pass import LayerPart, ModelOutput, chain_parents
from specgen.engine.inference_mode import inference
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model import Model
from specgen.engine.model_runner import ModelRunner

_PART = re.compile(r"(\d+)([am]?)")


@dataclass(frozen=True, slots=True)
class SkippedLayers:
    """The layers (indices from 0) whose attention is skipped, and those whose MLP is skipped. Called z in the Self-SD paper."""

    attention: frozenset[int]
    mlp: frozenset[int]

    @classmethod
    def parse(cls, text: str, layers: int) -> Self:
        """Reads the notation of the `skip` setting: `3+5a+7m` skips layer 3, the attention of layer 5 and the MLP of layer 7.

        `layers` is the model's number of layers. Raises SpecgenError for another notation, and for layers that do not exist.
        """
        attention: set[int] = set()
        mlp: set[int] = set()
        for part in text.split("+"):
            found = _PART.fullmatch(part.strip())
            if found is None:
                raise SpecgenError(
                    f"skip is {text!r}", "Write layers as 3+5a+7m (a: its attention alone, m: its MLP alone), or auto"
                )
            index = int((found[1].lstrip("0") or "0")[:9])  # longer numbers name no layer either
            if index >= layers:
                raise SpecgenError(f"skip names layer {index}", f"The target has the layers 0 to {layers - 1}")
            if found[2] != "m":
                attention.add(index)
            if found[2] != "a":
                mlp.add(index)
        return cls(frozenset(attention), frozenset(mlp))

    def __str__(self) -> str:
        kinds = ((self.attention & self.mlp, ""), (self.attention - self.mlp, "a"), (self.mlp - self.attention, "m"))
        return "+".join(f"{index}{mark}" for indices, mark in kinds for index in sorted(indices))


class LayerSkippingRunner(ModelRunner):
    """Runs the target without the layers in `skips`, to draft chains. Shares the KV cache of the runner `target`.

    `model` is the target's model. Raises SpecgenError if its layers cannot be run one by one.
    """

    def __init__(
        self, target: ModelRunner, model: Model, skips: SkippedLayers, penalties: PenaltyProcessor | None = None
    ) -> None:
        model.check_layers("layer skipping")
        layers = range(model.shape.num_layers)
        parts = [LayerPart(index, index not in skips.attention, index not in skips.mlp) for index in layers]
        forward = model.forward([part for part in parts if part.attention or part.mlp])
        super().__init__(model, penalties, forward, target.cache)
        self._target = target
        self._shared_at = -1  # the number returned by the target's `share_prefix` when this runner last used the shared cache

    @inference
    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        """Returns the logits of the model without the skipped layers, as `ModelRunner.logits`. Raises SpecgenError for a tree."""
        if parents is not None and list(parents) != list(chain_parents(len(draft))):
            raise SpecgenError("layer skipping drafts no trees", "Take width=1")
        committed, shared_at = self._target.share_prefix(context)
        if shared_at != self._shared_at:
            self._cached.set_committed(context, committed)
            self._shared_at = shared_at
        return super().logits(context, draft, start=start)
