"""String-level exact match: drafts of a model with any other tokenizer, by way of their text."""

from __future__ import annotations

from dataclasses import replace

from specgen.base.types import Context, Draft, SamplingParams
from specgen.decoding.drafting import ModelDrafter, Setup
from specgen.decoding.policy import LengthPolicy
from specgen.engine.inference_mode import inference
from specgen.engine.text.retokenized_context import RetokenizedContext

_PIECES = 4  # of the draft model's tokens that are drafted for one of the target's, at most


class TextDrafter:
    """Drafts text, and encodes it with the target's tokenizer (SLEM: Timor et al. 2025, arXiv 2502.05202, Algorithm 2).

    The draft model reads and chooses its own tokens, always the likeliest, so the length policy counts these; `limit` counts the
    target's. The drafted tokens were not drawn from any distribution over the target's vocabulary: a verifier accepts them where
    they are the target's argmax, or its own draw.
    """

    def __init__(self, setup: Setup) -> None:
        runner, tokenizers = setup.draft, setup.tokenizers
        assert runner is not None, "this drafter runs a model"
        runner = getattr(runner, "own", runner)  # of one that answers in the target's tokens
        assert tokenizers is not None, "this drafter needs the tokenizers of both models"
        target, draft = tokenizers
        ends = frozenset[int]() if draft.eos_id is None else frozenset({draft.eos_id})
        own = replace(setup, draft=runner, sampling=SamplingParams(), eos_ids=ends, vocab_size=runner.vocab_size)
        self._drafter = ModelDrafter(replace(own, record=False))
        self._retokenized = RetokenizedContext(target, draft)
        self._ends, self._num_embeddings = ends, runner.num_embeddings
        self._eos_id = target.eos_id if target.eos_id in setup.eos_ids else min(setup.eos_ids, default=None)

    @inference
    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        """Drafts at most `limit` of the target's tokens. Empty where the drafted text has no tokens that continue the context.

        Also where the context has no text yet, and where the draft model has no embedding for a token of the text.
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
        if len(drafted) < len(draft.tokens) and self._eos_id is not None and (tokens or not drafted):
            tokens.append(self._eos_id)
        if not tokens:
            return Draft(stop_reason=draft.stop_reason)
        return Draft.chain(tokens[:limit], stop_reason="length" if len(tokens) > limit else draft.stop_reason)
