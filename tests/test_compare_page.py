"""`compare --html` in a real browser: details on hover, no requests, fits a phone, light and dark."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from browser import DARK, LIGHT, Browser, check_silent

from specgen.cli.app import main


@pytest.fixture(scope="module")
def page(pair: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of the tiny pair in which one method fails."""
    folder = tmp_path_factory.mktemp("page")
    prompts = [{"prompt": "the cat sat on the mat", "id": "<cat>"}, {"prompt": "hello\nthere"}]
    (folder / "p.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    written = folder / "page.html"
    arguments = ["-m", "svip,lookup,transformers,sd:k=3", "--prompts", str(folder / "p.jsonl")]
    arguments += ["-n", "20", "--repeats", "1", "-q", "--html", str(written)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specgen.decoding.prompt_lookup.PromptLookupDrafter.propose", _broken)
        patch.setattr(sys, "argv", ["specgen", "compare", *pair, "--device", "cpu", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 1
    return written


def _broken(*_: object) -> None:
    from specgen.base.errors import RunError

    raise RunError("the <index> is gone", "Make it anew")


def test_the_page_has_table_intervals_and_answers_and_makes_no_requests(browser: Browser, page: Path) -> None:
    browser.open(page)
    check_silent(browser, page)
    rows = browser.texts(".methods tbody th")
    assert rows[0] == "ar"
    assert rows[-1] == "lookup"
    assert set(rows) == {"ar", "svip", "lookup", "transformers", "sd:k=3"}
    assert browser.texts(".methods .why") == ["not run: the <index> is gone; make it anew"]
    assert len(browser.find(".methods line.ci")) == 4
    assert browser.texts("article h3")[0] == "ar"
    assert set(browser.texts("article h3")) == {"ar", "svip", "sd:k=3"}
    answers = {"".join(browser.texts(f"article:nth-of-type({position}) .tok:not(.gone)")) for position in (1, 2, 3)}
    assert len(answers) == 1
    token = browser.find(".tok.acc")[0]
    browser.point_at(token)
    assert "drafted, accepted" in browser.css(".tok.acc", "content", "::after")
    assert "Machine" in browser.texts("main")[0]
    assert "prompt 0 (<cat>)" in browser.texts("main")[0]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_fits_a_phone_in_light_and_dark(browser: Browser, page: Path, dark: bool) -> None:
    browser.open(page, width=390, dark=dark)
    assert browser.overflow() <= 0
    assert browser.css("body", "backgroundColor") == (DARK if dark else LIGHT)
    check_silent(browser, page)
