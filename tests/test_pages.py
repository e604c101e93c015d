"""The pages in a real browser: details on hover and tap, no requests and no error messages, any
window, light and dark.

`test_views.py` holds what they contain.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import traces
from browser import DARK, LIGHT, Browser, check_silent
from cli_helpers import run_main
from comparisons import report_of, usual

from specgen.view.pages import comparison_page

OpenPage = Callable[..., None]


@pytest.fixture
def open_page(
    browser: Browser,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> OpenPage:
    """Open the page of these runs, each in its own trace file, and check that it is silent."""

    def call(*runs: list[traces.Line], **view: Any) -> None:
        paths = [
            traces.write(tmp_path / f"run-{position}.jsonl", *run)
            for position, run in enumerate(runs)
        ]
        page = tmp_path / "page.html"
        assert (
            run_main(monkeypatch, capfd, "inspect", "-q", *map(str, paths), "--html", str(page))[0]
            == 0
        )
        browser.open(page, **view)
        check_silent(browser, page)

    return call


def test_tokens_show_their_details_on_hover_and_on_tap(
    browser: Browser, open_page: OpenPage
) -> None:
    open_page(traces.a_run())
    assert browser.driver.title.endswith(
        "77% accepted, 67% of the text from the draft, 2.50 tokens a pass"
    )
    committed = "".join(browser.texts(".tok:not(.gone)"))
    assert committed == "Hello starts with 24 pencils pencils. 3 baskets baskets\n     world.⟨eos⟩"
    gone = browser.find(".tok.gone")
    assert [token.is_displayed() for token in gone] == [False] * 3
    browser.find(".reveal")[0].click()
    assert [token.is_displayed() for token in gone] == [True] * 3
    assert browser.css(".tok.rej i", "textDecorationLine") == "line-through"
    browser.point_at(gone[0])
    tip = browser.css(".tok.rej", "content", "::after")
    assert tip == (
        '"“ packs”, id 7: drafted, rejected. Round 2, 4 of 5. Entropy 0.50, top probability 75%."'
    )
    accepted = browser.find(".tok.acc")[0]
    accepted.click()
    assert browser.driver.switch_to.active_element == accepted
    assert "“ starts”, id 1: drafted, accepted. Round 1, 1 of 3." in browser.css(
        ".tok.acc", "content", "::after"
    )
    details = browser.find("details")[0]
    assert not browser.find(".list li")[0].is_displayed()
    details.find_element("css selector", "summary").click()
    assert browser.find(".list li")[0].is_displayed()


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        (320, False),
        (768, True),
        *(pytest.param(*view, marks=pytest.mark.slow) for view in ((390, True), (1600, False))),
    ],
)
def test_pages_fit_any_window_in_light_and_dark(
    browser: Browser, open_page: OpenPage, width: int, dark: bool, tmp_path: Path
) -> None:
    open_page(
        traces.a_recorded_run(120, 1),
        traces.a_run("ar"),
        traces.a_recorded_run(30, 2),
        width=width,
        dark=dark,
    )
    assert browser.overflow() == 0
    assert browser.css("body", "backgroundColor") == (DARK if dark else LIGHT)
    tops = {round(article.rect["y"]) for article in browser.find("article")}
    assert len(tops) == (1 if width == 1600 else 3)
    assert browser.find(".methods thead")[0].is_displayed() == (width > 704)
    assert {
        browser.css(f".{kind} svg.gutter text", "fontSize") for kind in ("rounds", "bounds")
    } == {"12px"}
    page = tmp_path / "compared.html"
    page.write_text("".join(comparison_page(report_of(usual()), [], "", "")), encoding="utf-8")
    browser.open(page, width=width, dark=dark)
    check_silent(browser, page)
    assert browser.overflow() <= 0
    assert len(browser.find(".methods line.ci")) == 5
