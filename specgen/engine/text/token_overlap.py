"""How much of a target's output a draft model with another tokenizer can say in single tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from specgen.base.files import load_yaml
from specgen.base.paths import examples_file
from specgen.engine.text.token_bytes import TokenBytes, token_bytes
from specgen.engine.text.tokenizer import Tokenizer

LOW = 0.7  # vLLM reports an acceptance of 0.15 at a similar share of the vocabulary (pull request 38174)
_ENOUGH = 20  # tokens, below which the share of a text says little


@dataclass(frozen=True, slots=True)
class TokenOverlap:
    """The tokens of a target that a draft model's tokenizer has, too, and how many of a text's are among its own of that text.

    `common` is the number of target tokens with bytes that are a token of the draft, of `vocabulary` with bytes. `covered` of
    `tokens` tokens of the text have a byte span that is also exactly one token of the draft's encoding. `is_output`: the text is
    the target's own output; otherwise it is example text.
    """

    common: int
    vocabulary: int
    covered: int
    tokens: int
    is_output: bool = False

    @property
    def kappa(self) -> float | None:
        """The share of covered tokens: about the highest acceptance of a draft that keeps its own segmentation of a text.

        A draft that was distilled on the target's tokens (`tune --train --methods sd`) can have a higher one. None: too little
        text. See Timor et al. 2025 (arXiv 2502.05202), whose Theorem 4.1 is about the same for the vocabulary.
        """
        return self.covered / self.tokens if self.tokens >= _ENOUGH else None

    @property
    def is_low(self) -> bool:
        """Whether drafts by way of their text, or without a model, are likely to be faster."""
        return self.kappa is not None and self.kappa < LOW

    @property
    def expected_run(self) -> float | None:
        """The mean number of covered tokens in a row, kappa / (1 - kappa), as if each were covered independently.

        None if kappa is None, or 1.
        """
        kappa = self.kappa
        return None if kappa is None or kappa == 1 else kappa / (1 - kappa)

    def as_dict(self) -> dict[str, Any]:
        """Returns the counts, kappa and the expected run for JSON output."""
        return {**asdict(self), "kappa": self.kappa, "expected_run": self.expected_run}


def token_overlap(
    target: Tokenizer, draft: Tokenizer, texts: Iterable[str] = (), outputs: Iterable[Sequence[int]] = ()
) -> TokenOverlap:
    """Counts the covered tokens of `outputs`, token ids of the target's own; without any, those of `texts`.

    Raises NoTokenBytes if a tokenizer's tokens do not stand for bytes of the text.
    """
    ours, theirs = token_bytes(target), token_bytes(draft)
    said = [ids for ids in outputs if ids]
    covered = tokens = 0
    for ids in said or map(target.encode_plain, texts):
        of_text = covered_tokens(ours, theirs, draft.encode_plain, ids)
        covered, tokens = covered + of_text[0], tokens + of_text[1]
    pieces = [piece for piece in ours.pieces if piece is not None]
    return TokenOverlap(sum(piece in theirs.ids for piece in pieces), len(pieces), covered, tokens, is_output=bool(said))


def covered_tokens(
    ours: TokenBytes, theirs: TokenBytes, encode: Callable[[str], list[int]], ids: Sequence[int], first: int = 0
) -> tuple[int, int]:
    """Counts tokens of a text from number `first` on: the covered ones (see TokenOverlap), and all. Their quotient is kappa.

    `ids` are the whole text in the target's tokens, and `encode` gives the draft's, without special tokens. Tokens without bytes,
    such as special ones, and an incomplete character at the end do not count.
    """
    ids = _whole_characters(ours, ids)
    spans = list(_spans(ours, ids[first:]))
    found = set(_spans(theirs, encode(ours.of_ids(ids).decode(errors="replace"))))
    return sum(span in found for span in spans), len(spans)


def overlap_of_examples(target: Tokenizer, draft: Tokenizer) -> TokenOverlap:
    """Counts the covered tokens of the texts in examples.yaml. Raises NoTokenBytes as `token_overlap` does."""
    entries = load_yaml(examples_file().read_text(encoding="utf-8"))["prompts"]
    return token_overlap(target, draft, (entry["prompt"] for entry in entries))


def _spans(tokens: TokenBytes, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the byte span (start, end) of each token that has bytes, in bytes before the end of the text.

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
