"""Tokenizers and chat templates read without transformers: the same results as transformers' AutoTokenizer, or its tokenizer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Pipeline
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specgen import demo
from specgen.engine import model_loading
from specgen.engine.tokenizer import Tokenizer, load_tokenizer
from specgen.engine.tokenizer_class import CLASS_OF_MODEL_TYPE, CLASSES
from specgen.errors import SpecgenError

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog is not amused: 12345 times!",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "Ein Märchen über Größe. L'été à Noël, ça va? \u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3067\u3059\u3002 I'll we've they're",
] * 4
TEXTS = [
    "",
    " ",
    "The quick fox",
    "  two leading spaces and a trailing one ",
    "\n\n\n\tlines\r\n\r\n  \n end",
    "I'LL we've 12345 67 3.14 x2y",
    "e\u0301te\u0301 A\u030angstro\u0308m \u00e9t\u00e9",
    "\u65e5\u672c\u8a9e \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \u0e20\u0e32\u0e29\u0e32 \u202btest",
    "<s>Hi</s> there<pad> <unk>",
    "a<|endoftext|>b <|endoftext|> c<|user|>d <|user|> e",
    "<bos>x<eos> <extra> y <new>z<mask><CLS>",
    "fibonacci(n - 1) \u2581 \u2581x \u0120y <0x41>",
    "quick" * 40,
    "a </s> b <unk> c <eos> d",
    "\x00\x07 \ufffd \ud7ff",
]
NAMES = ["<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "<|endoftext|>"]


@cache
def byte_level(normalizer: str = "", ignore_merges: bool = False, with_template: bool = False) -> str:
    pipeline = Pipeline(models.BPE(ignore_merges=ignore_merges))
    pipeline.normalizer = getattr(normalizers, normalizer)() if normalizer else None
    split = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\p{L}+|\s+|[^\s\p{L}\p{N}]+"), "isolated")
    pipeline.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    pipeline.decoder = decoders.ByteLevel()
    special = [*NAMES[:4], "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pipeline.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
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
    """A BPE tokenizer made like SentencePiece's, with bytes for unknown characters; `kind` as in files of several ages."""
    trained = Pipeline(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    words = [*NAMES[:6], *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocabulary = {word: id_ for id_, word in enumerate(dict.fromkeys(words))}
    merges = [tuple(merge) for merge in model["merges"]]
    pipeline = Pipeline(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "gemma":
        pipeline.normalizer = normalizers.Replace(" ", "\u2581")
    elif kind == "first":
        pipeline.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        pipeline.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        steps.append(decoders.Strip(" ", 1, 0))
    pipeline.decoder = decoders.Sequence(steps)
    pipeline.add_special_tokens(["<unk>", "<s>", "</s>"])
    pipeline.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    text: str = pipeline.to_str()
    return text


@cache
def other_model(kind: str) -> str:
    """A tokenizer whose model is none of byte pairs."""
    words = dict.fromkeys(" ".join(CORPUS).split())
    pipeline = Pipeline(models.WordLevel({word: id_ for id_, word in enumerate([*NAMES, *words])}, unk_token="<unk>"))
    pipeline.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind != "WordLevel":
        pipeline = Pipeline(getattr(models, kind)())
        trainer = getattr(trainers, f"{kind}Trainer")
        pipeline.pre_tokenizer = pre_tokenizers.Metaspace() if kind == "Unigram" else pre_tokenizers.Whitespace()
        pipeline.decoder = decoders.Metaspace() if kind == "Unigram" else decoders.WordPiece()
        options = {"unk_token": "<unk>"} if kind == "Unigram" else {}
        pipeline.train_from_iterator(CORPUS, trainer(vocab_size=150, special_tokens=NAMES, show_progress=False, **options))
        if kind == "WordPiece":
            pipeline.model.unk_token = "<unk>"
    pipeline.enable_padding(pad_token="<pad>", pad_id=3, length=8)
    pipeline.enable_truncation(5)
    text: str = pipeline.to_str()
    return text


def write(folder: Path, tokenizer: str, settings: dict[str, Any] | None, config: dict[str, Any], **files: Any) -> Path:
    """Writes a model's folder without weights; `files` are other files by their names before the dot."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(folder, json.loads((folder / "config.json").read_text(encoding="utf-8")), trust_remote_code=False)


def assert_same(folder: Path, texts: list[str] = TEXTS) -> Tokenizer:
    """Compares a native tokenizer with AutoTokenizer's."""
    ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.fallback is None
    assert ours.vocabulary() == theirs.get_vocab()
    assert ours.eos_id == theirs.eos_token_id
    assert ours._backend.special_tokens == theirs.special_tokens_map  # type: ignore[attr-defined]
    for text in texts:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, text
        bare = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours._backend.encode(text, add_special_tokens=False) == bare, text
        for skip in (True, False):
            assert ours._backend.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), (text, skip)
    return ours


def token(content: str, kind: str | None = None, **flags: bool) -> dict[str, Any]:
    """The description of an added token; with `kind` as tokenizer_config.json has it outside its list of added tokens."""
    usual = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    return ({"__type": kind} if kind else {}) | {"content": content} | usual | flags


def added(content: str, **flags: bool) -> dict[str, Any]:
    return token(content, "AddedToken", **flags)


SETTINGS: dict[str, dict[str, Any] | None] = {
    "no file": None,
    "names": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    "nulls": {"bos_token": None, "eos_token": "</s>", "pad_token": None, "mask_token": None, "image_token": None},
    "described names": {"eos_token": added("</s>", lstrip=True), "bos_token": added("<s>")},
    "new names": {
        "eos_token": "<new>",
        "image_token": "<image>",
        "additional_special_tokens": ["<extra>", added("<other>", rstrip=True), "<new>"],
    },
    "added tokens": {
        "eos_token": "</s>",
        "bos_token": "<s>",
        "added_tokens_decoder": {
            "0": token("<unk>"),
            "2": token("</s>", lstrip=True),
            "1": token("<s>", special=False),
            "400": token("quick", normalized=True, special=False),
        },
        "extra_special_tokens": ["quick"],
    },
    "added tokens beside the vocabulary": {
        "eos_token": "<new>",
        "added_tokens_decoder": {"4": token("<new>", special=False), "3": token("<zz>")},
        "extra_special_tokens": ["<extra>", "fox"],
    },
    "flags without effect": {
        "add_bos_token": False,
        "add_eos_token": True,
        "model_max_length": 3,
        "padding_side": "left",
        "truncation_side": "left",
    },
    "clean-up": {"clean_up_tokenization_spaces": True},
    "split": {"split_special_tokens": True, "eos_token": "</s>"},
    "prefix": {"add_prefix_space": True, "legacy": True},
    "no prefix": {"add_prefix_space": False, "legacy": False},
    "named extras": {"extra_special_tokens": {"image_token": "<image>", "audio_token": "<audio>"}},
    "two lists of extras": {"additional_special_tokens": ["<x>"], "extra_special_tokens": ["<y>"]},
}
FILES = {
    "byte-level": byte_level,
    "byte-level, NFC, template": lambda: byte_level("NFC", True, True),
    "first": metaspace,
    "prepend": lambda: metaspace("prepend"),
    "gemma": lambda: metaspace("gemma"),
}
OLDER = not hasattr(PreTrainedTokenizerFast, "_tokenizer_json_has_byte_level")  # transformers 5.17
CASES = [  # file, declared class, model type
    pytest.param("byte-level", "LlamaTokenizerFast", "llama", marks=pytest.mark.skipif(OLDER, reason="gives nonsense ids")),
    ("byte-level, NFC, template", "PreTrainedTokenizerFast", "llama"),
    ("first", "PreTrainedTokenizer", "phi3"),
    ("prepend", "LlamaTokenizer", "llama"),
    ("first", "LlamaTokenizerFast", "smollm3"),
    ("prepend", "LlamaTokenizer", "mistral"),
    ("gemma", "GemmaTokenizerFast", "gemma2"),
    ("gemma", None, "gemma3_text"),
    ("byte-level", "Qwen2Tokenizer", "qwen3"),
    ("byte-level, NFC, template", "LlamaTokenizer", "qwen2"),
    ("byte-level", "GPT2TokenizerFast", "starcoder2"),
    ("byte-level, NFC, template", "GPT2Tokenizer", "granite"),
    ("byte-level, NFC, template", "CohereTokenizerFast", "cohere"),
    ("byte-level, NFC, template", None, "gpt_neox"),
    ("byte-level", "BloomTokenizerFast", "bloom"),
]


@pytest.mark.parametrize(("file", "declared", "model_type"), CASES)
def test_byte_pair_tokenizers(tmp_path: Path, file: str, declared: str | None, model_type: str) -> None:
    for number, settings in enumerate(SETTINGS.values()):
        named = {**(settings or {}), **({"tokenizer_class": declared} if declared else {})}
        assert_same(write(tmp_path / str(number), FILES[file](), None if settings is None else named, {"model_type": model_type}))


@pytest.mark.parametrize("kind", ["WordLevel", "Unigram", "WordPiece"])
def test_other_tokenizers(tmp_path: Path, kind: str) -> None:
    for number, settings in enumerate(SETTINGS.values()):
        folder = write(tmp_path / str(number), other_model(kind), settings, {"model_type": "llama"})
        if settings and "clean_up_tokenization_spaces" in settings:
            assert load(folder).fallback == f"its {kind} model needs steps of transformers"
        else:
            assert_same(folder)


@pytest.mark.parametrize("declared", [None, "LlamaTokenizer"])
def test_the_map_of_special_tokens_counts_without_a_list_of_added_tokens(tmp_path: Path, declared: str | None) -> None:
    map_ = {"eos_token": token("<eos>", lstrip=True, special=False), "additional_special_tokens": ["<q>"], "unk_token": "<unk>"}
    for number, settings in enumerate(SETTINGS.values()):
        named = {**(settings or {}), "tokenizer_class": declared}
        folder = write(tmp_path / str(number), metaspace(), named, {"model_type": "llama"}, special_tokens_map=map_)
        assert_same(folder)


def test_the_class_of_config_json_counts_if_the_tokenizer_declares_none(tmp_path: Path) -> None:
    folder = write(tmp_path, metaspace("prepend"), {}, {"model_type": "llama", "tokenizer_class": "LlamaTokenizerFast"})
    assert assert_same(folder).encode("<s> x") != load(write(tmp_path, metaspace("prepend"), {}, {"model_type": "llama"})).encode(
        "<s> x"
    )


def test_the_table_of_classes_is_that_of_transformers() -> None:
    from transformers.models.auto import tokenization_auto as auto

    ours = {model_type: name for model_type, name in CLASS_OF_MODEL_TYPE.items() if name}
    assert ours == {model_type: auto.TOKENIZER_MAPPING_NAMES[model_type] for model_type in ours}
    assert not (CLASS_OF_MODEL_TYPE.keys() - ours.keys()) & auto.TOKENIZER_MAPPING_NAMES.keys()
    wrong = auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS & CLASS_OF_MODEL_TYPE.keys()
    assert wrong == {"qwen2", "phi3"}
    assert all(auto.tokenizer_class_from_name(name).__name__ == name for name in CLASSES)


LLAMA = {"model_type": "llama"}
UNUSUAL: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # fields of tokenizer_config.json and config.json, the reason
    ({}, {"model_type": "nystromformer"}, "the tokenizer class of model type nystromformer is not known"),
    ({"auto_map": {"AutoTokenizer": ["a.B", None]}}, {"model_type": "qwen3"}, "the model has code of its own"),
    ({"tokenizer_class": "NoSuchTokenizer"}, LLAMA, "its tokenizer class is NoSuchTokenizer"),
    ({"fix_mistral_regex": True}, {"model_type": "mistral"}, "unusual field: fix_mistral_regex"),
    ({"chat_control_tokens": []}, LLAMA, "unusual field: chat_control_tokens"),
    ({"image_token": "<i>", "extra_special_tokens": {"audio_token": "<a>"}}, LLAMA, "several kinds of special tokens"),
]


@pytest.mark.parametrize(("settings", "config", "reason"), UNUSUAL)
def test_unusual_tokenizers_are_left_to_transformers(
    tmp_path: Path, settings: dict[str, Any], config: dict[str, Any], reason: str
) -> None:
    folder = write(tmp_path, byte_level(), settings, config)
    tokenizer, reference = load(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.fallback is not None
    assert reason in tokenizer.fallback
    assert tokenizer.digest is None
    assert tokenizer.vocabulary() == reference.get_vocab()
    assert [tokenizer.encode(text) for text in TEXTS] == [reference(text)["input_ids"] for text in TEXTS]


def test_other_files_are_left_to_transformers(tmp_path: Path) -> None:
    folder = write(tmp_path / "vocabulary", "{}", {}, {"model_type": "gpt2"})
    (folder / "tokenizer.json").unlink()
    vocabulary = json.loads(byte_level())["model"]["vocab"]
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    assert load(folder).fallback == "there is no tokenizer.json"
    assert load(folder).vocabulary() == AutoTokenizer.from_pretrained(folder).get_vocab()
    old = write(tmp_path / "old", byte_level(), {}, LLAMA, added_tokens={"<later>": 450})
    assert load(old).fallback == "it has an added_tokens.json of the old format"
    odd = write(tmp_path / "odd", byte_level(), {}, LLAMA, special_tokens_map={"extra_special_tokens": ["<e>"]})
    assert load(odd).fallback == "special_tokens_map.json has an unusual field: extra_special_tokens"
    assert load(odd).vocabulary() == AutoTokenizer.from_pretrained(odd).get_vocab()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", '{"eos_token": {"content": "</s>"}}'),
        ("tokenizer_config.json", '{"extra_special_tokens": 3}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}'),
        ("tokenizer_config.json", '{"split_special_tokens": "yes"}'),
        ("special_tokens_map.json", "{"),
    ],
)
def test_damaged_files_raise_the_error_of_transformers(tmp_path: Path, file: str, content: str) -> None:
    folder = write(tmp_path, byte_level(), {}, {"model_type": "qwen3"})
    (folder / file).write_text(content, encoding="utf-8")
    with pytest.raises(Exception) as expected:
        AutoTokenizer.from_pretrained(folder)
    reason = " ".join(str(expected.value).split())[:60].rstrip(".")
    with pytest.raises(SpecgenError, match=re.escape(reason)):
        load(folder)
    source = model_loading.ModelSource(str(folder), label="thing")
    with pytest.raises(SpecgenError, match="cannot read the tokenizer of thing"):
        model_loading.prepare(source, announce=lambda _: None)


def test_one_definition_is_read_once_and_needs_no_comparison(tmp_path: Path) -> None:
    one, other, third = (
        load(write(tmp_path / str(number), byte_level(), {"chat_template": str(number), "eos_token": eos}, LLAMA))
        for number, eos in enumerate(["</s>", "</s>", "<s>"])
    )
    assert one._backend is other._backend
    assert one.digest == other.digest != third.digest
    assert one.chat("x", None) == one._backend.encode("0", add_special_tokens=False)
    assert other.chat("x", None) == one._backend.encode("1", add_special_tokens=False)


TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "namespace": "{%- set ns = namespace(seen=false, n=0) -%}{% for m in messages[::-1] %}{% set ns.n = loop.index0 %}"
    "{% if m.role == 'user' and not ns.seen %}{% set ns.seen = true %}{{ loop.index }}{% endif %}{% endfor %}{{ ns.n }}",
    "date": "{{ bos_token }}{{ strftime_now('%Y') }}{% if tools is none and documents is none %}-{% endif %}{{ eos_token }}",
    "alternation": "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[INST] {{ m.content }} [/INST]{% endfor %}",
    "no system": "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x",
    "macro": "{% macro one(m, mark='#') %}{{ mark }} {{ m.role | upper }}: {{ m.content }}{% endmacro %}"
    "{% for m in messages %}{{ one(m) }}\n{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}"
    "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}|{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2, sort_keys=true) }}"
    "{{ {'a': '<é>'} | tojson(ensure_ascii=true) }}{{ [1, 2] | tojson(separators=(',', ':')) }}",
    "dict": "{{ dict(a=1, b=messages[0].role) }}{{ dict.fromkeys(['x', 'y'], 0) }}{{ dict.__class__ }}{{ dict.mro }}",
    "whitespace": "  {% if true %}\n    {{ messages[-1].content }}   \n  {% endif %}\n\n{# note #}\n  end  ",
    "tokens": "{{ bos_token }}|{{ unk_token is defined }}|{{ pad_token is defined }}|{{ image_token }}|{{ cls_token is none }}",
    "undefined": "{{ nothing }}{{ messages[0].nothing }}{{ nothing.attribute }}",
    "syntax": "{% for m in messages %}{{ m.content }}",
    "unknown filter": "{{ messages | nothing }}",
    "division": "{{ 1 / 0 }}",
    "underscore attribute": "{{ messages.__class__.__mro__ }}",
    "underscore method": "{{ ''.__class__.mro()[1].__subclasses__() }}",
    "underscore name": "{% set ns = namespace(_x=1) %}{{ ns._x }}",
    "underscore later": "{% set ns = namespace() %}{% set ns.__init__ = 1 %}{{ ns.__init__ }}",
    "self": "{% set ns = namespace(self=1, x=2) %}{{ ns.self + ns.x }}{{ namespace({'a': 3}).a }}",
    "mutation": "{{ messages.append(1) }}",
    "format": "{{ '{0.__class__}'.format(messages) }}",
    "globals": "{{ raise_exception.__globals__ }}{{ strftime_now.__globals__ }}{{ cycler.__init__.__globals__ }}",
    "import": "{% import 'os' as os %}{{ os }}",
    "range": "{{ range(99999999) | list }}",
}
OWN_ERRORS = {"underscore name", "underscore later"}  # refused in our own words
CHATS: list[tuple[str, str | None, list[tuple[str, str]]]] = [
    ("Hello, quick fox?", None, []),
    ("  é 日本 <|user|> {{ x }} \n", "You are <b>brief</b>.", []),
    ("third", "", [("one", "first answer"), ("two", "second </s> answer")]),
    ("", None, [("q", "")]),
]


def test_chat_templates_give_what_transformers_gives(tmp_path: Path) -> None:
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": None, "image_token": "<image>"}
    folder = write(tmp_path, byte_level(with_template=True), {**settings, "chat_template": "x"}, {"model_type": "qwen3"})
    reference = AutoTokenizer.from_pretrained(folder)
    refused = set()
    for name, template in TEMPLATES.items():
        if OLDER and name in OWN_ERRORS:  # it allows them
            continue
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        tokenizer = load(folder)
        assert tokenizer.fallback is None
        for prompt, system, before in CHATS:
            messages = [{"role": "system", "content": system}] if system is not None else []
            for question, answer in before:
                messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            messages.append({"role": "user", "content": prompt})
            expected, error = outcome(
                lambda messages=messages, template=template: reference.apply_chat_template(
                    messages, chat_template=template, add_generation_prompt=True, return_dict=False
                )
            )
            ids, refusal = outcome(
                lambda tokenizer=tokenizer, prompt=prompt, system=system, before=before: tokenizer.chat(prompt, system, before)
            )
            assert ids == expected, (name, prompt, error, refusal)
            if error is not None:
                refused.add(name)
                assert isinstance(refusal, SpecgenError)
                assert type(refusal.__cause__) is type(error), (name, error)
                if name not in OWN_ERRORS:
                    assert str(refusal.__cause__) == str(error), name
    assert refused >= {"alternation", "no system", "syntax", "mutation", "import", "range"} | (set() if OLDER else OWN_ERRORS)
    assert len(TEMPLATES.keys() - refused) >= 12


def outcome(call: Callable[[], list[int]]) -> tuple[list[int] | None, Exception | None]:
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001  templates raise anything
        return None, error


def chat_template_cases(folder: Path) -> None:
    """Compares the chosen chat template of a folder with transformers'."""
    reference, tokenizer = AutoTokenizer.from_pretrained(folder), load(folder)
    assert tokenizer.fallback is None
    messages = [{"role": "user", "content": "Hi"}]
    if not reference.chat_template:
        with pytest.raises(SpecgenError, match="no chat template"):
            tokenizer.chat("Hi", None)
        return
    try:
        text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except ValueError:
        with pytest.raises(SpecgenError, match="none is called default: other, tool_use"):
            tokenizer.chat("Hi", None)
    else:
        assert tokenizer.chat("Hi", None) == reference(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("configured", "file", "others"),
    [
        (None, None, {}),
        ("", None, {}),
        ("config {{ messages[0].content }}", None, {}),
        ("config", "file {{ messages[0].content }}\r\n{{ bos_token }}", {}),
        ([{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}], None, {}),
        ([{"name": "other", "template": "A"}, {"name": "tool_use", "template": "B"}], None, {}),
        ({"default": "A", "rag": "B"}, None, {}),
        ([{"name": "other", "template": "A"}], "file", {}),
        ("config", None, {"other": "A", "tool_use": "B"}),
        ("config", "file", {"tool_use": "B"}),
        ("config", None, {"default": "C"}),
    ],
)
def test_sources_of_chat_templates(tmp_path: Path, configured: Any, file: str | None, others: dict[str, str]) -> None:
    folder = write(tmp_path, byte_level(), {"bos_token": "<s>", "chat_template": configured}, LLAMA)
    if file is not None:
        (folder / "chat_template.jinja").write_text(file, encoding="utf-8", newline="")
    for name, template in others.items():
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(template, encoding="utf-8")
    chat_template_cases(folder)


@pytest.mark.parametrize(("file", "declared", "model_type"), CASES)
def test_default_special_tokens_are_variables(tmp_path: Path, file: str, declared: str | None, model_type: str) -> None:
    names = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    template = "".join(f"{name}={{{{ {name}_token if {name}_token is defined else 'undefined' }}}};" for name in names)
    settings = {"chat_template": template, **({"tokenizer_class": declared} if declared else {})}
    chat_template_cases(write(tmp_path, FILES[file](), settings, {"model_type": model_type}))


def test_the_demo_tokenizer_needs_no_transformers() -> None:
    program = """
import json, sys
from pathlib import Path
from specgen.engine.tokenizer import load_tokenizer
folder = Path(sys.argv[1])
tokenizer = load_tokenizer(folder, json.loads((folder / "config.json").read_text()), trust_remote_code=False)
ids = tokenizer.encode("def f(x):")
heavy = {"transformers", "torch", "numpy", "huggingface_hub", "jinja2"} & sys.modules.keys()
chat = tokenizer.chat("Hi", None)
print(json.dumps([ids, chat, sorted(heavy), sorted({"transformers", "torch", "numpy"} & sys.modules.keys())]))
"""
    folder = demo.folder("target")
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True)
    ids, chat, before, after = json.loads(done.stdout)
    reference = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Hi"}]
    assert ids == reference("def f(x):")["input_ids"]
    assert chat == reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert (before, after) == ([], [])


def test_the_demo_pair_shares_one_tokenizer() -> None:
    target, draft = (load(Path(demo.folder(role))) for role in ("target", "draft"))
    assert target.digest == draft.digest
    assert target.fallback is None
