"""What rounding a target's weights costs in quality: its perplexity and its greedy tokens, beside
those of the stored weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from specgen import demo
from specgen.base.measuring import Sample
from specgen.engine.devices import free_memory, inference
from specgen.engine.loaded_model import LoadedModel, load_weights
from specgen.engine.model import Model
from specgen.engine.precision import Precision

if TYPE_CHECKING:
    from specgen.pair.pair import Pair

TOKENS = 512  # of the bundled text
_ROWS = 128  # logits that are normalised at once
_SMALL = 1 << 30  # parameters, of a target for which it takes seconds
_BYTES = 5  # per parameter, of the stored model in float32


class RoundingCost(NamedTuple):
    """The perplexities of a text of so many `tokens` under the rounded and the stored weights.

    `changed` is the share of the text's tokens after which the two have different most likely next
    tokens.
    """

    tokens: int
    rounded_perplexity: float
    stored_perplexity: float
    changed: float


def rounding_cost(
    pair: Pair, announce: Callable[[str], None], *, is_small_only: bool = False
) -> RoundingCost | None:
    """Returns what rounding the target's weights costs, as it was measured on this machine before,
    or measures it now.

    Measuring runs both models on the beginning of the bundled text, and loads the stored weights
    once more, in float32. Returns None if the weights are not rounded, if the memory may be too
    small for the stored ones, and with `is_small_only` if it was not measured before and the target
    has more than `_SMALL` parameters.
    """
    target = pair.target
    free = free_memory(target.device)
    if target.precision.rounding is None:
        return None
    cost = pair.measurements.stored("rounding", (TOKENS,), _read, with_draft=False)
    parameters = sum(target.files.parameters.values())
    is_possible = (free is None or free >= _BYTES * parameters) and not (
        is_small_only and parameters > _SMALL
    )
    if cost is None and is_possible:
        announce("comparing the rounded with the stored weights")
        cost = _measure(target)
        pair.measurements.put(
            "rounding", (TOKENS,), Sample(cost._asdict(), 1, 1.0), with_draft=False
        )
    return cost


def _read(stored: Any) -> RoundingCost:
    return RoundingCost(**stored)


@inference
def _measure(target: LoadedModel) -> RoundingCost:
    ids = target.tokenizer.encode("\n\n".join(demo.documents()[:100]))[
        : min(TOKENS, target.context_limit)
    ]
    rounded_loss, rounded_choices = _predictions(target.model, ids)
    stored_loss, stored_choices = _predictions(
        load_weights(target.files, Precision(torch.float32), [target.device]), ids
    )
    changed = float((rounded_choices != stored_choices).float().mean())
    return RoundingCost(len(ids), math.exp(rounded_loss), math.exp(stored_loss), changed)


def _predictions(model: Model, ids: list[int]) -> tuple[float, torch.Tensor]:
    """Returns the mean loss of the tokens after the first in nats, and the most likely token after
    each but the last."""
    logits = model.reference_logits(ids)[:-1]
    labels = torch.tensor(ids[1:], device=model.device)
    losses = []
    for rows, expected in zip(torch.split(logits, _ROWS), torch.split(labels, _ROWS), strict=True):
        losses.append(torch.nn.functional.cross_entropy(rows.float(), expected, reduction="none"))
    return float(torch.cat(losses).mean()), logits.argmax(1)
