"""Training text as token ids: the user's files, or the corpus on which the bundled models were trained."""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from random import Random

from specgen.errors import SpecgenError

Encode = Callable[[str], list[int]]
HELD_OUT_EVERY = 8  # documents, prompts and texts with an index divisible by it are held out of training
MAX_TOKENS = 8_000_000
DEMO_SEED = 1_000_000  # outside the range of the seeds that the demo models were trained with
_LONGEST_LINE = 1 << 22  # characters read at once
_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character, which cannot be encoded
_PIECE_CHARACTERS = 20_000  # of plain text, encoded in one call


class Corpus:
    """Tokenized documents, stored one after the other. No document is added once MAX_TOKENS tokens are stored."""

    def __init__(self, documents: Iterable[Sequence[int]]) -> None:
        self._ids = array("i")
        self._starts = [0]
        for document in documents:
            if len(document) > 1:  # a single token has no next token to predict
                self._ids.extend(document)
                self._starts.append(len(self._ids))
            if len(self._ids) >= MAX_TOKENS:
                break

    @property
    def tokens(self) -> int:
        return len(self._ids)

    def sample(self, rng: Random, max_tokens: int, *, from_start: bool = False, held_out: bool | None = None) -> list[int]:
        """Returns at most `max_tokens` consecutive tokens of a random document.

        A document is chosen with probability proportional to its length. `from_start` takes its first tokens, not a random part.
        `held_out` True chooses among the documents that are held out from training, False among the documents for training, None
        among all. A corpus of fewer than HELD_OUT_EVERY documents holds out none; `held_out` then has no effect.
        """
        while True:
            position = rng.randrange(len(self._ids))
            document = bisect_right(self._starts, position) - 1
            if held_out is None or len(self._starts) <= HELD_OUT_EVERY or (document % HELD_OUT_EVERY == 0) == held_out:
                break
        start, end = self._starts[document], self._starts[document + 1]
        if end - start > max_tokens and not from_start:
            start = min(position, end - max_tokens)
        return self._ids[start : min(end, start + max_tokens)].tolist()

    def digest(self) -> str:
        """Returns eight hexadecimal digits of a hash of all tokens, to recognize the same corpus again."""
        return sha256(self._ids.tobytes()).hexdigest()[:8]


def read_corpus(path: Path, encode: Encode) -> Corpus:
    """Reads a corpus from a file: JSON lines with the field `text` if its name ends in .jsonl or .json, otherwise plain text.

    Raises SpecgenError if the file cannot be read, has a wrong line or contains no text.
    """
    corpus = Corpus(map(encode, _json_texts(path) if path.suffix in (".jsonl", ".json") else _pieces(path)))
    if not corpus.tokens:
        raise SpecgenError(f"the corpus {path} contains no text", "Give plain text, or JSON lines with the field text")
    return corpus


def demo_corpus(encode: Encode, seed: int, tokens: int) -> Corpus:
    """Returns about `tokens` tokens of the generated text that the bundled demo models were trained on (code, math, news, chat).

    Its documents come from other random seeds than the training of the demo models. Only short documents and functions of
    Python's standard library can be the same.
    """
    from specgen.demo.corpus.documents import sample

    return Corpus(sample(tokens, DEMO_SEED + seed, encode))


def _json_texts(path: Path) -> Iterator[str]:
    for number, line in _lines(path):
        if len(line) == _LONGEST_LINE and not line.endswith("\n"):
            message = f"{path}, line {number}: longer than {_LONGEST_LINE:,} characters"
            raise SpecgenError(message, "Write several shorter texts, each on a line")
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str) or not text.strip() or _SURROGATE.search(text):
            raise SpecgenError(f"{path}, line {number}: not a JSON object with a text", 'Write {"text": "..."} on each line')
        yield text


def _pieces(path: Path) -> Iterator[str]:
    """Yields a plain text file in pieces of about _PIECE_CHARACTERS. A piece ends at a line break unless a line is longer."""
    piece = ""
    for _, line in _lines(path):
        piece += line
        while len(piece) >= _PIECE_CHARACTERS:
            size = _PIECE_CHARACTERS if len(line) > _PIECE_CHARACTERS else len(piece)
            yield piece[:size]
            piece = piece[size:]
    if piece.strip():
        yield piece


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines of a text file with their numbers. Of a longer line than _LONGEST_LINE it yields the parts."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), ""), 1):
                if "\0" in line:
                    raise SpecgenError(f"{path} is not text: line {number:,} has a NUL character", "Name a text file")
                yield number, line
    except OSError as error:
        raise SpecgenError(f"cannot read {path}: {error.strerror}", "Name a text file") from error
    except UnicodeDecodeError as error:
        raise SpecgenError(f"{path} is not UTF-8", "Convert it first, for example with iconv") from error
