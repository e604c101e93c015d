"""The n-grams that lookahead decoding and Ouroboros draft from, by their first token."""

from __future__ import annotations

from collections.abc import Sequence

from specgen.base.types import Context

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
