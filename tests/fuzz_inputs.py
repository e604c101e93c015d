"""Makes damaged and absurd input files for the fuzzer: prompts, traces, profiles, model folders and exit layers.

Every function takes a `random.Random`, so that a seed repeats a file.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import yaml

ESCAPE = "\x1b[2J\x1b]0;title\x07\x9b31m"
TEXTS = ("", " ", "x", "abc", ESCAPE, "=cmd|' /C calc'!A0", "a\nb\r\n\tc", "é√\u200e\u202e\u2028", "\ud800", "<b>&\"'", "[bold]x")
WHOLE = (0, -1, 1, 2, 3, 17, 2**31, 2**63, 2**64, -(2**63), 10**400)
NUMBERS = (*WHOLE, 1.5, -0.5, 0.0, 1e299, 5e-324, math.nan, math.inf, -math.inf)
NESTED = "[" * 600 + "]" * 600
TOKENS = (
    *[
        "null",
        "true",
        "false",
        "0",
        "-1",
        "1.5",
        "1e999",
        "-1e999",
        "NaN",
        "Infinity",
        "1e299",
        "5e-324",
        '""',
        '"x"',
        "[]",
        "{}",
        "[[1]]",
        '{"a":1}',
        ",",
        "}",
        "01",
        '"\\ud800"',
        '"\\u001b[2J"',
    ],
    *("9" * 400, "9" * 5000, NESTED, "[" * 3000, "", "1 2", "\x00"),
)


def weird(rng: Random, depth: int = 0) -> Any:
    """A value that JSON can hold, of any type."""
    kind = rng.randrange(8 if depth < 2 else 5)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice((*TEXTS, "a" * rng.choice((10, 300, 5000))))
    if kind == 4:
        return rng.choice((None, True, False))
    if kind == 5:
        return [weird(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {rng.choice((*TEXTS, "prompt", "type")): weird(rng, depth + 1) for _ in range(rng.randrange(3))}
    return json.loads(NESTED)


def changed(rng: Random, value: Any, depth: int = 0) -> Any:
    """A copy of a JSON value with one of its parts replaced, removed, repeated or added."""
    if isinstance(value, dict) and value and (depth == 0 or rng.random() < 0.8):
        key, copy = rng.choice(list(value)), dict(value)
        choice = rng.random()
        if choice < 0.15:
            del copy[key]
        elif choice < 0.25:
            copy[rng.choice((*TEXTS, rng.choice(list(value)) + "s"))] = weird(rng)
        else:
            copy[key] = changed(rng, value[key], depth + 1)
        return copy
    if isinstance(value, list) and value and rng.random() < 0.8:
        position, copy_ = rng.randrange(len(value)), list(value)
        choice = rng.random()
        if choice < 0.2:
            del copy_[position]
        elif choice < 0.4:
            copy_.insert(position, copy_[position])
        elif choice < 0.45:
            copy_ *= 50
        else:
            copy_[position] = changed(rng, value[position], depth + 1)
        return copy_
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.5:
        return rng.choice((-value, value + 1, value - 1, value * 1000, value // 7, str(value), [value], *NUMBERS))
    return weird(rng)


def bytes_changed(rng: Random, data: bytes) -> bytes:
    """The data with a few bytes replaced, inserted, removed or repeated, or cut off."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(out) + 1)
        choice = rng.randrange(6)
        if choice == 0:
            out[at : at + 1] = bytes([rng.randrange(256)])
        elif choice == 1:
            out[at:at] = rng.choice(
                (*(b"\x00", b"\xff", b"\n", b"\r", b'"', b"\\"), b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\x1b[2J")
            )
        elif choice == 2:
            del out[at : at + rng.choice((1, 1, 10, 100))]
        elif choice == 3:
            del out[at:]
        elif choice == 4:
            piece = out[at : at + rng.choice((1, 20, 200))]
            out[at:at] = piece
        else:
            out[:0] = rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\n\n", b"# c\n"))
    return bytes(out)


def tokens_changed(rng: Random, text: str) -> str:
    """JSON or YAML text with a few of its numbers and strings replaced by other tokens."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        found = list(re.finditer(r'"(?:[^"\\]|\\.)*"|-?\d[\d.e+-]*|\b(?:null|true|false)\b', text))
        if not found:
            return text
        token = rng.choice(found)
        text = text[: token.start()] + rng.choice(TOKENS) + text[token.end() :]
    return text


def yaml_of(value: Any) -> str:
    try:
        return yaml.safe_dump(value)
    except RecursionError:
        return json.dumps(value)


def text_changed(rng: Random, text: str, values: Callable[[str], str] | None = None) -> bytes:
    """A text file at one of three levels: as it is with other bytes, with other tokens, or with other values (`values`)."""
    choice = rng.random()
    if choice < 0.1:
        return text.encode()
    if choice < 0.3:
        return bytes_changed(rng, text.encode())
    if choice < 0.6 or values is None:
        return tokens_changed(rng, text).encode(errors="surrogatepass")
    return values(text).encode(errors="surrogatepass")


def json_changed(rng: Random, text: str) -> bytes:
    def values(text: str) -> str:
        value = json.loads(text)
        for _ in range(rng.choice((1, 1, 2, 3))):
            value = changed(rng, value)
        return json.dumps(value)

    return text_changed(rng, text, values)


def lines_changed(rng: Random, text: str) -> bytes:
    """JSON lines, some changed, dropped or repeated. Of a trace, every second change is in a line that is no round's."""

    def values(text: str) -> str:
        lines = text.splitlines()
        for _ in range(rng.choice((1, 1, 2, 4))):
            others = [at for at, line in enumerate(lines) if '"type": "round"' not in line]
            at, choice = rng.choice(others if others and rng.random() < 0.5 else range(len(lines))), rng.random()
            if choice < 0.1 and len(lines) > 1:
                del lines[at]
            elif choice < 0.2:
                lines.insert(at, rng.choice(lines))
            elif choice < 0.25:
                lines.insert(at, rng.choice(("", "  ", "{}", "[]", "null", "x", '{"type": "round"}', '{"type": "other"}')))
            else:
                try:
                    lines[at] = json.dumps(changed(rng, json.loads(lines[at])))
                except ValueError:
                    continue
        return "\n".join(lines) + "\n" * (rng.random() < 0.9)

    return text_changed(rng, text, values)


# ------------------------------------------------------------------ prompts

YAML = (
    "prompts:\n- hello\n- {prompt: 'abc abc', category: c}\n- {turns: [one, two], id: 7}\n",
    "- abc\n- def\n",
    "x: &a [b, c]\nprompts: [*a, *a]\n",
    "prompts:\n- !!python/object/apply:os.system [id]\n",
    "prompts:\n- {prompt: 2024-99-99}\n",
    "prompts:\n- prompt: |\n    def f(x):\n      return x\n",
    "a: &a [x,x]\nb: &b [*a,*a,*a]\nc: &c [*b,*b,*b]\nprompts: *c\n",
    "prompts: " + "9" * 5000 + "\n",
    "prompts: [" * 500,
    "? [a]\n: b\n",
    "prompts: !!binary aGVsbG8=\n",
    "prompts: !!set {a, b}\n",
    "<<: [1]\nprompts: [a]\n",
    "prompts: [.inf, .nan, 0x1F, 1_000, 12:30:45]\n",
    "--- a\n--- b\n",
    "%YAML 9.9\n---\n- a\n",
)


def prompts(rng: Random, folder: Path) -> Path:
    """A file of prompts in one of the three formats."""
    if rng.random() < 0.5:
        text, name = rng.choice(YAML[:2] if rng.random() < 0.5 else YAML), "prompts.yaml"
        data = text_changed(rng, text) if rng.random() < 0.7 else text.encode()
    else:
        entries: list[Any] = [{"prompt": "hello"}, {"prompt": "abc abc", "category": "c", "id": "p1"}]
        if rng.random() < 0.5:
            entries = [{"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": ["x"]}] * 2
        if rng.random() < 0.3:
            entries.append({"prompt": rng.choice(TEXTS), "category": rng.choice(TEXTS), "name": rng.choice(TEXTS)})
        data, name = lines_changed(rng, "".join(json.dumps(entry) + "\n" for entry in entries)), "prompts.jsonl"
    path = folder / rng.choice((name, name, name, "prompts.txt", "prompts", "p\x1b[2J.jsonl", "p.json"))
    path.write_bytes(data)
    return path


# ------------------------------------------------------------------ traces, profiles, exit layers


def trace(rng: Random, folder: Path, sources: list[str]) -> Path:
    path = folder / f"t{rng.randrange(1000)}.jsonl"
    path.write_bytes(lines_changed(rng, rng.choice(sources)))
    return path


def profile(rng: Random, folder: Path, source: dict[str, Any]) -> Path:
    def values(_: str) -> str:
        return json.dumps(changed(rng, source)) if rng.random() < 0.5 else yaml_of(changed(rng, changed(rng, source)))

    folder.mkdir()
    text = yaml.safe_dump(source, sort_keys=False)
    (folder / "profile.yaml").write_bytes(text_changed(rng, text, values))
    return folder


def safetensors_changed(rng: Random, data: bytes) -> bytes:
    """A safetensors file with other values in its header, another length of the header, or other bytes."""
    size = struct.unpack("<Q", data[:8])[0]
    header, body = data[8 : 8 + size].decode(), data[8 + size :]
    choice = rng.random()
    if choice < 0.1:
        return bytes_changed(rng, data[: 8 + size]) + body
    if choice < 0.2:
        return struct.pack("<Q", rng.choice((0, 1, size - 1, size + 1, 2**40, 2**63))) + data[8:]
    if choice < 0.3:
        return data[: rng.randrange(len(data))]
    if choice < 0.4:
        floats = bytearray(body)
        for _ in range(rng.choice((1, 100))):
            floats[rng.randrange(len(floats))] = 0xFF
        return data[: 8 + size] + bytes(floats)
    if choice < 0.45:
        new = ("[" * 100_000).encode()
    elif choice < 0.6:
        value = json.loads(header)
        names = [name for name in value if name != "__metadata__"]
        one, other = rng.choice(names), rng.choice(names)
        if rng.random() < 0.5:
            value[one], value[other] = value[other], value[one]
        else:
            value[rng.choice((one + "s", "x", "model.layers.9.self_attn.q_proj.weight", ESCAPE))] = value.pop(one)
        new = json.dumps(value).encode()
    else:
        new = json_changed(rng, header)
    return struct.pack("<Q", len(new)) + new + body


def exit_layer(rng: Random, folder: Path, source: Path) -> Path:
    """A copy of an exit layer's folder with one of its two files changed."""
    folder.mkdir()
    weights, described = (source / "exit.safetensors").read_bytes(), (source / "exit.yaml").read_text(encoding="utf-8")

    def values(text: str) -> str:
        return yaml_of(changed(rng, yaml.safe_load(text)))

    which = rng.randrange(3)
    (folder / "exit.safetensors").write_bytes(safetensors_changed(rng, weights) if which else weights)
    (folder / "exit.yaml").write_bytes(text_changed(rng, described, values) if which != 1 else described.encode())
    if rng.random() < 0.1:
        (folder / rng.choice(("exit.yaml", "exit.safetensors"))).unlink()
    return rng.choice((folder, folder, folder / "exit.yaml", folder / "exit.safetensors"))


# ------------------------------------------------------------------ model folders

TEMPLATES = (
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{{ messages[0]",
    "{{ undefined.thing }}",
    "{{ raise_exception('" + ESCAPE + "') }}",
    "{{ 1 / 0 }}",
    "",
    "{% include 'x' %}",
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.join }}",
    "{% set x = 9 ** 9 %}{{ x }}",
    "{{ messages[9].content }}",
    "\x00\ud800".encode(errors="surrogatepass").decode(errors="replace"),
    "{{ '\\x1b[2J' }}{{ messages[-1]['content'] }}",
    "{{ strftime_now(1) }}",
)
GENERATION: dict[str, Any] = {
    "eos_token_id": [2],
    "pad_token_id": 0,
    "repetition_penalty": 1.1,
    "no_repeat_ngram_size": 3,
    "suppress_tokens": [5],
    "bad_words_ids": [[5, 6]],
    "begin_suppress_tokens": [7],
    "forced_eos_token_id": 2,
    "min_length": 3,
    "min_new_tokens": 2,
    "sequence_bias": [[[5], -1.0]],
    "temperature": 0.6,
    "encoder_repetition_penalty": 1.0,
    "forced_bos_token_id": 1,
    "exponential_decay_length_penalty": [1, 1.1],
    "do_sample": True,
    "stop_strings": ["x"],
}


def model_folder(rng: Random, folder: Path, source: Path, which: str) -> Path:
    """A copy of a model's folder with the file `which` changed."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    path = folder / which
    if which == "generation_config.json" and rng.random() < 0.7:
        keys = rng.sample(list(GENERATION), rng.choice((1, 2, 4)))
        path.write_bytes(json_changed(rng, json.dumps({key: GENERATION[key] for key in keys})))
    elif which == "chat_template.jinja":
        text = rng.choice((*TEMPLATES, path.read_text(encoding="utf-8")))
        path.write_bytes(text.encode() if rng.random() < 0.6 else bytes_changed(rng, text.encode()))
    elif which == "model.safetensors":
        path.write_bytes(safetensors_changed(rng, path.read_bytes()))
    else:
        path.write_bytes(json_changed(rng, path.read_text(encoding="utf-8")))
    if rng.random() < 0.03:
        path.unlink()
    if rng.random() < 0.03:
        path.unlink(missing_ok=True)
        path.mkdir()
    return folder


MODEL_FILES = (
    "config.json",
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "chat_template.jinja",
)
