"""Drafters propose tokens. Each ends a draft at its limit, at an end-of-sequence, or when the length policy says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from specgen.decoding import logits_ops, signals
from specgen.decoding.policies import DraftedToken, LengthPolicy, Signals
from specgen.engine.inference_mode import inference
from specgen.errors import nan_logits
from specgen.types import Context, Draft, SamplingParams

if TYPE_CHECKING:
    from specgen.engine.model_runner import DraftRunner


class Drafter(Protocol):
    """Proposes tokens to follow a context. `decoding.drafter_kinds` lists the signals of each drafter."""

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        """At most `limit` tokens to follow the context; an empty draft where there is nothing to propose or `limit` is 0."""


class AcceptancePredictor(Protocol):
    """Predicts for each drafted token the probability that the target accepts it (EESD, Eq. 5)."""

    def begin(self, context: Context) -> None:
        """Start a draft after this context."""

    def score(self, draft_hidden: torch.Tensor, position: int) -> torch.Tensor:
        """theta_M [] of the token at `position`, from 1, that was chosen from the hidden state [width]."""


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """What a drafter is constructed from. `runner` is None for drafters without a model, which read nothing but `eos_ids`.

    `vocab_size` is the width of the target's logits, `seed` the drafter's own; `keep_logits` keeps each draft's logits.
    """

    runner: DraftRunner | None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos_ids: frozenset[int] = frozenset()
    vocab_size: int = 0
    seed: int = 0
    keep_logits: bool = False
    acceptance_predictor: AcceptancePredictor | None = None


def extend_draft(policy: LengthPolicy, limit: int, extend: Callable[[int], DraftedToken | str]) -> str:
    """The loop of every drafter: extend the draft until `limit`, an end-of-sequence or the policy ends it. Returns the reason.

    `extend` adds the token (or level) at a position, from 1. It returns the token that the policy is to see or, where the draft
    has to end without consulting the policy, the reason.
    """
    for position in range(1, limit + 1):
        token = extend(position)
        if isinstance(token, str):
            return token
        if not policy.keep_drafting(token):
            return policy.reason
    return "length"


class ModelDrafterBase:
    """Base of all drafters that run a model."""

    def __init__(self, setup: DraftSetup) -> None:
        assert setup.runner is not None, "this drafter runs a model"
        self._runner: DraftRunner = setup.runner
        self._setup = setup
        self._sampling, self._eos_ids, self._vocab_size = setup.sampling, setup.eos_ids, setup.vocab_size
        self._generator = logits_ops.make_generator(setup.runner.device, setup.seed)

    def _room(self, context: Context, limit: int) -> int:
        """The number of tokens, at most `limit`, that fit after the context; 0 if the draft model lacks one of its tokens."""
        runner = self._runner
        return 0 if context.largest_id >= runner.num_embeddings else min(limit, runner.context_limit - len(context))


class ModelDrafter(ModelDrafterBase):
    """Drafts token by token with a smaller model of the same tokenizer (Leviathan et al. 2023, Chen et al. 2023).

    Or with a part of the target: its first layers and an exit layer (EESD), or the target without some layers (Self-SD). Logits
    beyond the target's vocabulary are cut before a token is chosen, and contexts with tokens unknown to the draft get no draft.
    """

    _own_signals: ClassVar[Signals] = frozenset()  # that the drafter itself reads
    _keeps_probs: ClassVar[bool] = True  # for a verifier that reads the draft's distributions

    @inference
    def propose(self, context: Context, policy: LengthPolicy, limit: int, unverified: Sequence[int] = ()) -> Draft:
        """`unverified` are tokens drafted earlier, between the context and the new tokens."""
        tokens = list(unverified)
        limit = self._room(context, limit + len(tokens)) - len(tokens)
        if limit < 1:
            return Draft()
        chain = DraftChain(self._setup, self._generator, policy.signals, self._own_signals, keep_probs=self._keeps_probs)
        predictor = self._setup.acceptance_predictor if "predicted_acceptance" in policy.signals else None
        if predictor is not None:
            predictor.begin(context)

        def extend(position: int) -> DraftedToken | str:
            output = self._runner.logits(context, tokens, start=len(tokens))
            scored = predictor is not None and output.hidden_states is not None
            score = predictor.score(output.hidden_states[0], position) if scored else None  # type: ignore[union-attr, index]
            token = chain.append(output.logits[0, : self._vocab_size], score)
            if refusal := self._refusal(chain.values):
                chain.drop_last()
                return refusal
            tokens.append(chain.tokens[-1])
            return "eos" if chain.tokens[-1] in self._eos_ids else token

        return chain.draft(extend_draft(policy, limit, extend))

    def _refusal(self, values: Mapping[str, float]) -> str | None:
        """Why the last token must not be in the draft, given its signals; None to keep it."""
        return None


class DraftChain:
    """A draft that grows token by token, with one device-to-host transfer each: the id and the signals that are read.

    Entropies and top probabilities that nothing reads while drafting are computed for all tokens at once at the end.
    """

    def __init__(
        self, setup: DraftSetup, generator: torch.Generator, read: Signals, own: Signals = frozenset(), *, keep_probs: bool = True
    ) -> None:
        self.tokens: list[int] = []
        self.values: dict[str, float] = {}  # the computed signals of the last token
        self._setup, self._generator, self._keep_probs = setup, generator, keep_probs
        self._read, self._computed = read, read | own
        self._logits: list[torch.Tensor] = []
        self._probs: list[torch.Tensor] = []
        self._statistics: list[tuple[float, float]] = []  # entropy and top probability

    def append(self, logits: torch.Tensor, predicted_acceptance: torch.Tensor | None = None) -> DraftedToken:
        """Choose a token from the logits [vocabulary]: the likeliest, or drawn from the warped distribution."""
        self._logits.append(logits)
        probs = None
        if self._setup.sampling.greedy:
            token = logits.argmax()
        else:
            probs = logits_ops.warp(logits, self._setup.sampling)
            token = logits_ops.draw(probs, self._generator)
            if self._keep_probs:
                self._probs.append(probs)
        if not self._computed:
            self.tokens.append(logits_ops.valid_token(int(token), "draft"))
            return DraftedToken(len(self.tokens))
        computed = signals.compute(self._computed, logits, token, probs, predicted_acceptance)
        chosen, *numbers = logits_ops.to_host(token, *computed.values())
        self.values = values = dict(zip(computed, numbers, strict=True))
        if "entropy" in values:
            self._statistics.append((values["entropy"], values["top_prob"]))
            if math.isnan(values["entropy"]):
                raise nan_logits("draft")
        self.tokens.append(logits_ops.valid_token(int(chosen), "draft"))
        return DraftedToken(len(self.tokens), {name: values[name] for name in self._read if name in values})

    def drop_last(self) -> None:
        for kept in (self.tokens, self._logits, self._probs, self._statistics):
            if kept:
                kept.pop()

    def draft(self, reason: str) -> Draft:
        """The whole draft; `probs` padded with zeros to the target's vocabulary."""
        if not self.tokens:
            return Draft(stop_reason=reason)
        entropies, top_probs = (
            zip(*self._statistics, strict=True) if self._statistics else draft_statistics(torch.stack(self._logits))
        )
        return Draft.chain(
            self.tokens,
            probs=logits_ops.pad_probs(torch.stack(self._probs), self._setup.vocab_size) if self._probs else None,
            entropies=entropies,
            top_probs=top_probs,
            stop_reason=reason,
            logits=torch.stack(self._logits) if self._setup.keep_logits else None,
        )


def draft_statistics(logits: torch.Tensor) -> tuple[list[float], list[float]]:
    """Entropies (nats) and top probabilities of draft logits [n, vocabulary], in one transfer. Raises RunError for NaN."""
    entropies, top_probs = torch.stack(logits_ops.entropy_and_top_prob(logits)).tolist()
    if math.isnan(sum(entropies)):
        raise nan_logits("draft")
    return entropies, top_probs


class PromptLookupDrafter:
    """Finds the longest n-gram at the context's end that occurred before, and proposes what followed it (Saxena 2023).

    The index of n-grams grows with the context, so the cost of a round does not depend on the context's length. The latest
    occurrence counts; a continuation that reaches the context's end continues with the draft's own tokens, as a repetition.
    """

    def __init__(self, ngram: int, eos_ids: Collection[int]) -> None:
        self._ngram = ngram
        self._eos_ids = eos_ids
        self._continuations: dict[tuple[int, ...], int] = {}
        self._context: Context | None = None
        self._indexed = 0

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        self._index(context)
        start = self._match(context)
        if start is None or limit < 1:
            return Draft()
        tokens: list[int] = []

        def extend(position: int) -> DraftedToken | str:
            source = start + position - 1
            tokens.append(context.ids[source] if source < len(context) else tokens[source - len(context)])
            return "eos" if tokens[-1] in self._eos_ids else DraftedToken(position)

        reason = extend_draft(policy, limit, extend)
        return Draft.chain(tokens, stop_reason=reason)

    def _index(self, context: Context) -> None:
        """For each new token, record it as the continuation of the n-grams that end before it."""
        if context is not self._context:
            self._context, self._indexed = context, 0
            self._continuations.clear()
        for position in range(self._indexed, len(context)):
            for length in range(1, min(self._ngram, position) + 1):
                self._continuations[tuple(context.ids[position - length : position])] = position
        self._indexed = len(context)

    def _match(self, context: Context) -> int | None:
        """The position that follows the latest occurrence of the longest n-gram at the end; None without one."""
        grams = (tuple(context.ids[-length:]) for length in range(min(self._ngram, len(context)), 0, -1))
        return next((self._continuations[gram] for gram in grams if gram in self._continuations), None)


class NoDrafter:
    """Proposes nothing: plain decoding."""

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        return Draft()
