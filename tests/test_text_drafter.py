"""Drafts by way of their text: a drafter that knows the coming text, of any tokenizer, and what its drafts become."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from scripted_models import ids_of
from tokenizer_helpers import CORPUS, LLAMA, byte_level, load, metaspace, write
from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from specgen import factory, methods
from specgen.decoding.components import Components
from specgen.decoding.run import Clock, Run
from specgen.engine.model_runner import ModelOutput
from specgen.engine.tokenizer import Tokenizer
from specgen.errors import SpecgenError
from specgen.types import Context, Round, SamplingParams

TEXT = (
    'The quick dog jumps over the lazy cat,  and 12345 cats\' dogs: "I\'ll be\n\n\tamused".\n'
    "def fibonacci(n):\n    return fibonacci(n - 1)\n"
    "Größe, L'été à Noël: 日本語の文章です。 🙂 the the the the dog dog dog dog international lazydog\n"
)
GREEDY = SamplingParams(max_new_tokens=10_000)


def word_piece(*, lowercase: bool = False) -> str:
    pipeline = Pipeline(models.WordPiece(unk_token="[UNK]"))
    pipeline.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pipeline.decoder = decoders.WordPiece(cleanup=False)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    pipeline.train_from_iterator([*CORPUS, TEXT], trainer)
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    pipeline.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    text: str = pipeline.to_str()
    return text


def other_merges() -> str:
    tokenizer = json.loads(byte_level())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:40]
    return json.dumps(tokenizer)


def permuted() -> str:
    tokenizer = json.loads(byte_level())
    vocabulary, named = tokenizer["model"]["vocab"], {token["content"] for token in tokenizer["added_tokens"]}
    words = [word for word in vocabulary if word not in named]
    shuffled = dict(zip(words, Random(0).sample([vocabulary[word] for word in words], len(words)), strict=True))
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


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")

    @cache
    def made(name: str) -> Tokenizer:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "[SEP]" if name == "word piece" else "</s>"}
        return load(write(folder / name.replace(" ", "-"), FILES[name](), settings, LLAMA))

    return made


class Script:
    """A model that says `ids`, whatever came before: the token at each position is certain."""

    context_limit = 10_000
    device = torch.device("cpu")

    def __init__(self, ids: Sequence[int], vocab_size: int) -> None:
        self.ids, self.vocab_size, self.num_embeddings = ids, vocab_size, vocab_size

    def next_token(self, ids: Sequence[int]) -> int:
        return self.ids[min(len(ids), len(self.ids) - 1)]

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        rows = torch.full((len(draft) + 1 - start, self.vocab_size), -10.0)
        for row, length in enumerate(range(start, len(draft) + 1)):
            rows[row, self.next_token([*context.ids, *draft[:length]])] = 10.0
        return ModelOutput(rows, rows)


class Oracle(Script):
    """A draft model that continues any prefix of `text` with the text that follows, in tokens of its own.

    It errs after each prefix whose length is a multiple of `errs`. `contexts` are what it was asked about.
    """

    def __init__(self, tokenizer: Tokenizer, text: str, errs: int = 10_000) -> None:
        super().__init__([], max(tokenizer.vocabulary().values()) + 1)
        self._tokenizer, self._text, self._errs = tokenizer, text, errs

    def next_token(self, ids: Sequence[int]) -> int:
        tokenizer = self._tokenizer
        pieces = list(map(tokenizer.detokenizer(()).push, ids))
        said = "".join(pieces)
        part = next((number for number, piece in enumerate(reversed(pieces)) if piece), 0)  # tokens of a character
        if len(said) % self._errs == self._errs - 1 or not self._text.startswith(said):
            return tokenizer.encode_plain("a")[-1]
        rest = tokenizer.encode_after(said[-20:], self._text[len(said) :]) or tokenizer.encode_plain(self._text[len(said) :])
        return [*rest, *tokenizer.encode_plain("a")[-1:] * 9][part]


def run_of(
    target: Tokenizer, draft: Tokenizer, ids: Sequence[int], prompt: int, runner: Any, k: int = 4, **settings: object
) -> Run:
    """A run whose target says `ids`, of which the first `prompt` are the prompt."""
    size = max(target.vocabulary().values()) + 1
    components = Components(Script(ids, size), runner, GREEDY, frozenset(), size, 0, tokenizers=(target, draft))  # type: ignore[arg-type]
    resolved = methods.resolve(methods.METHODS["sd"], {"translation": "text", "k": k, **settings})
    limit = len(ids) - prompt
    return factory.make_run(methods.METHODS["sd"], resolved, components, Context(ids[:prompt]), limit, None, Clock(None))


def accepted(rounds: Sequence[Round]) -> int:
    return sum(len(round_.verdict.path) for round_ in rounds)


@pytest.mark.parametrize(
    ("target", "draft", "least"),
    [
        ("byte-level", "byte-level", 0.99),
        ("byte-level", "permuted", 0.99),
        ("byte-level", "other merges", 0.75),
        ("byte-level", "first", 0.75),
        ("byte-level", "gemma", 0.75),
        ("with bos", "prepend", 0.75),
        ("first", "byte-level", 0.75),
        ("prepend", "with bos", 0.75),
        ("gemma", "first", 0.9),
        ("byte-level", "word piece", 0.3),
        ("first", "word piece", 0.3),
        ("lower case", "byte-level", 0.0),
    ],
)
def test_a_draft_that_knows_the_text_is_accepted(
    tokenizer_of: Callable[[str], Tokenizer], target: str, draft: str, least: float
) -> None:
    """Whatever both tokenizers are. Tokens at a draft's end may be rejected: text that follows would change them."""
    ours, theirs = tokenizer_of(target), tokenizer_of(draft)
    ids = ours.encode(TEXT)
    rounds = list(run_of(ours, theirs, ids, 6, Oracle(theirs, TEXT)).rounds())
    assert ids_of(rounds) == ids[6:]
    drafted = sum(len(round_.draft.tokens) for round_ in rounds)
    print(target, draft, accepted(rounds) / max(drafted, 1), len(ids) / len(rounds))
