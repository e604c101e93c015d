"""Does a model keep what a session relies on? A few tokens tell, once a load, before anything is generated."""

from __future__ import annotations

from typing import Any

import torch

from specgen.engine.inference_mode import inference
from specgen.engine.model_runner import ModelRunner
from specgen.errors import SpecgenError, is_out_of_memory
from specgen.types import Context

TOLERANCE = {torch.float32: 1e-3}  # of the largest logit; narrower dtypes round each width of a pass differently
NARROW_TOLERANCE = 0.1


@inference
def check_rollback(runner: ModelRunner, model: Any, name: str) -> None:
    """Compare a row behind a rolled-back draft with the model's own, computed without a cache.

    Raises SpecgenError where they differ: attention that looks ahead, a cache that is not used, a mask that is not heeded.
    """
    ids = [token % runner.known_ids for token in (5, 9, 7, 3, 11, 4)]
    wrong = [token % runner.known_ids for token in (6, 8)]
    try:
        context = Context(ids[:3])
        runner.logits(context, wrong)
        context.extend([wrong[0], *ids[4:]])
        found = runner.logits(context).logits[0].float()
        own = model(input_ids=torch.tensor([context.ids], device=runner.device), use_cache=False).logits[0, -1].float()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise _refusal(name, f"a pass ends in {type(error).__name__}") from error
    if own.isnan().any():  # damaged weights: said when they are used
        return
    allowed = TOLERANCE.get(model.dtype, NARROW_TOLERANCE) * float(own.abs().max())
    if not float((found - own).abs().max()) <= allowed:
        raise _refusal(name, "its rows are not what it says without a cache")


def _refusal(name: str, why: str) -> SpecgenError:
    return SpecgenError(
        f"{name} does not work with a cache that is rolled back: {why}",
        "Take a causal language model with attention in every layer",
    )
