"""Translates between the tokens of a target and those of a draft model with another tokenizer, by the bytes they stand for.

For token-level intersection (Timor et al. 2025, arXiv 2502.05202, Algorithm 4). Special tokens have no bytes and are matched by
role (beginning and end of text, unknown, padding), then by their text.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from hashlib import sha256
from itertools import takewhile

from tokenizers import Tokenizer as Pipeline

from specgen.engine.text.token_bytes import ROLES, TokenBytes, token_bytes
from specgen.engine.text.tokenizer import ANCHORS, Tokenizer

_INVALID = re.compile("([\ud800-\udfff]+)")  # bytes that are not UTF-8, as `surrogateescape` decodes them
_LEFT_OUT = "bos", "pad"  # roles of special tokens that are not written as text where the draft has no such token


def same_tokens(target: Tokenizer, draft: Tokenizer) -> bool:
    """Whether two tokenizers have the same tokens with the same ids.

    One of them may have more tokens, at most 1 %. The sizes of the models' embeddings do not count, because models of one family
    pad them differently.
    """
    if target.digest is not None and target.digest == draft.digest:
        return True  # building two large vocabularies takes longer than all the rest
    smaller, larger = sorted((target.vocabulary(), draft.vocabulary()), key=len)
    return len(smaller) >= 0.99 * len(larger) and smaller.items() <= larger.items()


class _Side:
    """One of the two tokenizers. `start` are the special tokens that it puts before a text.

    `prefixes_first`: it puts a space before a text; `prefixes_later`: also before a text that follows a special token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens: TokenBytes = token_bytes(tokenizer)
        assert tokenizer.pipeline is not None, "token_bytes refuses other tokenizers"
        self.pipeline: Pipeline = tokenizer.pipeline
        self.start = list(takewhile(self.is_special, tokenizer.encode("a")))
        self.prefixes_first = self.tokens.of_ids(self.encode("a")) == b" a"
        names = [self.tokens.names[self.tokens.special[role]] for role in ROLES if role in self.tokens.special][:1]
        self.prefixes_later = any(self.tokens.of_ids(self.encode(name + "a")) == b" a" for name in names)

    def is_special(self, id_: int) -> bool:
        return id_ in self.tokens.names

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text without the special tokens that the tokenizer puts around it."""
        ids: list[int] = self.pipeline.encode(text, add_special_tokens=False).ids
        return ids


class Translation:
    """Between a target's vocabulary and a draft model's. Can be pickled.

    `target_to_draft[id]` is the draft's token with the same bytes, -1 if there is no single one; `draft_to_target` likewise. Of
    several tokens with the same bytes it is the one that the tokenizer emits, so several draft tokens may have one target token.
    `common` is the number of target tokens that the draft has, `width` the number of logits that the target has per position
    (None: the number of its tokenizer's tokens). `target_ends` and `draft_ends` are the ids that end an output of either model.
    Raises NoTokenBytes if a tokenizer's tokens do not stand for bytes.
    """

    def __init__(
        self,
        target: Tokenizer,
        draft: Tokenizer,
        target_ends: AbstractSet[int] = frozenset(),
        draft_ends: AbstractSet[int] = frozenset(),
        width: int | None = None,
    ) -> None:
        self._target, self._draft = _Side(target), _Side(draft)
        of_target, of_draft = self.target, self.draft
        self.target_to_draft = _by_bytes(of_target, of_draft)
        self.draft_to_target = _by_bytes(of_draft, of_target)
        _match_special(of_target, of_draft, self.target_to_draft)
        _match_special(of_draft, of_target, self.draft_to_target)
        _match_ends(target_ends, draft_ends, of_draft, self.target_to_draft)
        _match_ends(draft_ends, target_ends, of_target, self.draft_to_target)
        self.width = len(self.target_to_draft) if width is None else width
        self.common = sum(id_ >= 0 for id_ in self.target_to_draft)
        self._longest = max(map(len, of_draft.ids), default=1)
        self._spelled: dict[int, tuple[int, ...]] = {}

    @property
    def target(self) -> TokenBytes:
        return self._target.tokens

    @property
    def draft(self) -> TokenBytes:
        return self._draft.tokens

    def encode_for_draft(self, text: str) -> list[int]:
        """Returns the draft's ids of a text without the special tokens that its tokenizer puts around it."""
        return self._draft.encode(text)

    @property
    def digest(self) -> str:
        """A text that two translations share only if the same tokens are common."""
        return sha256(array("q", [self.width, *self.draft_to_target]).tobytes()).hexdigest()[:16]

    def prompt(self, ids: Sequence[int]) -> list[int]:
        """Returns the draft's ids of a prompt in the target's ids.

        Text between special tokens is encoded by the draft's tokenizer. A beginning-of-text token at the start becomes what the
        draft's tokenizer puts there. Other special tokens that the draft lacks are written as text.
        """
        draft, rest = self._start(list(ids))
        is_first = not any(map(self._draft.is_special, draft[1:]))
        strips = self._target.prefixes_first  # whether the target's tokenizer has put a space before the next token
        text = bytearray()
        for id_ in [*rest, None]:
            piece = None if id_ is None else self._piece(id_)
            if piece is not None:
                text += piece[1:] if strips and piece.startswith(b" ") else piece
                strips = False
                continue
            draft += self._encode(bytes(text), is_first=is_first)
            spelled = () if id_ is None else self.spelling(id_)
            is_first = is_first and not text and not spelled
            text, strips = bytearray(), self._target.prefixes_later
            draft += spelled
        return draft

    def spelling(self, id_: int) -> tuple[int, ...]:
        """Returns the draft's ids of one target token that follows others: its single token, or those that make up its bytes.

        A special token that the draft lacks is written as text; beginning of text and padding are left out. Bytes that the draft
        cannot write, and ids without a token, become its token for unknown text, if there is one.
        """
        if id_ < len(self.target_to_draft) and (single := self.target_to_draft[id_]) >= 0:
            return (single,)
        found = self._spelled.get(id_)
        if found is None:
            found = self._spelled[id_] = tuple(self._spell(id_))
        return found

    def _spell(self, id_: int) -> list[int]:
        piece = self._piece(id_)
        if piece is not None:
            return self._encode(piece, is_first=False)
        return [self.draft.special["unk"]] if "unk" in self.draft.special and id_ not in self.target.names else []

    def _piece(self, id_: int) -> bytes | None:
        """Returns a target token's bytes, or the bytes of the name of a special token that has to be written as text."""
        target = self.target
        piece = target.pieces[id_] if 0 <= id_ < len(target.pieces) else None
        if piece is not None or id_ not in target.names or self.target_to_draft[id_] >= 0:
            return piece
        is_left_out = any(target.special.get(role) == id_ for role in _LEFT_OUT)
        return None if is_left_out else target.names[id_].encode()

    def _start(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """Returns the draft's special tokens before a prompt, and the prompt's ids after the target's own."""
        usual, start = self._target.start, self._draft.start
        bos = self.target.special.get("bos")
        if bos is not None and ids[:1] == [bos]:
            return list(start), ids[1:]
        if usual and ids[: len(usual)] != usual:  # this prompt was made without them
            return [], ids
        return list(start), ids[len(usual) :]

    def _encode(self, data: bytes, *, is_first: bool) -> list[int]:
        """Returns the draft's ids of some text, with the space that its tokenizer puts before a text only if `is_first`."""
        ids: list[int] = []
        for text, is_text in _parts(data):
            exact = text.encode(errors="surrogateescape")
            if not is_text:
                ids += self._spell_bytes(exact)
            elif is_first and not ids:
                ids += self._draft.encode(text)
            else:
                found = self._encode_inside(text)
                ids += found if found is not None else self._spell_bytes(exact)
        return ids

    def _encode_inside(self, text: str) -> list[int] | None:
        """Returns the ids of a text that follows other text; None if the tokenizer gives none with exactly this text."""
        tokens, data = self.draft, text.encode()
        if not self._draft.prefixes_first:
            ids = self._draft.encode(text)
            return ids if tokens.of_ids(ids) == data or len(data) > self._longest else None
        for anchor in ANCHORS:
            ids, before = self._draft.encode(anchor + text), b""
            for number, id_ in enumerate(ids):
                before += tokens.pieces[id_] or b""
                if before == b" " + anchor.encode():
                    return ids[number + 1 :]
        return None

    def _spell_bytes(self, data: bytes) -> list[int]:
        """Returns draft tokens with these bytes: each time the longest one that fits."""
        ids: list[int] = []
        unknown = self.draft.special.get("unk")
        start = 0
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            end = next((end for end in ends if data[start:end] in self.draft.ids), None)
            if end is not None:
                ids.append(self.draft.ids[data[start:end]])
            elif unknown is not None and ids[-1:] != [unknown]:
                ids.append(unknown)
            start = start + 1 if end is None else end
        return ids


def _by_bytes(source: TokenBytes, other: TokenBytes) -> list[int]:
    """Returns for each token of `source` the other vocabulary's token with the same bytes, or -1."""
    get = other.ids.get
    return [-1 if piece is None else get(piece, -1) for piece in source.pieces]


def _match_special(source: TokenBytes, other: TokenBytes, found: list[int]) -> None:
    """Adds to `found` the tokens without bytes: by role, then by the same text."""
    for role in ("eos", "bos", "unk", "pad"):  # one token may have several roles
        if role in source.special and role in other.special and found[source.special[role]] < 0:
            found[source.special[role]] = other.special[role]
    by_name = {name: id_ for id_, name in other.names.items()}
    for id_, name in source.names.items():
        if found[id_] < 0 and name in by_name:
            found[id_] = by_name[name]


def _match_ends(ends: AbstractSet[int], other_ends: AbstractSet[int], other: TokenBytes, found: list[int]) -> None:
    """Makes each token that ends an output stand for one that ends the other model's outputs, so that drafts can end."""
    usual = other.special.get("eos")
    end = usual if usual in other_ends else min(other_ends, default=None)
    for id_ in ends:
        if end is not None and id_ < len(found) and found[id_] not in other_ends:
            found[id_] = end


def _parts(data: bytes) -> Iterator[tuple[str, bool]]:
    """Yields the parts of some bytes in order, each with whether it is UTF-8; other bytes are decoded by `surrogateescape`."""
    for part in _INVALID.split(data.decode(errors="surrogateescape")):
        if part:
            yield part, _INVALID.fullmatch(part) is None
