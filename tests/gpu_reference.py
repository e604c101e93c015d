"""Transformers' plain and assisted generation for `measure_gpu.py`: models of the same shapes, and the same forced acceptance."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from gpu_models import ForcedCandidates, Sizes, synchronize, transformers_model


def transformers_figures(
    sizes: Sizes, device: torch.device, prompt: Sequence[int], new_tokens: int, draft_length: int, rate: float
) -> dict[str, float]:
    """Tokens per second without the prefill, of plain and of assisted generation with this many tokens per draft."""
    from transformers.utils import logging

    logging.set_verbosity(logging.CRITICAL)  # of the end-of-sequence id that there is none of
    target = transformers_model(sizes.target, device, sizes.dtype)
    draft = transformers_model(sizes.draft, device, sizes.dtype)
    draft.generation_config.num_assistant_tokens = draft_length
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    ids = torch.tensor([list(prompt)], device=device)
    forced = ForcedCandidates(rate)
    options: dict[str, dict[str, Any]] = {
        "transformers": {},
        "transformers_assisted": {"assistant_model": draft, "logits_processor": [forced]},
    }
    found = {}
    for name, more in options.items():
        seconds = []
        for count in (2, new_tokens // 4, new_tokens, 2):  # the first calls warm up; the last one is the time of the prefill
            passes: list[int] = []
            hook = target.register_forward_pre_hook(lambda *_, passes=passes: passes.append(1))
            forced.drafted = 0
            synchronize(device)
            start = time.perf_counter()
            with torch.inference_mode(), forced.installed():
                output = target.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=count,
                    do_sample=False,
                    eos_token_id=-1,
                    pad_token_id=0,
                    **more,
                )
            synchronize(device)
            seconds.append(time.perf_counter() - start)
            hook.remove()
            if count == new_tokens:
                made = output.shape[1] - ids.shape[1]
                if forced.drafted:
                    found[f"{name}_acceptance_rate"] = (made - len(passes)) / forced.drafted
        found[f"{name}_tokens_per_second"] = (made - 2) / (seconds[2] - seconds[3])
    return found
