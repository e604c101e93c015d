"""The options of `specgen compare` that say what to measure, to display and to write to files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from specgen.base.errors import SpecgenError
from specgen.base.files import file_identity
from specgen.cli import options

_output = partial(typer.Option, rich_help_panel="Output")

ByCategory = Annotated[bool, _output("--by-category", help="Show one row for each category as well.")]
Phases = Annotated[bool, _output("--phases", help="Show the time for drafting, the length policy, verification and sampling.")]
Predict = Annotated[
    bool, _output("--predict", help="Show the speedups predicted by EESD's Eq. 14 and by measured costs of the forward passes.")
]
Resume = Annotated[
    Path | None, _output(metavar="FILE.jsonl", help="Continue an interrupted comparison from its trace, and append to it.")
]
Csv = Annotated[Path | None, _output(metavar="FILE", help="Write all figures to a CSV file.")]
Html = Annotated[
    Path | None, _output(metavar="FILE", help="Write a self-contained page with all figures and an example of each method.")
]
Svg = Annotated[Path | None, _output(metavar="FILE", help="Write the table as an SVG image.")]


@dataclass(frozen=True, slots=True)
class CompareOutput:
    """The values of these options. `resume` is the trace of an interrupted comparison, which is read first and then appended to.
    Paths that are None are not written.

    Raises SpecgenError for options that contradict each other.
    """

    by_category: ByCategory = False
    phases: Phases = False
    predict: Predict = False
    perplexity: options.Perplexity = False
    energy: options.Energy = False
    trace: options.Trace = None
    record: options.Record = None
    resume: Resume = None
    csv: Csv = None
    svg: Svg = None
    html: Html = None

    def __post_init__(self) -> None:
        if self.trace is not None and self.resume is not None and file_identity(self.trace) != file_identity(self.resume):
            raise SpecgenError(f"--trace {self.trace} differs from --resume {self.resume}", "--resume appends to its own file")
        if self.records_distributions and self.trace_path is None:
            raise SpecgenError("--record distributions needs --trace", "Name the trace too: --trace FILE.jsonl")

    @property
    def files(self) -> dict[str, Path | None]:
        """The paths of the files to write, by their options."""
        trace = {"--trace": self.trace} if self.resume is None else {"--resume": self.resume}
        return {**trace, "--csv": self.csv, "--svg": self.svg, "--html": self.html}

    @property
    def trace_path(self) -> Path | None:
        return self.resume or self.trace

    @property
    def records_distributions(self) -> bool:
        return options.recorded(self.record)
