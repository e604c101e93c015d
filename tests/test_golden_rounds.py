"""Methods do in every round what was recorded, on the bundled pair. `golden_rounds.py` checks all cases and families."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from golden_rounds import FILE, cases, difference, run

CHECKED = """
ar t=1;sd t=0;sd:width=3:depth=4:nodes=8 t=1;sd:k=6:cape=true t=1;sd:translation=text t=0;heuristic t=1;confidence t=0;svip t=1
adaptive:draft_cost=0.1:verify_cost=0.03 t=0;beta-ts t=1;lookup:k=10 t=0;suffix:k=6:min_prob=0.1:factor=1 t=1;lookahead t=1
ouroboros t=0;pearl:window=3 t=1;mtad t=0;bild t=1;joint:k=2 t=0;spectr t=1;specinfer t=1;eesd t=1;eesd-beta t=0;eesd-tree t=1
medusa t=0;eagle t=1;glide:cape=true t=0;selfsd:skip=5+6a+7m t=1;session t=0;sd:policy=cali-ts t=0
""".replace("\n", ";").split(";")
RECORDED = json.loads(gzip.decompress(FILE.read_bytes()))
CASES = {name: (pair, arguments) for name, pair, arguments in cases()}


@pytest.mark.parametrize("case", [f"demo {name}" for name in CHECKED if name])
def test_rounds_are_as_recorded(case: str, tmp_path: Path) -> None:
    assert difference(RECORDED[case], run(case, *CASES[case], tmp_path)) is None


def test_all_cases_are_recorded() -> None:
    assert list(RECORDED) == list(CASES)
