"""Which of transformers' tokenizer classes a model folder asks for, and the tokenizing steps that this class prescribes.

AutoTokenizer either takes tokenizer.json as it is, or builds one of its classes: vocabulary, merges and post-processor of the
file, but the class's own normalizer, pre-tokenizer, decoder, model flags and default special tokens. This module repeats that
for the classes of the model families in use (transformers 5.23, `models/auto/tokenization_auto.py` and the classes' files).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

AS_FILE = "TokenizersBackend"  # the class that takes tokenizer.json as it is

_NAMES_OF_AS_FILE = {AS_FILE, "PreTrainedTokenizerFast", "PreTrainedTokenizer", "PythonBackend", "BloomTokenizer"}

CLASS_OF_MODEL_TYPE: dict[str, str | None] = {
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "opt", "phi", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("cohere", "cohere2"), "CohereTokenizer"),
    **dict.fromkeys(("gpt_neox", "mpt", "olmo", "olmoe"), "GPTNeoXTokenizer"),
    **dict.fromkeys(
        ("gpt_bigcode", "granite", "granitemoe", "mistral", "mixtral", "olmo2", "olmo3", "phi3", "stablelm"), AS_FILE
    ),
    **dict.fromkeys(("bloom", "falcon", "gpt_oss", "llama", "smollm3")),
}
"""The tokenizer class that transformers has registered for a model type; None: no class of its own."""

_WRONG_ON_THE_HUB = {"phi3", "qwen2"}  # types whose files often declare a wrong class, so that the type's own class counts

_MODELS_AS_FILE = (  # models whose declared class transformers ignores because of their name
    "deepseek-ai/deepseek-r1-distill-llama-*",
    "deepseek-ai/deepseek-coder-*",
    "allenai/dolma2-tokenizer",
)

_QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPACE_MARK = "\u2581"  # how SentencePiece writes a space in tokens


class NotNativeError(Exception):
    """The tokenizer is left to transformers. The message says why, in a few words."""


@dataclass(frozen=True, slots=True)
class TokenizerClass:
    """What a class of transformers sets, whatever tokenizer.json says.

    `pipeline` sets normalizer, pre-tokenizer, decoder and model flags on a tokenizer, given the fields of tokenizer_config.json
    and the special tokens by name. `special_tokens` are the defaults for names that tokenizer_config.json does not have.
    """

    pipeline: Callable[[Tokenizer, Mapping[str, Any], Mapping[str, Any]], None]
    special_tokens: Mapping[str, str | None] = field(default_factory=dict)
    keeps_post_processor: bool = True


def class_name(folder: Path, config: Mapping[str, Any], tokenizer_config: Mapping[str, Any], is_byte_level: bool) -> str:
    """Returns the name of the class that AutoTokenizer would build: `AS_FILE` or a key of `CLASSES`.

    `is_byte_level`: tokenizer.json names the part ByteLevel. Raises NotNativeError where the class is another or uncertain.
    """
    model_type = config.get("model_type")
    if "auto_map" in tokenizer_config or "auto_map" in config:
        raise NotNativeError("the model has code of its own")
    if not isinstance(model_type, str) or model_type not in CLASS_OF_MODEL_TYPE or "model_name" in config:
        raise NotNativeError(f"the tokenizer class of model type {model_type} is not known")
    for name in (str(folder), str(config.get("_name_or_path"))):
        if any(fnmatch(name.lower(), pattern) for pattern in _MODELS_AS_FILE):
            raise NotNativeError("transformers treats models of this name in a special way")
    own = CLASS_OF_MODEL_TYPE[model_type]
    declared = tokenizer_config.get("tokenizer_class", config.get("tokenizer_class"))
    if declared is None:
        return own or AS_FILE
    if not isinstance(declared, str) or not declared:
        raise NotNativeError("the declared tokenizer class is not a name")
    declared = declared.removesuffix("Fast")
    if declared == "LlamaTokenizer" and is_byte_level and model_type not in _WRONG_ON_THE_HUB:
        return AS_FILE  # such files are Llama 3's, which this class would break
    chosen = own if own == AS_FILE or model_type in _WRONG_ON_THE_HUB else declared
    if chosen in _NAMES_OF_AS_FILE:
        return AS_FILE
    if chosen not in CLASSES:
        raise NotNativeError(f"its tokenizer class is {chosen}")
    return chosen


def _llama(tokenizer: Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, Any]) -> None:
    has_prefix = config.get("add_prefix_space") is not False
    scheme = ("always" if config.get("legacy") else "first") if has_prefix else "never"
    steps = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE_MARK, prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if has_prefix else steps)
    _set_flags(tokenizer, fuse_unk=True, byte_fallback=True)


def _gemma(tokenizer: Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, Any]) -> None:
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE_MARK)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    _set_flags(tokenizer, fuse_unk=True, byte_fallback=True, unk_token=str(special_tokens.get("unk_token")))


def _qwen2(tokenizer: Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, Any]) -> None:
    split = pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated", invert=False)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")), use_regex=False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    _set_flags(tokenizer)


def _gpt2(tokenizer: Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, Any]) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=config.get("add_prefix_space", False))
    tokenizer.decoder = decoders.ByteLevel()
    _set_flags(tokenizer)


def _cohere(tokenizer: Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, Any]) -> None:
    has_prefix = config.get("add_prefix_space", False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=has_prefix)])
    tokenizer.decoder = decoders.ByteLevel()
    _set_flags(tokenizer)


def _gpt_neox(tokenizer: Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, Any]) -> None:
    tokenizer.normalizer = normalizers.NFC()
    _gpt2(tokenizer, config, special_tokens)


def _set_flags(tokenizer: Tokenizer, fuse_unk: bool = False, byte_fallback: bool = False, unk_token: str | None = None) -> None:
    """Sets what a class fixes in its byte-pair model; the vocabulary and the merges stay those of the file."""
    model = tokenizer.model
    if model.continuing_subword_prefix or model.end_of_word_suffix:  # the merges were read with them
        raise NotNativeError("its tokens carry a prefix or suffix that the class does not know")
    model.dropout, model.unk_token, model.ignore_merges = None, unk_token, False
    model.fuse_unk, model.byte_fallback = fuse_unk, byte_fallback


def _names(**tokens: str | None) -> dict[str, str | None]:
    return {f"{name}_token": token for name, token in tokens.items()}


_END = "<|endoftext|>"
CLASSES: dict[str, TokenizerClass] = {
    "LlamaTokenizer": TokenizerClass(_llama, _names(unk="<unk>", bos="<s>", eos="</s>")),
    "GemmaTokenizer": TokenizerClass(_gemma, _names(unk="<unk>", bos="<bos>", eos="<eos>", pad="<pad>", mask="<mask>")),
    "Qwen2Tokenizer": TokenizerClass(_qwen2, _names(unk=_END, bos=None, eos=_END, pad=_END)),
    "GPT2Tokenizer": TokenizerClass(_gpt2, _names(unk=_END, bos=_END, eos=_END, pad=None)),
    "CohereTokenizer": TokenizerClass(
        _cohere,
        _names(
            unk="<UNK>",
            bos="<BOS_TOKEN>",
            eos="<|END_OF_TURN_TOKEN|>",
            pad="<PAD>",
            cls="<CLS>",
            sep="<SEP>",
            mask="<MASK_TOKEN>",
        ),
    ),
    "GPTNeoXTokenizer": TokenizerClass(
        _gpt_neox, _names(unk=_END, bos=_END, eos=_END, pad="<|padding|>"), keeps_post_processor=False
    ),
}
