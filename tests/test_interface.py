"""The interface that users and scripts rely on is the recorded one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from golden_interface import FILE, record

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
