"""Lookahead decoding (Fu et al. 2024): the target makes n-grams by Jacobi iteration beside its own passes, and verifies them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile
from random import Random
from typing import TYPE_CHECKING

import torch

from specgen.base.types import Context, Draft, Verdict
from specgen.decoding import logits_ops
from specgen.decoding.drafting import LearningDrafter, Setup, derive_seed
from specgen.decoding.policy import LengthPolicy
from specgen.decoding.tree import Tree
from specgen.engine.devices import upload

if TYPE_CHECKING:
    from specgen.engine.forward_pass import ModelOutput


Phrase = tuple[int, ...]


class NgramPool:
    """A map from a token to at most `size` phrases of `ngram` - 1 tokens that may follow it (Fu et al. 2024, section 3.2).

    A phrase that is added again counts as new. The oldest phrases are removed first.
    """

    def __init__(self, ngram: int, size: int) -> None:
        self.ngram = ngram
        self._size = size
        self._phrases: dict[int, dict[Phrase, None]] = {}  # the newest phrase is the last
        self._context: Context | None = None
        self._read = 0  # tokens of the context that `read` has seen

    def add(self, token: int, phrase: Sequence[int]) -> None:
        """Adds the phrase that may follow the token. Phrases of another length are ignored, and those with a -1 for no token."""
        if len(phrase) != self.ngram - 1 or -1 in phrase:
            return
        phrases = self._phrases.setdefault(token, {})
        phrases.pop(tuple(phrase), None)
        phrases[tuple(phrase)] = None
        if len(phrases) > self._size:
            del phrases[next(iter(phrases))]

    def replace(self, token: int, phrase: Phrase, correct: Sequence[int]) -> None:
        """Removes a phrase that was thought to follow the token, and adds the one that does."""
        self._phrases.get(token, {}).pop(phrase, None)
        self.add(token, correct)

    def phrases(self, token: int, count: int | None = None) -> list[Phrase]:
        """Returns the phrases that may follow the token, the newest first; at most `count` (None: all)."""
        return list(reversed(self._phrases.get(token, {})))[:count]

    def read(self, context: Context) -> None:
        """Adds all n-grams of the context: of the prompt, and of the output so far. Another context empties the pool."""
        if context is not self._context:
            self._context, self._read = context, 0
            self._phrases.clear()
        ids = context.ids
        for end in range(max(self._read + 1, self.ngram), len(ids) + 1):
            self.add(ids[end - self.ngram], ids[end - self.ngram + 1 : end])
        self._read = len(ids)


class LookaheadWindow:
    """The window of lookahead decoding: guesses for the next positions, which each pass of a model replaces by better ones.

    It has `ngram` - 1 levels of `width` tokens. The token of level j in column i is a guess for i + j positions after the last
    token of the sequence, which itself is level 0 in column 0. Level 0 is a chain; below each of its tokens hang those of the
    column's other levels. The tokens below it see level 0 only up to their own column, so this is a tree of draft nodes (Fu et
    al., Figure 5). The likeliest tokens after the last level complete one n-gram in each column, of the column's tokens and them.

    `tips` are each column's node in the last level, after `add_to`. `random` draws tokens of a prompt: the first guesses, and
    others for guesses that end an output (`eos_ids`).
    """

    def __init__(self, width: int, ngram: int, eos_ids: Collection[int], random: Random) -> None:
        self._width, self._ngram, self._eos_ids, self._random = width, ngram, eos_ids, random
        self.tips: list[int] = []
        self._levels: list[list[int]] = []  # level 0 begins with column 1; one level is filled in each pass
        self._prompt: Sequence[int] = ()

    def start(self, prompt: Sequence[int]) -> None:
        """Begins a new sequence with random tokens of the prompt as level 0."""
        self._prompt = prompt
        missing = self._ngram - 2  # while the other levels are filled, level 0 loses a column in each pass
        self._levels = [self._random.choices(prompt, k=self._width - 1 + missing)]

    @property
    def next_tokens(self) -> Phrase:
        """The guesses for the tokens that follow the sequence's last token: column 0, or level 0 if there is no other level.

        With n-grams of two tokens this is Jacobi decoding.
        """
        return tuple(self._levels[0]) if self._ngram == 2 else tuple(level[0] for level in self._levels[1:] if level)

    def add_to(self, tree: Tree, root: int, room: int) -> None:
        """Adds the window to a tree after node `root`, which holds the sequence's last token (-1: the context does).

        There are `room` positions left after this token. The window loses the columns that do not fit.
        """
        first, *others = self._levels
        columns = max(min(room + 2 - len(self._levels), len(first) + 1, *map(len, others)), 0)
        self._levels = [first[: max(columns - 1, 0)], *(level[:columns] for level in others)]
        self.tips = []
        if columns:
            roots = [root, *tree.extend(root, self._levels[0])]
            self.tips = roots if not others else [self._stub(tree, node, column) for column, node in enumerate(roots)]

    def _stub(self, tree: Tree, node: int, column: int) -> int:
        return tree.extend(node, (level[column] for level in self._levels[1:]))[-1]

    def update(self, found: Sequence[int], last: int, pool: NgramPool) -> None:
        """Moves the window on by one position, with new guesses, and adds its n-grams to the pool.

        `found` are the likeliest tokens after the nodes in `tips`, `last` is the sequence's last token before the model's pass.
        """
        columns = list(zip([last, *self._levels[0]], *self._levels[1:], found, strict=True)) if self.tips else []
        guesses = [token if token not in self._eos_ids else self._random.choice(self._prompt) for token in found]
        if len(self._levels) < self._ngram - 1:
            self._levels = [level[1:] for level in (*self._levels, guesses)]
        else:
            for first, *phrase in columns:
                pool.add(first, phrase)
            self._levels = [*self._levels[1:], guesses]
            self._levels[0] = self._levels[0][1:]
        self.tips = []


class LookaheadDrafter(LearningDrafter):
    """Drafts phrases of the n-gram pool that may follow the last token, and has the target run a window that makes n-grams.

    `width` (W in the paper) and `ngram` (N) are the window's, `guesses` (G) is the largest number of phrases for a token. The
    pool also gets the n-grams of the prompt and of the output. The draft's candidates are a tree of the phrases and of the
    window's own guesses for the next tokens, without common beginnings twice; then follow the window's other nodes, which are
    not judged. Lossless, because no candidate depends on the random numbers that verify it. The window takes the likeliest
    tokens also in sampling.
    """

    def __init__(self, setup: Setup, *, width: int, ngram: int, guesses: int) -> None:
        assert setup.target is not None
        self._eos_ids, self._context_limit = setup.eos_ids, setup.target.context_limit
        self._pool = NgramPool(ngram, guesses)
        self._window = LookaheadWindow(width, ngram, setup.eos_ids, Random(derive_seed(setup.seed, "draft")))
        self._context: Context | None = None

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        if limit < 1:
            return Draft()
        if context is not self._context:
            self._context = context
            self._window.start(context.ids[: context.prompt_length])
        self._pool.read(context)
        tree = Tree()
        phrases = self._pool.phrases(context.ids[-1])
        for phrase in (self._window.next_tokens, *phrases):
            tree.extend(-1, until_end(phrase, self._eos_ids)[:limit])
        judged = len(tree)
        self._window.add_to(tree, -1, self._context_limit - len(context))
        reason = f"{len(phrases)} phrase{'s' * (len(phrases) != 1)}"
        return Draft(tree.tokens, tree.parents, stop_reason=reason, judged=judged)

    def learn(self, draft: Draft, output: ModelOutput, verdict: Verdict) -> None:
        if self._context is None or not self._window.tips:
            return
        rows = upload(torch.tensor([node + 1 for node in self._window.tips]), output.logits.device)
        found = logits_ops.argmax_tokens(output.logits.index_select(0, rows))
        self._window.update([logits_ops.valid_token(token, "target") for token in found], self._context.ids[-1], self._pool)


def until_end(phrase: Phrase, eos_ids: Collection[int]) -> Phrase:
    """Returns the phrase up to its first token that ends an output."""
    length = len(list(takewhile(lambda token: token not in eos_ids, phrase)))
    return phrase[: length + 1]
