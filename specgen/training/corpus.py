"""Text to train on, as token ids: files of the user's, or the demo pair's own corpus."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from random import Random

from specgen.errors import SpecgenError

Encode = Callable[[str], list[int]]
HELD_OUT = 8  # of so many texts one is never trained on
MOST_TOKENS = 8_000_000  # of a corpus: what lies behind is not read
_PIECE = 20_000  # characters of plain text that are encoded at once
DEMO_SEED = 1_000_000  # far from the seeds that the demo models were trained with


class Texts:
    """Documents as ids, one behind the other."""

    def __init__(self, documents: Iterable[Sequence[int]], most: int = MOST_TOKENS) -> None:
        self._ids = array("i")
        self._starts = [0]
        for document in documents:
            if len(document) > 1:  # a single token has nothing to predict
                self._ids.extend(document)
                self._starts.append(len(self._ids))
            if len(self._ids) >= most:
                break

    @property
    def tokens(self) -> int:
        return len(self._ids)

    def draw(self, rng: Random, longest: int, *, beginning: bool = False, apart: bool | None = None) -> list[int]:
        """One document with a probability that follows its length: whole, or a stretch of `longest` tokens of it, or with
        `beginning` its first ones. Of all, of those that are kept `apart` (one in HELD_OUT), or of the others; there has to be
        that many for any to be."""
        while True:
            position = rng.randrange(len(self._ids))
            document = bisect_right(self._starts, position) - 1
            if apart is None or len(self._starts) <= HELD_OUT or (document % HELD_OUT == 0) == apart:
                break
        start, end = self._starts[document], self._starts[document + 1]
        if end - start > longest and not beginning:
            start = min(position, end - longest)
        return self._ids[start : min(end, start + longest)].tolist()

    def digest(self) -> str:
        """Eight hexadecimal digits that tell these texts from others."""
        return sha256(self._ids.tobytes()).hexdigest()[:8]


def read_corpus(path: Path, encode: Encode) -> Texts:
    """A plain text file, or JSON lines with `text`. Raises SpecgenError where it cannot be read or is empty."""
    found = Texts(map(encode, _json_lines(path, ("text",)) if path.suffix in (".jsonl", ".json") else _pieces(path)))
    if not found.tokens:
        raise SpecgenError(f"the corpus {path} holds no text", "Give plain text, or JSON lines with a field text")
    return found


def demo_texts(encode: Encode, seed: int, tokens: int) -> Texts:
    """The demo pair's corpus: about `tokens` of it in its own proportions, documents that the pair never saw, but for short ones
    and the library's functions."""
    from specgen.demo.corpus.documents import sample

    return Texts(sample(tokens, DEMO_SEED + seed, encode))


def _json_lines(path: Path, names: Sequence[str]) -> Iterator[str]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise SpecgenError(f"{path}, line {number}: no JSON", f"Write one object a line, with {names[0]}") from error
        known = [name for name in names if isinstance(entry, dict) and name in entry]
        if not known:
            raise SpecgenError(f"{path}, line {number}: there is no {names[0]!r}", f"Write one object a line, with {names[0]}")
        yield _text(path, number, entry[known[0]])


def _text(path: Path, number: int, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise SpecgenError(f"{path}, entry {number}: {value!r} is no text", "Write a text that is not empty")
    return value


def _pieces(path: Path) -> Iterator[str]:
    """Plain text in pieces that end with a line where lines are short."""
    piece = ""
    for _, line in _lines(path):
        piece += line
        while len(piece) >= _PIECE:
            yield piece[:_PIECE] if len(line) > _PIECE else piece
            piece = piece[_PIECE:] if len(line) > _PIECE else ""
    if piece.strip():
        yield piece


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from enumerate(file, 1)
    except OSError as error:
        raise SpecgenError(f"cannot read {path}: {error.strerror}", "Name a file of text") from error
    except UnicodeDecodeError as error:
        raise SpecgenError(f"{path} is not UTF-8", "Convert it first, for instance with iconv") from error
