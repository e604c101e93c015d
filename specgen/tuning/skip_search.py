"""Which layers Self-SD is to skip: z scored by measured greedy tokens a second on a few prompts (Zhang et al. 2023, section 3.3).

The authors search with 1,000 trials of a Bayesian optimiser. A minute has to do here, so it begins with good guesses, evenly
spread or in the middle of the stack, and goes on from the best one a flip at a time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specgen.compare.prompts import examples_file, load_prompts
from specgen.errors import SpecgenError
from specgen.tuning.outcome import Candidate
from specgen.types import SamplingParams

if TYPE_CHECKING:
    from specgen.engine.layer_skipping import SkippedLayers
    from specgen.pair import Pair
    from specgen.tuning.recorded_drafts import ReferenceOutput

SECONDS = 10.0
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 32, 32  # the authors: 8 prompts of 32 tokens


@dataclass(frozen=True, slots=True)
class FoundSkips:
    """The best z as it is written in settings, its speed, and how many were tried."""

    skips: str
    tokens_per_second: float
    tried: int


def search_skips(
    pair: Pair, layers: int, *, prompts: Sequence[Sequence[int]] | None = None, seconds: float | None = None, seed: int = 0
) -> FoundSkips:
    """Search for about `seconds` (None: `SECONDS`); at least the first guess is measured. `prompts` are token ids; None: of the
    examples."""
    from specgen.engine.layer_skipping import SkippedLayers

    deadline = time.perf_counter() + (SECONDS if seconds is None else seconds)
    texts = _prompts(pair) if prompts is None else prompts
    rng = random.Random(seed)
    speeds: dict[str, float] = {}
    for skips in _guesses(layers):
        if speeds and time.perf_counter() >= deadline:
            break
        speeds.setdefault(str(skips), _speed(pair, skips, texts))
    best = max(speeds, key=lambda text: speeds[text])
    while time.perf_counter() < deadline:
        tried = _flipped(SkippedLayers.parse(best, layers), layers, rng)
        text = str(tried)
        if not text or text in speeds:
            if len(speeds) >= 4**layers - 1:
                break
            continue
        speeds[text] = _speed(pair, tried, texts)
        if speeds[text] > speeds[best]:  # once more, in turn: a lucky measurement is no better z
            again = _speed(pair, SkippedLayers.parse(best, layers), texts), _speed(pair, tried, texts)
            speeds[best], speeds[text] = max(speeds[best], again[0]), min(speeds[text], again[1])
            best = text if speeds[text] > speeds[best] else best
    return FoundSkips(best, speeds[best], len(speeds))


def tuned_skips(pair: Pair, answers: Sequence[ReferenceOutput], seconds: float) -> Candidate:
    """Layer skipping with the best layers that a search of about `seconds` finds on the beginnings of the answers' prompts.

    Raises SpecgenError where the model cannot be taken apart, or where there is no time to measure a first guess.
    """
    from specgen.engine.decoder_layers import check_llama_structure

    check_llama_structure(pair.target.model, "layer skipping")
    some = [answer.prompt_ids[:PROMPT_TOKENS] for answer in answers[:PROMPTS]]
    a_token = sum(answer.seconds for answer in answers) / sum(len(answer.token_ids) for answer in answers)
    if len(some) * NEW_TOKENS * a_token > seconds:
        raise SpecgenError("time was short for a search of the layers to skip", "A larger --budget helps")
    config = pair.target.model.config.get_text_config()
    found = search_skips(pair, config.num_hidden_layers, prompts=some, seconds=seconds)
    return Candidate("selfsd", {"skip": found.skips}, True, found.tokens_per_second, found.tried)


def _guesses(layers: int) -> Iterator[SkippedLayers]:
    """Half of the layers, a third, all between the outer ones; whole, and attentions alone. Never the first or the last first."""
    from specgen.engine.layer_skipping import SkippedLayers

    inner = range(1, layers - 1) if layers > 2 else range(layers)
    middle = len(inner) // 2
    sets = (
        inner[::2],
        inner[1::2],
        inner[::3],
        inner[middle - middle // 2 : middle + middle // 2 + 1],
        [number for number in inner if number % 3],
        inner,
    )
    for numbers in sets:
        chosen = frozenset(numbers)
        if chosen:
            yield SkippedLayers(chosen, chosen)
            yield SkippedLayers(chosen, frozenset())


def _flipped(skips: SkippedLayers, layers: int, rng: random.Random) -> SkippedLayers:
    """One or two of z's bits turned."""
    from specgen.engine.layer_skipping import SkippedLayers

    attention, mlp = set(skips.attention), set(skips.mlp)
    for _ in range(rng.choice((1, 1, 2))):
        number = rng.randrange(layers)
        kind = rng.randrange(3)
        if kind != 1:
            attention ^= {number}
        if kind != 0:
            mlp ^= {number}
    return SkippedLayers(frozenset(attention), frozenset(mlp))


def _speed(pair: Pair, skips: SkippedLayers, prompts: Sequence[Sequence[int]]) -> float:
    """Generated tokens a second behind the prefill."""
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    tokens, seconds = 0, 0.0
    for ids in prompts:
        for round_ in pair.rounds(list(ids), "selfsd", sampling, skip=str(skips)):
            if round_.mode != "prefill":
                tokens += len(round_.token_ids)
                seconds += sum(round_.seconds.values())
    return tokens / seconds if seconds else 0.0


def _prompts(pair: Pair) -> list[list[int]]:
    """The beginnings of a few examples, as far as they fit into half of the target's context."""
    most = min(PROMPT_TOKENS, pair.target.context_limit // 2)
    found = [pair.tokenizer.encode(prompt.text)[:most] for prompt in load_prompts(examples_file(), limit=PROMPTS)]
    if not any(found):
        raise SpecgenError("the target's tokenizer knows nothing of the example prompts", "Name the layers: skip=3+5+7")
    return [ids for ids in found if ids]
