"""A comparison's figures by hand, the same in JSON, CSV and table; and the verdicts on outputs that differ."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace

import pytest
from comparisons import PHASE_SHARES, results_of, run, shown, usual

from specgen.compare.columns import COLUMNS, as_json, csv_text
from specgen.compare.results import method_results
from specgen.compare.verdict import Difference, count_outcomes, first_difference, judge, outcome_text
from specgen.engine.tolerances import tie_threshold

CSV_HEADER = (
    "method,category,lossless,prompts,identical,tied,diverged,acceptance_rate,draft_share,harmonic_mean,block_efficiency,"
    "mean_draft_length,mean_accepted_run,target_passes,rounds,drafted,accepted,new_tokens,seconds,tokens_per_second,speedup,speedup_low,speedup_high,"
    "perplexity,joules_per_token,gross_joules_per_token,prefill_seconds,draft_seconds,policy_seconds,verify_seconds,sample_seconds,other_seconds,"
    "predicted_eq14,predicted_pass_costs,error"
)


def test_csv_and_json_keep_their_keys() -> None:
    made = method_results(usual())
    header = csv_text(made).splitlines()[0]
    assert header == CSV_HEADER
    csv_only = {"category", *(f"{phase}_seconds" for phase in PHASE_SHARES), "predicted_eq14", "predicted_pass_costs"}
    json_only = {"type", "ties", "energy", "phase_seconds", "differences", "by_category"}
    assert all(set(as_json(result)) == (set(header.split(",")) - csv_only) | json_only for result in made)


def test_figures_by_hand_are_the_same_in_json_csv_and_table() -> None:
    """Prompts 0 and 2 are of one category, prompt 1 is of another."""
    drafting = [
        run(seconds, drafted, accepted, rejections=20, joules_per_token=joules)
        for seconds, drafted, accepted, joules in ((1.0, 90, 70, 0.2), (1.25, 100, 60, 0.5), (0.75, 90, 80, 0.2))
    ]
    results = results_of(
        {"ar": [run(2.0), run(2.2), run(2.1)], "svip": drafting, "transformers": [run(2.0, phase_seconds=None)] * 3}
    )
    results.differences["svip", 1, 0] = Difference(1, 0, 57, 4, 5, 0.0004, 1e-3)
    _, svip, transformers = method_results(results)
    rate, share, low, high = 210 / 280, 210 / 300, (100 / 1.25) / (100 / 2.2), (100 / 0.75) / (100 / 2.1)
    expected = {
        "prompts": 3,
        "identical": 2,
        "tied": 1,
        "diverged": 0,
        "acceptance_rate": rate,
        "draft_share": share,
        "harmonic_mean": 2 / (1 / rate + 1 / share),
        "block_efficiency": 300 / 90,
        "mean_draft_length": 280 / 90,
        "mean_accepted_run": 210 / 60,
        "target_passes": 90,
        "ties": 0,
        "rounds": 90,
        "drafted": 280,
        "accepted": 210,
        "new_tokens": 300,
        "seconds": 3.0,
        "tokens_per_second": 100.0,
        "speedup": 100 / (300 / 6.3),
        "speedup_low": low,  # all three drawn prompts are the slowest one in 4 % of draws
        "speedup_high": high,
        "perplexity": None,
        "joules_per_token": 0.3,
        "energy": None,
        "phase_seconds": pytest.approx(
            {"prefill": 0.3, "draft": 0.51, "policy": 0.09, "verify": 1.8, "sample": 0.15, "other": 0.15}
        ),
    }
    line = as_json(svip)
    assert {key: line[key] for key in expected} == {
        key: pytest.approx(value) if isinstance(value, float) else value for key, value in expected.items()
    }
    one = line["by_category"]["one"]
    assert (one["prompts"], one["tied"], one["drafted"], one["speedup"]) == (1, 1, 100, pytest.approx(low))
    assert (one["speedup_low"], one["speedup_high"]) == (None, None), "of one prompt"
    rows = {
        (row["method"], row["category"]): row
        for row in csv.DictReader(io.StringIO(csv_text([svip, transformers], by_category=True)))
    }
    for category, figures in (("", line), *line["by_category"].items()):
        row = rows["svip", category]
        for key in set(row) & set(expected):
            assert row[key] == ("" if figures[key] is None else str(figures[key])), (category, key)
        for phase in PHASE_SHARES:
            assert float(row[f"{phase}_seconds"]) == pytest.approx(figures["phase_seconds"][phase])
    assert as_json(transformers)["phase_seconds"] is None
    assert rows["transformers", ""]["draft_seconds"] == ""
    (shown_line,) = (text for text in shown(results, 200) if text.startswith("svip  "))
    cells = [
        "svip",
        "tie",
        "at",
        "57",
        "75%",
        "70%",
        "0.72",
        "3.33",
        "3.1",
        "3.5",
        "90",
        "0.3",
        "100.0",
        "2.10×",
        f"{low:.2f}–{high:.2f}",
    ]
    assert shown_line.split()[: len(cells)] == cells
    branching = replace(svip, branches=True)
    assert next(column for column in COLUMNS if column.key == "mean_draft_length").text(branching) == "3 nodes"


def test_a_method_that_did_not_run_has_its_error_in_json_and_csv() -> None:
    left = method_results(usual())[-1]
    error = "sd needs a thing that is not there. Make one: specgen tune --train"
    assert (as_json(left)["error"], as_json(left)["speedup"], as_json(left)["identical"]) == (error, None, None)
    (row,) = csv.DictReader(io.StringIO(csv_text([left], by_category=True)))
    assert (row["method"], row["error"], row["speedup"], row["identical"]) == ("sd:k=8", error, "", "")
    assert as_json(method_results(usual())[0])["error"] is None


# ------------------------------------------------------------------ verdicts


def test_the_first_difference_may_be_the_end_of_one_answer() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    ends: list[tuple[list[int], list[int], int | None, int | None]] = [
        ([1, 2, 3], [1, 2], 3, None),
        ([1, 2], [1, 2, 3], None, 3),
    ]
    for reference, other, own, token in ends:
        found = judge(None, 4, 1, [9], reference, other)  # type: ignore[arg-type]  # no logits are needed
        assert found == Difference(4, 1, 2, own, token, None, 1e-3)
        assert found.is_broken
        assert found.as_dict()["tie"] is False
        assert "one answer ends there" in found.explanation("sd", "prompt 4")


def test_a_cell_names_the_worst_outcome() -> None:
    def difference(prompt: int, gap: float, repeat: int = 0) -> Difference:
        return Difference(prompt, repeat, 10 + prompt, 4, 5, gap, 1e-3)

    assert outcome_text([]) == "same"
    assert outcome_text([difference(3, 0.0)]) == "tie at 13"
    assert outcome_text([difference(3, 0.0), difference(3, 0.0, 1)]) == "tie at 13", "the same prompt again"
    assert outcome_text([difference(3, 0.0), difference(4, 0.0)]) == "2 ties"
    assert outcome_text([difference(3, 0.0), difference(4, 2.0), difference(5, 0.0)]) == "differs at 14"
    assert outcome_text([difference(3, 2.0), difference(4, -2.0), difference(5, 0.0)]) == "2 differ"
    assert count_outcomes(9, [difference(3, 2.0), difference(3, 0.0, 1), difference(5, 0.0)]) == {
        "identical": 7,
        "tied": 1,
        "diverged": 1,
    }


def test_ties_are_gaps_that_rounding_explains() -> None:
    assert tie_threshold("float32", 50.0) == 1e-3
    assert tie_threshold("bfloat16", 32.0) == 0.5
    assert tie_threshold("float16", 32.0) == 0.125
    assert not Difference(0, 0, 1, 3, 4, -0.4, 0.5).is_broken
    assert Difference(0, 0, 1, 3, 4, -0.6, 0.5).is_broken
    assert Difference(0, 0, 1, 3, 4, math.nan, 0.5).is_broken
    assert Difference(0, 0, 1, 3, 4, 0.5, 0.5).is_broken
