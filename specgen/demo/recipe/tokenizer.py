"""The pair's one tokenizer: byte-level byte-pair encoding, trained on the corpus, with a chat template."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from specgen.demo import ROLES
from specgen.demo.corpus.documents import MIX, documents
from specgen.errors import SpecgenError

VOCABULARY_SIZE = 4096
CONTEXT_LENGTH = 1024
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SMALLEST_VOCABULARY = len((PAD, BOS, EOS)) + 256  # every byte has its token, so that no text is out of reach

# The corpus's own form of a conversation: "User: ...\nAssistant: ...\nUser: ..."
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ {'system': '', 'user': 'User: ', 'assistant': 'Assistant: '}[m['role']] + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\nAssistant:' }}{% endif %}"
)


def train_tokenizer(out: Path, vocabulary_size: int = VOCABULARY_SIZE, characters: int = 3_000_000) -> None:
    """Train on about `characters` of the corpus (seed 0) and save to `out`/target and `out`/draft.

    Byte-pair encoding breaks ties by order, so the same text gives the same tokenizer. Raises SpecgenError where
    `vocabulary_size` has no room for the 256 bytes and the special tokens.
    """
    if vocabulary_size < SMALLEST_VOCABULARY:
        raise SpecgenError(f"the vocabulary size is {vocabulary_size}", f"It has to be at least {SMALLEST_VOCABULARY}")
    bpe = Tokenizer(models.BPE())
    # A token for each digit: sums are learned digit by digit, and 128 and 129 have two of three in common.
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(_sample(characters), trainer=trainer)
    begin = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bpe.token_to_id(BOS))])
    bpe.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=PAD)
    tokenizer.model_max_length = CONTEXT_LENGTH
    tokenizer.chat_template = CHAT_TEMPLATE
    for role in ROLES:
        tokenizer.save_pretrained(out / role)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer saved in `folder`. Raises SpecgenError where there is none, or none that can be read."""
    if not (folder / "tokenizer.json").is_file():
        cure = f"Train one first: python -m specgen.demo.recipe tokenizer {folder.parent}"
        raise SpecgenError(f"there is no tokenizer in {folder}", cure)
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # the Rust library raises nothing finer
        raise SpecgenError(f"the tokenizer in {folder} cannot be read", "Train it anew") from error


def _sample(characters: int) -> Iterator[str]:
    """Documents in the proportions of MIX."""
    for domain, share in MIX.items():
        budget, stream = int(characters * share), documents(domain, seed=0)
        while budget > 0:
            text = next(stream)
            budget -= len(text)
            yield text
