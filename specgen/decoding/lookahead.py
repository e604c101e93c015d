"""Lookahead decoding (Fu et al. 2024): each pass of the target both verifies n-grams and makes new
ones by Jacobi iteration.

Ouroboros (Zhao et al. 2024): the draft model drafts by lookahead decoding, and phrases of its
n-gram pool follow its drafts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from random import Random
from typing import TYPE_CHECKING

import torch

from specgen.base.seeds import derive_seed
from specgen.base.types import Context, Draft, Verdict
from specgen.decoding import token_sampling
from specgen.decoding.drafting import (
    NO_CANDIDATES,
    DraftModelUser,
    LearningDrafter,
    Setup,
)
from specgen.decoding.policy_base import DraftedToken, LengthPolicy, extend_draft
from specgen.decoding.tree import Tree
from specgen.decoding.verification import match_path, own_tokens
from specgen.engine.devices import inference, upload

if TYPE_CHECKING:
    from specgen.engine.forward_pass import ModelOutput


Phrase = tuple[int, ...]


class NgramPool:
    """A map from a token to at most `size` phrases of `ngram` - 1 tokens that may follow it (Fu et
    al. 2024, section 3.2).

    If there are more, the oldest are removed. A phrase that is added again counts as new.
    """

    def __init__(self, ngram: int, size: int) -> None:
        self.ngram = ngram
        self._size = size
        self._phrases: dict[int, dict[Phrase, None]] = {}  # the newest phrase is the last
        self.context: Context | None = None
        self._read = 0  # tokens of the context that `read` has seen

    def add(self, token: int, phrase: Sequence[int]) -> None:
        """Adds a phrase that may follow the token. Ignored if it has not `ngram` - 1 tokens, or if
        one of them is -1 (no token)."""
        if len(phrase) != self.ngram - 1 or -1 in phrase:
            return
        phrases = self._phrases.setdefault(token, {})
        phrases.pop(tuple(phrase), None)
        phrases[tuple(phrase)] = None
        if len(phrases) > self._size:
            del phrases[next(iter(phrases))]

    def replace(self, token: int, phrase: Phrase, correct: Sequence[int]) -> None:
        """Removes `phrase` from those that may follow the token, and adds the phrase `correct`,
        which does follow it."""
        self._phrases.get(token, {}).pop(phrase, None)
        self.add(token, correct)

    def phrases(self, token: int) -> list[Phrase]:
        """Returns the phrases that may follow the token, the newest first."""
        return list(reversed(self._phrases.get(token, {})))

    def read(self, context: Context, window: LookaheadWindow) -> None:
        """Adds all n-grams of the context, prompt and output, that were not added before.

        If the context is another object than at the last call, the pool is emptied first, and
        `window` starts again with its prompt.
        """
        if context is not self.context:
            self.context = context
            self._read = 0
            self._phrases.clear()
            window.start(context.ids[: context.prompt_length])
        ids = context.ids
        for end in range(max(self._read + 1, self.ngram), len(ids) + 1):
            self.add(ids[end - self.ngram], ids[end - self.ngram + 1 : end])
        self._read = len(ids)


class LookaheadWindow:
    """The window of lookahead decoding: guesses for the next positions, which each pass of a model
    replaces by better ones.

    It has `ngram` - 1 levels of `width` tokens. The token of level j in column i is a guess for the
    position i + j after the sequence's last token; that last token itself is level 0 in column 0.
    In the tree of draft nodes, level 0 is a chain, and each of its tokens is followed by the tokens
    of its column's other levels. So a column sees level 0 only up to its own token (Fu et al.,
    Figure 5). After a pass, a column's tokens and the likeliest token after its last one are one
    n-gram.

    `tips` are each column's node in the last level, set by `add_to`. `random` draws tokens of the
    prompt: as first guesses, and in place of guesses that are in `eos_ids`.
    """

    def __init__(self, width: int, ngram: int, eos_ids: Collection[int], random: Random) -> None:
        self._width = width
        self._ngram = ngram
        self._eos_ids = eos_ids
        self._random = random
        self.tips: list[int] = []
        # level 0 begins with column 1; one level is filled in each pass
        self._levels: list[list[int]] = []
        self._prompt: Sequence[int] = ()

    def start(self, prompt: Sequence[int]) -> None:
        """Begins a new sequence with random tokens of the prompt as level 0."""
        self._prompt = prompt
        # while the other levels are filled, level 0 loses a column in each pass
        missing = self._ngram - 2
        self._levels = [self._random.choices(prompt, k=self._width - 1 + missing)]

    @property
    def next_tokens(self) -> Phrase:
        """The window's guesses for the tokens that follow the sequence's last token: column 0 of
        the levels after level 0.

        With n-grams of two tokens there is only level 0, which is returned instead: this is Jacobi
        decoding.
        """
        if self._ngram == 2:
            return tuple(self._levels[0])
        return tuple(level[0] for level in self._levels[1:] if level)

    def add_to(self, tree: Tree, root: int, room: int) -> None:
        """Adds the window's tokens to a tree after node `root`, the sequence's last token (-1: this
        token is the context's last one).

        `room` is the number of positions left after that token. Columns that do not fit are dropped
        from the window.
        """
        first, *others = self._levels
        columns = max(min(room + 2 - len(self._levels), len(first) + 1, *map(len, others)), 0)
        self._levels = [first[: max(columns - 1, 0)], *(level[:columns] for level in others)]
        self.tips = []
        if not columns:
            return
        for column, node in enumerate([root, *tree.extend(root, self._levels[0])]):
            path = tree.extend(node, (level[column] for level in self._levels[1:]))
            self.tips.append(path[-1] if path else node)

    def update(self, likeliest: Sequence[int], last: int, pool: NgramPool) -> None:
        """Moves the window on by one position, with new guesses, and adds its n-grams to the pool.

        `likeliest` are the likeliest tokens after the nodes in `tips`. `last` is the sequence's
        last token as it was before the model's pass.
        """
        columns: list[tuple[int, ...]] = []
        if self.tips:
            columns = list(zip([last, *self._levels[0]], *self._levels[1:], likeliest, strict=True))
        guesses = [
            token if token not in self._eos_ids else self._random.choice(self._prompt)
            for token in likeliest
        ]
        if len(self._levels) < self._ngram - 1:
            self._levels = [level[1:] for level in (*self._levels, guesses)]
        else:
            for first, *phrase in columns:
                pool.add(first, phrase)
            self._levels = [*self._levels[1:], guesses]
            self._levels[0] = self._levels[0][1:]
        self.tips = []


class LookaheadDrafter(LearningDrafter):
    """Drafts phrases of the n-gram pool that may follow the last token, and has the target run a
    window that makes n-grams.

    `window` (W in the paper) is the window's width, `ngram` (N) the length of its n-grams, and
    `guesses` (G) the largest number of phrases kept for a token. The pool also gets the n-grams of
    the prompt and of the output. The draft's candidates are a tree of the phrases and of the
    window's guesses for the next tokens; phrases with the same beginning share nodes. The window's
    other nodes come after the candidates and are not verified. Lossless, because no candidate
    depends on the random numbers that verify it. The window takes the likeliest tokens also in
    sampling.
    """

    def __init__(self, setup: Setup, *, window: int, ngram: int, guesses: int) -> None:
        assert setup.target is not None
        self._eos_ids = setup.eos_ids
        self._context_limit = setup.target.context_limit
        self._pool = NgramPool(ngram, guesses)
        self._window = LookaheadWindow(
            window, ngram, setup.eos_ids, Random(derive_seed(setup.seed, "draft"))
        )

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        if limit < 1:
            return Draft()
        self._pool.read(context, self._window)
        tree = Tree()
        phrases = self._pool.phrases(context.ids[-1])
        for phrase in (self._window.next_tokens, *phrases):
            tree.extend(-1, until_end(phrase, self._eos_ids)[:limit])
        judged = len(tree)

        self._window.add_to(tree, -1, self._context_limit - len(context))
        reason = f"{len(phrases)} phrase{'s' * (len(phrases) != 1)}"
        return Draft(tree.tokens, tree.parents, stop_reason=reason, judged=judged)

    def learn(self, draft: Draft, output: ModelOutput, verdict: Verdict) -> None:
        if self._pool.context is None or not self._window.tips:
            return
        rows = upload(torch.tensor([node + 1 for node in self._window.tips]), output.logits.device)
        likeliest = token_sampling.argmax_tokens(output.logits.index_select(0, rows))
        likeliest = [token_sampling.valid_token(token, "target") for token in likeliest]
        self._window.update(likeliest, self._pool.context.ids[-1], self._pool)


def until_end(phrase: Phrase, eos_ids: Collection[int]) -> Phrase:
    """Returns the phrase up to and including its first token that is in `eos_ids`; the whole phrase
    if there is none."""
    length = len(list(takewhile(lambda token: token not in eos_ids, phrase)))
    return phrase[: length + 1]


class OuroborosDrafter(DraftModelUser, LearningDrafter):
    """Drafts a chain by lookahead decoding on the draft model, then phrases of an n-gram pool as
    branches after its last token.

    Each pass of the draft model verifies phrases that may follow the last token, so it adds one
    token to the chain or more. `ngram` (N in the paper) and `window` (W) are those of the draft
    model's lookahead window, and the pool keeps `window` phrases for a token. At most `branches`
    (K) phrases follow the chain.

    The pool also learns from the target (section 3.3). After a rejection, it gets the N - 1 tokens
    that the target predicts after the rejected token, and after each later one of the chain,
    wherever the chain continues with all but the last of them. Each phrase that was tried as a
    branch is replaced by what the target predicts along this phrase.

    In sampling, the draft model draws its tokens, so that the chain is a sample of its
    distribution. The branches are not drawn.
    """

    def __init__(self, setup: Setup, *, window: int, ngram: int, branches: int) -> None:
        super().__init__(setup)
        self._branches = branches
        self._pool = NgramPool(ngram, window)
        self._window = LookaheadWindow(
            window, ngram, setup.eos_ids, Random(derive_seed(setup.seed, "draft"))
        )
        # tokens of the last pass, with their distributions
        self._drawn: deque[tuple[int, torch.Tensor | None]] = deque()
        self._chain: list[int] = []
        # phrases tried after the chain's last token, with their nodes
        self._tried: list[tuple[Phrase, list[int]]] = []

    @inference
    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        self._chain = []
        self._tried = []
        limit = self._room(context, limit)
        if limit < 1:
            return Draft()
        self._pool.read(context, self._window)
        self._drawn.clear()
        probs: list[torch.Tensor] = []

        def extend(position: int) -> DraftedToken | str:
            if not self._drawn and not self._run(context, limit - len(self._chain)):
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
        padded = token_sampling.pad_probs(torch.stack(probs), self._vocab_size) if probs else None
        return Draft(tree.tokens, tree.parents, padded, stop_reason=reason)

    def _run(self, context: Context, limit: int) -> bool:
        """Runs the draft model once, on the phrases that may follow the chain and on its window.

        Puts the tokens that it chooses, at most `limit`, into `_drawn`, and returns True. Returns
        False if penalties forbid all tokens.
        """
        window = self._window
        tree = Tree()
        end = tree.extend(-1, self._chain)[-1] if self._chain else -1
        last = [*context.ids[-1:], *self._chain][-1]
        start = len(tree)
        for phrase in (window.next_tokens, *self._pool.phrases(last)):
            with_embedding = takewhile(
                lambda token: token < self._runner.num_embeddings, until_end(phrase, self._eos_ids)
            )
            tree.extend(end, list(with_embedding)[: limit - 1])
        parents = [parent - start for parent in tree.parents[start:]]  # -1: the chain's end
        candidates = Draft(tree.tokens[start:], parents)
        rows = len(candidates.tokens) + 1

        window.add_to(tree, end, self._runner.room(context) - start)
        output = self._runner.logits(context, tree.tokens, tree.parents, start=start)
        logits = output.logits[:, : self._vocab_size]
        if output.unpenalised is not None and token_sampling.is_forbidden(logits):
            return False

        likeliest = token_sampling.argmax_tokens(logits)
        choose: Callable[[int], int] = likeliest.__getitem__
        if not self._sampling.greedy:
            choose = own_tokens(logits[:rows], self._sampling, self._generator)
        verdict = match_path(
            candidates, lambda row: token_sampling.valid_token(choose(row), "draft"), rows
        )
        after_tips = [
            token_sampling.valid_token(likeliest[node - start + 1], "draft") for node in window.tips
        ]
        window.update(after_tips, last, self._pool)

        assert verdict.token is not None
        chosen = [*(candidates.tokens[node] for node in verdict.path), verdict.token]
        for row, token in zip((0, *(node + 1 for node in verdict.path)), chosen, strict=True):
            probs = None
            if not self._sampling.greedy:
                probs = token_sampling.warp(logits[row], self._sampling)
            self._drawn.append((token, probs))
        return True

    def _add_branches(self, tree: Tree, end: int, limit: int) -> None:
        """Adds phrases of at most `limit` tokens after the chain's last node, first the tokens that
        the draft has chosen."""
        phrases = self._pool.phrases(self._chain[-1])
        if self._drawn:
            phrases.insert(0, tuple(token for token, _ in self._drawn))
        for phrase in phrases[: self._branches]:
            shown = until_end(phrase, self._eos_ids)[:limit]
            self._tried.append((phrase, tree.extend(end, shown)))

    def learn(self, draft: Draft, output: ModelOutput, verdict: Verdict) -> None:
        if not self._chain:
            return
        # the target's tokens: after the context, and after node i at index i + 1
        predicted = token_sampling.argmax_tokens(output.logits)
        length = len(self._chain)
        self._learn_rejected(predicted[1 : length + 1], min(len(verdict.path), length))

        last = self._chain[-1]
        # the newest is added last, so that it stays the newest
        for phrase, nodes in reversed(self._tried):
            if len(nodes) == self._pool.ngram - 1:
                correct = [predicted[length], *(predicted[node + 1] for node in nodes[:-1])]
                self._pool.replace(last, phrase, correct)

    def _learn_rejected(self, predicted: list[int], accepted: int) -> None:
        """Adds the n-grams that begin with a token of the chain, from number `accepted` on, and
        continue as the target predicts.

        `predicted` are the target's predictions after each token of the chain. They form an n-gram
        only where the chain has the same tokens, except for the last one.
        """
        longest = self._pool.ngram - 1
        for start in range(accepted, len(self._chain) - longest + 1):
            phrase = predicted[start : start + longest]
            if phrase[:-1] == self._chain[start + 1 : start + longest]:
                self._pool.add(self._chain[start], phrase)
