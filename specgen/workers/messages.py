"""The requests to a draft worker process. Imports no torch.

A message is a pair of a serial number and a request, pickled by `multiprocessing.connection`. The worker answers `LoadModel` and
`DraftRequest`, and whatever fails: the serial number and None, a `DraftAnswer`, or the SpecgenError to raise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from specgen.decoding.components import Components
from specgen.setting_parsing import Settings


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Load a model: its name in messages, its folder, its device and dtype as text, and the number of CPU threads to use."""

    name: str
    folder: str
    trust_remote_code: bool
    device: str
    dtype: str
    threads: int


@dataclass(frozen=True, slots=True)
class BeginRun:
    """Begin a run, and run its prompt at once. The run's number is the serial number of this message.

    `components` have no models. `offset` is where the run's part of the shared memory begins, in bytes. `penalties` are the
    arguments of the target's penalty processor; None without penalties.
    """

    prompt_ids: Sequence[int]
    settings: Settings
    components: Components
    window: int
    offset: int
    penalties: Mapping[str, Any] | None


class DraftRequest(NamedTuple):  # pickled faster than a dataclass
    """Draft at most `limit` tokens in the run of that number.

    `committed` are the tokens committed since the last request, `unverified` those pending verification. `observed` are pairs of
    drafted and accepted tokens for the policy. The distributions go to `slot` (0 or 1) of the shared memory.
    """

    run: int
    committed: Sequence[int]
    unverified: Sequence[int]
    observed: Sequence[tuple[int, int]]
    limit: int
    slot: int


class DraftAnswer(NamedTuple):
    """A drafted chain, without the tensors, and the seconds that it took."""

    tokens: Sequence[int]
    entropies: Sequence[float]
    top_probs: Sequence[float]
    stop_reason: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class EndRun:
    """End the run of that number."""

    run: int


@dataclass(frozen=True, slots=True)
class ForgetCache:
    """Clear the KV cache."""
