"""Tokenizers: the results of transformers' AutoTokenizer, by transformers once and then without it;
chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizer_helpers import (
    CASES,
    FILES,
    LLAMA,
    TEXTS,
    byte_level,
    load,
    metaspace,
    other_model,
    write,
)
from transformers import AutoTokenizer

from specgen.base.errors import SpecgenError
from specgen.engine import model_files
from specgen.engine.text.tokenizer import Tokenizer
from specgen.pair.prompts import messages as conversation


def assert_same(folder: Path, texts: list[str] = TEXTS) -> None:
    """Compares the tokenizer with AutoTokenizer's, when it is read for the first time and from what
    was kept then."""
    theirs = AutoTokenizer.from_pretrained(folder)
    for ours in (load(folder), read_again(folder)):
        assert ours.fallback is None
        assert ours.vocabulary() == theirs.get_vocab()
        assert ours.eos_id == theirs.eos_token_id
        assert ours.special_tokens == theirs.special_tokens_map
        for text in texts:
            ids = theirs(text)["input_ids"]
            assert ours.encode(text) == ids, text
            bare = theirs(text, add_special_tokens=False)["input_ids"]
            assert ours.encode(text, special=False) == bare, text
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), (
                    text,
                    skip,
                )


def read_again(folder: Path) -> Tokenizer:
    """Loads a tokenizer that has been loaded before: without transformers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoTokenizer, "from_pretrained", None)
        return load(folder)


def token(content: str, kind: str | None = None, **flags: bool) -> dict[str, Any]:
    """The description of an added token; with `kind` as tokenizer_config.json has it outside its
    list of added tokens."""
    usual = {
        "lstrip": False,
        "rstrip": False,
        "single_word": False,
        "normalized": False,
        "special": True,
    }
    return ({"__type": kind} if kind else {}) | {"content": content} | usual | flags


def added(content: str, **flags: bool) -> dict[str, Any]:
    return token(content, "AddedToken", **flags)


SETTINGS: list[dict[str, Any] | None] = [
    None,
    {
        "eos_token": added("</s>", lstrip=True),
        "bos_token": "<s>",
        "image_token": None,
        "add_eos_token": True,
    },
    {
        "eos_token": "<new>",
        "added_tokens_decoder": {
            "4": token("<new>", special=False),
            "400": token("quick", normalized=True, special=False),
        },
        "additional_special_tokens": ["<extra>", added("<other>", rstrip=True), "fox"],
    },
    {
        "add_prefix_space": True,
        "legacy": True,
        "extra_special_tokens": {"image_token": "<image>", "audio_token": "<audio>"},
    },
]


@pytest.mark.parametrize(("file", "declared", "model_type"), CASES)
def test_byte_pair_tokenizers(
    tmp_path: Path, file: str, declared: str | None, model_type: str
) -> None:
    for number, settings in enumerate(SETTINGS):
        named = {**(settings or {}), **({"tokenizer_class": declared} if declared else {})}
        folder = tmp_path / str(number)
        assert_same(
            write(
                folder,
                FILES[file](),
                None if settings is None else named,
                {"model_type": model_type},
            )
        )


@pytest.mark.parametrize("kind", ["WordLevel", "Unigram", "WordPiece"])
def test_other_tokenizers(tmp_path: Path, kind: str) -> None:
    for number, settings in enumerate(SETTINGS):
        assert_same(write(tmp_path / str(number), other_model(kind), settings, LLAMA))


# tokenizer.json, fields of tokenizer_config.json, the class
UNUSUAL: list[tuple[str, dict[str, Any], str]] = [
    (byte_level(), {"split_special_tokens": True, "eos_token": "</s>"}, "TokenizersBackend"),
    (
        other_model("WordLevel"),
        {"clean_up_tokenization_spaces": True, "tokenizer_class": "PreTrainedTokenizerFast"},
        "TokenizersBackend",
    ),
]


@pytest.mark.parametrize(("file", "settings", "reason"), UNUSUAL)
def test_what_the_tokenizers_library_cannot_do_is_left_to_transformers(
    tmp_path: Path, file: str, settings: dict[str, Any], reason: str
) -> None:
    folder = write(tmp_path, file, settings, LLAMA)
    reference = AutoTokenizer.from_pretrained(folder)
    for tokenizer in (load(folder), load(folder)):
        assert tokenizer.fallback == f"{reason} does more than the tokenizers library"
        assert tokenizer.digest is None
        assert tokenizer.vocabulary() == reference.get_vocab()
        assert [tokenizer.encode(text) for text in TEXTS] == [
            reference(text)["input_ids"] for text in TEXTS
        ]


def test_what_is_kept_belongs_to_the_contents_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other contents under the same names are read anew, and so is what was kept and is damaged."""
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path / "cache"))
    folder = write(tmp_path / "model", byte_level(), {"eos_token": "</s>"}, LLAMA)
    assert load(folder).special_tokens == {"eos_token": "</s>"}
    write(folder, metaspace(), {"eos_token": "<s>"}, LLAMA)
    assert_same(folder)
    for file in (tmp_path / "cache" / "tokenizers").iterdir():
        file.write_text(file.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    assert_same(folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", '{"eos_token": {"content": "</s>"}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}'),
        ("tokenizer_config.json", '{"split_special_tokens": "yes"}'),
    ],
)
def test_damaged_files_raise_the_error_of_transformers(
    tmp_path: Path, file: str, content: str
) -> None:
    folder = write(tmp_path, byte_level(), {}, {"model_type": "qwen3"})
    (folder / file).write_text(content, encoding="utf-8")
    with pytest.raises(Exception) as expected:
        AutoTokenizer.from_pretrained(folder)
    reason = " ".join(str(expected.value).split())[:60].rstrip(".")
    with pytest.raises(SpecgenError, match=re.escape(reason)):
        load(folder)
    source = model_files.ModelSource(str(folder))
    with pytest.raises(SpecgenError, match=f"cannot read the tokenizer of {folder}"):
        model_files.find_model(source, announce=lambda _: None)


def test_a_tokenizer_that_fails_on_a_text_is_a_wrong_input() -> None:
    """The tokenizers library raises plain Exception, for instance if the vocabulary lacks the token
    for unknown words."""

    def encode(text: str, special: bool) -> list[int]:
        if text == "abc":
            raise Exception("Unk token `<unk>` not found in the vocabulary")
        return [0]

    tokenizer = Tokenizer(encode, lambda ids, skip: ".", dict)
    with pytest.raises(
        SpecgenError, match="the tokenizer cannot encode this text: Unk token `<unk>` not found"
    ):
        tokenizer.encode("abc")


# ------------------------------------------------------------------ chat templates


TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] | trim "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "namespace": "{%- set ns = namespace(seen=false, n=0) -%}{% for m in messages[::-1] "
    "%}{% set ns.n = loop.index0 %}"
    "{% if m.role == 'user' and not ns.seen %}{% set ns.seen = true %}{{ loop.index }}{% endif %}"
    "{% endfor %}{{ ns.n }}",
    "date": (
        "{{ bos_token }}{{ strftime_now('%Y') }}{% if tools is none and documents is "
        "none %}-{% endif %}{{ eos_token }}"
    ),
    "alternation": "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != "
    "(loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[INST] {{ m.content }} "
    "[/INST]{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif "
    "%}{% if m.role == 'system' %}"
    "{% continue %}{% endif %}{{ m.content }}|{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %} "
    "{{ m.content }}{{ eos_token }}"
    " {% endgeneration %}|{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2, sort_keys=true) }}{{ "
    "{'a': '<é>'}"
    " | tojson(ensure_ascii=true) }}{{ [1, 2] | tojson(separators=(',', ':')) }}",
    "dict": (
        "{{ dict(a=1, b=messages[0].role) }}{{ dict.fromkeys(['x', 'y'], 0) }}{{ "
        "dict.__class__ }}{{ dict.mro }}"
    ),
    "undefined": "{{ nothing }}{{ messages[0].nothing }}{{ nothing.attribute }}",
    "syntax": "{% for m in messages %}{{ m.content }}",
    "underscore method": "{{ ''.__class__.mro()[1].__subclasses__() }}",
    "self": "{% set ns = namespace(self=1, x=2) %}{{ ns.self + ns.x }}{{ namespace({'a': 3}).a }}",
    "mutation": "{{ messages.append(1) }}",
    "globals": (
        "{{ raise_exception.__globals__ }}{{ strftime_now.__globals__ }}{{ "
        "cycler.__init__.__globals__ }}"
    ),
    "import": "{% import 'os' as os %}{{ os }}",
    "range": "{{ range(99999999) | list }}",
}
CHATS: list[tuple[str, str | None, list[tuple[str, str]]]] = [
    ("Hello, quick fox?", None, []),
    ("  é 日本 <|user|> {{ x }} \n", "You are <b>brief</b>.", []),
    ("third", "", [("one", "first answer"), ("two", "second </s> answer")]),
]


def outcome(call: Callable[[], list[int]]) -> tuple[list[int] | None, str | None]:
    """The ids, or the error's class and text."""
    try:
        return call(), None
    except Exception as raised:  # noqa: BLE001  templates raise anything
        error = raised.__cause__ if isinstance(raised, SpecgenError) else raised
        return None, f"{type(error)} {error}"


def test_chat_templates_give_what_transformers_gives(tmp_path: Path) -> None:
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": None,
        "image_token": "<image>",
    }
    folder = write(
        tmp_path,
        byte_level(with_template=True),
        {**settings, "chat_template": "x"},
        {"model_type": "qwen3"},
    )
    reference = AutoTokenizer.from_pretrained(folder)
    refused = set()
    for name, template in TEMPLATES.items():
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        tokenizer = load(folder)
        for prompt, system, before in CHATS:
            messages = conversation(prompt, system, before)
            expected = outcome(
                partial(
                    reference.apply_chat_template,
                    messages,
                    None,
                    None,
                    template,
                    add_generation_prompt=True,
                    return_dict=False,
                )
            )
            assert outcome(partial(tokenizer.conversation, messages)) == expected, (name, prompt)
            refused |= {name} if expected[1] else set()
    assert (
        {"alternation", "syntax", "mutation", "import", "range"}
        <= refused
        < TEMPLATES.keys() - {"chatml", "json"}
    )


@pytest.mark.parametrize(
    ("configured", "file", "others"),
    [
        (None, None, {}),
        (
            "config",
            "file {{ messages[0].content }}\r\n{{ bos_token }}{{ pad_token is defined }}",
            {},
        ),
        ([{"name": "other", "template": "A"}, {"name": "tool_use", "template": "B"}], None, {}),
        ("config", "file", {"tool_use": "B"}),
    ],
)
def test_sources_of_chat_templates(
    tmp_path: Path, configured: Any, file: str | None, others: dict[str, str]
) -> None:
    folder = write(tmp_path, byte_level(), {"bos_token": "<s>", "chat_template": configured}, LLAMA)
    if file is not None:
        (folder / "chat_template.jinja").write_text(file, encoding="utf-8", newline="")
    for name, template in others.items():
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(
            template, encoding="utf-8"
        )
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer = load(folder)
    if not reference.chat_template:
        with pytest.raises(SpecgenError, match="no chat template"):
            tokenizer.conversation([{"role": "user", "content": "Hi"}])
        return
    try:
        text = reference.apply_chat_template(
            [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
        )
    except ValueError:
        with pytest.raises(SpecgenError, match="none is called default: other, tool_use"):
            tokenizer.conversation([{"role": "user", "content": "Hi"}])
    else:
        assert (
            tokenizer.conversation([{"role": "user", "content": "Hi"}])
            == reference(text, add_special_tokens=False)["input_ids"]
        )


def test_a_template_that_only_chat_template_json_holds_is_used(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}!"
    folder = write(tmp_path, byte_level(), {}, LLAMA, chat_template={"chat_template": template})
    tokenizer = load(folder)
    assert tokenizer.conversation([{"role": "user", "content": "Hi"}]) == tokenizer.encode(
        "Hi!", special=False
    )
    (folder / "chat_template.jinja").write_text("another")
    assert load(folder).conversation([{"role": "user", "content": "Hi"}]) == tokenizer.encode(
        "another", special=False
    )
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text("[]")
    with pytest.raises(SpecgenError, match="no chat template"):
        load(folder).conversation([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("content", "packages"),
    [(b"\x0a\x0e\x0a\x05<unk>", "sentencepiece protobuf"), (b"IQ== 0\nIg== 1\n", "tiktoken")],
)
def test_a_vocabulary_that_needs_a_package_names_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, packages: str
) -> None:
    monkeypatch.setattr("specgen.engine.text.tokenizer.find_spec", lambda _: None)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(SpecgenError, match=f"Install what is missing: pip install {packages}$"):
        load(tmp_path)
