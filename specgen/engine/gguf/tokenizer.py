"""Turns the vocabulary in a GGUF file's metadata into the description of a tokenizer that the
`tokenizers` library reads.

Two kinds: byte-level tokenizers (`gpt2`), which also need to know how a text is split (see
`pre_tokenizers`), and those converted from SentencePiece (`llama`), which join pieces by their
scores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from specgen.engine.gguf.file import GgufFile
from specgen.engine.gguf.metadata import Metadata
from specgen.engine.gguf.pre_tokenizers import FALLBACK, PRE_TOKENIZERS, PreTokenizer

Json = dict[str, Any]

# types of tokens; the others are 1 (normal) and 6 (a byte)
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
_MARK = "\N{LOWER ONE EIGHTH BLOCK}"  # in place of a space
_PADDING = re.compile(r"\[PAD\d+\]")  # fills a vocabulary up to the size of the embedding
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# Architectures whose scores of pieces do not tell the order in which they are joined; their ids do.
_JOINED_BY_ID = {"gemma", "gemma2", "gemma3"}
_LONGEST_PIECE = 1000  # of characters; those that SentencePiece learns have 16 by default
_STRIPPING = {"phi3"}  # architectures whose special tokens take the spaces and line ends after them
_NOT_STRIPPING = {"<unk>", "<s>", "<|endoftext|>"}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """What a file says about its tokenizer.

    `description` is the content of a tokenizer.json. `special_tokens` are the texts of special
    tokens by name, such as bos_token. `template` is the chat template, or several by name; None:
    there is none. `warning` is a sentence for the user, or None.
    """

    description: Json
    special_tokens: Mapping[str, str]
    template: str | Mapping[str, str] | None
    warning: str | None


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The texts of all tokens by id, and their types."""

    tokens: Sequence[str]
    types: Sequence[int]

    @property
    def ids(self) -> dict[str, int]:
        """The ids of the tokens that stand for something, by text."""
        pairs = zip(self.tokens, self.types, strict=True)
        return {
            text: id_
            for id_, (text, kind) in enumerate(pairs)
            if kind != _UNUSED or not _PADDING.fullmatch(text)
        }

    def added(self, strips: bool) -> list[Json]:
        """Returns the tokens that are looked for in a text before it is split."""
        return [
            {
                "id": id_,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": strips and text not in _NOT_STRIPPING,
                "normalized": False,
                "special": kind != _USER_DEFINED,
            }
            for id_, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and text == _spelled(text)
        ]


def read_tokenizer(opened: GgufFile, name: str) -> GgufTokenizer:
    """Returns the tokenizer of a GGUF file; messages call the model `name`.

    Raises SpecgenError for a kind of tokenizer that is not supported, and for metadata that does
    not fit together.
    """
    metadata = Metadata(opened.metadata, name)
    kind = metadata.text("tokenizer.ggml.model")
    vocabulary = _vocabulary(metadata)
    special = _special_tokens(metadata, vocabulary)
    if kind == "gpt2":
        pre_tokenizer, warning = _pre_tokenizer(metadata, name)
        steps = _byte_level(metadata, vocabulary, pre_tokenizer)
        has_bos = pre_tokenizer.has_bos
    elif kind == "llama":
        steps = _sentence_piece(metadata, vocabulary, special)
        warning = None
        has_bos = True
    else:
        raise metadata.refuse(
            f"has a tokenizer of the kind {kind!r}, which is not supported",
            "Take a safetensors model",
        )
    strips = kind == "llama" and metadata.architecture in _STRIPPING
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(strips),
        **steps,
        "post_processor": _post_processor(metadata, special, vocabulary, has_bos),
    }
    return GgufTokenizer(description, special, _template(metadata), warning)


def _vocabulary(metadata: Metadata) -> _Vocabulary:
    tokens = [
        text or f"[EMPTY_{id_}]"
        for id_, text in enumerate(metadata.list_of("tokenizer.ggml.tokens", str))
    ]
    types = [1] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = metadata.list_of("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise metadata.refuse(f"has {len(tokens):,} tokens, and types of {len(types):,} tokens")
    if len(set(tokens)) != len(tokens):
        raise metadata.refuse("has two tokens with the same text")
    return _Vocabulary(tokens, types)


def _special_tokens(metadata: Metadata, vocabulary: _Vocabulary) -> dict[str, str]:
    """Returns the texts of special tokens by their names in a chat template."""
    texts = {}
    for role, named in _SPECIAL.items():
        key = f"tokenizer.ggml.{named}_token_id"
        if key in metadata:
            id_ = metadata.integer(key)
            if 0 <= id_ < len(vocabulary.tokens):
                texts[f"{role}_token"] = vocabulary.tokens[id_]
    return texts


def _template(metadata: Metadata) -> str | Mapping[str, str] | None:
    key = "tokenizer.chat_template"
    return metadata.text(key) if key in metadata else None


def _pre_tokenizer(metadata: Metadata, name: str) -> tuple[PreTokenizer, str | None]:
    """Returns how the tokenizer splits text, and a warning if the file names no way that is
    known."""
    named = metadata.text("tokenizer.ggml.pre", "")
    pre_tokenizer = PRE_TOKENIZERS.get(named)
    if pre_tokenizer is not None:
        return pre_tokenizer, None
    what = f"its pre-tokenizer {named[:40]!r} is unknown" if named else "it names no pre-tokenizer"
    return PRE_TOKENIZERS[
        FALLBACK
    ], f"{name}: {what}, so text is split as by {FALLBACK}, which may give other tokens"


def _byte_level(metadata: Metadata, vocabulary: _Vocabulary, pre_tokenizer: PreTokenizer) -> Json:
    ids = vocabulary.ids
    pairs = [_pair(text) for text in metadata.list_of("tokenizer.ggml.merges", str)]
    merges = [
        (left, right)
        for left, right in pairs
        if left in ids and right in ids and left + right in ids
    ]
    return {
        "normalizer": {"type": "NFC"} if pre_tokenizer.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizer.all_steps},
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": _model(ids, merges, ignore_merges=pre_tokenizer.ignores_merges),
    }


def _pair(merge: str) -> tuple[str, str]:
    """Returns the two pieces that a merge joins; they are separated by a space, which may also
    begin the first one."""
    left, _, right = merge[1:].partition(" ")
    return merge[:1] + left, right


def _model(ids: Mapping[str, int], merges: Sequence[tuple[str, str]], **more: Any) -> Json:
    plain = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
    }
    return {
        "type": "BPE",
        **plain,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": ids,
        "merges": merges,
        **more,
    }


def _sentence_piece(
    metadata: Metadata, vocabulary: _Vocabulary, special: Mapping[str, str]
) -> Json:
    """Returns the steps of a tokenizer converted from SentencePiece, as transformers' converters
    write them."""
    has_prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    marks: Json = {"type": "Replace", "pattern": {"String": " "}, "content": _MARK}
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": _MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer = marks
    if has_prefix:
        normalizer = {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": _MARK}, marks],
        }
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    spelled = _Vocabulary([_spelled(text) for text in vocabulary.tokens], vocabulary.types)
    ids = spelled.ids
    unknown = {"unk_token": special.get("unk_token"), "fuse_unk": True, "byte_fallback": True}
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(
            ids,
            _merges(metadata, ids, _ranks(metadata, vocabulary)),
            **unknown,
            ignore_merges=False,
        ),
    }


def _spelled(text: str) -> str:
    """Returns a token's text with marks in place of spaces; files have some tokens that are spaces
    alone."""
    return text.replace(" ", _MARK) if text.isspace() else text


def _ranks(metadata: Metadata, vocabulary: _Vocabulary) -> Sequence[float]:
    """Returns a number for each token: of two pieces that can be joined next, that with the larger
    one comes first."""
    if metadata.architecture in _JOINED_BY_ID:
        return range(0, -len(vocabulary.tokens), -1)
    scores = metadata.list_of_numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary.tokens):
        raise metadata.refuse(
            f"has {len(vocabulary.tokens):,} tokens, and scores of {len(scores):,} tokens"
        )
    return scores


def _merges(
    metadata: Metadata, ids: Mapping[str, int], ranks: Sequence[float]
) -> list[tuple[str, str]]:
    """Returns the pairs of tokens whose texts together are a token, those that are joined first at
    the front.

    Raises SpecgenError for longer tokens than models have: the work grows with the square of their
    length.
    """
    merges = []
    longest = max(map(len, ids), default=0)
    if longest > _LONGEST_PIECE:
        raise metadata.refuse(
            f"has a token of {longest:,} characters, and at most {_LONGEST_PIECE:,} are supported"
        )
    for text, id_ in ids.items():
        for middle in range(1, len(text)):
            left = ids.get(text[:middle])
            right = ids.get(text[middle:])
            if left is not None and right is not None:
                order = -ranks[id_], -middle, middle - len(text), -left, -right
                merges.append((order, (text[:middle], text[middle:])))
    merges.sort(key=itemgetter(0))
    return [pair for _, pair in merges]


def _post_processor(
    metadata: Metadata, special: Mapping[str, str], vocabulary: _Vocabulary, has_bos: bool
) -> Json | None:
    """Returns the step that puts special tokens around a text."""
    text: Json = {"Sequence": {"id": "A", "type_id": 0}}
    second: Json = {"Sequence": {"id": "B", "type_id": 0}}
    before = _around(special, "bos_token", metadata.flag("tokenizer.ggml.add_bos_token", has_bos))
    after = _around(special, "eos_token", metadata.flag("tokenizer.ggml.add_eos_token", False))
    names = {part["SpecialToken"]["id"] for part in (*before, *after)}
    ids = {name: vocabulary.tokens.index(name) for name in names}
    return {
        "type": "TemplateProcessing",
        "single": [*before, text, *after],
        "pair": [*before, text, *after, *before, second, *after],
        "special_tokens": {
            name: {"id": name, "ids": [id_], "tokens": [name]} for name, id_ in ids.items()
        },
    }


def _around(special: Mapping[str, str], role: str, is_added: bool) -> list[Json]:
    return (
        [{"SpecialToken": {"id": special[role], "type_id": 0}}]
        if is_added and role in special
        else []
    )
