"""What a run is made from: the checked request, the plan, and the result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, TypeVar

from specgen.errors import SpecgenError

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.methods import Method
    from specgen.setting_parsing import Settings
    from specgen.traces.trace_writer import RunInfo
    from specgen.types import Round, SamplingParams

T = TypeVar("T")
RESERVED = 4096  # at most so many new tokens are reserved in the caches, however large the limit is


@dataclass(frozen=True, slots=True)
class Plan:
    """A run that is ready to start. `info` describes it for traces, with its settings and seed in use."""

    run: Run
    method: Method
    settings: Settings
    info: RunInfo
    context_ends: bool  # the context is full before `max_new_tokens` are generated
    record: bool = False

    @property
    def seed(self) -> int:
        """The seed in use, chosen at random where none was given."""
        assert self.info.sampling.seed is not None
        return self.info.sampling.seed


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run. `summary` has the keys of a trace's summary line."""

    text: str
    token_ids: list[int]
    rounds: list[Round]
    summary: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The arguments of a run, checked. `limit` is the number of new tokens that fit into the context."""

    method: Method
    settings: Settings
    sampling: SamplingParams
    prompt_ids: list[int]
    limit: int

    @property
    def capacity(self) -> int:
        """Tokens to reserve in the caches."""
        return len(self.prompt_ids) + min(self.limit, RESERVED)

    @property
    def typical_length(self) -> int:
        """The context's length in the middle of the run."""
        return len(self.prompt_ids) + min(self.limit, RESERVED) // 2


def check_prompt_ids(prompt_ids: Iterable[Any], num_embeddings: int) -> list[int]:
    """The prompt's token ids as Python integers. Raises SpecgenError for an empty prompt or an id not below `num_embeddings`."""
    ids = []
    for token in prompt_ids:
        try:
            id_ = index(token)
        except TypeError:
            id_ = -1
        if not 0 <= id_ < num_embeddings:
            raise SpecgenError(f"the prompt holds the token id {token!r}", f"Ids go from 0 to {num_embeddings - 1}")
        ids.append(id_)
    if not ids:
        raise SpecgenError("the prompt is empty", "Give the model a text to continue")
    return ids


def fitting_tokens(prompt_length: int, wanted: int, context_limit: int) -> int:
    """How many of the `wanted` new tokens fit into the context. Raises SpecgenError where not even one does."""
    room = context_limit - prompt_length
    if room >= 1:
        return min(wanted, room)
    raise SpecgenError(
        f"the prompt is too long: {prompt_length:,} tokens and {wanted:,} new ones are {wanted - room:,} over "
        f"the target's {context_limit:,}",
        "Shorten the prompt; a smaller -n alone is not enough",
    )


def prepared(method: Method, value: T | None) -> T:
    """The value of a setting that is `auto`. Raises SpecgenError where `Pair.prepare` did not find one."""
    if value is None:
        raise SpecgenError(f"{method.name} is not prepared for this run", "Call pair.prepare with the same arguments first")
    return value
