"""The requests to a draft worker (a process that runs the draft model), and its answers. Imports no torch.

A request is sent as a pickled pair: serial number, request. The answer is a pair too, with the serial number of its request:
None for `LoadModel`, a `DraftAnswer` for `DraftRequest`, or a SpecgenError for any request that failed. Other requests that
succeed get no answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from specgen.base.settings import Settings
from specgen.decoding.components import Components

if TYPE_CHECKING:
    from specgen.engine.generation_config import GenerationConfig
    from specgen.engine.text.translation import Translation


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Asks the worker to load a model. `name` appears in error messages, `folder` holds the weights.

    `device` and `dtype` are written as text, such as `cuda:0` and `bfloat16`; `threads` is the number of CPU threads to use.
    `backend` says whose forward pass to run, `quantise` what to round the weights to (see `ModelSource`). `translation` is
    between the target's tokens and the model's; None if both have the same.
    """

    name: str
    folder: str
    trust_remote_code: bool
    device: str
    dtype: str
    threads: int
    backend: str = "auto"
    translation: Translation | None = None
    quantise: str | None = None


@dataclass(frozen=True, slots=True)
class BeginRun:
    """Begins a run (the generation of one output) with the forward pass over its prompt.

    The serial number of this message becomes the run's number in later messages. `components` are sent without the models;
    `window` is the largest number of tokens in a draft. `offset` (bytes) is where the run's part of the shared memory begins.
    `penalties` are the target's generation config and end-of-sequence ids; None if the target has no penalties.
    """

    prompt_ids: Sequence[int]
    settings: Settings
    components: Components
    window: int
    offset: int
    penalties: tuple[GenerationConfig, frozenset[int]] | None


class DraftRequest(NamedTuple):  # pickled faster than a dataclass
    """Asks for a draft of at most `limit` tokens in the run with number `run`.

    `committed` are the output's new tokens since the last request; `unverified` are drafted tokens after them that the target is
    still verifying. `observed` are (drafted, accepted) token counts of the drafts verified since, for the length policy.
    The worker writes the draft's probabilities and logits to `slot` (0 or 1) of the shared memory.
    """

    run: int
    committed: Sequence[int]
    unverified: Sequence[int]
    observed: Sequence[tuple[int, int]]
    limit: int
    slot: int


class DraftAnswer(NamedTuple):
    """A drafted chain. Its `probs` and `logits` tensors are not in the message: they go through shared memory, where needed.

    `entropies` (nats) and `top_probs` (largest probability) have one number per token. `stop_reason` says why the draft ended;
    None only for an empty draft. `seconds` is the time that drafting took. `predicted` is that of `Draft`. `policy_state` is what
    the length policy had learned before it, where this depends on what only the worker knows; otherwise None.
    """

    tokens: Sequence[int]
    entropies: Sequence[float]
    top_probs: Sequence[float]
    stop_reason: str | None
    seconds: float
    predicted: Sequence[float] = ()
    policy_state: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class EndRun:
    """Ends the run with number `run`: the serial number of its `BeginRun` message."""

    run: int


@dataclass(frozen=True, slots=True)
class ForgetCache:
    """Clears the draft model's KV cache."""
