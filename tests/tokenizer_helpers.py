"""Small tokenizer files of several kinds, written into model folders without weights."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Pipeline

from specgen.engine.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog is not amused: 12345 times!",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    (
        "Ein Märchen über Größe. L'été à Noël, ça va? "
        "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3067\u3059\u3002 I'll we've they're"
    ),
] * 4
NAMES = ["<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "<|endoftext|>"]
LLAMA = {"model_type": "llama"}
TEXTS = [
    "",
    " ",
    "The quick fox",
    "  two leading spaces and a trailing one ",
    "\n\n\n\tlines\r\n\r\n  \n end",
    "I'LL we've 12345 67 3.14 x2y",
    "e\u0301te\u0301 A\u030angstro\u0308m \u00e9t\u00e9",
    (
        "\u65e5\u672c\u8a9e \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 "
        "\u0e20\u0e32\u0e29\u0e32 \u202btest"
    ),
    "<s>Hi</s> there<pad> <unk>",
    "a<|endoftext|>b <|endoftext|> c<|user|>d <|user|> e",
    "<bos>x<eos> <extra> y <new>z<mask><CLS>",
    "fibonacci(n - 1) \u2581 \u2581x \u0120y <0x41>",
    "quick" * 40,
    "a </s> b <unk> c <eos> d",
    "\x00\x07 \ufffd \ud7ff",
]


@cache
def byte_level(
    normalizer: str = "", ignore_merges: bool = False, with_template: bool = False
) -> str:
    pipeline = Pipeline(models.BPE(ignore_merges=ignore_merges))
    pipeline.normalizer = getattr(normalizers, normalizer)() if normalizer else None
    split = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\p{L}+|\s+|[^\s\p{L}\p{N}]+"), "isolated")
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    pipeline.decoder = decoders.ByteLevel()
    special = [*NAMES[:4], "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pipeline.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    pipeline.add_tokens([AddedToken("<|user|>", normalized=False), AddedToken("fox", lstrip=True)])
    if with_template:
        pipeline.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", pipeline.token_to_id("<s>"))]
        )
    else:
        pipeline.post_processor = processors.ByteLevel(trim_offsets=False)
    text: str = pipeline.to_str()
    return text


@cache
def metaspace(kind: str = "first") -> str:
    """The tokenizer.json of a BPE tokenizer as converted from SentencePiece, with bytes for unknown
    characters.

    `kind` says how it treats spaces: `first` and `prepend` as newer and older files of Llama,
    `gemma` as files of Gemma.
    """
    trained = Pipeline(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    words = [*NAMES[:6], *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocabulary = {word: id_ for id_, word in enumerate(dict.fromkeys(words))}
    merges = [tuple(merge) for merge in model["merges"]]
    pipeline = Pipeline(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "gemma":
        pipeline.normalizer = normalizers.Replace(" ", "\u2581")
    elif kind == "first":
        pipeline.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        pipeline.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        steps.append(decoders.Strip(" ", 1, 0))
    pipeline.decoder = decoders.Sequence(steps)
    pipeline.add_special_tokens(["<unk>", "<s>", "</s>"])
    pipeline.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    text: str = pipeline.to_str()
    return text


def write(
    folder: Path,
    tokenizer: str,
    settings: dict[str, Any] | None,
    config: dict[str, Any],
    **files: Any,
) -> Path:
    """Writes a model's folder without weights, and returns it. `files` has the contents of further
    JSON files by their names without `.json`."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(
        folder,
        json.loads((folder / "config.json").read_text(encoding="utf-8")),
        trust_remote_code=False,
    )


FILES = {
    "byte-level": byte_level,
    "byte-level, NFC, template": lambda: byte_level("NFC", True, True),
    "first": metaspace,
    "prepend": lambda: metaspace("prepend"),
    "gemma": lambda: metaspace("gemma"),
}
CASES = [  # file, declared class, model type
    ("byte-level", "LlamaTokenizerFast", "llama"),
    ("byte-level, NFC, template", "PreTrainedTokenizerFast", "llama"),
    ("prepend", "LlamaTokenizer", "mistral"),
    ("gemma", None, "gemma3_text"),
    ("byte-level", "Qwen2Tokenizer", "qwen3"),
    ("first", None, "olmo2"),
]


@cache
def other_model(kind: str) -> str:
    """The tokenizer.json of a tokenizer whose model is not BPE: `WordLevel`, `WordPiece` or
    `Unigram`."""
    words = dict.fromkeys(" ".join(CORPUS).split())
    pipeline = Pipeline(
        models.WordLevel(
            {word: id_ for id_, word in enumerate([*NAMES, *words])}, unk_token="<unk>"
        )
    )
    pipeline.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind != "WordLevel":
        pipeline = Pipeline(getattr(models, kind)())
        trainer = getattr(trainers, f"{kind}Trainer")
        pipeline.pre_tokenizer = (
            pre_tokenizers.Metaspace() if kind == "Unigram" else pre_tokenizers.Whitespace()
        )
        pipeline.decoder = decoders.Metaspace() if kind == "Unigram" else decoders.WordPiece()
        options = {"unk_token": "<unk>"} if kind == "Unigram" else {}
        pipeline.train_from_iterator(
            CORPUS, trainer(vocab_size=150, special_tokens=NAMES, show_progress=False, **options)
        )
        if kind == "WordPiece":
            pipeline.model.unk_token = "<unk>"
    pipeline.enable_padding(pad_token="<pad>", pad_id=3, length=8)
    pipeline.enable_truncation(5)
    text: str = pipeline.to_str()
    return text
