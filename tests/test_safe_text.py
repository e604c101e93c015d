"""Text that would change the terminal, hide in other text or be computed by a spreadsheet, and
values at their bounds."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import traces
from cli_helpers import UNSAFE, run_main
from comparisons import report_of, usual
from rich.text import Text

from specgen.base.text import significant
from specgen.view import theme
from specgen.view.comparison import page
from specgen.view.comparison_columns import csv_text
from specgen.view.progress import Progress

HOSTILE = "\x1b]0;title\x07\x1b[2J\r\n\x9b31m\u202e\u200b\U000e0041[/x] =cmd|' /C calc'!A0"
Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Main:
    return lambda *arguments: run_main(monkeypatch, capfd, *map(str, arguments))


# -------------------------------------------------------------- text that would change the terminal


def hostile(value: Any, key: str = "") -> Any:
    """The value with every text in it made hostile, except those that have to be one of a few
    words."""
    if isinstance(value, dict):
        return {
            name + HOSTILE * (key in ("settings", "versions")): hostile(each, name)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [hostile(each, key) for each in value]
    return (
        value + HOSTILE
        if isinstance(value, str) and key not in ("type", "mode", "source", "finish_reason")
        else value
    )


@pytest.mark.parametrize("more", [(), ("--run", "1", "--rounds", "9")])
def test_no_text_of_a_trace_reaches_the_terminal_unchanged(
    main: Main, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """Every text of the trace is hostile, so a field that is shown in a new place is tested too."""
    runs = [
        traces.a_recorded_run(6, spec="beta-ts"),
        *(traces.a_run(method, spec=method, category="c") for method in ("svip", "pearl")),
    ]
    lines = [hostile(line) for run in runs for line in run]
    path = traces.write(tmp_path / f"t{HOSTILE.replace('/', '')}.jsonl", *lines)
    page_file = tmp_path / "page.html"
    code, out, err = main("inspect", path, *more)
    assert (code, err) == (0, "")
    assert "␛[2J" in out
    assert not any(line.startswith(("\x9b31m", "�31m", " =cmd")) for line in out.splitlines())
    out += main("inspect", path, "--json")[1]
    out += main("inspect", path, "--html", page_file)[2] + page_file.read_text(encoding="utf-8")
    assert not UNSAFE.search(out)


def test_the_console_shows_its_own_styles_only() -> None:
    """The last barrier: text that no other function has looked at."""
    out = io.StringIO()
    console = theme.console(file=out, force_terminal=True, width=300, color_system="standard")
    console.print(Text(HOSTILE, "bad"))
    console.print(HOSTILE, Text.assemble(("a\x1b[2J", "good"), "b"))
    console.stream(Text(f"line\n{HOSTILE}\n"))
    with console.status(Text(HOSTILE)):
        pass
    with Progress(console, quiet=False) as loading:
        loading.announce(f"loading {HOSTILE}")  # not Rich's markup either
        loading.bar(HOSTILE, 0.5, HOSTILE)
    shown = re.sub(r"\x1b(\[[\d;?]*[A-Za-z]|[78])", "", out.getvalue().replace("\x1b[2J", "FORGED"))
    assert "FORGED" not in shown
    assert not UNSAFE.search(shown.replace("\r", ""))
    first, second = out.getvalue().splitlines()[:2]
    assert "␛]0;title" in first, "a text is one line"
    assert "␛]0;title" in second


def test_pictures_have_no_control_characters() -> None:
    assert not UNSAFE.search(theme.svg([Text(HOSTILE)], 300))


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
        ("+1", "'+1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'⇥=1"),
        ("\n=1", "'↵=1"),
        ("＝1", "'＝1"),
        ("a;=1", "a;'=1"),
        ("a\x1b[2J\ud800b", "a␛[2J�b"),
        ("sd:k=8", "sd:k=8"),
    ],
)
def test_text_in_csv_files_is_no_formula_and_no_control_sequence(text: str, cell: str) -> None:
    results = usual()
    results.config = replace(
        results.config,
        prompts=[replace(prompt, category=text) for prompt in results.config.prompts],
    )
    report = report_of(results, by_category=True)
    rows = list(csv.DictReader(io.StringIO(csv_text(report.methods, by_category=True))))
    assert {row["category"] for row in rows} == {"", cell}
    assert all(float(row["speedup"]) > 0 for row in rows if row["method"] == "svip"), (
        "numbers stay numbers"
    )
    csv_text(report.methods, by_category=True).encode()
    assert not UNSAFE.search("\n".join(line.plain for line in page(report, 200)))


def test_numbers_have_no_exponents() -> None:
    shown = [
        significant(number)
        for number in (1180.4, 0.0042, 12.0, 1.5, 0.00001234, 123456.0, -2.345, 0.0, 999.9)
    ]
    assert shown == ["1,180", "0.0042", "12", "1.5", "0.0000123", "123,000", "-2.35", "0", "1,000"]
    assert [significant(number, 2) for number in (123.0, 0.0014, 3.5)] == ["120", "0.0014", "3.5"]
    assert significant(float("inf")) == "inf"
