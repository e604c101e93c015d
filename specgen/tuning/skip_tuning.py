"""Searches the layers to skip on the prompts that a pair is tuned on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specgen.engine.decoder_layers import check_llama_structure
from specgen.errors import SpecgenError
from specgen.skip_search import NEW_TOKENS, PROMPT_TOKENS, PROMPTS, search_skips
from specgen.tuning.outcome import Candidate

if TYPE_CHECKING:
    from specgen.pair import Pair
    from specgen.tuning.recorded_drafts import ReferenceOutput


def tuned_skips(pair: Pair, outputs: Sequence[ReferenceOutput], seconds: float) -> Candidate:
    """Layer skipping with the fastest set that a search of about `seconds` finds on the beginnings of the outputs' prompts.

    Raises SpecgenError where the target's layers cannot be run one by one, or where the time is too short for the first guess.
    """
    check_llama_structure(pair.target.model, "layer skipping")
    prompts = [output.prompt_ids[:PROMPT_TOKENS] for output in outputs[:PROMPTS]]
    seconds_per_token = sum(output.seconds for output in outputs) / sum(len(output.token_ids) for output in outputs)
    if len(prompts) * NEW_TOKENS * seconds_per_token > seconds:
        raise SpecgenError("time was short for a search of the layers to skip", "A larger --budget helps")
    layers = pair.target.model.config.get_text_config().num_hidden_layers
    found = search_skips(layers, lambda skips: pair.skipping_speed(skips, prompts), seconds)
    return Candidate("selfsd", {"skip": found.skips}, True, found.tokens_per_second, found.tried)
