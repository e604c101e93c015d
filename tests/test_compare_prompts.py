"""Prompt files in three forms, and methods as they are written. `test_bad_inputs.py` has what is
wrong with one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specgen.base.errors import SpecgenError
from specgen.compare.method_specs import parse_specs
from specgen.compare.prompts import load_prompts
from specgen.methods import METHODS


def written(tmp_path: Path, content: str, name: str) -> Path:
    path = tmp_path / name
    path.write_text(content)
    return path


def test_the_examples_are_the_default_and_a_limit_takes_categories_in_turn() -> None:
    prompts = load_prompts(None)
    assert [prompt.index for prompt in prompts] == list(range(36))
    assert Counter(prompt.category for prompt in load_prompts(None, limit=6)) == {
        "code": 2,
        "math": 2,
        "news": 1,
        "chat": 1,
    }
    assert [prompt.name for prompt in load_prompts(None, category="math", limit=2)] == [
        "math-lemons",
        "math-buttons",
    ]
    assert prompts[0].label == "prompt 0 (code-longest-line)"


def test_all_forms_of_files_are_read(tmp_path: Path) -> None:
    """JSON lines need only a prompt; Spec-Bench's questions have turns; without a known ending, the
    form is detected."""
    one, two = load_prompts(
        written(
            tmp_path,
            '\ufeff{"prompt": "one"}\n\n{"prompt": "two\\u2028", "category": "x", "id": 7}',
            "p.jsonl",
        )
    )
    assert (one.text, one.category, one.name) == ("one", "other", "")
    assert (two.text, two.category, two.name, two.index) == ("two\u2028", "x", "7", 1)
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        {"question_id": 82, "turns": ["c"]},
    ]
    path = written(tmp_path, "\n".join(map(json.dumps, lines)), "question.jsonl")
    assert [
        (prompt.index, prompt.text, prompt.previous_turns) for prompt in load_prompts(path)
    ] == [(0, "a", ()), (2, "c", ())]
    every = load_prompts(path, all_turns=True)
    assert [(each.index, each.text, each.previous_turns) for each in every] == [
        (0, "a", ()),
        (1, "b", ("a",)),
        (2, "c", ()),
    ]
    assert every[1].name == "81"
    assert load_prompts(written(tmp_path, '{"prompt": "a"}', "prompts"))[0].text == "a"
    assert load_prompts(written(tmp_path, "- a\n- prompt: b\n", "prompts"))[1].text == "b"


def test_prompts_for_tuning_are_left_out_of_comparisons(tmp_path: Path) -> None:
    entries = [("a", "x", True), ("b", "x", False), ("c", "y", None), ("d", "z", True)]
    lines = [
        {"prompt": text, "category": category, "tuning": tuning}
        for text, category, tuning in entries
    ]
    path = written(tmp_path, "\n".join(map(json.dumps, lines)), "p.jsonl")

    def texts(**given: Any) -> str:
        return "".join(prompt.text for prompt in load_prompts(path, **given))

    assert (texts(), texts(for_tuning=True)) == ("bc", "ad")
    assert [prompt.index for prompt in load_prompts(path)] == [1, 2], "positions in the whole file"
    assert (texts(category="x"), texts(category="x", for_tuning=True)) == ("b", "a")
    assert (texts(category="y"), texts(category="y", for_tuning=True)) == ("c", "c"), (
        "no prompt of it is marked"
    )
    with pytest.raises(SpecgenError, match=r"p\.jsonl, category 'z', has only prompts for tuning"):
        texts(category="z")
    with pytest.raises(SpecgenError, match="did you mean"):
        texts(category="xy")


def test_methods_as_they_are_written() -> None:
    """Plain decoding comes first and nothing twice; `all` stands for the whole table but
    yardsticks."""
    specs = parse_specs(["svip,sd:k=8 , svip", "lookup:policy=beta-ts:alpha=2,ar"])
    assert [spec.written for spec in specs] == [
        "ar",
        "svip",
        "sd:k=8",
        "lookup:policy=beta-ts:alpha=2",
    ]
    assert specs[2].choice.given == {"k": "8"}
    assert [spec.name for spec in parse_specs(["all"])] == [
        name for name in METHODS if name != "joint"
    ]
    assert parse_specs(["all", "joint"])[-1].name == "joint"
