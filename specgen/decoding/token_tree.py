"""A tree of token sequences that share common beginnings, for drafts that were not drawn at random."""

from __future__ import annotations

from collections.abc import Iterable


class TokenTree:
    """Nodes in the order in which they were added: their `tokens` and the numbers of their `parents` (-1: the context)."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._children: dict[tuple[int, int], int] = {}  # by parent and token

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int:
        """Returns the child of node `parent` that has this token. Adds it if there is none."""
        node = self._children.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    def extend(self, parent: int, tokens: Iterable[int]) -> list[int]:
        """Adds a path of tokens after node `parent`, where it is missing, and returns its nodes."""
        path: list[int] = []
        for token in tokens:
            parent = self.add(parent, token)
            path.append(parent)
        return path
