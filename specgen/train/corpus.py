"""Training text as token ids: the user's files, or the corpus on which the bundled models were
trained."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from io import StringIO
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from specgen import demo
from specgen.base.errors import SpecgenError
from specgen.base.schema import check, read_text

if TYPE_CHECKING:
    from specgen.engine.text.tokenizer import Tokenizer

Encode = Callable[[str], list[int]]
MAX_TOKENS = 8_000_000
LARGEST = 1 << 28  # bytes of a file
_HINT = f"Name a text file, or a part of it: {MAX_TOKENS:,} tokens are used at most"
_FORM = 'Write {"text": "..."} on each line'
_CHAT_FORM = (
    'Write {"messages": [{"role": "user", "content": "..."}]} or {"prompt": "..."} on each line'
)
# a plain text file is cut into at least so many pieces, unless they would be too short
_PIECES = 64
_MIN_PIECE = 500  # characters
_MAX_PIECE = 20_000  # characters


class Use(IntEnum):
    """What a document, a prompt or a generated text is used for.

    TRAIN: to train an exit layer, a head or a draft model. PREDICTOR: to train the predictor of an
    exit layer, which needs text that the exit layer was not trained on. HELD_OUT: only to measure.
    """

    TRAIN = 0
    HELD_OUT = 1
    PREDICTOR = 2


# What each of ten consecutive documents or prompts is used for; then the cycle begins again. If
# there are fewer than ten, all are for training.
CYCLE = (
    Use.HELD_OUT,
    Use.TRAIN,
    Use.PREDICTOR,
    Use.TRAIN,
    Use.TRAIN,
    Use.TRAIN,
    Use.PREDICTOR,
    Use.TRAIN,
    Use.TRAIN,
    Use.TRAIN,
)
ALL_USES = frozenset(Use)
NOT_HELD_OUT = (Use.TRAIN, Use.PREDICTOR)


class Corpus:
    """Tokenized documents, stored one after the other. No document is added once MAX_TOKENS tokens
    are stored.

    Each document has a use (`Use`): training, training of a predictor, or measuring. Equal
    documents have the same use. The corpus `is_split` if there are at least ten different ones.
    Otherwise all are for training, and the argument `uses` of `sample` and `different` has no
    effect.
    """

    def __init__(self, documents: Iterable[Sequence[int]]) -> None:
        self._ids = array("i")
        self._starts = [0]
        self._numbers: list[int] = []  # the documents' different contents, numbered from 0
        known: dict[bytes, int] = {}
        for document in documents:
            if document:
                self._ids.extend(document)
                content = sha256(self._ids[self._starts[-1] :].tobytes()).digest()
                self._numbers.append(known.setdefault(content, len(known)))
                self._starts.append(len(self._ids))
            if len(self._ids) >= MAX_TOKENS:
                break
        self.is_split = len(known) >= len(CYCLE)
        self._chosen: dict[frozenset[Use], tuple[list[int], list[int]]] = {}

    @property
    def tokens(self) -> int:
        return len(self._ids)

    def sample(
        self,
        rng: Random,
        max_tokens: int,
        *,
        from_start: bool = False,
        uses: Collection[Use] = ALL_USES,
    ) -> list[int]:
        """Returns at most `max_tokens` consecutive tokens of a random document whose use (`Use`)
        is one of `uses`.

        A document is chosen with probability proportional to its length; there has to be one. With
        `from_start` its first tokens are returned, otherwise tokens from a random place on.
        """
        documents, ends = self._documents(uses)
        position = rng.randrange(ends[-1])
        index = bisect_right(ends, position)
        start, end = self._starts[documents[index] : documents[index] + 2]
        if end - start > max_tokens and not from_start:
            start = min(end - (ends[index] - position), end - max_tokens)
        return self._ids[start : min(end, start + max_tokens)].tolist()

    def different(self, uses: Collection[Use]) -> list[tuple[int, ...]]:
        """Returns the different documents (token ids) whose use (`Use`) is one of `uses`, in
        their order."""
        indices, _ = self._documents(uses)
        return list(
            dict.fromkeys(
                tuple(self._ids[self._starts[index] : self._starts[index + 1]]) for index in indices
            )
        )

    def _documents(self, uses: Collection[Use]) -> tuple[list[int], list[int]]:
        """Returns the indices of the documents whose use is one of `uses`, and the running total
        of their numbers of tokens."""
        key = frozenset(uses)
        if key not in self._chosen:
            numbers = enumerate(self._numbers)
            chosen = [
                index
                for index, number in numbers
                if not self.is_split or CYCLE[number % len(CYCLE)] in key
            ]
            lengths = (self._starts[index + 1] - self._starts[index] for index in chosen)
            self._chosen[key] = chosen, list(accumulate(lengths))
        return self._chosen[key]

    def digest(self) -> str:
        """Returns eight hexadecimal digits of a hash of all tokens, to recognize the same corpus
        again."""
        return sha256(self._ids.tobytes()).hexdigest()[:8]


@dataclass(frozen=True)
class _Message:
    role: Annotated[str, Field(min_length=1)]
    content: Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class _Document:
    """A line of a corpus in JSON lines. Other keys are ignored."""

    text: Annotated[str, Field(pattern=r"\S")]


@dataclass(frozen=True)
class _Conversation:
    """A line of a file of conversations. Other keys are ignored."""

    messages: list[_Message] | None = None
    prompt: str | None = None
    text: str | None = None


def read_corpus(path: Path, encode: Encode) -> Corpus:
    """Reads a corpus from a file: JSON lines with the field `text` if its name ends in .jsonl or
    .json, otherwise plain text.

    A plain text is cut into pieces, which count as documents. Raises SpecgenError if the file
    cannot be read, has a wrong line or contains no text.
    """
    texts = _pieces(read_text(path, "corpus", _HINT, LARGEST))
    if _is_json_lines(path):
        texts = (check(line, _Document, where, _FORM).text for where, line in _lines(path))
    corpus = Corpus(map(encode, texts))
    if not corpus.tokens:
        raise SpecgenError(
            f"the corpus {path} contains no text",
            "Give plain text, or JSON lines with the field text",
        )
    return corpus


def chat_prompts(path: Path, tokenizer: Tokenizer, max_tokens: int) -> list[list[int]]:
    """Reads conversations from a file. Returns one prompt (token ids in the model's chat template)
    per conversation.

    A file named .jsonl or .json has JSON lines with the field `messages` (mappings with `role` and
    `content`), `prompt` or `text`; another file has one message of a user per line. A prompt ends
    with the last message of the user with which it has at most `max_tokens` tokens; conversations
    that give no such prompt are left out. Raises SpecgenError if the file cannot be read or has a
    wrong line, or if the model has no chat template.
    """
    prompts = []
    for messages in _conversations(path):
        for end in range(len(messages), 0, -1):
            if messages[end - 1]["role"] == "user":
                ids = tokenizer.conversation(messages[:end])
                if len(ids) <= max_tokens:
                    prompts.append(ids)
                    break
    return prompts


def _conversations(path: Path) -> Iterator[list[dict[str, str]]]:
    for where, line in _lines(path):
        entry = (
            check(line, _Conversation, where, _CHAT_FORM)
            if _is_json_lines(path)
            else _Conversation(text=line.strip())
        )
        text = entry.prompt or entry.text
        if entry.messages:
            yield [{"role": message.role, "content": message.content} for message in entry.messages]
        elif text:
            yield [{"role": "user", "content": text}]
        else:
            raise SpecgenError(f"{where} has neither messages nor a prompt or a text", _CHAT_FORM)


def demo_corpus(encode: Encode, seed: int, tokens: int) -> Corpus:
    """Returns about `tokens` tokens of the bundled text (code, math, news, chat): random documents,
    chosen by `seed`."""
    texts = demo.documents()
    documents = list[list[int]]()
    Random(seed).shuffle(texts)
    while texts and tokens > 0:
        documents.append(encode(texts.pop(0)))
        tokens -= len(documents[-1])
    return Corpus(documents)


def _is_json_lines(path: Path) -> bool:
    return path.suffix in (".jsonl", ".json")


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the lines of a text file that are not blank, each as its position for error messages
    (`FILE, line 3`) and its text."""
    for number, line in enumerate(read_text(path, "corpus", _HINT, LARGEST).split("\n"), 1):
        if line.strip():
            yield f"{path}, line {number}", line


def _pieces(text: str) -> Iterator[str]:
    """Yields a plain text in pieces. A piece ends at a line break unless a line is longer.

    The pieces have about _MAX_PIECE characters, fewer in a short text, so that some of them can be
    held out of training.
    """
    size = max(_MIN_PIECE, min(_MAX_PIECE, len(text.encode()) // _PIECES))
    piece = ""
    for line in StringIO(text, None):
        piece += line
        while len(piece) >= size:
            end = size if len(line) > size else len(piece)
            yield piece[:end]
            piece = piece[end:]
    if piece.strip():
        yield piece
