"""How byte-level tokenizers split a text before they join bytes to tokens, by the names in
`tokenizer.ggml.pre`.

The names are llama.cpp's. The steps are those of the original tokenizers, as descriptions of the
`tokenizers` library, in the order in which they are applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Step = dict[str, Any]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SENTENCE = r" ?[^(\s|[.,!?…。，、।۔،])]+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
_QWEN35 = rf"{_CONTRACTIONS}|{_MARKED_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_PATHS}|{_SPACES}"
_GPT4O = (
    rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_PATHS}|{_SPACES}"
)
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_SEED = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)


_TO_CHARACTERS: Step = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a tokenizer splits text: `steps`, after which bytes become characters unless one of them
    has done that.

    `ignores_merges`: a piece that is a token is not built from smaller ones. `composes`: the text
    is normalised first (NFC). `has_bos`: the beginning-of-text token is put in front where the file
    does not say.
    """

    steps: tuple[Step, ...]
    ignores_merges: bool = False
    composes: bool = False
    has_bos: bool = False

    @property
    def all_steps(self) -> tuple[Step, ...]:
        """The steps with the one that turns bytes into characters."""
        is_done = any(step["type"] == "ByteLevel" for step in self.steps)
        return self.steps if is_done else (*self.steps, _TO_CHARACTERS)


def _split(*patterns: str) -> tuple[Step, ...]:
    """Returns steps that each cut out what matches a pattern."""
    return tuple(
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    )


_DIGITS: Step = {"type": "Digits", "individual_digits": True}
_PUNCTUATION_MARKS: Step = {"type": "Punctuation", "behavior": "Contiguous"}
_BYTES_OF_WORDS: Step = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_NUMBERS: Step = {"type": "Digits", "individual_digits": False}
_CODE = PreTokenizer((_DIGITS, *_split(_GPT2)))
_WORDS = PreTokenizer(_split(_GPT2))
_OF_LLAMA3 = PreTokenizer(_split(_LLAMA3), ignores_merges=True, has_bos=True)
_OF_QWEN2 = PreTokenizer(_split(_QWEN2))
_OF_GPT4O = PreTokenizer(_split(_GPT4O))
_OF_DEEPSEEK3 = PreTokenizer(_split(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK))
_OF_BLOOM = PreTokenizer(_split(_SENTENCE))
FALLBACK = "gpt-2"  # what is used for an unknown name: the commonest

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer(_split(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _OF_LLAMA3,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer(_split(_LLAMA3))),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "megrez", "kormo"),
        PreTokenizer(_split(_QWEN2), composes=True),
    ),
    **dict.fromkeys(("stablelm2", "hunyuan", "grok-2", "solar-open"), _OF_QWEN2),
    "qwen35": PreTokenizer(_split(_QWEN35), composes=True),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "jais", "gigachat", "mellum", "exaone4", "trillion", "a.x-4.0"), _WORDS
    ),
    "granite-docling": _WORDS,
    **dict.fromkeys(("olmo", "mpt"), PreTokenizer(_split(_GPT2), composes=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _CODE),
    "command-r": PreTokenizer(_CODE.steps, composes=True),
    "falcon": PreTokenizer(
        (_PUNCTUATION_MARKS, _BYTES_OF_WORDS, _NUMBERS, *_split("[0-9][0-9][0-9]"))
    ),
    "tekken": PreTokenizer(_split(_TEKKEN), ignores_merges=True, has_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _OF_GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _OF_DEEPSEEK3),
    "deepseek-coder": PreTokenizer(
        _split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
    ),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _OF_BLOOM),
    "viking": PreTokenizer((*_OF_BLOOM.steps, _DIGITS)),
    "seed-coder": PreTokenizer(_split(_SEED)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenizer(_split(_BAILING))),
}
