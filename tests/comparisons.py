"""Comparisons on the tiny pair, and what their traces hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Lines, parsed, run_main

PROMPTS = ["the cat sat on the mat", "hello there", "a b c a b c a b", "what is one and one"]
CATEGORIES = ["prose", "prose", "code", "code"]

Compare = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    entries = [{"prompt": text, "category": category} for text, category in zip(PROMPTS, CATEGORIES, strict=True)]
    path.write_text("\n".join(map(json.dumps, entries)))
    return str(path)


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], pair: tuple[str, ...], prompts: str) -> Compare:
    """Run `specgen compare` on the tiny pair in this process: its exit code, stdout and stderr."""

    def call(*arguments: str, models: tuple[str, ...] = pair) -> tuple[int, str, str]:
        return run_main(monkeypatch, capfd, "compare", *models, "--device", "cpu", "--prompts", prompts, *arguments)

    return call


def runs_of(trace: Path) -> dict[str, dict[int, Lines]]:
    """By method and prompt the runs of a trace: the summary line, with its rounds and its start line."""
    runs: dict[str, dict[int, Lines]] = {}
    run: dict[str, Any] = {}
    for line in parsed(trace.read_text(encoding="utf-8")):
        if line["type"] == "start":
            run = {"start": line, "rounds": []}
        elif line["type"] == "round":
            run["rounds"].append(line)
        else:
            start = run["start"]
            runs.setdefault(start["spec"], {}).setdefault(start["prompt_index"], []).append({**line, **run})
    return runs
