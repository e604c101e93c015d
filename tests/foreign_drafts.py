"""Drafts for the bundled target that have tokenizers of their own, made from the bundled draft.

Four folders: `permuted` has the bundled draft's vocabulary in another order; `merges` a byte-level BPE vocabulary trained on
other text, with digits in groups; `sentencepiece` a BPE vocabulary made like SentencePiece's (a mark for spaces, tokens for
bytes). These two have the bundled draft's layers, and as a token's embedding the mean of those of the pieces of its bytes.
`independent` has the last one's tokenizer, and was trained from nothing in that tokenization.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Pipeline
from training_helpers import opened
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specgen import demo
from specgen.demo.corpus.documents import sample
from specgen.demo.recipe.hyperparameters import BUNDLED
from specgen.demo.recipe.train import train
from specgen.engine.text.translation import Translation
from specgen.train.corpus import demo_corpus
from specgen.train.distillation import distill
from specgen.train.training_task import Recipe, TrainingObserver, TrainingTask

NAMES = ("permuted", "merges", "sentencepiece", "independent")
SEED = 7_000_000  # outside the range of the seeds that the demo models and their tokenizer were trained with
CHARACTERS = 2_000_000
_SPACE = "\u2581"
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}
_EMBEDDINGS = "model.embed_tokens.weight"


def make_draft(name: str, out: Path, vocabulary_size: int = 4096) -> None:
    """Writes one of the drafts NAMES, before any distillation, to the folder `out`."""
    if name == "independent":
        _train_independent(out, vocabulary_size)
        return
    source = demo.folder("draft")
    shutil.copytree(source, out, dirs_exist_ok=True)
    weights = load_file(source / "model.safetensors")
    if name == "permuted":
        order = list(range(3, len(weights[_EMBEDDINGS])))
        Random(SEED).shuffle(order)
        order = [0, 1, 2, *order]  # by new id: the id before
        _write_permuted_tokenizer(out, order)
        weights[_EMBEDDINGS] = weights[_EMBEDDINGS][order].contiguous()
    else:
        tokenizer = (_byte_level if name == "merges" else _sentencepiece)(vocabulary_size)
        tokenizer.save_pretrained(out)
        weights[_EMBEDDINGS] = _embeddings_by_bytes(tokenizer, weights[_EMBEDDINGS])
    config = json.loads((out / "config.json").read_text())
    config["vocab_size"] = len(weights[_EMBEDDINGS])
    (out / "config.json").write_text(json.dumps(config, indent=2))
    save_file(weights, out / "model.safetensors", {"format": "pt"})


def _train_independent(out: Path, vocabulary_size: int) -> None:
    """Trains a draft of the bundled draft's shape on the demo corpus, with the same recipe but fewer steps."""
    made = out.with_name(f"{out.name}-training")
    _sentencepiece(vocabulary_size).save_pretrained(made / "draft")
    train("draft", replace(BUNDLED["draft"], minutes=None, steps=1200), made, device="cpu")
    shutil.copytree(made / "draft", out)
    shutil.rmtree(made)


def _write_permuted_tokenizer(folder: Path, order: Sequence[int]) -> None:
    """Changes the ids of the tokens in tokenizer.json: `order` has the old id of each new one."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    new_id = {old: new for new, old in enumerate(order)}
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: new_id[old] for token, old in vocabulary.items()}
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def _texts() -> Iterator[str]:
    return sample(CHARACTERS, SEED, str)


def _saved(pipeline: Pipeline, special: dict[str, str]) -> PreTrainedTokenizerFast:
    add_bos = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", pipeline.token_to_id("<s>"))])
    pipeline.post_processor = add_bos
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pipeline, bos_token="<s>", eos_token="</s>", **special)
    tokenizer.model_max_length = 1024
    tokenizer.chat_template = (demo.folder("draft") / "chat_template.jinja").read_text(encoding="utf-8")
    return tokenizer


def _byte_level(vocabulary_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer like GPT-2's. Digits are in groups, other than in the bundled tokenizer, which has one token per digit."""
    pipeline = Pipeline(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    pipeline.train_from_iterator(_texts(), trainer)
    return _saved(pipeline, {"pad_token": "<pad>"})


def _sentencepiece(vocabulary_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's: `\u2581` for a space, one also before the text, runs of spaces, single digits, byte tokens."""
    trained = Pipeline(models.BPE())
    trained.normalizer = normalizers.Replace(" ", _SPACE)
    trained.pre_tokenizer = pre_tokenizers.Split(
        Regex(rf"\p{{N}}|{_SPACE}?\p{{L}}+|\s|{_SPACE}?[^\s\p{{L}}\p{{N}}{_SPACE}]+|{_SPACE}+"), "isolated"
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<s>", "</s>"]
    alphabet = sorted(set("".join(map(chr, range(33, 127)))) | {_SPACE})
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - len(bytes_) - len(special),
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    trained.train_from_iterator(_texts(), trainer)
    model = json.loads(trained.to_str())["model"]
    vocabulary = {token: id_ for id_, token in enumerate(dict.fromkeys([*special, *bytes_, *model["vocab"]]))}
    merges = [tuple(merge) for merge in model["merges"]]
    pipeline = Pipeline(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    pipeline.decoder = decoders.Sequence(steps)
    pipeline.add_special_tokens(special)
    return _saved(pipeline, {"unk_token": "<unk>"})


def _embeddings_by_bytes(tokenizer: PreTrainedTokenizerFast, embeddings: torch.Tensor) -> torch.Tensor:
    """Returns embeddings [vocabulary of `tokenizer`, width] from those of the bundled draft.

    A token has the mean of the embeddings that the bundled tokenizer's pieces of its bytes have.
    """
    bundled = Pipeline.from_file(str(demo.folder("draft") / "tokenizer.json"))
    by_bytes = {_bytes_of(token): id_ for token, id_ in bundled.get_vocab().items()}
    rows = [embeddings.float().mean(dim=0)] * len(tokenizer)
    for token, id_ in tokenizer.get_vocab().items():
        if bundled.token_to_id(token) is not None and token in tokenizer.all_special_tokens:
            rows[id_] = embeddings[bundled.token_to_id(token)].float()
        elif token not in tokenizer.all_special_tokens:
            piece = _bytes_of(token, is_byte_level=tokenizer.unk_token is None)
            rows[id_] = embeddings[_pieces(bundled, by_bytes, piece)].float().mean(dim=0)
    return torch.stack(rows).to(embeddings.dtype)


def _bytes_of(token: str, *, is_byte_level: bool = True) -> bytes:
    """Returns the bytes for which an entry of a vocabulary stands: byte-level, or as SentencePiece writes it."""
    if is_byte_level:
        return bytes(_BYTES[character] for character in token) if set(token) <= _BYTES.keys() else token.encode()
    if token.startswith("<0x"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE, " ").encode()


def _pieces(bundled: Pipeline, by_bytes: dict[bytes, int], piece: bytes) -> list[int]:
    """Returns the ids that the bundled tokenizer writes for some bytes: single bytes where they are no whole characters."""
    if piece in by_bytes:
        return [by_bytes[piece]]
    try:
        ids: list[int] = bundled.encode(piece.decode(), add_special_tokens=False).ids
        return ids
    except UnicodeDecodeError:
        return [by_bytes[bytes([byte])] for byte in piece]


def distil_draft(source: Path, out: Path, steps: int, observer: TrainingObserver) -> dict[str, Any]:
    """Distils the draft in `source` from the bundled target to the folder `out`, and returns the figures."""
    target, draft = opened(demo.folder("target")), opened(source, "transformers")
    ends = target.eos_ids, draft.eos_ids
    draft = replace(draft, translation=Translation(target.tokenizer, draft.tokenizer, *ends))
    recipe = Recipe(steps=steps, learning_rate=1e-3, batch_size=16, training_length=256, generated_share=1.0)
    task = TrainingTask(out, recipe, corpus=demo_corpus(target.tokenizer.encode, 0, 600_000))
    return distill(target, draft, task, observer, torch.bfloat16)
