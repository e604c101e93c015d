"""A check at load time that a model works with a KV cache that is rolled back."""

from __future__ import annotations

from typing import Any

import torch

from specgen.engine.inference_mode import inference
from specgen.engine.model_runner import ModelRunner
from specgen.engine.tolerances import logits_agree
from specgen.errors import SpecgenError, is_out_of_memory
from specgen.types import Context


@inference
def check_rollback(runner: ModelRunner, model: Any, name: str) -> None:
    """Compare logits after a rolled-back draft with those of a forward pass without a cache.

    Raises SpecgenError if they differ: the attention is not causal, or the model ignores the cache or the mask.
    """
    ids = [token % runner.num_embeddings for token in (5, 9, 7, 3, 11, 4)]
    rejected = [token % runner.num_embeddings for token in (6, 8)]
    try:
        context = Context(ids[:3])
        runner.logits(context, rejected)
        context.extend([rejected[0], *ids[4:]])
        logits = runner.logits(context).logits[0].float()
        expected = model(input_ids=torch.tensor([context.ids], device=runner.device), use_cache=False).logits[0, -1].float()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise _refusal(name, f"a forward pass ends in {type(error).__name__}") from error
    if not logits_agree(logits, expected, model.dtype):
        raise _refusal(name, "its logits differ from those without a cache")


def _refusal(name: str, why: str) -> SpecgenError:
    return SpecgenError(
        f"{name} does not work with a cache that is rolled back: {why}",
        "Take a causal language model with attention in every layer",
    )
