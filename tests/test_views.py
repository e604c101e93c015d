"""What the views show of one recorded trace, one comparison, one tuning and one pair: text, JSON,
CSV and pages, as recorded in `golden/`. `python tests/test_views.py` records them anew, after a
change that is meant: look at the difference.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from comparisons import comparison, report_of, usual
from rich.text import Text
from tuning_helpers import outcome

from specgen.decoding.costs import WIDTHS, SpeedupModel
from specgen.decoding.parallel_costs import ParallelCosts
from specgen.engine.devices import ThreadChoice
from specgen.engine.text.translation import TokenOverlap
from specgen.methods.readiness import Readiness
from specgen.tune.outcome import Candidate
from specgen.tune.pair_inspection import (
    KernelShare,
    ModelFacts,
    OverlapTrial,
    PairReport,
    TokenizerFacts,
)
from specgen.view import pair_report, theme
from specgen.view.comparison import page
from specgen.view.comparison_columns import as_json, csv_text
from specgen.view.pages import comparison_page

GOLDEN = Path(__file__).parent / "golden"
# of four methods: chains, all that can be recorded, PEARL, lossy trees
TRACE = GOLDEN / "trace.jsonl"


def inspect(*arguments: str, width: int = 100) -> str:
    """What `specgen inspect` prints about the trace."""
    from specgen.cli.app import main

    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    command = ["specgen", "inspect", TRACE.name, *arguments]
    here = os.getcwd()
    changed = patch.dict(os.environ, COLUMNS=str(width)), patch.object(sys, "argv", command)
    with changed[0], changed[1], redirect_stdout(out), suppress(SystemExit):
        os.chdir(GOLDEN)
        main()
    os.chdir(here)
    out.flush()
    return out.buffer.getvalue().decode()  # type: ignore[attr-defined]


def inspect_page(folder: Path) -> str:
    """The HTML of the trace's page without its style sheet, with a line an element."""
    inspect("-q", "--html", str(folder / "page.html"))
    return without_style((folder / "page.html").read_text(encoding="utf-8"))


def without_style(html: str) -> str:
    return re.sub(r">(?=<)", ">\n", re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL))


def compare_text(width: int) -> str:
    return "\n".join(line.plain for line in page(comparison(), width))


def compare_html() -> str:
    return without_style(
        "".join(
            comparison_page(
                comparison(), [("Machine", "a <fast> one")], "specgen 1", "specgen compare"
            )
        )
    )


def tuned(width: int) -> str:
    lossy = Candidate(
        "mtad", {"k": 4}, 120.0, measured=110.0, speedup=1.3, low=1.2, high=1.4, perplexity=1.07
    )
    left_out = dict.fromkeys(("pearl", "bild"), "no second core")
    found = replace(outcome(), methods=[*outcome().methods, lossy], left_out=left_out)
    out = io.StringIO()
    console = theme.ThemedConsole(
        "mono", file=out, force_terminal=True, width=width, no_color=True, _environ={}
    )
    pair_report.show_tuning(console, found, Path("/profiles/one/profile.yaml"))
    return re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())


def pair(**changes: Any) -> PairReport:
    """A measured pair of models with all that can be said about one."""
    target = ModelFacts(
        *(
            "big",
            "llama",
            3_000_000_000,
            600_000_000,
            32,
            4096,
            "bfloat16",
            "cuda:0",
            6 << 30,
            1 << 17,
            8192,
            32_064,
        ),
        *("native", None, "the dtype of its weights", None),
        no_kernels="they are for CPUs, and the model runs on cuda:0",
        kept_as="bfloat16",
        cache_dtype="bfloat16",
    )
    draft = replace(
        target,
        name="small",
        parameters=90_000_000,
        active_parameters=90_000_000,
        weight_bytes=180 << 20,
        cache_bytes=1 << 14,
        context_limit=2048,
        table_rows=32_000,
        backend="transformers",
        fallback="GPT-2 is not native",
        tokenizer_fallback="it has code of its own",
    )
    tokens = TokenizerFacts(32_000, 32_000, 32_000, (), None, ("a b", (1, 2, 3), (1, 4)))
    methods = {
        "ar": Readiness(True, "needs no draft model"),
        "sd": Readiness(True),
        **dict.fromkeys(("eagle", "medusa"), Readiness(False, "no head", "train one")),
    }
    model = SpeedupModel({width: 0.02 + 0.0002 * (width - 1) for width in WIDTHS}, 0.004, 256)
    costs = ParallelCosts(0.005, 0.02, 0.02, 0.02, 4, 256, 0.0045, 0.0175, 0.015)
    trial = OverlapTrial(0.91, 0.95, 0.815, 3, 4)
    threads = ThreadChoice(2, "the fewest", {1: 0.02, 2: 0.01})
    shares = {
        "target": KernelShare(("all operators",), 1.0),
        "draft": KernelShare(("short convolutions (3 of 32 layers)",), 0.125),
    }
    report = PairReport(
        *(target, draft, tokens, 7 << 30, methods, model, costs, threads),
        ranks=2,
        on_torch=shares,
        overlap_trial=trial,
    )
    return replace(report, **changes)


def foreign() -> PairReport:
    """A pair whose drafts are in common tokens, not measured; the target's weights do not fit."""
    overlap = TokenOverlap(common=20_000, vocabulary=32_000, covered=300, tokens=500)
    tokens = TokenizerFacts(32_000, 50_000, 20_000, (), None, None, overlap)
    return pair(
        tokenizers=tokens,
        free_bytes=1 << 30,
        speedup_model=None,
        parallel_costs=None,
        overlap_trial=None,
        threads=None,
        ranks=None,
        on_torch=None,
    )


def untranslated() -> PairReport:
    tokens = TokenizerFacts(
        5, 5, 3, ({"token_id": 3, "target": "a\x1b", "draft": None},), "the tokenizers differ", None
    )
    return pair(
        tokenizers=tokens,
        draft_free_bytes=1 << 40,
        draft=replace(
            pair().target,
            name="small",
            device="cpu",
            kernels="avx2",
            no_kernels=None,
            kept_as="as stored (bfloat16)",
            cache_dtype="float32",
        ),
    )


def pair_text(width: int, *reports: PairReport) -> str:
    return "\n\n----\n".join(
        "\n".join(map(str, pair_report.lines(each, width, "specgen compare"))) for each in reports
    )


def rounded(text: str) -> str:
    return re.sub(r"\d+\.\d{6,}", lambda number: f"{float(number[0]):.5g}", text)


def as_lines(*values: Any) -> str:
    return "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)


VIEWS: dict[str, Callable[[Path], str]] = {
    "inspect.txt": lambda _: inspect(width=150),
    "inspect.44.txt": lambda _: inspect("--rounds", "9", width=44),
    "inspect.jsonl": lambda _: inspect("--json"),
    "inspect.html": inspect_page,
    "compare.txt": lambda _: compare_text(200),
    "compare.60.txt": lambda _: compare_text(60),
    "compare.csv": lambda _: rounded(csv_text(comparison().methods, by_category=True)),
    "compare.jsonl": lambda _: as_lines(*map(as_json, comparison().methods)),
    "compare.html": lambda _: compare_html(),
    "tune.txt": lambda _: f"{tuned(100)}\n{tuned(60)}",
    "pair.txt": lambda _: pair_text(90, pair(), foreign(), untranslated()),
    "pair.jsonl": lambda _: as_lines(*(each().as_dict() for each in (pair, foreign, untranslated))),
}


def trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def values(lines: list[str]) -> list[Any]:
    """The values of JSON lines, without the last digits of numbers."""
    return [json.loads(line, parse_float=lambda digits: f"{float(digits):.6g}") for line in lines]


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_as_recorded(name: str, tmp_path: Path) -> None:
    found = trimmed(VIEWS[name](tmp_path))
    wanted = trimmed((GOLDEN / name).read_text(encoding="utf-8"))
    assert (values(found) == values(wanted)) if name.endswith("jsonl") else (found == wanted)


def test_a_path_stays_in_one_piece() -> None:
    path = "/a/folder" * 9
    lines = [
        line.plain
        for line in theme.labelled(Text("not read"), Text(f"in the file {path} is nothing"), 40, 10)
    ]
    assert [line.strip() for line in lines] == ["not read  in the file", path, "is nothing"]


@pytest.mark.parametrize("width", [200, 130, 100, 80, 60, 50, 40])
def test_every_line_fits_its_width(width: int) -> None:
    found = {
        "trace": inspect("--rounds", "9", width=width),
        "comparison": compare_text(width),
        "tuning": tuned(width) if width >= 60 else "",
        "pair": pair_text(width, pair(), foreign(), untranslated()),
    }
    for name, text in found.items():
        assert max(map(len, text.splitlines()), default=0) <= max(
            width, 53 * (name == "comparison")
        ), name
    assert found["trace"].count("Where the time went") == 4
    # no name is cut
    for name in ("ar", "svip", "lookup", "transformers-assisted", "wild", "sd:k=8"):
        assert re.search(rf"^{name}( |$)", found["comparison"], flags=re.MULTILINE)


def test_narrow_terminals_drop_columns_by_priority() -> None:
    titles = ("passes", "harm.", "share", "a pass", "length", "lexity", "interval")
    left = []
    for width in range(140, 45, -1):
        lines = [line.plain for line in page(report_of(usual()), width)]
        left.append([title for title in titles if not any(title in line for line in lines[2:4])])
    assert (left[0], left[-1]) == ([], list(titles))
    assert all(gone == list(titles[: len(gone)]) for gone in left)


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as made:
        for each, view in VIEWS.items():
            (GOLDEN / each).write_text(
                "\n".join(trimmed(view(Path(made)))) + "\n", encoding="utf-8"
            )
