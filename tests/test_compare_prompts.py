"""Prompt files: three forms, and one clear line for whatever is wrong with one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specgen.base.errors import SpecgenError
from specgen.compare.method_specs import parse_specs
from specgen.compare.prompts import LARGEST_JSONL, LARGEST_YAML, load_prompts


def written(tmp_path: Path, content: str | bytes, name: str) -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_the_examples_are_the_default_and_a_limit_takes_categories_in_turn() -> None:
    prompts = load_prompts(None)
    assert len(prompts) == 36
    assert [prompt.index for prompt in prompts] == list(range(36))
    assert Counter(prompt.category for prompt in load_prompts(None, limit=6)) == {"code": 2, "math": 2, "news": 1, "chat": 1}
    assert [prompt.name for prompt in load_prompts(None, category="math", limit=2)] == ["math-lemons", "math-buttons"]
    assert prompts[0].label == "prompt 0 (code-longest-line)"


def test_json_lines_need_only_a_prompt(tmp_path: Path) -> None:
    path = written(tmp_path, '\ufeff{"prompt": "one"}\n\n{"prompt": "two\\u2028", "category": "x", "id": 7}', "p.jsonl")
    one, two = load_prompts(path)
    assert (one.text, one.category, one.name) == ("one", "other", "")
    assert (two.text, two.category, two.name, two.index) == ("two\u2028", "x", "7", 1)


def test_prompts_for_tuning_are_left_out_of_comparisons(tmp_path: Path) -> None:
    entries = [("a", "x", True), ("b", "x", False), ("c", "y", None), ("d", "z", True)]
    lines = [{"prompt": text, "category": category, "tuning": tuning} for text, category, tuning in entries]
    path = written(tmp_path, "\n".join(map(json.dumps, lines)), "p.jsonl")

    def texts(**given: Any) -> str:
        return "".join(prompt.text for prompt in load_prompts(path, **given))

    assert (texts(), texts(for_tuning=True)) == ("bc", "ad")
    assert [prompt.index for prompt in load_prompts(path)] == [1, 2], "positions in the whole file"
    assert (texts(category="x"), texts(category="x", for_tuning=True)) == ("b", "a")
    assert (texts(category="y"), texts(category="y", for_tuning=True)) == ("c", "c"), "no prompt of it is marked"
    assert texts(limit=1, for_tuning=True) == "a"
    with pytest.raises(SpecgenError, match=r"p\.jsonl, category 'z', has only prompts for tuning"):
        texts(category="z")
    with pytest.raises(SpecgenError, match=r"line 1: tuning: .*it is 'yes'"):
        load_prompts(written(tmp_path, '{"prompt": "a", "tuning": "yes"}', "q.jsonl"))


def test_spec_bench_questions_have_turns(tmp_path: Path) -> None:
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        {"question_id": 82, "category": "qa", "turns": ["c"]},
    ]
    path = written(tmp_path, "\n".join(map(json.dumps, lines)), "question.jsonl")
    assert [(prompt.index, prompt.text, prompt.previous_turns) for prompt in load_prompts(path)] == [(0, "a", ()), (2, "c", ())]
    every = load_prompts(path, all_turns=True)
    assert [(prompt.index, prompt.text, prompt.previous_turns) for prompt in every] == [
        (0, "a", ()),
        (1, "b", ("a",)),
        (2, "c", ()),
    ]
    assert every[1].name == "81"


def test_the_form_of_a_file_without_a_known_ending_is_detected(tmp_path: Path) -> None:
    assert load_prompts(written(tmp_path, '{"prompt": "a"}', "prompts"))[0].text == "a"
    assert load_prompts(written(tmp_path, "- a\n- prompt: b\n", "prompts"))[1].text == "b"


BOMB = "a: &a [x,x]\n" + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)},*{chr(97 + i)}]\n" for i in range(20))


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("p.yaml", BOMB, ("line 2", "alias")),
        ("p.yaml", "prompts: " + "[" * 5000, ("levels",)),
        ("p.yaml", "prompts:\n  - prompt: a\n   bad", ("line 3", "not YAML")),
        ("p.yaml", "prompts: 5", ("no list of prompts",)),
        ("p.yaml", "prompts: {a: b}", ("no list of prompts",)),
        ("p.yaml", "", ("no list of prompts",)),
        ("p.yaml", "prompts: []", ("no prompts",)),
        ("p.yaml", "prompts:\n  - prompt: [1]", ("prompt 1: prompt", "it is a list of 1")),
        ("p.yaml", "prompts:\n  - prompt: 5", ("prompt: ", "(it is 5)",)),
        ("p.yaml", "prompts:\n  - text: a", ("neither `prompt` nor `turns`",)),
        ("p.yaml", "prompts:\n  - prompt: a\n    category: [b]", ("category", "(it is a list of 1)",)),
        ("p.yaml", "prompts:\n  - prompt: ' '", ("the prompt is empty",)),
        ("p.yaml", "prompts:\n  - prompt: a\x1bb", ("not YAML",)),
        ("p.yaml", "prompts:\n  - 2024-13-45\n", ("not YAML",)),
        ("p.yaml", "!!python/object/apply:os.system ['true']", ("not YAML", "line 1")),
        ("p.yaml", "- !!bool maybe", ("not YAML")),
        ("p.yaml", "- !!timestamp foo", ("not YAML",)),
        ("p.yaml", "- !!int ''", ("not YAML",)),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": "b', ("line 2", "Invalid JSON")),
        ("p.jsonl", '{"prompt": "a\x1b"}', ("line 1", "control character")),
        ("p.jsonl", '{"prompt": "\\ud800"}', ("line 1", "hex escape")),
        ("p.jsonl", "[1]", ("line 1", "it is a list of 1")),
        ("p.jsonl", "5", ("line 1", "it is 5")),
        ("p.jsonl", "[" * 200_000, ("line 1", "Invalid JSON")),
        ("p.jsonl", '{"n": ' + "9" * 5000 + "}", ("line 1", "Invalid JSON")),
        ("p.jsonl", '{"turns": []}', ("neither `prompt` nor `turns`",)),
        ("p.jsonl", '{"turns": "abc"}', ("turns: ", "it is 'abc'")),
        ("p.jsonl", b'{"prompt": "\xff"}', ("not UTF-8", "byte 12")),
        ("p.jsonl", '{"prompt": "' + "a" * (LARGEST_JSONL + 1), ("larger than 64 MB",)),
        ("p.yaml", "a" * (LARGEST_YAML + 1), ("larger than 4 MB",)),
        ("p", "a" * (LARGEST_YAML + 1), ("larger than 4 MB",)),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_a_mistake_in_a_file_is_one_line(tmp_path: Path, name: str, content: str | bytes, named: tuple[str, ...]) -> None:
    path = written(tmp_path, content, name)
    with pytest.raises(SpecgenError) as refused:
        load_prompts(path)
    message = str(refused.value)
    assert refused.value.exit_code == 2
    assert str(path) in message
    assert len(message.replace(str(path), "")) < 300
    assert all(text in message for text in named), message


def test_a_folder_and_a_missing_file_are_named(tmp_path: Path) -> None:
    for path, named in ((tmp_path, "Is a directory"), (tmp_path / "none.yaml", "No such file")):
        with pytest.raises(SpecgenError, match=named):
            load_prompts(path)
    with pytest.raises(SpecgenError, match="did you mean code"):
        load_prompts(None, category="coed")


# ------------------------------------------------------------------ methods as they are written


def test_plain_decoding_comes_first_and_nothing_twice() -> None:
    specs = parse_specs(["svip,sd:k=8 , svip", "lookup:policy=beta-ts:alpha=2,ar"])
    assert [spec.written for spec in specs] == ["ar", "svip", "sd:k=8", "lookup:policy=beta-ts:alpha=2"]
    assert specs[2].settings == {"k": "8"}


def test_all_stands_for_the_whole_table_but_yardsticks() -> None:
    from specgen.methods.table import METHODS

    assert [spec.name for spec in parse_specs(["all"])] == [name for name in METHODS if name != "joint"]
    assert parse_specs(["all", "joint"])[-1].name == "joint"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("sivp", "did you mean svip"),
        ("transformer", "did you mean transformers"),
        ("sd:k=x", "k is 'x'"),
        ("sd:k", "cannot read 'k'"),
        ("sd:=3", "cannot read '=3'"),
        ("svip,,sd", "a name is missing"),
        ("svip:treshold=1", "did you mean threshold"),
        ("transformers:k=3", "transformers has no setting 'k'"),
        ("transformers-assisted:schedule=often", "schedule is 'often'"),
        ("transformers-assisted:threshold=2", "threshold is 2"),
    ],
)
def test_a_wrong_method_is_named(text: str, named: str) -> None:
    with pytest.raises(SpecgenError, match=named):
        parse_specs([text])
