"""The likelihood of a text under a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specgen.engine.inference_mode import inference
from specgen.engine.model_runner import ModelRunner
from specgen.types import Context

_CHUNK = 512  # tokens whose logits are in memory at once


@inference
def log_likelihood(runner: ModelRunner, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float:
    """The log-likelihood (nats) of `token_ids` after the prompt at temperature 1, computed in float32 in one pass over the text.

    For the model's own distribution the runner must have no logits processor.
    """
    context = Context(prompt_ids)
    total = torch.zeros((), device=runner.device)
    for start in range(0, len(token_ids), _CHUNK):
        tokens = list(token_ids[start : start + _CHUNK])
        logits = runner.logits(context, tokens[:-1]).logits.float()
        chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
        total += (chosen - logits.logsumexp(dim=-1)).sum()
        context.extend(tokens)
    return float(total)
