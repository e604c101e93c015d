"""Translates between the tokens of a target and those of a draft model with another tokenizer, by
the bytes that they stand for.

For token-level intersection (Timor et al. 2025, arXiv 2502.05202, Algorithm 4). Special tokens have
no bytes and are matched by role (beginning and end of text, unknown, padding), then by their text.
Also measures kappa: how much of a target's output such a draft model can write in tokens that both
have.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from specgen.base import schema
from specgen.base.files import examples_file
from specgen.engine.text.token_bytes import TokenBytes, token_bytes
from specgen.engine.text.tokenizer import ANCHORS, Tokenizer

# bytes that are not UTF-8, as `surrogateescape` decodes them
_INVALID = re.compile("([\ud800-\udfff]+)")
LEAST_SHARED = 0.99  # of the tokens of the larger one of two tokenizers with the same tokens
# kappa; vLLM reports an acceptance of 0.15 at a similar share of the vocabulary (pull request
# 38174)
LOW = 0.7
_ENOUGH = 20  # tokens; in fewer, the share that is covered says little
# roles of special tokens that are not written as text where the draft has no such token
_LEFT_OUT = "bos", "pad"


def same_tokens(target: Tokenizer, draft: Tokenizer) -> bool:
    """Whether two tokenizers have the same tokens with the same ids.

    One of them may have more tokens, at most 1 %. The sizes of the models' embeddings do not count,
    because models of one family pad them differently.
    """
    if target.digest is not None and target.digest == draft.digest:
        return True  # building two large vocabularies takes longer than all the rest
    smaller, larger = sorted((target.vocabulary(), draft.vocabulary()), key=len)
    return len(smaller) >= LEAST_SHARED * len(larger) and smaller.items() <= larger.items()


class Translation:
    """The map between a target's vocabulary and a draft model's. Can be pickled.

    `target_to_draft[id]` is the draft's token with the same bytes, -1 if there is none;
    `draft_to_target` is the same in the other direction. If a vocabulary has several tokens with
    the same bytes, the one that its tokenizer emits is taken, so several draft tokens may have the
    same target token. `common` is the number of target tokens that the draft has. `width` is the
    number of logits that the target has per position (None: the number of its tokenizer's tokens).
    `target_ends` and `draft_ends` are the ids that end an output of either model. Raises
    NoTokenBytes if a tokenizer's tokens do not stand for bytes.
    """

    def __init__(
        self,
        target: Tokenizer,
        draft: Tokenizer,
        target_ends: AbstractSet[int] = frozenset(),
        draft_ends: AbstractSet[int] = frozenset(),
        width: int | None = None,
    ) -> None:
        self.target = token_bytes(target)
        self.draft = token_bytes(draft)
        self.target_to_draft = _matched(self.target, self.draft, target_ends, draft_ends)
        self.draft_to_target = _matched(self.draft, self.target, draft_ends, target_ends)
        self.width = len(self.target_to_draft) if width is None else width
        self.common = sum(id_ >= 0 for id_ in self.target_to_draft)
        self._longest = max(map(len, self.draft.ids), default=1)
        self._spelled: dict[int, tuple[int, ...]] = {}

    @property
    def digest(self) -> str:
        """A hash of the map: 16 hexadecimal digits, equal for two translations with the same common
        tokens."""
        return sha256(array("q", [self.width, *self.draft_to_target]).tobytes()).hexdigest()[:16]

    def prompt(self, ids: Sequence[int]) -> list[int]:
        """Returns the draft's ids for a prompt given in the target's ids.

        Text between special tokens is encoded by the draft's tokenizer. Special tokens that the
        target's tokenizer puts before a text are replaced by those of the draft's. Other special
        tokens that the draft lacks are written as text.
        """
        draft, rest = self._start(list(ids))
        is_first = not any(id_ in self.draft.names for id_ in draft[1:])
        # whether the target's tokenizer has put a space before the next token
        strips = self.target.prefixes_first
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
            text = bytearray()
            strips = self.target.prefixes_later
            draft += spelled
        return draft

    def spelling(self, id_: int) -> tuple[int, ...]:
        """Returns the draft's ids of one target token inside a text: its single token, or the
        tokens that make up its bytes.

        A special token that the draft lacks is written as text, but beginning-of-text and padding
        tokens are left out. Bytes that the draft cannot write, and ids without a token, become its
        token for unknown text, if there is one.
        """
        if id_ < len(self.target_to_draft) and (single := self.target_to_draft[id_]) >= 0:
            return (single,)
        ids = self._spelled.get(id_)
        if ids is None:
            ids = self._spelled[id_] = tuple(self._spell(id_))
        return ids

    def _spell(self, id_: int) -> list[int]:
        piece = self._piece(id_)
        if piece is not None:
            return self._encode(piece, is_first=False)
        return (
            [self.draft.special["unk"]]
            if "unk" in self.draft.special and id_ not in self.target.names
            else []
        )

    def _piece(self, id_: int) -> bytes | None:
        """Returns a target token's bytes, or the bytes of the name of a special token that has to
        be written as text."""
        target = self.target
        piece = target.pieces[id_] if 0 <= id_ < len(target.pieces) else None
        if piece is not None or id_ not in target.names or self.target_to_draft[id_] >= 0:
            return piece
        is_left_out = any(target.special.get(role) == id_ for role in _LEFT_OUT)
        return None if is_left_out else target.names[id_].encode()

    def _start(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """Returns the draft's special tokens before a prompt, and the prompt's ids after the
        target's own."""
        usual = self.target.start
        start = self.draft.start
        bos = self.target.special.get("bos")
        if bos is not None and ids[:1] == [bos]:
            return list(start), ids[1:]
        if usual and ids[: len(usual)] != usual:  # this prompt was encoded without special tokens
            return [], ids
        return list(start), ids[len(usual) :]

    def _encode(self, data: bytes, *, is_first: bool) -> list[int]:
        """Returns the draft's ids of some text, with the space that its tokenizer puts before a
        text only if `is_first`."""
        ids: list[int] = []
        for text, is_text in _parts(data):
            exact = text.encode(errors="surrogateescape")
            if not is_text:
                ids += self._spell_bytes(exact)
            elif is_first and not ids:
                ids += self.draft.encode(text)
            else:
                inside = self._encode_inside(text)
                ids += inside if inside is not None else self._spell_bytes(exact)
        return ids

    def _encode_inside(self, text: str) -> list[int] | None:
        """Returns the ids of a text that follows other text; None if the tokenizer gives none with
        exactly this text."""
        tokens = self.draft
        data = text.encode()
        if not self.draft.prefixes_first:
            ids = self.draft.encode(text)
            return ids if tokens.of_ids(ids) == data or len(data) > self._longest else None
        for anchor in ANCHORS:
            ids = self.draft.encode(anchor + text)
            before = b""
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


def _matched(
    source: TokenBytes, other: TokenBytes, ends: AbstractSet[int], other_ends: AbstractSet[int]
) -> list[int]:
    """Returns for each token of `source` the token of the other vocabulary that has the same
    meaning, or -1 if there is none.

    Tokens are matched by their bytes; tokens without bytes by their role, then by their text. Each
    of `ends` is matched with one of `other_ends`, so that drafts can end.
    """
    matches = [-1 if piece is None else other.ids.get(piece, -1) for piece in source.pieces]
    for role in ("eos", "bos", "unk", "pad"):  # one token may have several roles
        if role in source.special and role in other.special and matches[source.special[role]] < 0:
            matches[source.special[role]] = other.special[role]
    by_name = {name: id_ for id_, name in other.names.items()}
    for id_, name in source.names.items():
        if matches[id_] < 0 and name in by_name:
            matches[id_] = by_name[name]
    usual = other.special.get("eos")
    end = usual if usual in other_ends else min(other_ends, default=None)
    for id_ in ends:
        if end is not None and id_ < len(matches) and matches[id_] not in other_ends:
            matches[id_] = end
    return matches


def _parts(data: bytes) -> Iterator[tuple[str, bool]]:
    """Yields the parts of some bytes in order, each with whether it is UTF-8; other bytes are
    decoded by `surrogateescape`."""
    for part in _INVALID.split(data.decode(errors="surrogateescape")):
        if part:
            yield part, _INVALID.fullmatch(part) is None


@dataclass(frozen=True, slots=True)
class TokenOverlap:
    """How much of a target's vocabulary and of a text's tokens a draft model with another tokenizer
    has in common with the target.

    Of the target's `vocabulary` tokens that have bytes, `common` are also tokens of the draft. Both
    tokenizers encode the same text: of its `tokens` tokens in the target's encoding, `covered` span
    the same bytes as one token in the draft's encoding. `is_output`: the text is the target's own
    output; otherwise it is example text.
    """

    common: int
    vocabulary: int
    covered: int
    tokens: int
    is_output: bool = False

    @property
    def kappa(self) -> float | None:
        """The share of covered tokens, about the highest acceptance rate of a draft model that
        writes text in its own tokens.

        None if there is too little text. A draft model that was distilled on the target's tokens
        (`tune --train --methods sd`) can have a higher rate. See Timor et al. 2025 (arXiv
        2502.05202), whose Theorem 4.1 is about the same for the vocabulary.
        """
        return self.covered / self.tokens if self.tokens >= _ENOUGH else None

    @property
    def is_low(self) -> bool:
        """Whether kappa is so low that drafts by way of text, or methods without a draft model, are
        likely to be faster."""
        return self.kappa is not None and self.kappa < LOW

    @property
    def expected_run(self) -> float | None:
        """The mean number of covered tokens in a row, kappa / (1 - kappa), if each were covered
        independently of the others.

        None if kappa is None, or 1.
        """
        kappa = self.kappa
        return None if kappa is None or kappa == 1 else kappa / (1 - kappa)

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields, `kappa` and `expected_run`, for JSON output."""
        return {**asdict(self), "kappa": self.kappa, "expected_run": self.expected_run}


def token_overlap(
    target: Tokenizer,
    draft: Tokenizer,
    texts: Iterable[str] = (),
    outputs: Iterable[Sequence[int]] = (),
) -> TokenOverlap:
    """Compares two tokenizers by their vocabularies and by a text. The text is `outputs`, or
    `texts` if there are no outputs.

    `outputs` are token ids that the target has generated. Raises NoTokenBytes if a tokenizer's
    tokens do not stand for bytes of the text.
    """
    ours = token_bytes(target)
    theirs = token_bytes(draft)
    said = [ids for ids in outputs if ids]
    covered = tokens = 0
    for ids in said or (target.encode(text, special=False) for text in texts):
        of_text = covered_tokens(ours, theirs, ids)
        covered = covered + of_text[0]
        tokens = tokens + of_text[1]
    pieces = [piece for piece in ours.pieces if piece is not None]
    return TokenOverlap(
        sum(piece in theirs.ids for piece in pieces),
        len(pieces),
        covered,
        tokens,
        is_output=bool(said),
    )


def covered_tokens(
    ours: TokenBytes, theirs: TokenBytes, ids: Sequence[int], first: int = 0
) -> tuple[int, int]:
    """Counts tokens of a text, from number `first` on. Returns the number of covered ones (see
    `TokenOverlap`), and of all.

    `ids` are the whole text in the target's tokens. Tokens without bytes, such as special ones, and
    an incomplete character at the end do not count.
    """
    ids = _whole_characters(ours, ids)
    spans = list(_spans(ours, ids[first:]))
    their_spans = set(_spans(theirs, theirs.encode(ours.of_ids(ids).decode(errors="replace"))))
    return sum(span in their_spans for span in spans), len(spans)


def overlap_of_examples(target: Tokenizer, draft: Tokenizer) -> TokenOverlap:
    """Compares two tokenizers as `token_overlap` does, by the texts of the prompts in
    examples.yaml. Raises NoTokenBytes as it does."""
    entries = schema.parse_yaml(examples_file().read_text(encoding="utf-8"), "examples.yaml")[
        "prompts"
    ]
    return token_overlap(target, draft, (entry["prompt"] for entry in entries))


def _spans(tokens: TokenBytes, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the byte span (start, end) of each token that has bytes, in bytes before the end of
    the text.

    Counted from the end, because some tokenizers put a space before a text.
    """
    position = 0
    for id_ in reversed(ids):
        piece = tokens.pieces[id_] if id_ < len(tokens.pieces) else None
        if piece is not None:
            yield position + len(piece), position
            position += len(piece)


def _whole_characters(tokens: TokenBytes, ids: Sequence[int]) -> Sequence[int]:
    """Returns the ids without those of an incomplete character at the end."""
    for length in range(len(ids), max(len(ids) - 4, 0), -1):
        with suppress(UnicodeDecodeError):
            tokens.of_ids(ids[:length]).decode()
            return ids[:length]
    return ids
