"""The bytes of each token of a vocabulary, so that vocabularies of different tokenizers can be
compared.

The texts in a vocabulary cannot be compared directly: byte-level tokenizers write a space, a
newline and each byte of a non-ASCII character as stand-in characters, while SentencePiece writes a
space as U+2581 and a byte without a token as `<0x0A>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer as Pipeline

from specgen.base.errors import SpecgenError
from specgen.engine.text.tokenizer import ANCHORS, Tokenizer

ROLES = ("bos", "eos", "unk", "pad")

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# they keep the whole text
_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation", "UnicodeScripts"}
# kinds; of tokens with the same bytes, the lowest kind is emitted
_ADDED, _ORDINARY, _BYTE, _UNUSED = range(4)


class NoTokenBytes(SpecgenError):  # noqa: N818  names a fact, not a failure
    """The tokens of a tokenizer do not stand for bytes of the text, so they cannot be translated.
    The message says why."""


@dataclass
class TokenBytes:
    """The bytes of each token of a tokenizer. Can be pickled.

    `pieces[id]` are the token's bytes; None for special tokens, for added tokens that also take
    spaces around them, and for ids without a token. `special` has the ids of special tokens by
    role: `bos`, `eos`, `unk`, `pad`, where known. `ids` maps bytes to a token; of several tokens
    with the same bytes, to the one that the tokenizer emits (a character's own token, not its byte
    token). `names` are the texts of the tokens that have no bytes. `pipeline` is the tokenizer.
    """

    pieces: Sequence[bytes | None]
    special: Mapping[str, int]
    ids: Mapping[bytes, int]
    names: Mapping[int, str]
    pipeline: Pipeline = field(compare=False, repr=False)

    def of_ids(self, ids: Iterable[int]) -> bytes:
        """Returns the bytes of the tokens `ids`, joined. Tokens without bytes, such as special
        ones, are left out."""
        pieces = self.pieces
        return b"".join(pieces[id_] or b"" for id_ in ids if id_ < len(pieces))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without the special tokens that the tokenizer adds at its
        beginning and end."""
        ids: list[int] = self.pipeline.encode(text, add_special_tokens=False).ids
        return ids

    def encode_after(self, text: str) -> list[int]:
        """Returns the ids of a text that continues another one: without a space in front.

        If the tokenizer does not give the text's bytes, the longest tokens that do, one after the
        other; where no token fits, those of the text's beginning up to there alone.
        """
        wanted = text.encode()
        for anchor in ANCHORS:
            length = len(self.encode(anchor))
            ids = self.encode(anchor + text)
            for start in (length, length - 1, length + 1):
                if self.of_ids(ids[start:]) == wanted:
                    return ids[start:]
        return self._longest(wanted)

    def _longest(self, text: bytes) -> list[int]:
        ids = []
        while text:
            size = next((size for size in range(len(text), 0, -1) if text[:size] in self.ids), 0)
            if not size:
                break
            ids.append(self.ids[text[:size]])
            text = text[size:]
        return ids

    @cached_property
    def start(self) -> list[int]:
        """The ids of the special tokens that the tokenizer puts before a text."""
        return list(
            takewhile(
                self.names.__contains__, self.pipeline.encode("a", add_special_tokens=True).ids
            )
        )

    @cached_property
    def prefixes_first(self) -> bool:
        """Whether the tokenizer puts a space before a text."""
        return self.of_ids(self.encode("a")) == b" a"

    @cached_property
    def prefixes_later(self) -> bool:
        """Whether the tokenizer puts a space before a text that follows a special token."""
        names = [self.names[self.special[role]] for role in ROLES if role in self.special][:1]
        return any(self.of_ids(self.encode(name + "a")) == b" a" for name in names)


_known: WeakKeyDictionary[Tokenizer, TokenBytes] = WeakKeyDictionary()


def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """Returns the bytes of each token. Only byte-level tokenizers and those like SentencePiece have
    them.

    Raises NoTokenBytes for others, and for those that change the text (lower case, compatibility
    characters) or drop spaces. NFC normalisation is allowed, because it leaves almost all text as
    it is.
    """
    if tokenizer not in _known:
        _known[tokenizer] = _read(tokenizer)
    return _known[tokenizer]


def _read(tokenizer: Tokenizer) -> TokenBytes:
    pipeline = tokenizer.pipeline
    if pipeline is None:
        raise NoTokenBytes("its tokenizer is not one of the tokenizers library")
    _check_model(pipeline.model)
    steps = {
        name: list(_steps(getattr(pipeline, name)))
        for name in ("normalizer", "pre_tokenizer", "decoder")
    }
    _check_text_is_kept(steps["normalizer"], steps["pre_tokenizer"])
    of_token = _reader(pipeline.model, steps)

    vocabulary = tokenizer.vocabulary()
    added = pipeline.get_added_tokens_decoder()
    unknown = getattr(pipeline.model, "unk_token", None)
    special = _roles(tokenizer.special_tokens, vocabulary, unknown)
    without = {
        id_ for id_, token in added.items() if token.special or token.lstrip or token.rstrip
    } | set(special.values())
    pieces: list[bytes | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    kinds = bytearray(len(pieces))
    for text, id_ in vocabulary.items():
        if id_ in without:
            continue
        piece, kind = of_token(text, id_ in added)
        if piece:
            pieces[id_] = piece
            kinds[id_] = kind
    names = {id_: text for text, id_ in vocabulary.items() if pieces[id_] is None}
    return TokenBytes(pieces, special, _emitted(pieces, kinds), names, pipeline)


def _check_model(model: Any) -> None:
    """Raises NoTokenBytes for a model of the `tokenizers` library whose tokens do not stand for
    bytes."""
    kind = type(model).__name__
    if kind not in ("BPE", "Unigram"):
        raise NoTokenBytes(
            f"its tokens are those of a {kind} model, which does not keep the spaces between words"
        )
    if kind == "BPE" and (model.continuing_subword_prefix or model.end_of_word_suffix):
        raise NoTokenBytes("its tokens mark where words continue or end instead of spaces")


def _reader(
    model: Any, steps: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Callable[[str, bool], tuple[bytes, int]]:
    """Returns a function that gives a token's bytes and its kind, from its text and whether it was
    added to the vocabulary.

    Raises NoTokenBytes for a tokenizer that is neither byte-level nor marks spaces.
    """
    mark = _space_mark([*steps["normalizer"], *steps["pre_tokenizer"], *steps["decoder"]])
    is_byte_level = any(
        step["type"] == "ByteLevel" for step in (*steps["normalizer"], *steps["pre_tokenizer"])
    )
    if not is_byte_level and mark is None:
        raise NoTokenBytes(
            "its tokens are neither bytes nor does one of their characters stand for a space"
        )
    has_bytes = any(step["type"] == "ByteFallback" for step in steps["decoder"]) or bool(
        getattr(model, "byte_fallback", False)
    )

    def of_byte_level(text: str, is_added: bool) -> tuple[bytes, int]:
        return (text.encode(), _ADDED) if is_added else _of_byte_level(text)

    def of_marked(text: str, is_added: bool) -> tuple[bytes, int]:
        piece, kind = _of_marked(text, mark or " ", has_bytes=has_bytes)
        return piece, _ADDED if is_added else kind

    return of_byte_level if is_byte_level else of_marked


def _emitted(pieces: Sequence[bytes | None], kinds: Sequence[int]) -> dict[bytes, int]:
    """Returns a token for each piece: of several tokens with the same bytes, the first one of the
    lowest kind."""
    ids: dict[bytes, int] = {}
    for id_, piece in enumerate(pieces):
        if piece is None:
            continue
        if piece not in ids or kinds[id_] < kinds[ids[piece]]:
            ids[piece] = id_
    return ids


def _roles(
    named: Mapping[str, str], vocabulary: Mapping[str, int], unknown: str | None
) -> dict[str, int]:
    """Returns the ids of special tokens by role. `unknown` is the model's token for unknown text,
    where none is named."""
    texts = {role: named.get(f"{role}_token") for role in ROLES}
    texts["unk"] = texts["unk"] or unknown
    return {
        role: vocabulary[text]
        for role, text in texts.items()
        if text is not None and text in vocabulary
    }


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yields the steps of a normalizer, pre-tokenizer or decoder as their descriptions in
    tokenizer.json."""
    if part is not None:
        yield from _flat(json.loads(part.__getstate__()))


def _flat(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step["type"] != "Sequence":
        yield step
        return
    for parts in (value for value in step.values() if isinstance(value, list)):
        for part in parts:
            yield from _flat(part)


def _space_mark(steps: Iterable[Mapping[str, Any]]) -> str | None:
    """Returns the character that tokens have in place of a space, or None."""
    for step in steps:
        if step["type"] == "Metaspace":
            return str(step["replacement"])
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            replacement = step["content"]
            if pattern == " " or replacement == " ":
                return str(replacement if pattern == " " else pattern)
    return None


def _check_text_is_kept(
    normalizer: Sequence[Mapping[str, Any]], pre_tokenizer: Sequence[Mapping[str, Any]]
) -> None:
    """Raises NoTokenBytes if a step changes the text or drops a part of it."""
    for step in normalizer:
        marks_spaces = step["type"] == "Replace" and step["pattern"].get("String") == " "
        if not marks_spaces and step["type"] not in ("Prepend", "NFC", "ByteLevel"):
            raise NoTokenBytes(
                f"its tokenizer changes the text before it splits it ({step['type']})"
            )
    for step in pre_tokenizer:
        if step["type"] not in _PRE_TOKENIZERS or step.get("behavior") == "Removed":
            raise NoTokenBytes(f"its tokenizer drops the spaces between words ({step['type']})")


def _byte_alphabet() -> dict[int, int]:
    """Returns the inverse of GPT-2's byte alphabet as a table for `str.translate`, from stand-in
    characters to bytes.

    Characters below 256 that are no stand-ins become U+FFFF, which is not a byte.
    """
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(kept)]
    table = dict.fromkeys(range(256), 0xFFFF) | {byte: byte for byte in kept}
    return table | {256 + number: byte for number, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _of_byte_level(text: str) -> tuple[bytes, int]:
    """Returns the bytes of a token of a byte-level tokenizer, and its kind."""
    try:
        return text.translate(_ALPHABET).encode("latin-1"), _ORDINARY
    # the decoder takes a token with other characters as it is, but the tokenizer does not emit it
    except UnicodeEncodeError:
        return text.encode(), _UNUSED


def _of_marked(text: str, mark: str, *, has_bytes: bool) -> tuple[bytes, int]:
    """Returns the bytes of a token with `mark` in place of spaces, and its kind. `has_bytes`:
    `<0x41>` is the byte 0x41."""
    if has_bytes and (byte := _BYTE_TOKEN.fullmatch(text)):
        return bytes([int(byte[1], 16)]), _BYTE
    return text.replace(mark, " ").encode(), _UNUSED if " " in text else _ORDINARY
