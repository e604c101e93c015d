"""The data of one decoding run (one prompt, one method): its checked arguments and its result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any

from specgen.base.errors import SpecgenError

if TYPE_CHECKING:
    from specgen.base.settings import Settings
    from specgen.base.types import Round, SamplingParams
    from specgen.engine.model_loading import LoadedModel
    from specgen.engine.text.tokenizer import Tokenizer
    from specgen.methods.method import Method

RESERVED = 4096  # KV caches are allocated for at most this many new tokens before a run; they grow if it generates more


@dataclass(frozen=True, slots=True)
class Request:
    """The checked arguments of a decoding run; see `Pair.request`.

    `settings` are the method's; a value that has to be measured is still `auto`. `limit` is the maximum number of new tokens:
    `max_new_tokens`, or fewer if the target's context has no room for them. `record`: each round also measures how close the
    target's and the draft's probabilities are at each drafted token. Raises SpecgenError if the method cannot decode with the
    sampling parameters, or if earlier outputs (setting `history`) would change the tokens of a sampled run with a seed.
    """

    method: Method
    settings: Settings
    sampling: SamplingParams
    prompt_ids: list[int]
    limit: int
    record: bool = False

    def __post_init__(self) -> None:
        self.method.check_sampling(self.sampling)
        if self.settings.values.get("history") and self.sampling.seed is not None and not self.sampling.greedy:
            raise SpecgenError(
                f"{self.method.name} with history=true draws other tokens with the same seed after other outputs",
                "Leave the seed or history out",
            )

    @property
    def typical_length(self) -> int:
        return typical_length(len(self.prompt_ids), self.limit)

    def text(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
        """Returns the text of the new tokens `token_ids`, cut before the first stop string."""
        detokenizer = tokenizer.detokenizer(self.prompt_ids)
        text = "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()
        return text[: min((text.index(stop) for stop in self.sampling.stop if stop in text), default=len(text))]


@dataclass(frozen=True, slots=True)
class Result:
    """The output of a finished decoding run. `text` ends before a stop string; `token_ids` are all new tokens.

    `summary` holds statistics of the run, the same as the last line of a trace file.
    """

    text: str
    token_ids: list[int]
    rounds: list[Round]
    summary: dict[str, Any]


def typical_length(prompt_length: int, limit: int) -> int:
    """Returns the context's length in tokens when half of the `limit` new ones are generated. A limit over `RESERVED` counts as
    `RESERVED`."""
    return prompt_length + min(limit, RESERVED) // 2


def check_prompt_ids(prompt_ids: Iterable[Any], num_embeddings: int) -> list[int]:
    """Returns the prompt's token ids as Python integers. Raises SpecgenError for an empty prompt or an id without embedding."""
    given = list(prompt_ids)
    if not given:
        raise SpecgenError("the prompt is empty", "Give the model a text to continue")
    for token in given:
        if not hasattr(token, "__index__") or not 0 <= index(token) < num_embeddings:
            raise SpecgenError(f"the prompt holds the token id {token!r}", f"Ids go from 0 to {num_embeddings - 1}")
    return [index(token) for token in given]


def fitting_tokens(prompt_length: int, wanted: int, target: LoadedModel) -> int:
    """Returns how many of `wanted` new tokens fit into the target's context after the prompt.

    Raises SpecgenError if not even one token fits.
    """
    limit = target.max_tokens(prompt_length)
    room = limit - prompt_length
    if room >= 1:
        return min(wanted, room)
    raise SpecgenError(
        f"the prompt is too long: {prompt_length:,} tokens and {wanted:,} new ones are {wanted - room:,} over {limit:,}",
        "Shorten the prompt, or give a larger --context where the model allows it; a smaller -n alone is not enough",
    )
