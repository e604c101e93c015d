"""The interface that users and scripts rely on is the recorded one."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from golden_interface import FILE, command, record

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads(json.dumps(record()))


@pytest.mark.parametrize("section", GOLDEN)
def test_the_interface_is_as_recorded(recorded: dict[str, Any], section: str) -> None:
    """Where a change is meant: `python tests/golden_interface.py --write`."""
    assert recorded[section] == GOLDEN[section]
    texts = [json.dumps(content[section], sort_keys=True) for content in (recorded, GOLDEN)]
    assert texts[0] == texts[1]  # 1, 1.0 and true are equal in Python


def test_nothing_else_is_recorded(recorded: dict[str, Any]) -> None:
    assert list(recorded) == list(GOLDEN)


@pytest.mark.parametrize("name", ["generate", "compare", "inspect", "tune", "serve"])
def test_help_is_short_and_help_all_whole(name: str) -> None:
    code, short, _ = command(name, "--help", COLUMNS="80", TERMINAL_WIDTH="80")
    _, whole, _ = command(name, "--help-all", COLUMNS="80", TERMINAL_WIDTH="80")
    assert (code, len(short.splitlines()) <= 60) == (0, True)
    shown, known = (set(re.findall(r"--[a-z][\w-]+", text)) for text in (short, whole))
    assert {"--target", "--help-all"} <= shown < known
    assert len(known) > len(shown) + 10


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("specgen generate -m ada", ["adaptive"]),
        ("specgen generate -m sd --set tr", ["translation="]),
        ("specgen compare -m svip,sd:k=3:tr", ["svip,sd:k=3:translation="]),
        ("specgen tune --trai", ["--train"]),
        ("specgen generate --exac", ["--exact"]),
        ("specgen generate --dtype b", ["bfloat16"]),
        ("specgen generate --draft-dtype int", ["int8", "int4"]),
        ("specgen tune --objective p", ["perplexity"]),
    ],
)
def test_methods_settings_and_hidden_options_are_completed(words: str, offered: list[str]) -> None:
    variables = {
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
        "_SPECGEN_COMPLETE": "complete_bash",
    }
    code, out, _ = command(**variables)
    assert (code, out.split()) == (0, offered)


def test_options_have_hidden_names_that_other_programs_use() -> None:
    wrong = "5000000"
    for other, ours in (
        ("--temp", "--temperature"),
        (f"--temp={wrong}", "--temperature"),
        ("--max-tokens", "--max-new-tokens"),
    ):
        value = [] if "=" in other else [wrong if ours == "--temperature" else "x"]
        code, _, err = command("generate", "hi", other, *value)
        assert (
            code,
            ours.removeprefix("--").partition("-")[0] in err.replace("max_new", "max"),
        ) == (2, True), err
    for name in ("chat", "run"):
        code, _, err = command(name, "model")
        assert (code, err) == (
            2,
            (
                f"error: there is no command '{name}'; for a conversation take specgen "
                "generate --chat. See --help\n"
            ),
        )
    _, text, _ = command("generate", "--help-all", COLUMNS="999", TERMINAL_WIDTH="999")
    assert "--temp " not in text
    assert "<bool>" not in text


@pytest.mark.parametrize("size", ["0", "²", "", "-5", "1e3", "wide", "99999999999"])
def test_a_size_that_is_no_number_of_columns_is_ignored(size: str) -> None:
    trace = str(FILE.parent / "trace.jsonl")
    for arguments in (
        ["--help"],
        ["generate", "--help"],
        ["inspect", trace],
        ["inspect", "--methods"],
        ["generate", "-m", "no", "hi"],
    ):
        code, out, err = command(*arguments, COLUMNS=size, LINES=size, TERMINAL_WIDTH=size)
        assert code == (2 if "no" in arguments else 0), err
        assert "Traceback" not in out + err
