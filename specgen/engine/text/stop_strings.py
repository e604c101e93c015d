"""Stop strings: finds where an output ends, in its text. They may name special tokens, which stand
for no text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specgen.engine.text.tokenizer import Tokenizer

# Stand for special tokens in texts. Unicode reserves them for use inside of programs.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


@dataclass(frozen=True)
class StopStrings:
    """What is looked for in a text in which the special tokens that it names are marked.

    `marks` has the characters that mark these tokens, by token id. `texts` are the stop strings,
    and once more with marks in place of names: ordinary tokens may spell a name too.
    """

    texts: Sequence[str] = ()
    marks: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, texts: Sequence[str], tokenizer: Tokenizer) -> StopStrings:
        """Returns the stop strings `texts` for a tokenizer. In a text that is only the name of a
        special token, spaces around it do not matter."""
        named = dict(pair for text in texts for pair in _named(text, tokenizer))
        marks = dict(zip(named, _MARKS, strict=False))
        names = {named[token]: mark for token, mark in marks.items()}
        marked = [_marked(text, names) for text in texts]
        return cls(tuple(dict.fromkeys([*texts, *marked])), marks)

    def mark(self, token: int) -> str:
        """Returns the mark to put after the token's own text: empty unless a stop string names this
        special token."""
        return self.marks.get(token, "")

    def start(self, text: str) -> int | None:
        """Returns where the first stop string in a marked text begins; None if there is none."""
        return min((text.index(stop) for stop in self.texts if stop in text), default=None)

    def begun(self, text: str) -> int:
        """Returns how many characters at the end of a marked text may be the beginning of a stop
        string."""
        return max((_overlap(text, stop) for stop in self.texts), default=0)

    def shown(self, text: str) -> str:
        """Returns a marked text without the marks."""
        for mark in self.marks.values():
            text = text.replace(mark, "")
        return text


def _named(text: str, tokenizer: Tokenizer) -> Iterator[tuple[int, str]]:
    """Yields the special tokens that a text names, with their names as written there."""
    alone = tokenizer.special_id(text)
    if alone is not None:
        yield alone, text.strip()
        return
    for token in tokenizer.encode(text, special=False):
        name = tokenizer.text_of([token]).strip()
        if name and name in text and tokenizer.is_special(token):
            yield token, name


def _marked(text: str, names: Mapping[str, str]) -> str:
    if text.strip() in names:
        return names[text.strip()]
    for name, mark in names.items():
        text = text.replace(name, mark)
    return text


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of the text with which `stop` begins, shorter than
    `stop` itself."""
    return next((size for size in range(len(stop) - 1, 0, -1) if text.endswith(stop[:size])), 0)
