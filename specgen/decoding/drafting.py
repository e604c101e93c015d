"""Drafters propose tokens. A draft ends at a limit, at an end-of-sequence token, or when the length
policy ends it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import torch

from specgen.base.seeds import derive_seed
from specgen.base.types import Context, Draft, SamplingParams, Verdict
from specgen.decoding import token_sampling
from specgen.decoding.policy_base import LengthPolicy

if TYPE_CHECKING:
    from specgen.engine.forward_pass import ModelOutput
    from specgen.engine.model_runner import AcceptancePredictor, DraftRunner, TargetRunner

Scores = Callable[[torch.Tensor, int], torch.Tensor | float]
# the reason why a draft ended, if penalties forbid all tokens that the draft model has
NO_CANDIDATES = "no candidates"


class Drafter(Protocol):
    """Proposes tokens to follow a context. One whose attribute `takes_forced` is True also drafts
    after tokens that have to follow the context, which `propose` takes as `forced`."""

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        """Drafts at most `limit` tokens (levels, for a tree) after the context; `policy` may end
        the draft earlier.

        The draft is empty if there is nothing to propose or `limit` is 0. Raises RunError if the
        draft model's logits hold a NaN.
        """


class LearningDrafter(Drafter, ABC):
    """A drafter that learns from the target's logits. Works with the schedule `sequential` only,
    because no other calls `learn`."""

    @abstractmethod
    def learn(self, draft: Draft, output: ModelOutput, verdict: Verdict) -> None:
        """Learns from the target's pass over `draft`, the last draft that this drafter proposed.

        `output` has the target's logits after the context (row 0) and after each node i of the
        draft (row i + 1), also after the nodes that are not verified. It is valid only during the
        call. Called after verification, before accepted tokens join the context.
        """


class NoDrafter:
    """Proposes nothing: plain decoding."""

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        return Draft()


class UnrelatedDrafter:
    """Drafts the next of `tokens`, in a cycle, whatever the context. For measuring the target's
    passes: drafting takes no time.

    The policy has to be a `LengthSweep`, which sets the number of tokens.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = cycle(tokens)

    def propose(self, context: Context, policy: Any, limit: int) -> Draft:
        return Draft.chain(list(islice(self._tokens, min(policy.length, limit))))


@dataclass(frozen=True, slots=True)
class Setup:
    """The models and parameters from which the drafter, the verifier and the schedule of one run
    (one output) are made.

    `draft` runs the draft model or the part of the target that drafts; None if none does in this
    process. `target` is None only in a draft worker. `vocab_size` is the width of the target's
    logits. All random numbers derive from `seed`. `record`: drafts keep their logits, so that both
    models' distributions can be compared. `capacity` is the number of tokens to allocate KV caches
    for. `acceptance_predictor` comes with a trained part; None without one.
    """

    draft: DraftRunner | None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos_ids: frozenset[int] = frozenset()
    vocab_size: int = 0
    seed: int = 0
    target: TargetRunner | None = None
    record: bool = False
    acceptance_predictor: AcceptancePredictor | None = None
    capacity: int = 0

    @property
    def for_verifier(self) -> tuple[SamplingParams, torch.device, int]:
        """What a verifier is made with: the sampling parameters, the target's device, and a seed
        for the verifier's random numbers."""
        assert self.target is not None
        return self.sampling, self.target.device, derive_seed(self.seed, "target")

    @property
    def for_worker(self) -> Setup:
        """This setup without models and predictor, to be sent to a draft worker in another
        process."""
        return replace(self, draft=None, target=None, acceptance_predictor=None)


class DraftModelUser:
    """Base of all drafters that run a draft model (or part of the target as one).

    `depth` is the largest number of tokens in a draft (of levels, for a tree), which the length
    policy may end earlier. None: no such limit. `in_turn`: a draft's reason to end says that the
    models take turns (PEARL, where this is faster).
    """

    def __init__(self, setup: Setup, *, depth: int | None = None, in_turn: bool = False) -> None:
        assert setup.draft is not None, "this drafter runs a model"
        self._runner: DraftRunner = setup.draft
        self._setup = setup
        self._depth = depth
        self._in_turn = in_turn
        self._longest = setup.draft.traits.longest_draft
        self._sampling = setup.sampling
        self._eos_ids = setup.eos_ids
        self._vocab_size = setup.vocab_size
        self._generator = token_sampling.make_generator(
            setup.draft.device, derive_seed(setup.seed, "draft")
        )

    def _room(self, context: Context, limit: int, before: Sequence[int] = ()) -> int:
        """The number of tokens, at most `limit` and the drafter's depth, that the draft model can
        draft after the context and the tokens `before`.

        0 if one of these is a token that the draft model's vocabulary lacks; may be negative if the
        context is too long.
        """
        if max(before, default=0) >= self._runner.num_embeddings:
            return 0
        longest = self._runner.room(context)
        if self._longest is not None:
            longest = min(longest, self._longest)
        bounds = limit, longest - len(before), self._depth
        return min(bound for bound in bounds if bound is not None)

    def _reason(self, reason: str, levels: int) -> str:
        """Returns why a draft ended: `reason`, or `depth N` in place of `length` if the drafter's
        depth was the limit."""
        is_deepest = reason == "length" and levels == self._depth
        if self._in_turn:
            return reason_in_turn(reason, levels if is_deepest else None)
        return f"depth {levels}" if is_deepest else reason

    def _scores(self, policy: LengthPolicy, context: Context) -> Scores | None:
        """Returns the acceptance predictor's function `score` for a draft after the context.

        None without a predictor, or if the policy does not read its scores. The time that the
        predictor takes is added to `policy.seconds`; on a GPU, the time to start its kernels.
        """
        predictor = self._setup.acceptance_predictor
        if predictor is None or "predicted_acceptance" not in policy.signals:
            return None
        start = perf_counter()
        predictor.begin(context)
        policy.seconds += perf_counter() - start

        def score(hidden: torch.Tensor, position: int) -> torch.Tensor | float:
            start = perf_counter()
            probability = predictor.score(hidden, position)
            policy.seconds += perf_counter() - start
            return probability

        return score


def reason_in_turn(reason: str, filled: int | None) -> str:
    """Returns why a draft of PEARL ended where the models take turns: `in turn N` if it has as many
    tokens as drafts then have, N = `filled`; otherwise its own `reason`, with `in turn`."""
    return f"{reason}, in turn" if filled is None else f"in turn {filled}"
