"""Drafters propose tokens. A draft ends at a limit, at an end-of-sequence token, or when the length policy ends it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from specgen.base.errors import nan_logits
from specgen.base.types import Context, Draft, SamplingParams, Verdict
from specgen.decoding import logits_ops
from specgen.decoding.device_chain import ChoiceRule, DeviceChain
from specgen.decoding.policy import DraftedToken, LengthPolicy, Signals, extend_draft
from specgen.engine.inference_mode import inference
from specgen.engine.model_runner import ModelRunner, longest_draft, room

if TYPE_CHECKING:
    from specgen.engine.forward_pass import ModelOutput
    from specgen.engine.model_runner import DraftRunner
    from specgen.engine.text.tokenizer import Tokenizer

Scores = Callable[[torch.Tensor, int], torch.Tensor]
NO_CANDIDATES = "no candidates"  # why a draft ends where penalties forbid every token that the draft model has


class Drafter(Protocol):
    """Proposes tokens to follow a context."""

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


class NoDrafter:
    """Proposes nothing: plain decoding."""

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        return Draft()


class RepeatDrafter:
    """Drafts copies of the last token. This takes no time, so a round takes as long as the target's pass.

    The policy has to be a `LengthSweep`, which sets the number of copies.
    """

    def propose(self, context: Context, policy: Any, limit: int) -> Draft:
        return Draft.chain([context.ids[-1]] * min(policy.length, limit))


class AcceptancePredictor(Protocol):
    """Predicts for each drafted token the probability that the target accepts it (EESD, Eq. 5)."""

    def begin(self, context: Context) -> None:
        """Prepares to score the tokens of a draft that follows this context."""

    def score(self, draft_hidden: torch.Tensor, position: int) -> torch.Tensor:
        """Predicts the acceptance probability (theta_M in EESD) of a drafted token, a scalar tensor.

        `draft_hidden` [width] is the draft's hidden state that gave the token's logits; `position` counts drafted tokens from 1.
        """


def derive_seed(seed: int, role: str) -> int:
    """Derives an independent seed: from a run's for each source of randomness (`draft`, `target`, `policy`), from a
    comparison's for each prompt and repeat."""
    return int.from_bytes(blake2b(f"{role} {seed}".encode(), digest_size=7).digest(), "big")


@dataclass(frozen=True, slots=True)
class Setup:
    """The models and parameters that a method's drafter, verifier and schedule are made from, for one run (one output).

    `draft` runs the draft model; None if there is none and no part of the target drafts. `target` is None only in a draft worker.
    `vocab_size` is the width of the target's logits. All random numbers derive from `seed`. `record`: both models' distributions
    are compared, so drafts keep their logits. `acceptance_predictor` is trained with an exit layer; None if there is none.
    `capacity` is the number of tokens to allocate KV caches for. `window` is what was measured for PEARL's setting `auto`, and
    `worker` runs its draft model. `adaptive` is what the length policy of this name decides by. `history` has the outputs of
    earlier runs to copy from. `tokenizers` are the target's and the draft model's. All of these are None where a run has no use
    for them. The types of some are those of a method, in `methods`.
    """

    draft: DraftRunner | None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos_ids: frozenset[int] = frozenset()
    vocab_size: int = 0
    seed: int = 0
    target: ModelRunner | None = None
    record: bool = False
    acceptance_predictor: AcceptancePredictor | None = None
    capacity: int = 0
    window: Any = None
    worker: Any = None
    adaptive: Any = None
    history: Any = None
    tokenizers: tuple[Tokenizer, Tokenizer] | None = None

    @property
    def for_verifier(self) -> tuple[SamplingParams, torch.device, int]:
        """The sampling parameters, the device and the seed of a verifier."""
        assert self.target is not None
        return self.sampling, self.target.device, derive_seed(self.seed, "target")

    @property
    def for_worker(self) -> Setup:
        """What a draft worker in another process needs of this: no models."""
        return replace(self, draft=None, target=None, acceptance_predictor=None, worker=None, tokenizers=None)


class DraftModelUser:
    """Base of all drafters that run a draft model (or part of the target as one).

    `depth` is the largest number of levels of a draft (tokens, for a chain), which the policy may stay below; with None the
    policy alone decides.
    """

    def __init__(self, setup: Setup, *, depth: int | None = None) -> None:
        assert setup.draft is not None, "this drafter runs a model"
        self._runner: DraftRunner = setup.draft
        self._setup, self._depth, self._longest = setup, depth, longest_draft(setup.draft)
        self._sampling, self._eos_ids, self._vocab_size = setup.sampling, setup.eos_ids, setup.vocab_size
        self._generator = logits_ops.make_generator(setup.draft.device, derive_seed(setup.seed, "draft"))

    def _room(self, context: Context, limit: int) -> int:
        """The number of tokens, at most `limit` and the drafter's depth, that the draft model can draft after the context.

        0 if the context holds a token that the draft model's vocabulary lacks; may be negative if the context is too long.
        """
        bounds = limit, room(self._runner, context), self._depth, self._longest
        return min(bound for bound in bounds if bound is not None)

    def _reason(self, reason: str, levels: int) -> str:
        """Returns the reason why a draft of at most `levels` levels ended: the drafter's depth has a reason of its own."""
        return f"depth {levels}" if reason == "length" and levels == self._depth else reason

    def _scores(self, policy: LengthPolicy, context: Context) -> Scores | None:
        """Returns the acceptance predictor's `score` for a draft after the context; None without a predictor, and if the policy
        does not read its scores. The time that it takes is added to `policy.seconds`: on a GPU that to start its kernels."""
        predictor = self._setup.acceptance_predictor
        if predictor is None or "predicted_acceptance" not in policy.signals:
            return None
        start = perf_counter()
        predictor.begin(context)
        policy.seconds += perf_counter() - start

        def score(hidden: torch.Tensor, position: int) -> torch.Tensor:
            start = perf_counter()
            found = predictor.score(hidden, position)
            policy.seconds += perf_counter() - start
            return found

        return score


class ModelDrafter(DraftModelUser):
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
        scores = self._scores(policy, context)
        reads = scores is not None or policy.signals or self._own_signals or policy.random or show is not None
        device = None if reads else self._device_chain(context, tokens)
        host = HostChain(
            self._setup, self._generator, policy.signals, self._own_signals, self._likeliest, keep_probs=self._keeps_probs
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
            own, score = output.unpenalised_part(self._vocab_size), None
            logits = output.logits[:, : self._vocab_size]
            if own is not None and logits_ops.is_forbidden(logits):
                return NO_CANDIDATES
            if scores is not None and output.hidden_states is not None:
                score = scores(output.hidden_states[0], position)
            token = host.append(logits[0], score, None if own is None else own[0])
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
        if self._setup.record or not isinstance(runner, ModelRunner) or not runner.chooses_on_device:
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


class HostChain:
    """A draft that grows token by token, with what the length policy and the verifier need of each.

    Each token needs one transfer to the host: its id and its signals, numbers such as its entropy. `read` names those for the
    length policy, `own` those for the drafter. `keep_probs`: the verifier reads the draft's distributions. `likeliest`: how many
    of the likeliest tokens at each position are kept. `values` are the computed signals of the last token.
    """

    def __init__(
        self,
        setup: Setup,
        generator: torch.Generator,
        read: Signals,
        own: Signals = frozenset(),
        likeliest: int = 0,
        *,
        keep_probs: bool = True,
    ) -> None:
        self.tokens: list[int] = []
        self.values: dict[str, float] = {}
        self._setup, self._generator, self._keep_probs = setup, generator, keep_probs
        self._read, self._computed = read, read | own
        self._logits: list[torch.Tensor] = []
        self._probs: list[torch.Tensor] = []
        self._statistics: list[tuple[float, float]] = []  # entropy and top probability
        self._count_likeliest, self._likeliest = likeliest, list[torch.Tensor]()

    @property
    def likeliest(self) -> list[list[int]]:
        """The likeliest tokens at each position, as many as the constructor's argument says, see `logits_ops.likeliest`."""
        return torch.stack(self._likeliest).tolist() if self._likeliest else []

    def append(
        self,
        logits: torch.Tensor,
        predicted_acceptance: torch.Tensor | None = None,
        unpenalised: torch.Tensor | None = None,
    ) -> DraftedToken:
        """Adds a token chosen from the logits [vocabulary]: the likeliest in greedy decoding, otherwise drawn at random.

        `predicted_acceptance` is the predictor's acceptance probability for the token; None without a predictor. `unpenalised`
        are the logits of the draft model's own distribution, without penalties; None if `logits` are. They may have more columns:
        see `ModelOutput.unrestricted`.
        """
        probs = None
        if not self._setup.sampling.greedy:
            probs = logits_ops.warp(logits, self._setup.sampling)
            if self._keep_probs:
                self._probs.append(probs)
        if self._setup.record:
            self._logits.append((logits if unpenalised is None else unpenalised).clone())  # valid until the runner's next call
        if self._count_likeliest:
            self._likeliest.append(logits_ops.likeliest(logits, self._count_likeliest))
        choose = self._choose_on_cpu if logits.is_cpu else self._choose
        token, self.values = choose(logits, probs, predicted_acceptance, unpenalised)
        entropy = self.values["entropy"]
        if math.isnan(entropy):
            raise nan_logits("draft")
        self._statistics.append((entropy, self.values["top_prob"]))
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
        computed = logits_ops.signals(self._computed | {"entropy"}, logits, token, probs, predicted_acceptance, unpenalised)
        chosen, *numbers = torch.stack([token.float(), *(value.float() for value in computed.values())]).tolist()  # exact to 2^24
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
            computed = logits_ops.signals(others, logits, torch.tensor(token), probs, predicted_acceptance, unpenalised)
            values |= {name: value.item() for name, value in computed.items()}
        return token, values

    def drop_last(self) -> None:
        for kept in (self.tokens, self._logits, self._probs, self._statistics, self._likeliest):
            if kept:
                kept.pop()

    def draft(self, reason: str) -> Draft:
        """Returns the whole draft, with its `probs` padded with zeros to the target's vocabulary. `reason` says why it ended."""
        if not self.tokens:
            return Draft(stop_reason=reason)
        vocab_size = self._setup.vocab_size
        entropies, top_probs = zip(*self._statistics, strict=True)
        return Draft.chain(
            self.tokens,
            probs=logits_ops.pad_probs(torch.stack(self._probs), vocab_size) if self._probs else None,
            entropies=entropies,
            top_probs=top_probs,
            stop_reason=reason,
            logits=torch.stack(self._logits)[:, :vocab_size] if self._logits else None,
        )
