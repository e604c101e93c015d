"""What a comparison looks like, beside what `test_views.py` holds: which method is named the
fastest, styles, the page's HTML."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from comparisons import comparison, report_of, results_of, run, shown, usual

from specgen.base.types import SamplingParams
from specgen.compare.results import MethodResult, best, method_results, ranked
from specgen.compare.verdict import Difference
from specgen.view.comparison import headline, picture, speed_table
from specgen.view.pages import comparison_page


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        (
            {"ar": [2.0] * 10, "sd": [2.5] * 10},
            "Nothing here is faster than plain decoding (ar); the best is sd at 0.80×.",
        ),
        (
            {"ar": [2.0] * 9, "sd": [1.0] * 9},
            "sd came first here: 2.00× plain decoding (ar). 9 prompts and 900 tokens are too few "
            "to tell the fastest method: at least 10 and 500 are needed.",
        ),
        (
            {"ar": [2.0] * 10, "sd": [1.0] * 10, "svip": [0.9, 1.1, 1.03, 0.9, 1.1] * 2},
            "Too close to call: svip.",
        ),
        (
            {"ar": [2.0] * 10, "sd": [1.0] * 10, "svip": [1.1] * 10},
            "sd is the fastest that keeps the target's output: 2.00× plain",
        ),
        (
            {"ar": [2.0], "sd": [1.0], "svip": [1.1]},
            "sd came first here: 2.00× plain decoding (ar). 1 prompt and 100 tokens are too few",
        ),
    ],
)
def test_the_result_in_plain_words(methods: dict[str, list[float]], said: str) -> None:
    results = results_of(
        {name: [run(seconds, 50, 20) for seconds in times] for name, times in methods.items()}
    )
    text = " ".join(shown(results, 200))
    assert said in text
    assert ("Too close" in said) == ("Too close" in text)


def test_short_runs_have_no_interval_and_no_winner() -> None:
    """Too few prompts, and enough of them with too few tokens."""
    enough = {"ar": [2.0] * 10, "sd": [1.0, 1.1] * 5}

    def measured(prompts: int, tokens: int) -> list[MethodResult]:
        ids = {"token_ids": [1] * tokens}
        runs = {
            name: [run(seconds, 50, 20, perplexity=2.0, **ids) for seconds in times[:prompts]]
            for name, times in enough.items()
        }
        return method_results(results_of(runs))

    for prompts, tokens in ((9, 100), (10, 49)):
        results = measured(prompts, tokens)
        assert best(results) is None
        assert [(result.low, result.perplexity_interval) for result in results] == [(None,) * 2] * 2
        table = "\n".join(line.plain for line in speed_table(results, 200)[0])
        assert "interval" not in table
    plain, sd = measured(10, 50)
    assert best([plain, sd]) is sd
    assert sd.low is not None
    assert plain.low is None
    assert plain.perplexity_interval == pytest.approx((2.0, 2.0))


def test_the_number_of_prompts_in_the_file_is_named() -> None:
    results = usual()
    results.config = replace(results.config, available=36)
    assert "· 12 of 36 prompts × up to" in headline(report_of(results))


def test_the_filters_that_cut_tokens_are_named() -> None:
    results = usual()
    sampling = SamplingParams(temperature=0.5, top_p=0.9, top_k=2_000_000, min_p=0.1)
    results.config = replace(results.config, sampling=sampling)
    words = "temperature 0.5, top-p 0.9, top-k 2000000, min-p 0.1"
    assert headline(report_of(results)).endswith(words)


def test_a_broken_method_is_never_the_fastest() -> None:
    results = usual()
    results.differences["svip", 1, 0] = Difference(1, 0, 12, 4, 5, 3.5, 1e-3)
    lines = shown(results, 200)
    text = "\n".join(lines)
    assert any(line.startswith("svip ") and "differs at 12" in line for line in lines)
    assert (
        "svip differs from plain decoding at 12 of prompt 1 (p1): the two tokens' logits "
        "are 3.5 apart; rounding explains 0.001"
    ) in text
    assert "\ntransformers-assisted is the fastest" in text
    order = ["ar", "transformers-assisted", "lookup", "svip", "wild", "sd:k=8"]
    assert [result.spec.written for result in ranked(method_results(results))] == order, (
        "after all that are right"
    )
    assert [line.split()[0] for line in lines[4:10]] == order
    broken = next(row for row in method_results(results) if row.spec.written == "svip")
    assert broken.outcomes == {"identical": 11, "tied": 0, "diverged": 1}
    headline = next(comparison_page(report_of(results), [], "", "")).partition("<h1>")[2]
    assert headline.startswith("svip does not give the target&#39;s own output</h1>")


def test_only_the_best_lossless_method_is_bold_and_broken_output_is_red() -> None:
    results = usual()
    results.differences["lookup", 1, 0] = Difference(1, 0, 12, 4, 5, 3.5, 1e-3)
    lines = speed_table(method_results(results), 100)[0]
    styles = {line.plain.split()[0]: {str(span.style) for span in line.spans} for line in lines[2:]}
    assert [name for name, found in styles.items() if "bar.best" in found] == ["svip"]
    # 'not run' is bold too
    assert [name for name, found in styles.items() if "strong" in found] == ["svip", "sd:k=8"]
    assert [name for name, found in styles.items() if "bad" in found] == ["lookup"]


def test_the_bar_is_heavy_to_the_low_end_and_light_to_the_high_end() -> None:
    table = "\n".join(line.plain for line in speed_table(method_results(usual()), 120)[0])
    bars = dict(re.findall(r"^(\S+) .*?([━─]+)$", table, flags=re.MULTILINE))
    wild = next(made for made in method_results(usual()) if made.spec.written == "wild")
    assert wild.high is not None
    assert len(bars["ar"]) == pytest.approx(len(bars["wild"]) / wild.high, abs=1)
    assert set(bars["ar"]) == {"━"}
    assert re.fullmatch("━+─+", bars["svip"])


def test_a_picture_of_the_table_hides_no_column() -> None:
    svg = picture(comparison()).replace("&#160;", " ")
    assert "lexity" in svg
    assert "A wider terminal" not in svg
