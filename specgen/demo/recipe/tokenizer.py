"""The demo pair's tokenizer: byte-level byte-pair encoding trained on the generated documents, with a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from specgen.base.errors import SpecgenError
from specgen.demo import ROLES
from specgen.demo.corpus.documents import sample
from specgen.demo.recipe.hyperparameters import CONTEXT_LENGTH

_PAD, _BOS, _EOS = "<pad>", "<s>", "</s>"
_MIN_VOCABULARY = len((_PAD, _BOS, _EOS)) + 256  # a token for each byte, so that any text can be encoded

# The form of the corpus: "User: ...\nAssistant: ...\nUser: ..."
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ {'system': '', 'user': 'User: ', 'assistant': 'Assistant: '}[m['role']] + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\nAssistant:' }}{% endif %}"
)


def train_tokenizer(out: Path, vocabulary_size: int, characters: int = 3_000_000) -> None:
    """Train a tokenizer on about `characters` of the corpus (seed 0) and save it to `out`/target and `out`/draft.

    Raises SpecgenError if `vocabulary_size` is too small for the 256 bytes and the special tokens.
    """
    if vocabulary_size < _MIN_VOCABULARY:
        raise SpecgenError(f"the vocabulary size is {vocabulary_size}", f"It has to be at least {_MIN_VOCABULARY}")
    bpe = Tokenizer(models.BPE())
    # One token per digit, because the model learns sums digit by digit.
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[_PAD, _BOS, _EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(sample(characters, seed=0, encode=str), trainer=trainer)
    add_bos = processors.TemplateProcessing(single=f"{_BOS} $A", special_tokens=[(_BOS, bpe.token_to_id(_BOS))])
    bpe.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), add_bos])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=_BOS, eos_token=_EOS, pad_token=_PAD)
    tokenizer.model_max_length = CONTEXT_LENGTH
    tokenizer.chat_template = _CHAT_TEMPLATE
    for role in ROLES:
        tokenizer.save_pretrained(out / role)


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer that was saved in `folder`. Raises SpecgenError if there is none or if it cannot be read."""
    if not (folder / "tokenizer.json").is_file():
        raise SpecgenError(
            f"there is no tokenizer in {folder}", f"Train it first: python -m specgen.demo.recipe tokenizer {folder.parent}"
        )
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # the tokenizers library has no exception types of its own
        raise SpecgenError(f"the tokenizer in {folder} cannot be read", "Train it again") from error
