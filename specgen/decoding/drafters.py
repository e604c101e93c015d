"""Drafters propose tokens. A draft ends at a limit, at an end-of-sequence token, or when the length policy ends it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar, Protocol, overload

import torch

from specgen.decoding import logits_ops, signals
from specgen.decoding.device_chain import ChoiceOnDevice, DeviceChain
from specgen.decoding.length_policy import NO_SIGNALS, DraftedToken, LengthPolicy, Signals
from specgen.engine.inference_mode import inference
from specgen.engine.model_runner import ModelRunner, longest_draft
from specgen.errors import nan_logits
from specgen.types import Context, Draft, SamplingParams

if TYPE_CHECKING:
    from specgen.engine.model_runner import DraftRunner


class Drafter(Protocol):
    """Proposes tokens to follow a context. `decoding.drafter_kinds` lists all drafters."""

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        """Drafts at most `limit` tokens (levels, for a tree) after the context; `policy` may end the draft earlier.

        The draft is empty if there is nothing to propose or `limit` is 0.
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

    `runner` runs the draft model. It is None for drafters without a model, which read only `eos_ids`. `vocab_size` is the width
    of the target's logits. `seed` seeds the drafter's random draws. `keep_logits` stores the draft's logits in each draft.
    `acceptance_predictor` is None if the draft has none.
    """

    runner: DraftRunner | None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos_ids: frozenset[int] = frozenset()
    vocab_size: int = 0
    seed: int = 0
    keep_logits: bool = False
    acceptance_predictor: AcceptancePredictor | None = None


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
    """Base of all drafters that run a draft model (or part of the target as one)."""

    def __init__(self, setup: DraftSetup) -> None:
        assert setup.runner is not None, "this drafter runs a model"
        self._runner: DraftRunner = setup.runner
        self._longest = longest_draft(setup.runner)
        self._setup = setup
        self._sampling, self._eos_ids, self._vocab_size = setup.sampling, setup.eos_ids, setup.vocab_size
        self._generator = logits_ops.make_generator(setup.runner.device, setup.seed)

    def _room(self, context: Context, limit: int) -> int:
        """The number of tokens, at most `limit`, that the draft model can draft and has positions for after the context.

        0 if the context holds a token that the draft model's vocabulary lacks; may be negative if the context is too long.
        """
        runner = self._runner
        if self._longest is not None:
            limit = min(limit, self._longest)
        return 0 if context.largest_id >= runner.num_embeddings else min(limit, runner.context_limit - len(context))


class ModelDrafter(ModelDrafterBase):
    """Drafts token by token with a smaller model of the same tokenizer (Leviathan et al. 2023, Chen et al. 2023).

    The draft model may also be part of the target: its first layers with an exit layer (EESD), or the target without some layers
    (Self-SD). Logits beyond the target's vocabulary are cut before a token is chosen. A context with tokens that the draft model
    lacks gets an empty draft.
    """

    _own_signals: ClassVar[Signals] = frozenset()  # signals that the drafter itself reads, besides the policy's
    _keeps_probs: ClassVar[bool] = True  # whether the verifier reads the draft's distributions

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
        device = None if scores is not None else self._device_chain(context, tokens, policy, is_shown=show is not None)
        host = DraftChain(self._setup, self._generator, policy.signals, self._own_signals, keep_probs=self._keeps_probs)
        chain = host if device is None else device
        is_cut = False

        def extend(position: int) -> DraftedToken | str:
            nonlocal is_cut
            if is_cut:  # after the policy has seen the last token, from which it may learn later
                return "pass ended"
            if device is not None:
                token = device.append()
                if device.is_deferred:
                    return token
            else:
                output = self._runner.logits(context, tokens, start=len(tokens))
                score = None
                if scores is not None and output.hidden_states is not None:
                    score = scores.score(output.hidden_states[0], position)
                unpenalised = None if output.unpenalised is None else output.unpenalised[0, : self._vocab_size]
                token = host.append(output.logits[0, : self._vocab_size], score, unpenalised)
            if refusal := self._refusal(chain.values):
                chain.drop_last()
                return refusal
            tokens.append(chain.tokens[-1])
            is_cut = show is not None and not show(position - 1, tokens[-1])
            return "eos" if tokens[-1] in self._eos_ids else token

        return chain.draft(extend_draft(policy, limit, extend, unverified=len(unverified)))

    def _device_chain(
        self, context: Context, unverified: Sequence[int], policy: LengthPolicy, *, is_shown: bool
    ) -> DeviceChain | None:
        """Begins a draft whose tokens are chosen on the device. Returns None if they are not, or if their logits are kept."""
        runner = self._runner
        if self._setup.keep_logits or not isinstance(runner, ModelRunner) or not runner.chooses_on_device:
            return None
        names, keep_probs = policy.signals | self._own_signals, self._keeps_probs and not self._sampling.greedy
        choice = ChoiceOnDevice.make(self._sampling, self._vocab_size, names, keep_probs=keep_probs)
        is_deferred = not (names or policy.random or is_shown)  # then nothing needs a token before the draft ends
        sequence = context, unverified, policy.signals, self._eos_ids
        return DeviceChain(runner, choice, self._generator, *sequence, is_deferred=is_deferred)

    def _refusal(self, values: Mapping[str, float]) -> str | None:
        """Says why the last token must be dropped and the draft ended, or returns None to keep the token.

        `values` are the token's signals (numbers such as its entropy) by name.
        """
        return None


class DraftChain:
    """A draft that grows token by token. Each token needs one transfer to the host: its id and its signals.

    Signals are numbers such as the token's entropy. `read` names those for the length policy, `own` those for the drafter. If
    neither includes entropy or top probability, a GPU computes these for all tokens at once at the end, and copies them to the
    host only when they are read.
    """

    def __init__(
        self, setup: DraftSetup, generator: torch.Generator, read: Signals, own: Signals = frozenset(), *, keep_probs: bool = True
    ) -> None:
        self.tokens: list[int] = []
        self.values: dict[str, float] = {}  # the computed signals of the last token
        self._setup, self._generator, self._keep_probs = setup, generator, keep_probs
        self._greedy = setup.sampling.greedy
        self._read, self._computed = read, read | own
        self._logits: list[torch.Tensor] = []
        self._probs: list[torch.Tensor] = []
        self._statistics: list[tuple[float, float]] = []  # entropy and top probability

    def append(
        self,
        logits: torch.Tensor,
        predicted_acceptance: torch.Tensor | None = None,
        unpenalised: torch.Tensor | None = None,
    ) -> DraftedToken:
        """Adds a token chosen from the logits [vocabulary]: the likeliest in greedy decoding, otherwise drawn at random.

        `predicted_acceptance` is the predictor's acceptance probability for the token; None without a predictor. `unpenalised`
        are the logits without penalties; None if `logits` have none.
        """
        probs = None
        if not self._greedy:
            probs = logits_ops.warp(logits, self._setup.sampling)
            if self._keep_probs:
                self._probs.append(probs)
        on_cpu = logits.is_cpu
        if self._setup.keep_logits or not on_cpu:
            self._logits.append((logits if unpenalised is None else unpenalised).clone())  # valid until the runner's next call
        choose = self._choose_on_cpu if on_cpu else self._choose
        token, self.values = choose(logits, probs, predicted_acceptance, unpenalised)
        if "entropy" in self.values:
            self._statistics.append((self.values["entropy"], self.values["top_prob"]))
            if math.isnan(self.values["entropy"]):
                raise nan_logits("draft")
        self.tokens.append(logits_ops.valid_token(token, "draft"))
        return DraftedToken(len(self.tokens), {name: self.values[name] for name in self._read if name in self.values})

    def _choose(
        self,
        logits: torch.Tensor,
        probs: torch.Tensor | None,
        predicted_acceptance: torch.Tensor | None,
        unpenalised: torch.Tensor | None,
    ) -> tuple[int, dict[str, float]]:
        """Returns a token drawn from `probs` [vocabulary] (None: the likeliest), and its signals by name. One transfer."""
        token = logits_ops.argmax_token(logits) if probs is None else logits_ops.draw(probs, self._generator)
        computed = signals.compute(self._computed, logits, token, probs, predicted_acceptance, unpenalised)
        chosen, *numbers = logits_ops.to_host(token, *computed.values())
        return int(chosen), dict(zip(computed, numbers, strict=True))

    def _choose_on_cpu(
        self,
        logits: torch.Tensor,
        probs: torch.Tensor | None,
        predicted_acceptance: torch.Tensor | None,
        unpenalised: torch.Tensor | None,
    ) -> tuple[int, dict[str, float]]:
        """Does what `_choose` does, on a CPU: there entropy and top probability come with the argmax in one function."""
        token, entropy, top_prob = logits_ops.greedy_statistics(logits if unpenalised is None else unpenalised)
        values = {"entropy": entropy, "top_prob": top_prob}
        if token >= 0 and probs is not None:
            token = logits_ops.draw_on_cpu(probs, self._generator)
        elif token >= 0 and unpenalised is not None:
            token = logits_ops.argmax_tokens(logits[None])[0]
        if probs is None and unpenalised is None:
            values["prob"] = top_prob
        if others := self._computed - values.keys():
            computed = signals.compute(others, logits, torch.tensor(token), probs, predicted_acceptance, unpenalised)
            values |= {name: value.item() for name, value in computed.items()}
        return token, values

    def drop_last(self) -> None:
        for kept in (self.tokens, self._logits, self._probs, self._statistics):
            if kept:
                kept.pop()

    def draft(self, reason: str) -> Draft:
        """Returns the whole draft, with its `probs` padded with zeros to the target's vocabulary. `reason` says why it ended."""
        if not self.tokens:
            return Draft(stop_reason=reason)
        entropies: Sequence[float]
        top_probs: Sequence[float]
        if self._statistics:
            entropies, top_probs = zip(*self._statistics, strict=True)
        else:  # tokens are -1 where the logits hold a NaN, so these numbers hold none
            entropies, top_probs = map(DeviceNumbers, logits_ops.entropy_and_top_prob(torch.stack(self._logits)))
        return Draft.chain(
            self.tokens,
            probs=logits_ops.pad_probs(torch.stack(self._probs), self._setup.vocab_size) if self._probs else None,
            entropies=entropies,
            top_probs=top_probs,
            stop_reason=reason,
            logits=torch.stack(self._logits) if self._setup.keep_logits else None,
        )


class DeviceNumbers(Sequence[float]):
    """A vector [n] of numbers on a device, which is copied to the host when it is first read."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._on_host: list[float] | None = None

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> float: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[float]: ...

    def __getitem__(self, index: int | slice) -> float | Sequence[float]:
        if self._on_host is None:
            self._on_host = self._values.tolist()
        return self._on_host[index]


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
