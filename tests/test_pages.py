"""The pages in a real browser: content, details on hover and tap, no requests and no error messages."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import traces
from browser import DARK, LIGHT, Browser, check_silent

from specgen.cli.app import main

OpenPage = Callable[..., None]


@pytest.fixture
def open_page(browser: Browser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> OpenPage:
    """Open the page of these runs, each in its own trace file, and check that it is silent."""

    def call(*runs: list[traces.Line], **view: Any) -> None:
        paths = [traces.write(tmp_path / f"run-{position}.jsonl", *run) for position, run in enumerate(runs)]
        page = tmp_path / "page.html"
        monkeypatch.setattr(sys, "argv", ["specgen", "inspect", "-q", *map(str, paths), "--html", str(page)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        browser.open(page, **view)
        check_silent(browser, page)

    return call


def test_tokens_show_their_details_on_hover_and_on_tap(browser: Browser, open_page: OpenPage) -> None:
    open_page(traces.a_run())
    assert browser.driver.title.startswith("specgen: svip: 77% of drafted tokens accepted, 2.50 tokens per target pass")
    committed = "".join(browser.texts(".tok:not(.gone)"))
    assert committed == "Hello starts with 24 pencils pencils. 3 baskets baskets\n     world.⟨eos⟩"
    # the switch shows rejected and discarded tokens
    gone = browser.find(".tok.gone")
    assert [token.is_displayed() for token in gone] == [False] * 3
    browser.find(".reveal")[0].click()
    assert [token.is_displayed() for token in gone] == [True] * 3
    assert browser.texts(".tok.rej") == [" packs", " packs"]
    assert browser.css(".tok.rej i", "textDecorationLine") == "line-through"
    assert browser.texts(".tok.dis") == [" of"]
    # the strip below the text has the details of the token under the pointer, or of the tapped one
    browser.point_at(gone[0])
    tip = browser.css(".tok.rej", "content", "::after")
    assert tip == '"“ packs”, id 7: drafted, rejected. Round 2, 4 of 5. Entropy 0.50, top probability 75%."'
    accepted = browser.find(".tok.acc")[0]
    accepted.click()
    assert browser.driver.switch_to.active_element == accepted
    tip = browser.css(".tok.acc", "content", "::after")
    assert "“ starts”, id 1: drafted, accepted. Round 1, 1 of 3." in tip
    own = [token.get_attribute("data-tip") for token in browser.find(".tok.own")]
    assert own[:3] == [
        "“Hello”, id 10: chosen by the target after the prompt. Round 0.",
        "“ pencils”, id 4: bonus token after a completely accepted draft. Round 1.",
        "“ baskets”, id 9: correction of the draft's “ packs”. Round 2.",
    ]


def test_the_rounds_and_their_chart(browser: Browser, open_page: OpenPage) -> None:
    open_page(traces.a_run())
    titles = browser.texts("svg.rounds .col title")
    assert titles == [
        "round 0: prompt processed, then the target's token",
        "round 1: 3 of 3 accepted, then the bonus token",
        "round 2: 3 of 5 accepted, then the correction token",
        "round 3: 0 of 1 accepted, then the correction token",
        "round 4: nothing drafted, then the target's token",
        "round 5: 4 of 4 accepted",
    ]
    heights = []
    for kind in ("acc", "rej", "dis"):
        heights.append([float(found.get_attribute("height")) for found in browser.find(f"svg.rounds.gutter rect.{kind}")])
    assert heights == [[38, 38, 51], [12, 12], [12]]  # 13 pixels a token, one of them a gap
    details = browser.find("details")[0]
    assert not browser.find(".list li")[0].is_displayed()
    details.find_element("css selector", "summary").click()
    assert browser.find(".list li")[0].is_displayed()
    assert browser.texts(".list li")[2] == "23/5pencils. 3 ✗packs of → baskets√cH 0.43 > 0.40"
    assert browser.texts(".keys")[-1] != ""


def test_entropy_against_acceptance_and_the_posterior(browser: Browser, open_page: OpenPage) -> None:
    run = traces.a_recorded_run(40, settings={"c": 0.15, "threshold": 0.4})
    open_page(run)
    drafted = [(line, position) for line in run[1:-1] for position in range(len(line["draft_ids"]))]
    points = browser.find("svg.scatter.gutter circle, svg.scatter.gutter svg.x")
    assert len(points) == len(drafted)
    plot = browser.find("svg.scatter.gutter")[0].rect
    right = max(line["entropies"][position] for line, position in drafted) * 1.02
    for element, (line, position) in list(zip(points, drafted, strict=True))[::7]:
        at = element.rect
        x, y = at["x"] + at["width"] / 2 - plot["x"], at["y"] + at["height"] / 2 - plot["y"]
        assert x == pytest.approx(plot["width"] * line["entropies"][position] / right, abs=1.5)
        assert y == pytest.approx(8 + 288 * (1 - line["overlap"][position]), abs=1.5)
    assert [len(browser.find(f"svg.scatter.gutter polyline.{kind}")) for kind in ("est", "pinsker", "bh")] == [1, 1, 1]
    stop = browser.find("svg.scatter line.stop")[0]
    assert stop.get_attribute("x1") == f"{100 * (0.4**2 / 0.15) / right:.2f}%"
    assert browser.find("svg.posterior polygon.band")[0].rect["width"] > 500
    posterior = run[-2]["policy"]
    mean = posterior["alpha"] / (posterior["alpha"] + posterior["beta"])
    assert any(f"After round 39: {mean:.2f}, between" in text for text in browser.texts("figure .note"))


def test_bounds_token_by_token_ratios_and_accepted_lengths(browser: Browser, open_page: OpenPage) -> None:
    """Three tokens whose bounds can be computed by hand, see `test_acceptance_bounds`."""
    rounds = traces.rounds_with_distributions()
    open_page([traces.start_line(), *rounds, traces.summary_line(rounds)])

    def y(share: float) -> float:
        return (8 + (1 - share) * 208) / 240 * 100  # percent of the chart's height

    def points(text: str | None) -> list[tuple[float, float]]:
        return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", text or "")]

    places = (100 / 6, 50, 500 / 6)
    true = points(browser.find("svg.sorted.gutter polyline.true")[0].get_attribute("points"))
    assert true == [pytest.approx((x, y(share)), abs=0.1) for x, share in zip(places, (0.2, 0.7, 0.7), strict=True)]
    for kind, low, high, up in ("pinsker", 0.0625, 0.6660, 0), ("bh", 0.0903, 0.5528, 1.04), ("est", 0.7792, 0.6776, 0):
        marks = points(browser.find(f"svg.sorted.gutter path.{kind}")[0].get_attribute("d"))
        expected = [(x, y(share) - up) for x, share in zip(places, (low, high, high), strict=True)]
        assert marks == [pytest.approx(each, abs=0.1) for each in expected], kind
    titles = browser.texts("svg.ratios .col title")
    assert len(titles) == 21
    assert (titles[3], titles[20]) == ("1.3 to 1.4: 2 tokens, 67%", "3 and more: 1 tokens, 33%")
    heights = [float(bar.get_attribute("height")) for bar in browser.find("svg.ratios .bar")]
    assert (heights[3], heights[20], sum(heights)) == pytest.approx((208, 104, 312), abs=0.1)
    assert browser.find("svg.ratios.gutter line.assumed")[0].get_attribute("x1") == f"{300 / 21:.2f}%"
    assert browser.find("svg.ratios.gutter line.median")[0].get_attribute("x1") == f"{321.93 / 21:.2f}%"
    drafts = [(point.get_attribute("cx"), point.get_attribute("cy")) for point in browser.find("svg.lengths.gutter circle")]
    right = 0.6931472 * 1.02
    assert drafts == [(f"{69.31472 / right:.2f}%", "8.0"), (f"{32.50830 / right:.2f}%", "216.0")]
    assert browser.texts("svg.lengths circle title")[0] == "2 of 2 accepted, mean entropy 0.69"


def test_pages_show_the_bounds_of_all_runs(browser: Browser, open_page: OpenPage) -> None:
    open_page([line for seed in range(3) for line in traces.a_recorded_run(300, seed, spec="beta-ts")])
    notes = " ".join(browser.texts("figure .note"))
    assert "897 drafts of 3 runs. Correlation −" in notes
    assert re.search(r"One in \d of 3,\d\d\d tokens is drawn", notes)
    assert len(browser.find("svg.sorted.gutter polyline.true")[0].get_attribute("points").split()) <= 600


def test_without_distributions_the_chart_shows_the_share_of_accepted_tokens(browser: Browser, open_page: OpenPage) -> None:
    open_page(traces.a_run())
    assert browser.texts("svg.scatter .bin title") == ["entropy 0.5 to 1: 10 of 12 accepted, 83%"]
    assert browser.find("svg.scatter .pinsker") == []
    assert browser.find("svg.sorted, svg.ratios") == []
    assert len(browser.find("svg.lengths.gutter circle")) == 4
    assert any("--record distributions" in text for text in browser.texts("figure .note"))


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        (320, False),
        pytest.param(390, True, marks=pytest.mark.slow),
        (768, True),
        pytest.param(1600, False, marks=pytest.mark.slow),
    ],
)
def test_pages_fit_any_window_in_light_and_dark(browser: Browser, open_page: OpenPage, width: int, dark: bool) -> None:
    open_page(traces.a_recorded_run(120, 1), traces.a_run("ar"), traces.a_recorded_run(30, 2), width=width, dark=dark)
    assert browser.overflow() == 0
    assert browser.css("body", "backgroundColor") == (DARK if dark else LIGHT)
    assert len(browser.find("article")) == 3
    tops = {round(article.rect["y"]) for article in browser.find("article")}
    assert len(tops) == (1 if width == 1600 else 3)
    assert browser.find(".methods thead")[0].is_displayed() == (width > 704)
    sizes = {browser.css("svg.rounds.gutter text", "fontSize"), browser.css("svg.scatter.gutter text", "fontSize")}
    assert sizes == {"12px"}
    assert [row.text.split()[0] for row in browser.find(".methods tbody th")] == ["beta-ts", "ar", "beta-ts"]


def test_markup_and_control_characters_in_a_trace_stay_text(browser: Browser, open_page: OpenPage) -> None:
    evil = "\"'></span><script>document.title='owned'</script><img src=x onerror=alert(1)>&amp;\x1b[31m\u202e"
    start, first, second, *rest = traces.a_run("svip", target=evil, settings={evil: evil}, versions={"specgen": evil})
    open_page([start, first | {"token_text": evil}, second | {"draft_texts": [evil] * 3, "stop_reason": evil}, *rest])
    assert browser.find("img") == []
    assert browser.driver.title != "owned"
    assert browser.texts(".tok.own")[0] == evil.replace("\x1b", "␛").replace("\u202e", "")


def test_print_shows_the_whole_text(browser: Browser, open_page: OpenPage) -> None:
    open_page(traces.a_recorded_run(400))
    assert browser.css(".answer", "overflowY") == "auto"
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert browser.css(".answer", "maxHeight") == "none"
    assert browser.css(".answer", "overflowY") == "visible"
    assert browser.css(".reveal", "display") == "none"
    assert len(browser.driver.print_page()) > 10_000


@pytest.mark.slow
def test_a_page_of_ten_thousand_rounds_opens(browser: Browser, open_page: OpenPage) -> None:
    browser.driver.set_page_load_timeout(30)
    open_page(traces.a_recorded_run(10_000), width=390)
    assert browser.overflow() == 0
    assert len(browser.texts(".list li")) == 10_000
    assert len(browser.texts("svg.rounds.gutter .col")) == 200
    assert len(browser.texts("svg.scatter.gutter title")) <= 1500
    token = browser.find(".tok.acc")[0]
    browser.point_at(token)
    box, strip = browser.find(".box")[0].rect, 76
    assert box["height"] < 900  # the text scrolls, so that the strip with the details stays in view
    assert box["height"] > strip
