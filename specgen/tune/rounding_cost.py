"""What rounding a target's weights costs in quality: its perplexity and its greedy tokens, beside those of the stored weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from specgen import demo
from specgen.engine.devices import free_memory
from specgen.engine.inference_mode import inference
from specgen.engine.model import Model
from specgen.engine.model_loading import LoadedModel, load_weights

TOKENS = 512  # of the bundled text
_ROWS = 128  # logits that are normalised at once
_BYTES = 5  # per parameter, of the stored model in float32


class RoundingCost(NamedTuple):
    """The perplexities of a text of so many `tokens` under the rounded and the stored weights.

    `changed` is the share of the text's tokens after which the two have different most likely next tokens.
    """

    tokens: int
    rounded_perplexity: float
    stored_perplexity: float
    changed: float


@inference
def rounding_cost(target: LoadedModel, announce: Callable[[str], None]) -> RoundingCost | None:
    """Compares the target, whose weights are rounded, with the stored weights on the first `TOKENS` tokens of the bundled text.

    Loads the stored weights besides, in float32. Returns None if the target's weights are not rounded, or if the free memory may
    be too small for the stored ones. `announce` is called with a short description of the step.
    """
    free = free_memory(target.device)
    if target.quantise is None or (free is not None and free < _BYTES * sum(target.prepared.parameters.values())):
        return None
    announce("comparing the rounded with the stored weights")
    ids = target.tokenizer.encode("\n\n".join(demo.documents()[:100]))[: min(TOKENS, target.context_limit)]
    stored = replace(target.prepared, source=replace(target.prepared.source, quantise=None, wide_attention=False))
    rounded_loss, rounded_choices = _predictions(target.model, ids)
    stored_loss, stored_choices = _predictions(load_weights(stored, torch.float32, target.device), ids)
    changed = float((rounded_choices != stored_choices).float().mean())
    return RoundingCost(len(ids), math.exp(rounded_loss), math.exp(stored_loss), changed)


def _predictions(model: Model, ids: list[int]) -> tuple[float, torch.Tensor]:
    """Returns the mean loss of the tokens after the first in nats, and the most likely token after each but the last."""
    logits, labels, losses = model.reference_logits(ids)[:-1], torch.tensor(ids[1:], device=model.device), []
    for rows, expected in zip(torch.split(logits, _ROWS), torch.split(labels, _ROWS), strict=True):
        losses.append(torch.nn.functional.cross_entropy(rows.float(), expected, reduction="none"))
    return float(torch.cat(losses).mean()), logits.argmax(1)
