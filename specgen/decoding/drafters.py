"""Who proposes tokens. A drafter sees the committed context and a length policy, and never drafts past an end-of-sequence."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from specgen.decoding import logits_ops
from specgen.decoding.policies import DraftedToken, LengthPolicy, Signals
from specgen.engine.inference_mode import inference
from specgen.errors import nan_logits
from specgen.types import Context, Draft, SamplingParams

if TYPE_CHECKING:
    from specgen.engine.model_runner import DraftRunner


class Drafter(Protocol):
    """What each can tell a policy of a token stands in `methods.FEEDS`."""

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        """At most `limit` tokens to follow the context; none where the drafter has nothing to say or `limit` is 0."""
        ...


class AcceptancePredictor(Protocol):
    """What predicts, for each drafted token, whether the target will say the same (EESD, Eq. 5)."""

    def begin(self, context: Context) -> None:
        """A draft behind this context begins."""
        ...

    def score(self, draft_hidden: torch.Tensor, position: int) -> torch.Tensor:
        """theta_M [] of the token at `place` (from 1) that came from the hidden row [width]."""
        ...


def room(runner: DraftRunner, context: Context, limit: int) -> int:
    """How many tokens there may be behind the context: none where it holds one that the draft model does not know."""
    return 0 if context.largest_id >= runner.num_embeddings else min(limit, runner.context_limit - len(context))


class ModelDrafterBase:
    """What all share that draft with a model: its session, what is drawn and with what randomness, and where drafts end.

    `vocab_size` is the width of the target's logits; `keep_logits` keeps the rows of a draft for the record.
    """

    def __init__(
        self,
        runner: DraftRunner,
        sampling: SamplingParams,
        eos_ids: Collection[int],
        vocab_size: int,
        seed: int,
        *,
        keep_logits: bool = False,
    ) -> None:
        self._runner = runner
        self._sampling = sampling
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._generator = logits_ops.make_generator(runner.device, seed)
        self._keep_logits = keep_logits


class ModelDrafter(ModelDrafterBase):
    """A smaller model with the target's tokenizer, run token by token (Leviathan et al. 2023, Chen et al. 2023).

    Or a part of the target itself, behind a session of the same interface: its first layers and an exit layer, which may come
    with what predicts `agreement` (EESD), or the target with layers left out (Self-SD).

    Where tables are padded to different sizes, logits beyond the target's vocabulary are cut before anything is drawn, and no
    context is drafted for that holds a token unknown to the draft.
    """

    def __init__(
        self,
        runner: DraftRunner,
        sampling: SamplingParams,
        eos_ids: Collection[int],
        vocab_size: int,
        seed: int,
        *,
        keep_logits: bool = False,
        agreement: AcceptancePredictor | None = None,
    ) -> None:
        super().__init__(runner, sampling, eos_ids, vocab_size, seed, keep_logits=keep_logits)
        self._agreement = agreement

    @inference
    def propose(self, context: Context, policy: LengthPolicy, limit: int, pending: Sequence[int] = ()) -> Draft:
        """`pending` are tokens drafted before, not judged yet, that stand between the context and the new ones."""
        tokens = list(pending)
        limit = room(self._runner, context, limit + len(tokens)) - len(tokens)
        if limit < 1:
            return Draft()
        chain = _Chain(self._sampling, self._generator, policy.signals)
        asked = self._agreement if "agreement" in policy.signals else None
        if asked is not None:
            asked.begin(context)
        reason = "length"
        while len(chain.tokens) < limit:
            rows = self._runner.logits(context, tokens, start=len(tokens))
            score = (
                None if asked is None or rows.hidden_states is None else asked.score(rows.hidden_states[0], len(chain.tokens) + 1)
            )
            step = chain.append(rows.logits[0, : self._vocab_size], score)
            tokens.append(chain.tokens[-1])
            if chain.tokens[-1] in self._eos_ids:
                reason = "eos"
                break
            if not policy.keep_drafting(step):
                reason = policy.reason
                break
        return chain.draft(reason, self._vocab_size, keep_logits=self._keep_logits)


class _Chain:
    """A draft that grows by one token a row, with one transfer to the host each: the id and what the policy asked for.

    Entropies and top probabilities that no policy asks for are computed for all rows at once in the end.
    """

    def __init__(self, sampling: SamplingParams, generator: torch.Generator, signals: Signals) -> None:
        self.tokens: list[int] = []
        self._sampling, self._generator, self._needs = sampling, generator, signals
        self._rows: list[torch.Tensor] = []
        self._probs: list[torch.Tensor] = []
        self._figures: list[tuple[float, float]] = []

    def append(self, row: torch.Tensor, agreement: torch.Tensor | None = None) -> DraftedToken:
        """Choose a token from the logits [vocabulary]: the likeliest, or drawn from the warped distribution."""
        self._rows.append(row)
        step = DraftedToken(position=len(self._rows))
        if self._sampling.greedy:
            token = row.argmax()
        else:
            self._probs.append(logits_ops.warp(row, self._sampling))
            token = logits_ops.draw(self._probs[-1], self._generator)
        if not self._needs - {"agreement"}:
            chosen, *scores = logits_ops.to_host(token, *([] if agreement is None else [agreement]))
            step.agreement = scores[0] if scores else math.nan
            self.tokens.append(_sound(int(chosen)))
            return step
        wanted = [token, *logits_ops.figures(row)]
        if not self._sampling.greedy and "prob" in self._needs:
            wanted.append(self._probs[-1].gather(0, token[None])[0])  # an index with a tensor would visit the host
        if agreement is not None:
            wanted.append(agreement)
        chosen, negative_entropy, top_log_prob, *others = logits_ops.to_host(*wanted)
        step.agreement = others.pop() if agreement is not None else math.nan
        step.entropy = abs(negative_entropy)  # rounding may leave it a hair on the wrong side of 0
        step.prob = others[0] if others else math.exp(top_log_prob)
        self._figures.append((step.entropy, math.exp(top_log_prob)))
        self.tokens.append(_sound(int(chosen), step.entropy))
        return step

    def draft(self, reason: str, vocab_size: int, *, keep_logits: bool) -> Draft:
        """The whole draft; `probs` padded with zeros to the target's vocabulary."""
        figures = self._figures
        if not figures:
            sums, logs = torch.stack(logits_ops.figures(torch.stack(self._rows))).tolist()
            figures = [(abs(negative), math.exp(log)) for negative, log in zip(sums, logs, strict=True)]
        entropies, top_probs = zip(*figures, strict=True)
        _sound(0, sum(entropies))
        probs = None
        if self._probs:
            probs = torch.stack(self._probs)
            if probs.shape[-1] < vocab_size:
                probs = torch.nn.functional.pad(probs, (0, vocab_size - probs.shape[-1]))
        logits = torch.stack(self._rows) if keep_logits else None
        return Draft(self.tokens, range(-1, len(self.tokens) - 1), probs, entropies, top_probs, reason, logits=logits)


def _sound(token: int, figure: float = 0.0) -> int:
    """The token, unless it or the figure that came with it says that the row held a NaN."""
    if token < 0 or math.isnan(figure):
        raise nan_logits("draft")
    return token


class PromptLookupDrafter:
    """The longest n-gram at the context's end that occurred before, and what followed it then (Saxena 2023).

    The n-grams' places are kept as the context grows, so that a round costs nothing that grows with it. Of several places the
    latest counts; a continuation that reaches the context's end goes on into the draft itself, as a repetition does.
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
        reason = "length"
        while len(tokens) < limit:
            position = start + len(tokens)
            tokens.append(context.ids[position] if position < len(context) else tokens[position - len(context)])
            if tokens[-1] in self._eos_ids:
                reason = "eos"
                break
            if not policy.keep_drafting(DraftedToken(position=len(tokens))):
                reason = policy.reason
                break
        return Draft(tokens, range(-1, len(tokens) - 1), stop_reason=reason)

    def _index(self, context: Context) -> None:
        """Note for each n-gram that ends before a new token that this token follows it."""
        if context is not self._context:
            self._context, self._indexed = context, 0
            self._continuations.clear()
        for position in range(self._indexed, len(context)):
            for length in range(1, min(self._ngram, position) + 1):
                self._continuations[tuple(context.ids[position - length : position])] = position
        self._indexed = len(context)

    def _match(self, context: Context) -> int | None:
        for length in range(min(self._ngram, len(context)), 0, -1):
            position = self._continuations.get(tuple(context.ids[-length:]))
            if position is not None:
                return position
        return None


class NoDrafter:
    """Plain decoding: every draft is empty."""

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        return Draft()
