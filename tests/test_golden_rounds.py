"""Methods do in every round what was recorded, on the bundled pair. `golden_rounds.py` checks all
cases and families."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from golden_rounds import FILE, cases, difference, run

from specgen.methods import METHODS

RECORDED = json.loads(gzip.decompress(FILE.read_bytes()))
CASES = {name: (pair, arguments) for name, pair, arguments in cases()}
DEMO = [name for name, (pair, _) in CASES.items() if pair == "demo" and " --" not in name]


@pytest.mark.parametrize(
    "case", [case for number, case in enumerate(DEMO) if number % 3 == 0 or "ouroboros" in case]
)
def test_rounds_are_as_recorded(case: str, tmp_path: Path) -> None:
    """All settings of all methods: in turn greedy and sampled."""
    assert difference(RECORDED[case], run(case, *CASES[case], tmp_path)) is None


def test_all_cases_are_recorded() -> None:
    assert list(RECORDED) == list(CASES)
    assert set(METHODS) <= {name.split()[1].partition(":")[0] for name in DEMO}
