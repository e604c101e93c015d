"""How long a target's passes take here, by timing some: budgets in seconds are planned with it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from specgen.engine.devices import inference
from specgen.engine.forward_pass import BatchPass
from specgen.engine.loaded_model import LoadedModel

_TIMED_TOKENS = 48  # of a prompt, at most
_TIMED_PASSES = 3  # over a single token,
_TIMED_TEXTS = 8  # and over one of each of several texts


class Speed(NamedTuple):
    """The seconds of a target's pass over a single token (`one`), of each further token of a prompt
    in the same pass (`prompt`), and of each further text that gets a token in it (`text`)."""

    one: float
    prompt: float
    text: float

    def answers(self, number: int, prompt: int, seconds: float) -> float:
        """Returns how many tokens of each of so many answers can be generated together in that
        time, after prompts of `prompt` tokens."""
        left = seconds - self.one - number * prompt * self.prompt
        return max(0.0, left / (self.one + (number - 1) * self.text))


def measured_speed(target: LoadedModel, prompt: Sequence[int]) -> Speed:
    """Times a pass over a prompt (token ids), and passes after it of one and of several texts. A
    first pass is not timed."""
    ids = list(prompt[-min(_TIMED_TOKENS, target.context_limit - _TIMED_PASSES) :]) or [0]
    singles = [ids[:1]] * _TIMED_PASSES
    _timed_passes(target, [ids[:1]])
    first, *alone = _timed_passes(target, [ids, *singles])
    _, *together = _timed_passes(target, [ids[:1], *singles], _TIMED_TEXTS)
    one = min(alone)
    return Speed(
        one,
        max(0.0, first - one) / max(1, len(ids) - 1),
        max(0.0, min(together) - one) / (_TIMED_TEXTS - 1),
    )


@inference
def _timed_passes(
    target: LoadedModel, pieces: Sequence[Sequence[int]], texts: int = 1
) -> list[float]:
    """Runs one pass for each piece of a text (token ids), of which there are so many, and returns
    their seconds."""
    device = target.device
    cache = target.model.batch_cache(texts)
    cache.capacity = sum(map(len, pieces))
    seconds = []
    for piece in pieces:
        start = time.monotonic()
        keys = torch.arange(cache.length + len(piece), device=device)
        own = keys[cache.length :]
        visible = own[:, None] >= keys
        batch = BatchPass(
            torch.tensor([list(piece)] * texts, device=device),
            own.expand(texts, -1),
            visible.expand(texts, -1, -1),
            keys.expand(texts, -1),
            cache,
        )
        float(target.model.batch(batch, logits_to_keep=1).logits.sum())  # waits for the result
        cache.length = len(keys)
        seconds.append(time.monotonic() - start)
    return seconds
