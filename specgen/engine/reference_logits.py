"""Logits by one forward pass without a cache: the reference that every other computation is compared with."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch

from specgen.engine.inference_mode import inference
from specgen.engine.model_loading import LoadedModel
from specgen.types import Context


@inference
def reference_logits(loaded: LoadedModel, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
    """The float32 logits [vocabulary] after the prompt and `token_ids`, with the model's own penalties."""
    model = loaded.model
    context = Context(prompt_ids)
    if token_ids:
        context.extend(token_ids)
    takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": 1} if takes_logits_to_keep else {}
    output = model(input_ids=torch.tensor([context.ids], device=loaded.device), use_cache=False, **options)
    logits: torch.Tensor = output.logits[0, -1:]
    penalties = loaded.penalties_on(loaded.device, logits.shape[-1])
    if penalties is not None:
        logits = penalties(logits, context, [], [], 0)
    return logits[0].float()
