"""The tokenizer of a GGUF file gives the tokens of the tokenizer that was written, and says what it
does not know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_files import random_stored, write_gguf
from gguf_models import tokenizer_metadata
from tokenizer_helpers import CORPUS, TEXTS, byte_level, metaspace
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Pipeline
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from specgen.base.errors import SpecgenError
from specgen.engine.native.config_reading import read_config
from specgen.engine.text.tokenizer import Tokenizer, load_tokenizer

MORE = [
    "an unreachable word",
    "I'll WE'VE x1234567 12:30 3.14e-5, a_b-c$d`e`+=<|x|>~^",
    (
        "e\u0301t\u00e9 \u0661\u0662\u0663 \u00bd\u00b2 na\u00efve\u0301 CamelCaseWord "
        "HTTPServer/path\n/x\r\n\r\n  y"
    ),
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u30ab\u30bf\u30ab\u30ca 42 \ud55c\uad6d\uc5b4",
]
_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _sequence(*steps: Any) -> Any:
    return pre_tokenizers.Sequence(list(steps))


_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# How the tokenizer.json of a model with this pre-tokenizer splits text, and whether it composes
# characters first.
ORIGINALS = {
    "gpt-2": (_WORDS, False),
    "smollm": (_sequence(pre_tokenizers.Digits(individual_digits=True), _WORDS), False),
    "starcoder": (_sequence(pre_tokenizers.Digits(individual_digits=True), _WORDS), False),
    "command-r": (_sequence(pre_tokenizers.Digits(individual_digits=True), _WORDS), True),
    "olmo": (_WORDS, True),
    "qwen2": (_sequence(_split(PRETOKENIZE_REGEX), _BYTES), True),
    "llama-bpe": (
        _sequence(_split(PRETOKENIZE_REGEX.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), _BYTES),
        False,
    ),
    "tekken": (_sequence(_split(_CASED % ("", "", "")), _BYTES), False),
    "gpt-4o": (
        _sequence(_split(_CASED % (f"{_ENDINGS}?", f"{_ENDINGS}?", "{1,3}")), _BYTES),
        False,
    ),
    "falcon": (
        _sequence(
            pre_tokenizers.Punctuation("contiguous"),
            _WORDS,
            pre_tokenizers.Digits(individual_digits=False),
            _split("[0-9][0-9][0-9]"),
        ),
        False,
    ),
}


def original(name: str) -> Pipeline:
    """A tokenizer with the steps of models with this pre-tokenizer.

    Its tokens were learned without splitting, so that every split shows, and one token is no sum of
    others.
    """
    splits, composes = ORIGINALS[name]
    trained = Pipeline(models.BPE())
    trained.pre_tokenizer = _BYTES
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<s>", "<|end|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    trained.train_from_iterator([*CORPUS, *MORE, *MORE], trainer)
    described = json.loads(trained.to_str())
    described["model"]["vocab"]["\u0120unreachable"] = trained.get_vocab_size()
    described["model"]["ignore_merges"] = name in ("llama-bpe", "tekken")
    pipeline = Pipeline.from_str(json.dumps(described))
    pipeline.normalizer = normalizers.NFC() if composes else None
    pipeline.pre_tokenizer = splits
    pipeline.decoder = decoders.ByteLevel()
    return pipeline


def read(folder: Path, metadata: dict[str, Any], architecture: str = "llama") -> Tokenizer:
    path = folder / "tokenizer.gguf"
    tensors = {"token_embd.weight": random_stored((4, 32), "F32", 0)}
    write_gguf(path, {"general.architecture": architecture, **metadata}, tensors)
    return load_tokenizer(path, {}, trust_remote_code=False, name="the model")


@pytest.mark.parametrize("name", ORIGINALS)
def test_text_is_split_as_in_the_original_model(name: str, tmp_path: Path) -> None:
    pipeline = original(name)
    tokenizer = read(
        tmp_path,
        {**tokenizer_metadata(pipeline.to_str(), name), "tokenizer.ggml.add_bos_token": False},
    )
    for text in [*TEXTS, *MORE]:
        ids = pipeline.encode(text).ids
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids, True) == pipeline.decode(ids), text
    assert tokenizer.warning is None


def sentence_piece_metadata(tokenizer: str, **more: Any) -> dict[str, Any]:
    """The metadata of a tokenizer like SentencePiece's, with the scores that llama.cpp's converter
    finds in its file."""
    described = json.loads(tokenizer)
    vocabulary = described["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {token["content"] for token in described["added_tokens"]}
    rank = {"".join(pair): number for number, pair in enumerate(described["model"]["merges"])}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(rank.get(token, 1e6)) for token in tokens],
        "tokenizer.ggml.token_type": [
            3 if token in special else 6 if token.startswith("<0x") else 1 for token in tokens
        ],
        "tokenizer.ggml.bos_token_id": vocabulary["<s>"],
        "tokenizer.ggml.unknown_token_id": vocabulary["<unk>"],
        **more,
    }


@pytest.mark.parametrize("kind", ["prepend", "gemma"])
def test_pieces_are_joined_by_their_scores(kind: str, tmp_path: Path) -> None:
    pipeline = Pipeline.from_str(metaspace(kind))
    own = {} if kind == "prepend" else {"tokenizer.ggml.add_space_prefix": False}
    architecture = "llama" if kind == "prepend" else "gemma3"
    tokenizer = read(tmp_path, sentence_piece_metadata(metaspace(kind), **own), architecture)
    for text in [*TEXTS, *MORE]:
        # with <s>, as SentencePiece's models have it where the file does not say
        ids = pipeline.encode(text).ids
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids, True) == pipeline.decode(ids), text


def test_a_token_so_long_that_its_pieces_take_minutes_is_refused(tmp_path: Path) -> None:
    metadata = sentence_piece_metadata(metaspace("prepend"))
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    metadata["tokenizer.ggml.tokens"][last] = "a" * 2_000_000
    with pytest.raises(
        SpecgenError, match="has a token of 2,000,000 characters, and at most 1,000 are supported"
    ):
        read(tmp_path, metadata)
    metadata["tokenizer.ggml.tokens"][last] = "a" * 1000
    read(tmp_path, metadata)


def test_special_tokens_and_the_template_come_from_the_metadata(tmp_path: Path) -> None:
    named = {"bos": 1, "eos": 2, "padding": 3}
    ids = {f"tokenizer.ggml.{name}_token_id": id_ for name, id_ in named.items()}
    template = {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}"
    }
    tokenizer = read(
        tmp_path,
        {
            **tokenizer_metadata(byte_level()),
            **ids,
            **template,
            "tokenizer.ggml.add_bos_token": True,
        },
    )
    assert tokenizer.encode("a", special=True)[0] == 1
    assert tokenizer.encode("<s>a</s>", special=False)[::2] == [1, 2]
    assert tokenizer.conversation([{"role": "user", "content": "a"}]) == tokenizer.encode(
        "<s>a</s>", special=False
    )
    assert tokenizer.eos_id == 2
    assert tokenizer.is_special(2)


def test_tokens_that_end_an_answer_are_found_by_their_text(tmp_path: Path) -> None:
    texts = ["<unk>", "<eos>", "<|eot_id|>", "<|im_end|>", "<|im_end|", "a"]
    # <|im_end|> is an ordinary token here
    read_ends(tmp_path, texts, [3, 3, 3, 1, 3, 1], eos=1, expected=[1, 2])
    # gpt-oss
    read_ends(tmp_path, ["<|end|>", "<|return|>", "<|call|>"], [3, 3, 3], eos=1, expected=[1, 2])
    read_ends(tmp_path, ["<|end|>", "b", "c"], [3, 1, 1], eos=2, expected=[2, 0])


def read_ends(
    folder: Path, tokens: list[str], types: list[int], eos: int, expected: list[int]
) -> None:
    path = folder / "ends.gguf"
    metadata = {
        "general.architecture": "unheard",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.eos_token_id": eos,
    }
    write_gguf(path, metadata, {"x": random_stored((4, 32), "F32", 0)})
    assert read_config(path, "the model")["eos_token_id"] == expected


@pytest.mark.parametrize(
    ("pre", "words"),
    [("unheard", "its pre-tokenizer 'unheard' is unknown"), (None, "it names no pre-tokenizer")],
)
def test_an_unknown_pre_tokenizer_is_said(pre: str | None, words: str, tmp_path: Path) -> None:
    metadata = tokenizer_metadata(original("gpt-2").to_str(), pre or "")
    if pre is None:
        del metadata["tokenizer.ggml.pre"]
    tokenizer = read(tmp_path, metadata)
    assert tokenizer.warning is not None
    assert words in tokenizer.warning
    assert (
        tokenizer.encode("I'll see 123 words") == original("gpt-2").encode("I'll see 123 words").ids
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.model": "t5"}, "a tokenizer of the kind 't5', which is not supported"),
        (
            {"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]},
            "two tokens with the same text",
        ),
        ({"tokenizer.ggml.token_type": [1, 2, 3]}, "types of 3 tokens"),
        ({"tokenizer.ggml.tokens": 7}, "tokenizer.ggml.tokens of 7, which has to be a list"),
        ({"tokenizer.ggml.merges": [1, 2]}, "tokenizer.ggml.merges"),
        (
            {"tokenizer.ggml.bos_token_id": "<s>"},
            "tokenizer.ggml.bos_token_id of '<s>', which has to be a whole number",
        ),
    ],
)
def test_metadata_that_does_not_fit_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecgenError, match="the model ") as raised:
        read(tmp_path, {**tokenizer_metadata(), **changes})
    assert words in str(raised.value)
