"""Is specgen faster than llama.cpp on a model of half a billion parameters? Prints tokens/s of
both.

    pip install -e ".[bench]"        # builds llama.cpp from source, about ten minutes
    python tests/bench/measure_llama.py --llama FOLDER [--threads 2] [--avx2] [--folder FOLDER]

The target and the draft model are random (`random_models.py`); specgen and llama.cpp run the same
weights. The programs take turns; figures are medians. Both decode greedily, and llama.cpp's
speculative decoding (draft K tokens, verify them in one batch) is driven by its C functions, with
several K.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from programs import Programs, Way, add_options, measure, show
from random_models import KINDS, VOCABULARY, add_size_options, make_files

LENGTHS = (2, 4, 6, 8, 12)
PROMPTS = [list(range(first, first + 20)) for first in (100, 1000, 2000, 3000)]
ADAPTIVE = "specgen adaptive with draft, int8"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    add_size_options(parser)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--folder", type=Path, help="for the models' files, which are kept there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        make_files(folder, options)
        with Programs(options) as programs:
            ways = specgen_ways(programs, folder) | llama_ways(programs, folder)
            prompts = PROMPTS[: options.prompts]
            measure(ways, prompts[:1], 1, count=8, to_end=False)  # warms up
            answers = measure(ways, prompts, options.repeats, count=options.tokens, to_end=False)
    show("random texts", prompts, answers)
    rates = [answer["acceptance"] or 0.0 for answer in answers[ADAPTIVE]]
    print(f"acceptance of adaptive {median(rates):.2f}, {min(rates):.2f} to {max(rates):.2f}")


def specgen_ways(programs: Programs, folder: Path) -> dict[str, Way]:
    ways = {
        "specgen ar, stored": Way(programs.specgen(folder / "target"), "ar"),
        "specgen ar, file": Way(programs.specgen(folder / "target-Q4_1.gguf"), "ar"),
    }
    pair = programs.specgen(
        folder / "target", "int8", draft=str(folder / "draft"), draft_dtype="int8"
    )
    return {**ways, "specgen ar, int8": Way(pair, "ar"), ADAPTIVE: Way(pair, "adaptive")}


def llama_ways(programs: Programs, folder: Path) -> dict[str, Way]:
    """Only the first build runs with a draft model."""
    ways: dict[str, Way] = {}
    given = {"vocabulary": VOCABULARY, "ends": []}
    for number, build in enumerate(programs.llama_builds):
        for kind in KINDS:
            file = folder / f"target-{kind}.gguf"
            drafts = kind == "Q8_0" and number == 0
            draft = {"draft": str(folder / "draft-Q8_0.gguf")} if drafts else {}
            program = programs.llama(build, file, **given, **draft)
            ways[f"{build}, {kind}"] = Way(program, "plain")
            if drafts:
                ways |= {
                    f"{build}, {kind}, draft of {k}": Way(program, f"draft={k}") for k in LENGTHS
                }
    return ways


if __name__ == "__main__":
    main()
