"""Drafters propose tokens. A draft ends at a limit, at an end-of-sequence token, or when the length policy ends it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from specgen.base.errors import nan_logits
from specgen.base.types import Context, Draft, SamplingParams, Verdict
from specgen.decoding import logits_ops
from specgen.decoding.device_chain import ChoiceRule, DeviceChain
from specgen.decoding.draft_chain import DraftChain
from specgen.decoding.length_policy import NO_SIGNALS, DraftedToken, LengthPolicy, Signals
from specgen.engine.inference_mode import inference
from specgen.engine.model_runner import ModelRunner, longest_draft, room

if TYPE_CHECKING:
    from specgen.decoding.suffix_index import SuffixHistory
    from specgen.engine.forward_pass import ModelOutput
    from specgen.engine.model_runner import DraftRunner
    from specgen.engine.text.tokenizer import Tokenizer


class Drafter(Protocol):
    """Proposes tokens to follow a context. `decoding.drafter_kinds` lists all drafters."""

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        """Drafts at most `limit` tokens (levels, for a tree) after the context; `policy` may end the draft earlier.

        The draft is empty if there is nothing to propose or `limit` is 0.
        """


class LearningDrafter(Drafter, ABC):
    """A drafter that learns from the target's logits. Only the schedule `sequential` lets it."""

    @abstractmethod
    def learn(self, draft: Draft, output: ModelOutput, verdict: Verdict) -> None:
        """Learns from the round of the last draft: the target's output for the context's last token and for all nodes of `draft`.

        Called after verification, before accepted tokens join the context. `output` is valid only during the call.
        """


class AcceptancePredictor(Protocol):
    """Predicts for each drafted token the probability that the target accepts it (EESD, Eq. 5)."""

    def begin(self, context: Context) -> None:
        """Prepares to score the tokens of a draft that follows this context."""

    def score(self, draft_hidden: torch.Tensor, position: int) -> torch.Tensor:
        """Predicts the acceptance probability (theta_M in EESD) of a drafted token, a scalar tensor.

        `draft_hidden` [width] is the draft's hidden state that gave the token's logits; `position` counts drafted tokens from 1.
        """


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """The model and parameters that a drafter is constructed from.

    `runner` runs the draft model. It is None for drafters without a model. `vocab_size` is the width of the target's logits and
    `context_limit` the length of its longest context. `seed` seeds the drafter's random draws. `keep_logits` stores the draft's
    logits in each draft. `acceptance_predictor` is None if the draft has none. `history` has earlier outputs to copy from; None:
    none are kept. `tokenizers` are the target's and the draft model's; None without a draft model.
    """

    runner: DraftRunner | None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos_ids: frozenset[int] = frozenset()
    vocab_size: int = 0
    seed: int = 0
    keep_logits: bool = False
    acceptance_predictor: AcceptancePredictor | None = None
    history: SuffixHistory | None = None
    context_limit: int = 0
    tokenizers: tuple[Tokenizer, Tokenizer] | None = None


def extend_draft(
    policy: LengthPolicy,
    limit: int,
    extend: Callable[[int], DraftedToken | str],
    *,
    unverified: int = 0,
    known: Mapping[str, float] = NO_SIGNALS,
    is_last: bool = True,
) -> str:
    """Extends a draft until it has `limit` tokens (levels, for a tree) or the policy ends it. Returns the reason for the end.

    Drafts nothing if the policy does not start a draft. `extend(position)` drafts the token or level with this number, from 1. It
    returns the token for the policy to judge, or a string: the reason to end the draft without asking the policy, such as `eos`.
    At `limit` the reason is `length`. The draft follows `unverified` drafted tokens (PEARL). `known` are the first token's
    signals that are known before it is drafted; for `is_last` see `LengthPolicy.starts_draft`. The time that the policy takes is
    added to `policy.seconds`.
    """
    start = perf_counter()
    drafts = policy.starts_draft(unverified=unverified, signals=known, is_last=is_last)
    policy.seconds += perf_counter() - start
    if not drafts:
        return policy.reason
    for position in range(1, limit + 1):
        token = extend(position)
        if isinstance(token, str):
            return token
        start = perf_counter()
        keeps_drafting = policy.keep_drafting(token)
        policy.seconds += perf_counter() - start
        if not keeps_drafting:
            return policy.reason
    return "length"


class AcceptanceScores:
    """The acceptance predictor's scores of one draft. The time that they take is added to `policy.seconds`.

    On a GPU this is the time to start the kernels, not to run them.
    """

    def __init__(self, predictor: AcceptancePredictor, policy: LengthPolicy, context: Context) -> None:
        self._predictor, self._policy = predictor, policy
        start = perf_counter()
        predictor.begin(context)
        policy.seconds += perf_counter() - start

    @classmethod
    def wanted(cls, setup: DraftSetup, policy: LengthPolicy, context: Context) -> AcceptanceScores | None:
        """Begins to score a draft after the context. None without a predictor, and if the policy does not read its scores."""
        predictor = setup.acceptance_predictor
        return None if predictor is None or "predicted_acceptance" not in policy.signals else cls(predictor, policy, context)

    def score(self, draft_hidden: torch.Tensor, position: int) -> torch.Tensor:
        """Returns what `AcceptancePredictor.score` returns."""
        start = perf_counter()
        score = self._predictor.score(draft_hidden, position)
        self._policy.seconds += perf_counter() - start
        return score


class ModelDrafterBase:
    """Base of all drafters that run a draft model (or part of the target as one).

    `depth` is the largest number of levels of a draft (tokens, for a chain), which the policy may stay below; with None the
    policy alone decides.
    """

    def __init__(self, setup: DraftSetup, *, depth: int | None = None) -> None:
        assert setup.runner is not None, "this drafter runs a model"
        self._runner: DraftRunner = setup.runner
        self._setup, self._depth, self._longest = setup, depth, longest_draft(setup.runner)
        self._sampling, self._eos_ids, self._vocab_size = setup.sampling, setup.eos_ids, setup.vocab_size
        self._generator = logits_ops.make_generator(setup.runner.device, setup.seed)

    def _room(self, context: Context, limit: int) -> int:
        """The number of tokens, at most `limit` and the drafter's depth, that the draft model can draft after the context.

        0 if the context holds a token that the draft model's vocabulary lacks; may be negative if the context is too long.
        """
        bounds = limit, room(self._runner, context), self._depth, self._longest
        return min(bound for bound in bounds if bound is not None)

    def _reason(self, reason: str, levels: int) -> str:
        """Returns the reason why a draft of at most `levels` levels ended: the drafter's depth has a reason of its own."""
        return f"depth {levels}" if reason == "length" and levels == self._depth else reason


class ModelDrafter(ModelDrafterBase):
    """Drafts token by token with a smaller model of the same tokenizer (Leviathan et al. 2023, Chen et al. 2023).

    The draft model may also be part of the target: its first layers with an exit layer (EESD), or the target without some layers
    (Self-SD). Logits beyond the target's vocabulary are cut before a token is chosen. A context with tokens that the draft model
    lacks gets an empty draft.
    """

    _own_signals: ClassVar[Signals] = frozenset()  # signals that the drafter itself reads, besides the policy's
    _keeps_probs: ClassVar[bool] = True  # whether the verifier reads the draft's distributions
    _likeliest: ClassVar[int] = 0  # how many of the likeliest tokens at each position `_completed` needs

    @inference
    def propose(
        self,
        context: Context,
        policy: LengthPolicy,
        limit: int,
        unverified: Sequence[int] = (),
        show: Callable[[int, int], bool] | None = None,
    ) -> Draft:
        """Drafts at most `limit` new tokens after the context and after `unverified`: tokens drafted earlier.

        `show` gets each new token's number, from 0, and the token, as soon as it is drafted. If it returns False, the draft ends.
        """
        tokens = list(unverified)
        limit = self._room(context, limit + len(tokens)) - len(tokens)
        if limit < 1:
            return Draft()
        scores = AcceptanceScores.wanted(self._setup, policy, context)
        reads = scores is not None or policy.signals or self._own_signals or policy.random or show is not None
        device = None if reads else self._device_chain(context, tokens)
        host = DraftChain(
            self._sampling,
            self._vocab_size,
            self._generator,
            policy.signals,
            self._own_signals,
            keep_probs=self._keeps_probs,
            keep_logits=self._setup.keep_logits,
            likeliest=self._likeliest,
        )
        chain = host if device is None else device
        is_cut = False

        def extend(position: int) -> DraftedToken | str:
            nonlocal is_cut
            if is_cut:  # after the policy has seen the last token, from which it may learn later
                return "pass ended"
            if device is not None:
                return device.append()
            output = self._runner.logits(context, tokens, start=len(tokens))
            score = None
            if scores is not None and output.hidden_states is not None:
                score = scores.score(output.hidden_states[0], position)
            own = output.unpenalised_part(self._vocab_size)
            token = host.append(output.logits[0, : self._vocab_size], score, None if own is None else own[0])
            if refusal := self._refusal(host.values):
                host.drop_last()
                return refusal
            tokens.append(host.tokens[-1])
            token.nodes = self._nodes(host.values)
            is_cut = show is not None and not show(position - 1, tokens[-1])
            return "eos" if tokens[-1] in self._eos_ids else token

        reason = extend_draft(policy, limit, extend, unverified=len(unverified))
        return self._completed(chain.draft(self._reason(reason, limit)), chain.likeliest)

    def _device_chain(self, context: Context, unverified: Sequence[int]) -> DeviceChain | None:
        """Begins a draft whose tokens the host reads when it has ended. Returns None if they are not chosen on the device."""
        runner, sampling = self._runner, self._sampling
        if self._setup.keep_logits or not isinstance(runner, ModelRunner) or not runner.chooses_on_device:
            return None
        keeps_probs, width = self._keeps_probs and not sampling.greedy, min(runner.vocab_size, self._vocab_size)
        rule = ChoiceRule(sampling.temperature, sampling.top_p, sampling.top_k, width, keeps_probs, self._likeliest)
        return DeviceChain(runner, rule, self._generator, context, unverified, self._eos_ids, self._vocab_size)

    def _refusal(self, values: Mapping[str, float]) -> str | None:
        """Says why the last token must be dropped and the draft ended, or returns None to keep the token.

        `values` are the token's signals (numbers such as its entropy) by name.
        """
        return None

    def _nodes(self, values: Mapping[str, float]) -> int:
        """The number of nodes that a drafted token with these signals adds to the draft."""
        return 1

    def _completed(self, draft: Draft, likeliest: Sequence[Sequence[int]]) -> Draft:
        """Returns the draft that is verified. `likeliest` has the `_likeliest` most likely tokens at each position of `draft`."""
        return draft


def draft_statistics(logits: torch.Tensor) -> tuple[list[float], list[float]]:
    """Returns entropy (nats) and largest probability of each row of draft logits [n, vocabulary], in one transfer to the host.

    Raises RunError if the logits hold a NaN.
    """
    entropies, top_probs = torch.stack(logits_ops.entropy_and_top_prob(logits)).tolist()
    if math.isnan(sum(entropies)):
        raise nan_logits("draft")
    return entropies, top_probs


class NoDrafter:
    """Proposes nothing: plain decoding."""

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        return Draft()
