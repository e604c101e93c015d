"""Ouroboros (Zhao et al. 2024): the draft model drafts by lookahead decoding, and phrases prolong its drafts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import takewhile
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import torch

from specgen.base.types import Context, Draft, Verdict
from specgen.decoding import logits_ops
from specgen.decoding.drafting import NO_CANDIDATES, DraftModelUser, LearningDrafter, Setup, derive_seed
from specgen.decoding.policy import DraftedToken, LengthPolicy, extend_draft
from specgen.decoding.tree import Tree
from specgen.decoding.verification import match_path, own_tokens
from specgen.engine.devices import upload
from specgen.engine.inference_mode import inference
from specgen.engine.model_runner import room
from specgen.methods.lookahead_drafter import LookaheadWindow, NgramPool, Phrase, until_end

if TYPE_CHECKING:
    from specgen.engine.forward_pass import ModelOutput


class _Branch(NamedTuple):
    """A phrase that the draft tries after the chain's last token, and its nodes."""

    phrase: Phrase
    nodes: list[int]


class OuroborosDrafter(DraftModelUser, LearningDrafter):
    """Drafts a chain by lookahead decoding on the draft model, then phrases of an n-gram pool as branches after its last token.

    Each pass of the draft model verifies phrases that may follow the last token, so it adds one token to the chain or more. The
    pool is that of `LookaheadDrafter`, for the draft model; `ngram` (N in the paper) and `width` (W) are its window's, and the
    pool keeps `width` phrases for a token. At most `branches` (K) phrases follow the chain.

    The pool also learns from the target: after a rejected token, what the target would say after the chain's later tokens (N - 1
    tokens where the chain says the same); and it replaces each phrase tried by what the target says along it (section 3.3).

    In sampling, the draft model draws its tokens, so that the chain is a sample of its distribution. The branches are not drawn.
    """

    def __init__(self, setup: Setup, *, width: int, ngram: int, branches: int) -> None:
        super().__init__(setup)
        self._branches = branches
        self._pool = NgramPool(ngram, width)
        self._window = LookaheadWindow(width, ngram, setup.eos_ids, Random(derive_seed(setup.seed, "draft")))
        self._context: Context | None = None
        self._sequence = Context(())  # the context and the chain: the draft model's own context
        self._drawn: deque[tuple[int, torch.Tensor | None]] = deque()  # tokens of the last pass, with their distributions
        self._chain: list[int] = []
        self._tried: list[_Branch] = []

    @inference
    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        self._chain, self._tried = [], []
        limit = self._room(context, limit)
        if limit < 1:
            return Draft()
        self._follow(context)
        probs: list[torch.Tensor] = []

        def extend(position: int) -> DraftedToken | str:
            if not self._drawn and not self._run(limit - len(self._chain)):
                return NO_CANDIDATES
            token, drawn_from = self._drawn.popleft()
            self._chain.append(token)
            if drawn_from is not None:
                probs.append(drawn_from)
            return "eos" if token in self._eos_ids else DraftedToken(position)

        reason = extend_draft(policy, limit, extend)
        tree = Tree()
        end = tree.extend(-1, self._chain)
        if end and reason != "eos":
            self._add_branches(tree, end[-1], limit - len(end))
        padded = logits_ops.pad_probs(torch.stack(probs), self._vocab_size) if probs else None
        return Draft(tree.tokens, tree.parents, padded, stop_reason=reason)

    def _follow(self, context: Context) -> None:
        """Makes the draft model's context equal to `context`, and adds the context's new n-grams to the pool."""
        if context is not self._context:
            self._context = context
            self._window.start(context.ids[: context.prompt_length])
        self._pool.read(context)
        self._drawn.clear()
        length = len(self._sequence)
        if self._sequence.prompt_length != context.prompt_length or self._sequence.ids != context.ids[:length]:
            self._sequence = Context(context.ids)
            self._sequence.prompt_length = context.prompt_length
        elif length < len(context):
            self._sequence.extend(context.ids[length:])

    def _run(self, limit: int) -> bool:
        """Runs the draft model once, on the phrases that may follow the last token and on its window.

        Puts the tokens that it chooses, at most `limit`, into `_drawn`, and adds them to its context. Returns False, without
        any, where penalties forbid all tokens.
        """
        sequence, window = self._sequence, self._window
        last = sequence.ids[-1]
        tree = Tree()
        for phrase in (window.next_tokens, *self._pool.phrases(last)):
            known = takewhile(lambda token: token < self._runner.num_embeddings, until_end(phrase, self._eos_ids))
            tree.extend(-1, list(known)[: limit - 1])
        candidates = Draft(tree.tokens[:], tree.parents[:])
        rows = len(tree) + 1
        window.add_to(tree, -1, room(self._runner, sequence))
        output = self._runner.logits(sequence, tree.tokens, tree.parents)
        logits = output.logits[:, : self._vocab_size]
        if output.unpenalised is not None and logits_ops.is_forbidden(logits):
            return False
        greedy = self._sampling.greedy
        choose: Callable[[int], int]
        if greedy:
            tokens = logits_ops.argmax_tokens(logits)
            choose = tokens.__getitem__
            found = [tokens[node + 1] for node in window.tips]
        else:
            choose = own_tokens(logits[:rows], self._sampling, self._generator)
            tips = upload(torch.tensor([node + 1 for node in window.tips], dtype=torch.long), logits.device)
            found = logits_ops.argmax_tokens(logits.index_select(0, tips))
        verdict = match_path(candidates, lambda row: logits_ops.valid_token(choose(row), "draft"), rows)
        window.update([logits_ops.valid_token(token, "draft") for token in found], last, self._pool)
        assert verdict.token is not None
        chosen = [*(candidates.tokens[node] for node in verdict.path), verdict.token]
        for row, token in zip((0, *(node + 1 for node in verdict.path)), chosen, strict=True):
            self._drawn.append((token, None if greedy else logits_ops.warp(logits[row], self._sampling)))
        sequence.extend(chosen)
        return True

    def _add_branches(self, tree: Tree, end: int, limit: int) -> None:
        """Adds phrases of at most `limit` tokens after the chain's last node, first the tokens that the draft has chosen."""
        chosen = tuple(token for token, _ in self._drawn)
        phrases = [*([chosen] if chosen else []), *self._pool.phrases(self._chain[-1], self._branches)][: self._branches]
        for phrase in phrases:
            shown = until_end(phrase, self._eos_ids)[:limit]
            self._tried.append(_Branch(phrase, tree.extend(end, shown)))

    def learn(self, draft: Draft, output: ModelOutput, verdict: Verdict) -> None:
        if not self._chain:
            return
        said = logits_ops.argmax_tokens(output.logits)  # by the target after the context, and after node i at index i + 1
        self._learn_rejected(said[1 : len(self._chain) + 1], min(len(verdict.path), len(self._chain)))
        key = self._chain[-1]
        for phrase, nodes in reversed(self._tried):  # the newest last, to stay the newest
            if len(nodes) == self._pool.ngram - 1:
                self._pool.replace(key, phrase, [said[len(self._chain)], *(said[node + 1] for node in nodes[:-1])])

    def _learn_rejected(self, said: list[int], accepted: int) -> None:
        """Adds the n-grams that the target says after the chain's tokens from number `accepted` on.

        `said` are its tokens after each token of the chain. They follow each other as long as the chain has the same tokens.
        """
        longest = self._pool.ngram - 1
        for start in range(accepted, len(self._chain) - longest + 1):
            phrase = said[start : start + longest]
            if phrase[:-1] == self._chain[start + 1 : start + longest]:
                self._pool.add(self._chain[start], phrase)
