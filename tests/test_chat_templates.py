"""Chat templates rendered without transformers: the same text, and the same errors, as transformers' apply_chat_template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizer_helpers import CASES, FILES, LLAMA, OLDER, byte_level, load, write
from transformers import AutoTokenizer

from specgen.base.errors import SpecgenError

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
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %} {{ m.content }}{{ eos_token }} "
    "{% endgeneration %}|{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2, sort_keys=true) }}"
    "{{ {'a': '<é>'} | tojson(ensure_ascii=true) }}{{ [1, 2] | tojson(separators=(',', ':')) }}",
    "dict": "{{ dict(a=1, b=messages[0].role) }}{{ dict.fromkeys(['x', 'y'], 0) }}"
    "{{ dict.__class__ }}{{ dict.mro }}{{ dict.keys }}",
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
        ({"rag": "B", "default": "A"}, None, {}),
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
