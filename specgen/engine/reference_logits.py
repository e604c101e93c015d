"""A row of logits as the model itself gives it, by one pass without a cache: what every other way of computing it is held to."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch

from specgen.engine.inference_mode import inference
from specgen.engine.model_loading import LoadedModel
from specgen.types import Context


@inference
def reference_logits(loaded: LoadedModel, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
    """The logits [vocabulary], in float32, after the prompt and `token_ids`, reshaped by the model's own penalties."""
    model = loaded.model
    context = Context(prompt_ids)
    if token_ids:
        context.extend(token_ids)
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": 1} if keeps else {}
    output = model(input_ids=torch.tensor([context.ids], device=loaded.device), use_cache=False, **options)
    row: torch.Tensor = output.logits[0, -1:]
    penalties = loaded.penalties_on(loaded.device, row.shape[-1])
    if penalties is not None:
        row = penalties(row, context, [], [], 0)
    return row[0].float()
