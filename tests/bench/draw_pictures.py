"""Draws the README's pictures from runs on the bundled pair: `python
tests/bench/draw_pictures.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.text import Text

import specgen
from specgen.engine.text.stop_strings import StopStrings
from specgen.pair.figures import Figures
from specgen.traces.reader import read_trace
from specgen.traces.statistics import TraceStatistics
from specgen.view import trace_report
from specgen.view.generation import AnswerText, AnswerView, RoundsView, footer
from specgen.view.theme import BACKGROUNDS, recorder
from specgen.view.trace_report import RecordedMethod

WIDTH = 100  # columns
FOLDER = Path(__file__).parents[2] / ".github"
QUESTION = (
    "Question: Ben has 24 pencils. He buys 3 boxes with 8 pencils in each and gives 7 "
    "pencils to Hugo. "
    "How many pencils does Ben have now?"
)
STORY = "def read_lines(path):"


def draw(pair: specgen.Pair, flavour: str) -> str:
    """Decodes with the pair and returns the output of `--rounds` as an SVG picture of a terminal,
    in the colour scheme `flavour`."""
    console = recorder(WIDTH, flavour)
    sampling = specgen.SamplingParams(max_new_tokens=128)
    request = pair.request(f"{QUESTION}\nAnswer:", sampling=sampling)
    pair.prepare(request)
    rounds = RoundsView(
        console, pair.tokenizer.text_of, pair.target.eos_ids, len(request.prompt_ids)
    )
    answer = AnswerText(pair.tokenizer.detokenizer(request.prompt_ids), StopStrings())
    view = AnswerView(console)
    summary = Figures(request.method.name)
    pieces = []
    console.print(
        Text("$ ", "quiet").append(
            'specgen generate --rounds "Question: Ben has 24 pencils. … Answer:"', "none"
        )
    )
    rounds.legend()
    for round_ in pair.run(request).rounds():
        summary.add(round_)
        rounds.show(round_)
        pieces += answer.add(round_)
    console.print()
    view.show(pieces + answer.finish())
    console.print("\n")
    console.print(footer(summary, (), WIDTH))
    return console.export_svg(
        title="specgen", theme=BACKGROUNDS[flavour], unique_id=f"specgen-{flavour}"
    )


def draw_inspected(flavour: str, folder: Path) -> str:
    """Returns an SVG picture of two recorded runs side by side, as `inspect` shows them in a
    terminal. Traces go to `folder`."""
    shown = []
    for method in ("svip", "beta-ts"):
        path = folder / f"{method}.jsonl"
        options = (
            f"-m {method} -n 256 --temperature 0.7 --seed 1 --ignore-eos --device "
            f"cpu --dtype float32 -q --trace {path}"
        )
        subprocess.run(
            [sys.executable, "-m", "specgen", "generate", STORY, *options.split()],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        run = next(read_trace(path))
        shown.append(RecordedMethod(run.method, path.name, TraceStatistics(run.method), run))
        shown[-1].figures.add(run)
    console = recorder(WIDTH, flavour)
    console.print(Text("$ ", "quiet").append("specgen inspect svip.jsonl beta-ts.jsonl", "none"))
    trace_report.show(console, shown, None)
    return console.export_svg(
        title="specgen", theme=BACKGROUNDS[flavour], unique_id=f"specgen-inspect-{flavour}"
    )


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with specgen.load(device="cpu", dtype="float32") as pair:
        pair.generate(QUESTION)  # warm
        for flavour in BACKGROUNDS:
            (FOLDER / f"rounds-{flavour}.svg").write_text(draw(pair, flavour), encoding="utf-8")
            with TemporaryDirectory() as folder:
                (FOLDER / f"inspect-{flavour}.svg").write_text(
                    draw_inspected(flavour, Path(folder)), encoding="utf-8"
                )


if __name__ == "__main__":
    main()
