"""`specgen tune` measures a draft with rounded weights too, and what it chose is what `generate`
and `compare` load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pair_helpers import draft_here
from tuning_helpers import COSTS, GREEDY, TEXTS, finished, generated, outcome
from typer.testing import CliRunner

import specgen
from specgen.base.model_options import ModelOptions
from specgen.base.types import QUANTISED
from specgen.cli.app import app
from specgen.decoding.costs import CostTable, Curve
from specgen.engine.native.linear import refusal
from specgen.pair import profile as profiles
from specgen.pair import profile_place
from specgen.pair.loading import with_draft_dtype
from specgen.pair.pair import Pair
from specgen.tune import other_drafts, tuner
from specgen.tune.other_drafts import rounded, with_other_drafts
from specgen.tune.outcome import Candidate, Deadline, TuningRequest
from specgen.tune.profile import from_outcome
from specgen.tune.simulator import Simulator

pytestmark = pytest.mark.skipif(
    refusal("int8", __import__("torch").device("cpu")) is not None,
    reason="this torch or this processor has no int8 products",
)


@pytest.fixture(scope="module")
def both(pair: tuple[str, ...]) -> Iterator[tuple[Pair, Pair]]:
    with (
        specgen.load(pair[1], pair[3], device="cpu", dtype="float32") as stored,
        with_draft_dtype(stored, "int8") as rounded,
    ):
        for each in (stored, rounded):
            draft_here(each)  # PEARL's drafts in this process
        yield stored, rounded


@pytest.mark.parametrize(("seconds", "chosen"), [(0.5, "int8"), (1.5, None), (4.0, None)])
def test_the_draft_with_the_larger_expected_speedup_is_taken(
    both: tuple[Pair, Pair], monkeypatch: pytest.MonkeyPatch, seconds: float, chosen: str | None
) -> None:
    """What drafting costs is given: a token of the stored draft takes 2.0 s, and a pass of the
    target ten."""
    stored, rounded = both
    ran: list[tuple[Pair, float]] = []

    def given(pair: Pair, kinds: Any, *_: Any) -> Any:
        of_token = seconds * 2.0 if pair is rounded else 2.0
        costs = replace(
            COSTS, draft_cost=CostTable({8: Curve({0: 0.0, 1: of_token, 2: 2 * of_token})})
        )
        return {kind: costs if kind != "echo" else COSTS for kind in kinds}, {}

    def choose(self: tuner.Tuner, simulator: Simulator, names: object) -> Any:
        ran.append((simulator.pair, simulator.costs["model"].draft_cost.at(1, 8)))
        return [Candidate("ar", {}, 1.0), Candidate("sd", {}, 2.0)]

    monkeypatch.setattr(tuner, "measure_costs", given)
    monkeypatch.setattr(tuner.Tuner, "choose", choose)
    monkeypatch.setattr(tuner.Tuner, "confirm", lambda self, pair, found: found)
    steps = Mock()
    request = TuningRequest(TEXTS, GREEDY, Deadline.after(400, count().__next__), ["sd", "svip"])
    found = tuner.tune(stored, request, steps, [lambda best: rounded])
    taken = rounded if chosen else stored
    assert (found.draft_dtype, found.pair) == (chosen, taken)
    assert ran == [(taken, seconds * 2.0 if chosen else 2.0)]
    (said,) = [step for step in finished(steps) if step.startswith("int8 draft:")]
    assert said.endswith(": taken" if chosen else ": not taken")


def test_small_drafts_are_not_rounded(
    both: tuple[Pair, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [rounded(both[0], dtype) for dtype in QUANTISED] == [None, None]
    monkeypatch.setattr(tuner, "LEAST_BYTES", 1)
    with rounded(both[0], "int8") as pair:  # type: ignore[union-attr]
        assert pair.draft is not None
        assert pair.draft.dtype_name == "int8"
        assert pair.target is both[0].target


@pytest.mark.parametrize("dtype", [None, "float32", "int8"])
def test_tune_tries_drafts_in_8_bits_and_with_kernels_in_4(
    both: tuple[Pair, Pair], monkeypatch: pytest.MonkeyPatch, dtype: str | None
) -> None:
    """From the size where it pays, unless the user names the draft's dtype."""
    monkeypatch.setattr(tuner, "LEAST_BYTES", 1)
    for kernels, expected in ((object(), ["int8", "int4"]), (None, ["int8"])):
        monkeypatch.setattr(other_drafts, "kernels_for", Mock(return_value=kernels))
        with ExitStack() as opened:
            _, others = with_other_drafts(both[0], ModelOptions(draft_dtype=dtype), opened)
            pairs = [make(both[0]) for make in others]
            tried = [pair.draft.dtype_name for pair in pairs if pair is not None and pair.draft]
        assert tried == ([] if dtype else expected)


@pytest.fixture
def folder(both: tuple[Pair, Pair], tmp_path: Path) -> Path:
    """The profile of a tuning that chose the rounded draft."""
    found = from_outcome(
        replace(outcome(), draft_dtype="int8"), profile_place.profile_key_of(both[0])
    )
    assert found.draft_dtype == "int8"
    profiles.save(found, tmp_path)
    assert profiles.load(tmp_path).draft_dtype == "int8"
    return tmp_path


def test_generate_and_compare_take_the_tuned_dtype_unless_one_is_given(
    pair: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    named = ("--profile", str(folder))
    assert (
        "tuned: svip:threshold=0.45:c=0.15:max_draft=12, int8 draft  stopped at 6 tokens"
        in generated(pair, *named)
    )
    assert "tuned: svip:threshold=0.45:c=0.15:max_draft=12, int8 draft" in generated(
        pair, *named, "--draft-dtype", "int8"
    )
    said = generated(pair, *named, "--draft-dtype", "float32")
    assert "is stale: draft dtype was int8, and is float32; it is not used" in said
    assert "int8 draft" not in said
    said = generated(pair, *named, "--backend", "transformers")
    assert (
        "is stale: its draft was int8; it is not used. --draft-dtype int8 needs the native backend"
        in said
    )
    assert "int8 draft" not in said
    # own settings: no profile
    assert "int8 draft" not in generated(pair, *named, "-m", "sd", "--set", "k=2")
    given = [
        *pair,
        "--device",
        "cpu",
        "--dtype",
        "float32",
        *named,
        "-n",
        "4",
        "--limit",
        "1",
        "--repeats",
        "1",
    ]
    result = CliRunner().invoke(
        app, ["compare", "-m", "sd,ar", *given, "--html", str(tmp_path / "page.html")]
    )
    assert result.exit_code == 0, result.stderr
    assert "tuned: sd:k=3; int8 draft" in result.stderr
    assert "int8)" in (tmp_path / "page.html").read_text()
