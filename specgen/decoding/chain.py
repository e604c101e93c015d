"""Drafters of chains: a model drafts token by token, CaPE adds candidates at each position, and
text is encoded again (SLEM)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specgen.base.errors import nan_logits
from specgen.base.types import Context, Draft, SamplingParams
from specgen.decoding import token_sampling
from specgen.decoding.device_chain import DeviceChain
from specgen.decoding.drafting import NO_CANDIDATES, DraftModelUser, Setup
from specgen.decoding.policy_base import (
    DraftedToken,
    LengthPolicy,
    Signals,
    begins_draft,
    comparison,
    continue_draft,
    extend_draft,
)
from specgen.engine.block_runner import BlockRunner
from specgen.engine.devices import inference, upload
from specgen.engine.model_runner import ModelRunner
from specgen.engine.text.retokenized_context import RetokenizedContext

if TYPE_CHECKING:
    from specgen.engine.text.tokenizer import Tokenizer

_MOST_CANDIDATES = 7
# the number of further candidates where the top probability is at most so large
_BY_TOP_PROB = ((0.3, _MOST_CANDIDATES), (0.6, 5), (0.8, 3))
# `TextDrafter` drafts at most this many of the draft model's tokens for one of the target's
_PIECES = 4


class ModelDrafter(DraftModelUser):
    """Drafts token by token with a smaller model of the same tokenizer (Leviathan et al. 2023, Chen
    et al. 2023).

    The draft model may also be part of the target: its first layers with an exit layer (EESD), or
    the target without some layers (Self-SD). Logits beyond the target's vocabulary are cut before a
    token is chosen. The draft is empty if the context has tokens that the draft model lacks. If the
    runner's `traits.draws` is False, the likeliest tokens are drafted also where the target
    samples.

    With `cape`, each position gets further candidates without a further forward pass (CaPE, Du et
    al. 2024), see `with_candidates`. The length policy sees only the chain's tokens. Verification
    is lossless, also in sampling: the chain's token is verified as a draw from its distribution; if
    it is rejected, the target draws a token from the residual distribution, and a candidate that
    equals this token is accepted.

    With `fallback` above 0 (BiLD), a draft ends before a token whose distribution has a largest
    probability below `fallback` (at temperature 1, without filters); that token is dropped, so that
    the draft may be empty. This is not lossless.
    """

    takes_forced = True

    def __init__(
        self,
        setup: Setup,
        *,
        depth: int | None = None,
        in_turn: bool = False,
        cape: bool = False,
        fallback: float = 0.0,
    ) -> None:
        if setup.draft is not None and not setup.draft.traits.draws:
            setup = replace(setup, sampling=SamplingParams())
        super().__init__(setup, depth=depth, in_turn=in_turn)
        self._cape = cape
        self._fallback = fallback

    @inference
    def propose(
        self,
        context: Context,
        policy: LengthPolicy,
        limit: int,
        unverified: Sequence[int] = (),
        show: Callable[[int, int], bool] | None = None,
        forced: Sequence[int] = (),
    ) -> Draft:
        """Drafts at most `limit` new tokens after the context and after `unverified`, which are
        tokens drafted earlier, and `forced`, which have to follow them.

        `show` is called for each new token as soon as it is drafted, with its number (from 0) and
        the token. If it returns False, the draft ends. Raises RunError for logits that hold a NaN.
        """
        tokens = [*unverified, *forced]
        limit = self._room(context, limit, tokens)
        if limit < 1:
            return Draft()
        device = None if show is not None else self._device_chain(context, policy, tokens)
        if device is None:
            return self._host_draft(context, policy, limit, tokens, len(unverified), show)
        reason = extend_draft(policy, limit, device.append, unverified=len(unverified))
        return device.draft(self._reason(reason, limit))

    def _host_draft(
        self,
        context: Context,
        policy: LengthPolicy,
        limit: int,
        tokens: list[int],
        unverified: int,
        show: Callable[[int, int], bool] | None,
    ) -> Draft:
        """Drafts at most `limit` tokens, each known here before the next one. `tokens` are those to
        draft after, of which the first ones are `unverified`, and get the drafted ones."""
        if not begins_draft(policy, unverified=unverified):
            return Draft(stop_reason=self._reason(policy.reason, limit))

        scores = self._scores(policy, context)
        candidates = 1 + _MOST_CANDIDATES if self._cape else 0
        chain = HostChain(self._setup, self._generator, policy.signals, candidates)
        is_cut = False

        def extend(position: int) -> DraftedToken | str:
            nonlocal is_cut
            if position == 1 and isinstance(self._runner, BlockRunner):
                self._runner.plan(policy.block_levels)
            if is_cut:  # the policy has seen the last token, from which it may learn later
                return "pass ended"
            output = self._runner.logits(context, tokens, start=len(tokens))
            own = output.unpenalised_part(self._vocab_size)
            logits = output.logits
            if logits.shape[1] > self._vocab_size:
                logits = logits[:, : self._vocab_size]
            if own is not None and token_sampling.is_forbidden(logits):
                return NO_CANDIDATES

            score = None
            if scores is not None and output.hidden_states is not None:
                score = scores(output.hidden_states[0], position)
            token = chain.append(logits[0], score, None if own is None else own[0])

            top_prob = chain.statistics[-1][1]
            if top_prob < self._fallback:
                chain.drop_last()
                return f"unsure {comparison(top_prob, '<', self._fallback)}"
            if self._cape:
                token.nodes += further_candidates(top_prob)
            tokens.append(chain.tokens[-1])
            is_cut = show is not None and not show(position - 1, tokens[-1])
            return "eos" if tokens[-1] in self._eos_ids else token

        reason = continue_draft(policy, limit, extend)
        draft = chain.draft(self._reason(reason, limit))
        return with_candidates(draft, chain.likeliest) if self._cape else draft

    def _device_chain(
        self, context: Context, policy: LengthPolicy, unverified: Sequence[int]
    ) -> DeviceChain | None:
        """Begins a draft whose tokens are chosen on the device. Returns None if the host needs to
        know each token before the next one."""
        runner = self._runner
        if not isinstance(runner, ModelRunner) or not runner.chooses_on_device:
            return None
        if context.penalties is not None or context.constraint is not None:
            return None
        if policy.signals or policy.random or self._setup.record or self._cape or self._fallback:
            return None
        return DeviceChain(runner, self._setup, self._generator, context, unverified)


class HostChain:
    """A chain of drafted tokens that grows token by token, with what the length policy and the
    verifier need to know of each.

    `read` are the names of the signals (numbers about a token) that the policy reads. `statistics`
    has the entropy (nats) and the largest probability of each token's distribution. `candidates` is
    the number of likeliest tokens that are kept for each position; 0: none.
    """

    def __init__(
        self, setup: Setup, generator: torch.Generator, read: Signals, candidates: int
    ) -> None:
        self.tokens: list[int] = []
        self.statistics: list[tuple[float, float]] = []
        self._setup = setup
        self._generator = generator
        self._read = read
        self._candidates = candidates
        self._logits: list[torch.Tensor] = []
        self._probs: list[torch.Tensor] = []
        self._likeliest: list[torch.Tensor] = []

    @property
    def likeliest(self) -> list[list[int]]:
        """The likeliest tokens at each position, the likeliest first; -1 in place of an impossible
        token."""
        return torch.stack(self._likeliest).tolist() if self._likeliest else []

    def append(
        self,
        logits: torch.Tensor,
        predicted_acceptance: torch.Tensor | float | None,
        unpenalised: torch.Tensor | None,
    ) -> DraftedToken:
        """Adds a token chosen from the logits [vocabulary]: the likeliest in greedy decoding,
        otherwise drawn at random.

        `predicted_acceptance` is the predictor's acceptance probability for the token; None without
        a predictor. `unpenalised` are the logits of the draft model's own distribution, which may
        have more columns (see `ModelOutput.unrestricted`); None if `logits` are these. Raises
        RunError for logits that hold a NaN.
        """
        if self._setup.record:
            # valid until the runner's next call
            self._logits.append((logits if unpenalised is None else unpenalised).clone())
        if self._candidates:
            values, likeliest = logits.topk(min(self._candidates, logits.shape[-1]))
            self._likeliest.append(likeliest.masked_fill_(values == -torch.inf, -1))
        own = logits if unpenalised is None else unpenalised
        token, entropy, top_prob = token_sampling.greedy_statistics(own)
        if math.isnan(entropy):
            raise nan_logits("draft")
        signals = {"entropy": entropy, "top_prob": top_prob}
        probs = None
        if not self._setup.sampling.greedy:
            probs = token_sampling.warp(logits, self._setup.sampling)
            self._probs.append(probs)
            token = int(token_sampling.draw(probs, self._generator))
        elif unpenalised is not None:
            token = token_sampling.argmax_tokens(logits[None])[0]
        else:
            signals["prob"] = top_prob
        if predicted_acceptance is not None:
            signals["predicted_acceptance"] = float(predicted_acceptance)
        others = self._read - signals.keys()
        if others:
            drawn = torch.tensor(token, device=logits.device)
            computed = token_sampling.signals(others, logits, drawn, probs, unpenalised=unpenalised)
            signals |= {name: value.item() for name, value in computed.items()}
        self.statistics.append((entropy, top_prob))
        self.tokens.append(token_sampling.valid_token(token, "draft"))
        return DraftedToken(
            len(self.tokens), {name: signals[name] for name in self._read if name in signals}
        )

    def drop_last(self) -> None:
        for kept in (self.tokens, self.statistics, self._logits, self._probs, self._likeliest):
            if kept:
                kept.pop()

    def draft(self, reason: str) -> Draft:
        """Returns the whole draft, with its `probs` padded with zeros to the target's vocabulary
        (None in greedy decoding). `reason` says why it ended."""
        if not self.tokens:
            return Draft(stop_reason=reason)
        vocab_size = self._setup.vocab_size
        probs = None
        if self._probs:
            probs = token_sampling.pad_probs(torch.stack(self._probs), vocab_size)
        entropies, top_probs = zip(*self.statistics, strict=True)
        return Draft.chain(
            self.tokens,
            probs=probs,
            entropies=entropies,
            top_probs=top_probs,
            stop_reason=reason,
            logits=torch.stack(self._logits)[:, :vocab_size] if self._logits else None,
        )


def further_candidates(top_prob: float) -> int:
    """Returns the number of candidates that CaPE adds beside a drafted token. `top_prob` is the
    largest probability at temperature 1."""
    return next((number for limit, number in _BY_TOP_PROB if top_prob <= limit), 1)


def with_candidates(chain: Draft, likeliest: Sequence[Sequence[int]]) -> Draft:
    """Returns the chain with further candidates at each position: the likeliest tokens there
    besides the chain's own (CaPE).

    `likeliest` has the most likely tokens at each position, likeliest first; -1 for none. The
    candidates come after all tokens of the chain, so that `probs` still belong to the first nodes.
    Each candidate is a leaf, and a sibling of the chain's token at its position.
    """
    tokens = list(chain.tokens)
    origins = list(range(len(chain.tokens)))  # the chain's position of each node
    for position, (top_prob, ranked) in enumerate(zip(chain.top_probs, likeliest, strict=True)):
        others = [token for token in ranked if token not in (-1, chain.tokens[position])]
        others = others[: further_candidates(top_prob)]
        tokens += others
        origins += [position] * len(others)

    logits = chain.logits
    if logits is not None:
        logits = logits[upload(torch.tensor(origins), logits.device)]
    return replace(
        chain,
        tokens=tokens,
        parents=[origin - 1 for origin in origins],
        entropies=[chain.entropies[origin] for origin in origins],
        top_probs=[chain.top_probs[origin] for origin in origins],
        logits=logits,
    )


class TextDrafter:
    """Drafts text with the draft model, and encodes it with the target's tokenizer (SLEM: Timor et
    al. 2025, arXiv 2502.05202, Algorithm 2).

    For draft models with another tokenizer. The draft model always takes its likeliest token, and
    the length policy counts its tokens. The target's tokens that the text is encoded to were not
    drawn from a distribution: a verifier accepts them where they equal the target's argmax, or the
    token that the target draws. `target` and `draft` are the models' tokenizers.
    """

    def __init__(self, setup: Setup, target: Tokenizer, draft: Tokenizer) -> None:
        runner = setup.draft
        assert runner is not None, "this drafter runs a model"
        # a runner that answers in the target's tokens has one in the draft's own
        runner = getattr(runner, "own", runner)
        ends = frozenset[int]() if draft.eos_id is None else frozenset({draft.eos_id})
        own = replace(
            setup,
            draft=runner,
            sampling=SamplingParams(),
            eos_ids=ends,
            vocab_size=runner.vocab_size,
        )
        self._drafter = ModelDrafter(replace(own, record=False))
        self._retokenized = RetokenizedContext(target, draft)
        self._ends = ends
        self._num_embeddings = runner.num_embeddings
        self._eos_id = target.eos_id
        if target.eos_id not in setup.eos_ids:
            self._eos_id = min(setup.eos_ids, default=None)

    @inference
    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        """Drafts at most `limit` of the target's tokens.

        The draft is empty if the drafted text has no tokens that continue the context, if the
        context has no text yet, or if the draft model has no embedding for a token of the text.
        """
        if limit < 1:
            return Draft()
        texts = self._retokenized
        texts.follow(context)
        if not texts.context.ids or max(texts.tail, default=0) >= self._num_embeddings:
            return Draft()
        draft = self._drafter.propose(texts.context, policy, _PIECES * limit, texts.tail)
        drafted = [token for token in draft.tokens if token not in self._ends]
        tokens = texts.target_tokens(texts.text_after(drafted)) if drafted else []
        has_ended = len(drafted) < len(draft.tokens)
        if has_ended and self._eos_id is not None and (tokens or not drafted):
            tokens.append(self._eos_id)
        if not tokens:
            return Draft(stop_reason=draft.stop_reason)
        reason = "length" if len(tokens) > limit else draft.stop_reason
        return Draft.chain(tokens[:limit], stop_reason=reason)
