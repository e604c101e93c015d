"""What a comparison looks like: columns by width, the plain words below, the live table, the page."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from comparisons import report_of, results_of, run, shown, usual
from rich.console import Console


from specgen.base.types import Draft, Round, Verdict
from specgen.compare.method_specs import parse_spec
from specgen.compare.prompts import Prompt
from specgen.compare.ranking import ranked
from specgen.compare.results import MethodResult, Prediction, method_results
from specgen.compare.runner import BenchmarkStep
from specgen.compare.verdict import Difference
from specgen.traces.reader import TracedRound, TracedRun
from specgen.view import theme
from specgen.view.comparison import headed_table, page, phases_table, speed_table
from specgen.view.html import compare_page
from specgen.view.trace_report import LOSSY


@pytest.mark.parametrize("width", [200, 160, 130, 100, 80, 60, 50, 40])
def test_a_table_fits_the_terminal_and_never_cuts_a_name(width: int) -> None:
    for by_category in (False, True):
        lines = shown(usual(), width, by_category=by_category, phases=True)
        assert max(map(len, lines)) <= width, "\n".join(lines)
        for name in ("ar", "svip", "lookup", "transformers-assisted", "wild", "sd:k=8"):
            assert any(line == name or line.startswith(name + " ") for line in lines)
        assert any("2.10×" in line for line in lines)


def test_narrow_terminals_drop_columns_by_priority() -> None:
    titles = ("passes", "HM", "share", "a pass", "length", "lexity", "interval")
    report, left = report_of(usual()), []
    for width in range(140, 45, -1):
        heads = [line.plain for line in page(report, width)][2:4]
        left.append([title for title in titles if not any(title in line for line in heads)])
    assert left[0] == []
    assert left[-1] == list(titles)
    assert all(gone == list(titles[: len(gone)]) for gone in left)


def test_the_order_is_plain_lossless_by_speed_lossy_and_not_run() -> None:
    lines = shown(usual(), 100)[4:]
    names = [line.split()[0] for line in lines if line][:6]
    assert names == ["ar", "svip", "transformers-assisted", "lookup", "wild", "sd:k=8"]
    assert re.search(r"^svip +tie at 57 ", "\n".join(lines), flags=re.MULTILINE)
    assert "not run: needs a thing that is not there; make one: specgen tune --train" in " ".join(" ".join(lines).split())
    wide = shown(usual(), 200)
    first = "svip comes first of the methods that keep the target's output: 2.10× plain decoding (ar)."
    few = "3 prompts are too few for a reliable interval. Too close to call: transformers-assisted, lookup."
    assert f"{first} {few}" in wide
    assert any("tie at 57 of prompt 1 (p1) (svip): the two tokens' logits are 0.0004 apart" in line for line in wide)
    assert LOSSY in wide


def test_only_the_best_lossless_method_is_bold() -> None:
    lines = speed_table(method_results(usual()), 100)[0]
    bold = {line.plain.split()[0] for line in lines if any(span.style == "strong" and span.start == 0 for span in line.spans)}
    assert bold == {"svip"}


def test_the_bar_is_heavy_to_the_low_end_and_light_to_the_high_end() -> None:
    table = "\n".join(line.plain for line in speed_table(method_results(usual()), 100)[0])
    bars = dict(re.findall(r"^(\S+) .*?([━╾╸─╴]+)$", table, flags=re.MULTILINE))
    wild = next(made.overall for made in method_results(usual()) if made.spec.written == "wild")
    assert wild is not None
    assert wild.high is not None
    assert len(bars["ar"]) == pytest.approx(len(bars["wild"]) / wild.high, abs=1)
    assert set(bars["ar"]) <= set("━╸")
    assert bars["svip"].startswith("━")
    assert set(bars["svip"]) & set("╾─╴")


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ({"ar": [2.0] * 3, "sd": [2.5] * 3}, "Nothing here is faster than plain decoding (ar); the best is sd at 0.80×."),
        ({"ar": [2.0] * 3, "sd": [1.0, 2.5, 2.2]}, "nothing here is clearly faster than plain decoding (ar)."),
        ({"ar": [2.0] * 3, "sd": [1.0] * 3}, "sd keeps the target's output at 2.00× plain decoding (ar). 3 prompts are too few"),
        ({"ar": [2.0] * 5, "sd": [1.0] * 5, "svip": [0.9, 1.1, 1.03] * 2}, "Too close to call: svip."),
        ({"ar": [2.0] * 5, "sd": [1.0] * 5, "svip": [1.1] * 5}, "sd is the fastest that keeps the target's output: 2.00× plain"),
        ({"ar": [2.0], "sd": [1.0], "svip": [1.1]}, "(ar). One prompt gives no interval. Too close to call: svip."),
        ({"ar": [2.0] * 2, "sd": [1.0] * 2, "svip": [1.7] * 2}, "Too close to call: svip."),
        ({"ar": [2.0] * 6, "sd": [1.0] * 6, "sd:k=5": [1.1] * 6, "svip": [1.1] * 6}, "Too close to call: sd:k=5."),
    ],
)
def test_the_result_in_plain_words(methods: dict[str, list[float]], said: str) -> None:
    results = results_of({name: [run(seconds, 50, 20) for seconds in times] for name, times in methods.items()})
    assert said in " ".join(shown(results, 200))


def test_a_broken_method_is_never_the_fastest() -> None:
    results = usual()
    results.differences["svip", 1, 0] = Difference(1, 0, 12, 4, 5, 3.5, 1e-3)
    lines = shown(results, 200)
    assert any(line.startswith("svip ") and "differs at 12" in line for line in lines)
    text = "\n".join(lines)
    assert "svip differs from plain decoding at 12 of prompt 1 (p1): the target's logit of its token is 3.5 lower" in text
    assert "\ntransformers-assisted comes first" in text
    order = ["ar", "transformers-assisted", "lookup", "svip", "wild", "sd:k=8"]
    assert [result.spec.written for result in ranked(method_results(results))] == order, "after all that are right"
    assert [line.split()[0] for line in lines[4:10]] == order
    assert next(line for line in lines if line.startswith("wild ")).split()[1] == "lossy"
    broken = next(row for row in method_results(results) if row.spec.written == "svip")
    assert broken.broken is not None
    assert broken.overall is not None
    assert broken.overall.outcomes == {"identical": 2, "tied": 0, "diverged": 1}


def test_an_incomplete_repeat_is_not_counted() -> None:
    results = usual()
    del results.runs["lookup", 2, 0]
    made: dict[str, MethodResult] = {row.spec.written: row for row in method_results(results)}
    assert all(made[name].overall and made[name].overall.prompts == 2 for name in ("ar", "svip", "lookup"))  # type: ignore[union-attr]
    assert "2 of 3 prompts" in shown(results, 100)[0]


def test_rows_by_category_need_two_categories() -> None:
    results = usual()
    one_category = [replace(prompt, category="one") for prompt in results.config.prompts]
    for prompts, names in ((results.config.prompts, ["ar", "two", "one", "svip"]), (one_category, ["ar", "svip"])):
        results.config = replace(results.config, prompts=prompts)
        lines = shown(results, 120, by_category=True)[4:]
        assert [line.split()[0] for line in lines[: len(names)]] == names


def test_phases_add_up_to_the_whole() -> None:
    text = "\n".join(line.plain for line in phases_table(method_results(usual()), 120))
    assert re.search(
        r"^ar +0\.63  10% +1\.07  17% +0\.19   3% +3\.78  60% +0\.32   5% +0\.3[12]   5% +6\.30 s$", text, flags=re.MULTILINE
    )
    assert re.search(r"^transformers-assisted +4\.50 s$", text, flags=re.MULTILINE)


# ------------------------------------------------------------------ while it runs


def test_the_progress_fits_and_its_end_stays() -> None:
    step = BenchmarkStep(parse_spec("sd:k=8"), Prompt(3, "x", "code", "a-long-name-of-a-prompt"), False, 5, 48, 83.0)
    for width in (100, 80, 60, 40, 30):
        line = progress_line(step, width).plain
        assert len(line) <= width
        assert line.endswith("5 of 48 runs  ~83 s left")
    assert progress_line(step, 100).plain.startswith("▸ sd:k=8, prompt 3")
    assert progress_line(BenchmarkStep(step.spec, None, True, 0, 48, None), 100).plain.endswith("0 of 48 runs")
    assert [duration(seconds) for seconds in (9.2, 200, 7500)] == ["9 s", "3 min", "2 h 5 min"]


def test_the_live_table_is_drawn_on_show_and_erased_at_the_end() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=20, theme=theme.theme("ansi"), _environ={})
    step = BenchmarkStep(None, None, False, 3, 9, 4.0)
    with live_lines(console, quiet=False) as show:
        before = len(out.getvalue())
        assert show is not None
        show(live_table(headed_table(report_of(usual()), 80)[0], step, console))
        assert "3 of 9 runs" in out.getvalue()[before:]
    assert out.getvalue().endswith("\x1b[2K")
    with live_lines(Console(file=out, width=80), quiet=False) as show:
        assert show is None


# ------------------------------------------------------------------ the page


class Page(HTMLParser):
    """Checks that tags match, and collects tags, links and text."""

    VOID = frozenset({"meta", "link", "input", "br"})

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.links: list[str] = []
        self.tags: list[str] = []
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_shows_all_results_and_fetches_nothing() -> None:
    results = usual()
    results.config = replace(
        results.config, prompts=[Prompt(0, "<script>alert(1)</script>\x1b", "two", "<p0>"), *results.config.prompts[1:]]
    )
    start = {"method": "svip", "settings": {}, "prompt_ids": [1], "prompt_index": 0}
    round_ = Round(0, "sequential", Draft.chain([1], stop_reason="eos"), Verdict((0,), 2, "bonus"), {"verify": 1.0})
    summary = {"text": "<b>a</b>", "token_ids": [1, 2], "finish_reason": "length"}
    results.examples["svip"] = TracedRun(start, 0, [TracedRound(round_, ("<b>",), "</b>")], summary)
    about = [("Machine", "a <fast> one")], "specgen 1", "specgen compare"
    predictions = {"svip": Prediction(1.25, 1.5)}
    report = report_of(results, by_category=True)
    predicted = replace(
        report, made=[replace(made, prediction=predictions.get(made.spec.written, Prediction())) for made in report.made]
    )
    more = "".join(compare_page.page(predicted, *about))
    assert more.count(">1.25×</td>") == more.count(">1.50×</td>") == 1
    assert more.count('scope="row">one</th>') == more.count('scope="row">two</th>') >= 2
    assert "No prediction for " in more
    assert "No prediction for " in " ".join(line.plain for line in page(predicted, 200))
    for width in range(200, 45, -1):
        lines = [line.plain for line in page(predicted, width)]
        table, said = "\n".join(lines[: lines.index("", 3)]), " ".join(" ".join(lines[lines.index("", 3) :]).split())
        assert ("Eq. 14: EESD's" in said) == ("Eq. 14" in table), "a hidden column is not explained"
        assert ("by pass costs: all" in said) == ("by pass" in table)
    written = "".join(compare_page.page(report_of(results), *about))
    parsed = Page(written)
    assert not parsed.open
    assert "script" not in parsed.tags
    assert set(parsed.links) <= {"data:,"}
    assert "\x1b" not in written
    for text in (
        "svip gives the target's text 2.10 times as fast. 3 prompts are too few for a reliable interval",
        "tie at 57",
        "not run: needs a thing that is not there",
        "<script>alert(1)</script>␛",
        "a <fast> one",
        "<b></b>",
        "Hollow",
    ):
        assert text in parsed.text, text
    assert written.count('class="m best"') == 1
    assert 'class="m lossy"' in written
    assert "lookup" in parsed.text
