"""What travels between the rooms. Nothing here imports torch: a tensor is held as it comes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral, Real
from typing import Any, Literal

from specgen.errors import SpecgenError

Source = Literal["correction", "bonus"]
Mode = Literal["prefill", "sequential", "pre-verify", "post-verify"]
FinishReason = Literal["length", "eos", "stop", "interrupted"]
PHASES = ("prefill", "draft", "verify", "sample", "other")  # what a round's seconds are spent on


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a run ends. Temperature 0 is greedy decoding; `top_k` 0 keeps the whole vocabulary.

    Raises SpecgenError where a value makes no sense.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        self._check()
        numbers = {"max_new_tokens": int, "temperature": float, "top_p": float, "top_k": int} | (
            {"seed": int} if self.seed else {}
        )
        for name, kind in numbers.items():
            object.__setattr__(self, name, kind(getattr(self, name)))  # NumPy's numbers are no JSON

    def _check(self) -> None:
        if not _is_integer(self.max_new_tokens) or self.max_new_tokens < 1:
            raise SpecgenError(f"max_new_tokens is {self.max_new_tokens}", "It has to be a whole number of at least 1")
        if not _is_number(self.temperature) or not 0 <= self.temperature <= 100:
            raise SpecgenError(
                f"temperature is {self.temperature}",
                "It has to lie between 0 (greedy decoding) and 100; 1 is the model's own",
            )
        if 0 < self.temperature < 1e-3:
            raise SpecgenError(f"temperature is {self.temperature}", "Take 0 for greedy decoding, or at least 0.001")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise SpecgenError(f"top_p is {self.top_p}", "It has to be above 0 and at most 1 (1: no cut)")
        if not _is_integer(self.top_k) or self.top_k < 0:
            raise SpecgenError(f"top_k is {self.top_k}", "It has to be a whole number, 0 for no cut")
        if self.seed is not None and (not _is_integer(self.seed) or not 0 <= self.seed < 2**63):
            raise SpecgenError(f"seed is {self.seed}", "It has to be a whole number from 0 to 2^63 - 1")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise SpecgenError(f"stop holds {self.stop!r}", "Each stop text needs at least one character")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


class Context:
    """The committed tokens of one run, prompt first. It only ever grows, so whoever cached its first n tokens may trust them."""

    __slots__ = ("ids", "largest_id", "prompt_length")

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self.ids: list[int] = list(prompt_ids)
        self.prompt_length = len(self.ids)
        self.largest_id = max(self.ids, default=-1)

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, tokens: Sequence[int]) -> None:
        self.ids.extend(tokens)
        self.largest_id = max((self.largest_id, *tokens))


class TokenStatus(Enum):
    """What became of a drafted token: REJECTED was judged and refused, DISCARDED stood behind it or was never judged."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    DISCARDED = "discarded"


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens, as a tree: node i follows node `parents[i]`, -1 being the context. A chain's parents are -1, 0, 1, ...

    `probs[i]` is the distribution that node i was drawn from: a tensor [nodes, vocabulary], None for a deterministic draft.
    `draws` lists nodes in the order in which they were drawn, one that was drawn twice twice; None is each node once, in order.
    `log_likelihoods[i]` (nats) is the draft's own for the whole path to node i, empty where no verifier asks for it.
    `entropies` (nats) and `top_probs` are those of the draft's unwarped distributions, empty where the drafter has none.
    `logits` are kept for the record alone: a tensor [nodes, vocabulary], None where nobody asked or the drafter has none.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    probs: Any = None
    entropies: Sequence[float] = ()
    top_probs: Sequence[float] = ()
    stop_reason: str | None = None
    draws: Sequence[int] | None = None
    log_likelihoods: Sequence[float] = ()
    logits: Any = None

    @property
    def levels(self) -> int:
        """How many tokens the longest path has."""
        if isinstance(self.parents, range):
            return len(self.tokens)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)

    def part(self, start: int, stop: int | None = None) -> Draft:
        """The tokens `start` to `stop` of a chain, as a chain of its own."""
        tokens = self.tokens[start:stop]
        probs = None if self.probs is None else self.probs[start:stop]
        logits = None if self.logits is None else self.logits[start:stop]
        figures = self.entropies[start:stop], self.top_probs[start:stop]
        return Draft(tokens, range(-1, len(tokens) - 1), probs, *figures, self.stop_reason, logits=logits)


@dataclass(frozen=True, slots=True)
class DistributionOverlap:
    """How far draft and target agree at each drafted node, both unwarped: `overlap` is the sum of min(p, q), the chance of
    acceptance at temperature 1, and `kl` is KL(q||p) in nats."""

    overlap: Sequence[float]
    kl: Sequence[float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted nodes, from the root on, and the target's own token after them.

    `source` is None where no draft was judged (plain decoding, the prefill) or the output ended inside the draft (`token` None).
    `agreement` is there where it was to be recorded and the drafter has distributions.
    """

    path: tuple[int, ...] = ()
    token: int | None = None
    source: Source | None = None
    agreement: DistributionOverlap | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """One pass of the target and what led to it: the only thing that leaves the core. `seconds` are per phase."""

    index: int
    mode: Mode
    draft: Draft
    verdict: Verdict
    seconds: Mapping[str, float] = field(default_factory=dict)
    policy_state: Mapping[str, float] | None = None

    @property
    def accepted_ids(self) -> list[int]:
        return [self.draft.tokens[node] for node in self.verdict.path]

    @property
    def token_ids(self) -> list[int]:
        """All the tokens that this round committed, in order."""
        return self.accepted_ids if self.verdict.token is None else [*self.accepted_ids, self.verdict.token]

    @property
    def statuses(self) -> tuple[TokenStatus, ...]:
        """One fate a drafted node. The children of the last accepted node were refused, unless the output ended there."""
        accepted = set(self.verdict.path)
        last = self.verdict.path[-1] if self.verdict.path else -1
        refused = self.verdict.source == "correction"
        return tuple(
            TokenStatus.ACCEPTED
            if node in accepted
            else TokenStatus.REJECTED
            if refused and parent == last
            else TokenStatus.DISCARDED
            for node, parent in enumerate(self.draft.parents)
        )
