"""A real browser for the tests of HTML pages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run
--disable-background-networking --disable-component-update --disable-sync
--disable-dev-shm-usage --hide-scrollbars"""
DARK = "rgb(20, 22, 26)"
LIGHT = "rgb(251, 250, 247)"


class Browser:
    """Chromium, with the requests and console messages since the last page was opened."""

    def __init__(self, profile: Path) -> None:
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = BROWSER
        for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        # ends the requests of Chromium's start page, so that no test sees them
        self.driver.get("about:blank")

    def open(self, page: Path | str, *, width: int = 1100, dark: bool = False) -> None:
        """Opens a file, or an address."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"media": "", "features": features}
        )
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.get_log("performance")
        self.driver.get_log("browser")
        self.driver.get(page if isinstance(page, str) else page.as_uri())

    def requests(self) -> list[str]:
        messages = (
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        )
        return [
            entry["params"]["request"]["url"]
            for entry in messages
            if entry["method"] == "Network.requestWillBeSent"
        ]

    def find(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def texts(self, selector: str) -> list[str]:
        """The text content of all matching elements, in one call."""
        script = (
            "return [...document.querySelectorAll(arguments[0])].map(element => "
            "element.textContent)"
        )
        found: list[str] = self.driver.execute_script(script, selector)
        return found

    def css(self, selector: str, name: str, pseudo: str = "") -> str:
        script = (
            "return getComputedStyle(document.querySelector(arguments[0]), "
            "arguments[2] || null)[arguments[1]]"
        )
        return str(self.driver.execute_script(script, selector, name, pseudo))

    def point_at(self, element: Any) -> None:
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).move_to_element(element).perform()

    def overflow(self) -> int:
        """How many pixels the page is wider than its window."""
        return int(
            self.driver.execute_script("return document.documentElement.scrollWidth - innerWidth")
        )


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    pytest.importorskip("selenium", reason="selenium is not installed: pip install -e '.[dev]'")
    if BROWSER is None or DRIVER is None:
        pytest.skip("no chromium and chromedriver here: apt-get install chromium chromium-driver")
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.driver.quit()


def check_silent(browser: Browser, page: Path) -> None:
    """Check that the page made no requests and no console messages, and has no script."""
    assert [url for url in browser.requests() if not url.startswith("data:,")] == [page.as_uri()]
    assert browser.driver.get_log("browser") == []
    assert browser.find("script") == []
