"""Tokenizers of several kinds for one target: their files by name, and tiny models that have
them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

from families import make_model
from tokenizer_helpers import CORPUS, byte_level, metaspace
from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = (
    "The quick dog jumps over the lazy cat,  and 12345 cats' dogs: \"I'll be\n\n\tamused\".\n"
    "def fibonacci(n):\n    return fibonacci(n - 1)\n"
    "Größe, L'été à Noël: 日本語の文章です。 🙂 the the the the dog dog dog dog international "
    "lazydog\n"
)


def word_piece(*, lowercase: bool = False) -> str:
    pipeline = Pipeline(models.WordPiece(unk_token="[UNK]"))
    pipeline.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pipeline.decoder = decoders.WordPiece(cleanup=False)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    pipeline.train_from_iterator([*CORPUS, TEXT], trainer)
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    pipeline.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=ends
    )
    text: str = pipeline.to_str()
    return text


def other_merges() -> str:
    tokenizer = json.loads(byte_level())
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = merges[:40]
    dropped = {"".join(merge) for merge in merges[40:]}
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {
        token: id_ for token, id_ in vocabulary.items() if token not in dropped
    }
    for number, token in enumerate(tokenizer["added_tokens"][-2:]):  # behind the others
        token["id"] = max(tokenizer["model"]["vocab"].values()) + 1 + number
    return json.dumps(tokenizer)


def permuted() -> str:
    tokenizer = json.loads(byte_level())
    vocabulary = tokenizer["model"]["vocab"]
    named = {token["content"] for token in tokenizer["added_tokens"]}
    words = [word for word in vocabulary if word not in named]
    shuffled = dict(
        zip(words, Random(0).sample([vocabulary[word] for word in words], len(words)), strict=True)
    )
    tokenizer["model"]["vocab"] = vocabulary | shuffled
    return json.dumps(tokenizer)


def lower_case() -> str:
    return byte_level("Lowercase")


FILES: dict[str, Callable[[], str]] = {
    "byte-level": byte_level,
    "with bos": lambda: byte_level(with_template=True),
    "permuted": permuted,
    "other merges": other_merges,
    "first": metaspace,
    "prepend": lambda: metaspace("prepend"),
    "gemma": lambda: metaspace("gemma"),
    "word piece": word_piece,
    "lower case": lower_case,
}


def settings_of(name: str) -> dict[str, str]:
    """The fields of tokenizer_config.json for the tokenizer `name`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "[SEP]" if name == "word piece" else "</s>",
    }


def write_model(folder: Path, name: str, seed: int = 0) -> str:
    """Writes a tiny random model with the tokenizer `name`, and returns the folder."""
    size = max(Pipeline.from_str(FILES[name]()).get_vocab().values()) + 1
    make_model(
        "llama", seed, vocab_size=size, eos_token_id=2, initializer_range=0.05
    ).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(FILES[name](), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_of(name)), encoding="utf-8")
    return str(folder)
