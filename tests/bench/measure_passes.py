"""How long does a pass over several rows take, and how much does a busy neighbour disturb it?

    python tests/bench/measure_passes.py --llama FOLDER [--threads 2] [--avx2] [--busy]
        [--random FOLDER]

Prints the milliseconds of passes over 1 to 16 rows after 200 tokens, logits of all rows, of specgen
and of llama.cpp, on the published model or on a random one (`random_models.py`; FOLDER keeps its
files). The programs take turns; figures are medians, and minima in parentheses. Then the memory
that belongs to no file, of the model and its tokenizer: after loading, and at most while loading.
`--busy`: passes over one row, first quietly, then beside one busy process.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from measure_published import published_files
from programs import SAME_VALUES, Program, Programs, add_options
from published_model import gguf_file, target_folder
from random_models import KINDS, VOCABULARY, add_size_options, make_files

ROWS = (1, 2, 4, 8, 16)
PASSES = 5  # of one program and number of rows in one turn
PUBLISHED_VOCABULARY = 49_152


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    add_size_options(parser)
    parser.add_argument("--random", type=Path, metavar="FOLDER")
    parser.add_argument("--context", type=int, default=200, help="tokens before the pass")
    parser.add_argument("--turns", type=int, default=5, help=f"each of {PASSES} passes")
    parser.add_argument("--dtypes", default=",".join(SAME_VALUES), help="of specgen")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--busy-passes", type=int, default=500)
    options = parser.parse_args()
    if options.random is not None:
        make_files(options.random, options)
    with Programs(options) as programs:
        started = specgen_programs(programs, options) | llama_programs(programs, options)
        if options.busy:
            show_busy(started, options.context, options.busy_passes)
        else:
            show_passes(started, options.context, options.turns)
            show_loading(started)


def specgen_programs(programs: Programs, options: argparse.Namespace) -> dict[str, Program]:
    if options.random is None:
        folder, file = target_folder(), gguf_file()
    else:
        folder, file = options.random / "target", options.random / "target-Q4_1.gguf"
    models = {"stored": (folder, "auto"), "int8": (folder, "int8"), "file": (file, "auto")}
    return {
        f"specgen, {name}": programs.specgen(*models[name]) for name in options.dtypes.split(",")
    }


def llama_programs(programs: Programs, options: argparse.Namespace) -> dict[str, Program]:
    if options.random is None:
        files, vocabulary = published_files(), PUBLISHED_VOCABULARY
    else:
        files = {kind: options.random / f"target-{kind}.gguf" for kind in KINDS}
        vocabulary = VOCABULARY
    return {
        f"{build}, {kind}": programs.llama(build, path, vocabulary=vocabulary, ends=[])
        for build in programs.llama_builds
        for kind, path in files.items()
    }


def show_passes(programs: dict[str, Program], context: int, turns: int) -> None:
    times: dict[tuple[str, int], list[float]] = {
        (name, rows): [] for name in programs for rows in ROWS
    }
    for _ in range(turns):
        for name, program in programs.items():
            for rows in ROWS:
                times[name, rows] += program.ask(
                    "pass_seconds", rows=rows, context=context, repeats=PASSES
                )

    print(f"ms of a pass, rows  {'':4}" + "".join(f"{rows:>16}" for rows in ROWS) + "  8 rows / 1")
    for name in programs:
        row = ""
        for rows in ROWS:
            own = times[name, rows]
            row += f"{1e3 * median(own):8.1f} ({1e3 * min(own):5.1f})"
        factor = median(times[name, 8]) / median(times[name, 1])
        print(f"{name:24}{row}{factor:12.2f}")


def show_loading(programs: dict[str, Program]) -> None:
    for name, program in programs.items():
        if "weight_bytes" in program.description:
            sizes = program.description
            weights, loaded, most = (
                sizes[each] / 1e6 for each in ("weight_bytes", "loaded_bytes", "loading_bytes")
            )
            print(
                f"{name}: {weights:.0f} MB of weights as inspect says, {loaded:.0f} MB after "
                f"loading, at most {most:.0f} MB ({most / loaded:.2f} x, {most / weights:.2f} x)"
            )


def show_busy(programs: dict[str, Program], context: int, count: int) -> None:
    """Shows the median of quiet passes and, beside a busy process, the median, the 95th percentile
    and the latter's ratio to the quiet median."""
    for name, program in programs.items():
        quiet = program.ask("pass_seconds", rows=1, context=context, repeats=count)
        with busy_process():
            busy = sorted(program.ask("pass_seconds", rows=1, context=context, repeats=count))
        late = busy[math.ceil(0.95 * len(busy)) - 1]
        print(
            f"{name:24} quiet {1e3 * median(quiet):6.1f} ms; busy {1e3 * median(busy):6.1f} ms, "
            f"95th percentile {1e3 * late:6.1f} ms: {late / median(quiet):.2f} x quiet",
            flush=True,
        )


@contextmanager
def busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
