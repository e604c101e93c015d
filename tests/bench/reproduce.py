"""Measures the claims of a paper, and writes its table into `.github/PAPERS.md`.

    python tests/bench/reproduce.py eesd|svip|pearl|mtad|all [--pair published] [--quick] [--write]

Each figure is from a `specgen compare` command that stands below its table. Figures marked `counts`
follow from the drafted and accepted tokens, and no load disturbs them; those marked `time` need a
quiet machine. Prints Markdown; `--write` puts it between the paper's markers.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from papers import eesd, mtad, pearl, svip
from papers.claims import Claim, table
from papers.measuring import Bench, published_folders

PAGE = Path(__file__).resolve().parents[2] / ".github" / "PAPERS.md"
PAPERS: Mapping[str, Callable[[Bench], list[Claim]]] = {
    "eesd": eesd.claims,
    "svip": svip.claims,
    "pearl": pearl.claims,
    "mtad": mtad.claims,
}


def write(name: str, pair: str, text: str) -> None:
    """Puts a table between the markers of the paper and the pair. Raises ValueError if the page has
    no such markers."""
    begin, end = (f"<!-- {name} {pair} {word} -->" for word in ("begin", "end"))
    page = PAGE.read_text(encoding="utf-8")
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"{PAGE} needs the lines {begin} and {end}")
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    made = f"{begin}\n\n{text}\n\n{end}"
    PAGE.write_text(re.sub(pattern, lambda _: made, page, flags=re.DOTALL), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paper", choices=[*PAPERS, "all"])
    parser.add_argument("--pair", choices=["bundled", "published"], default="bundled")
    parser.add_argument("--quick", action="store_true", help="one repeat, fewer prompts and seeds")
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    parser.add_argument(
        "--exit-layer", type=Path, help="an exit layer for the published target, for EESD"
    )
    given = parser.parse_args()

    folders = published_folders() if given.pair == "published" else (None, None)
    bench = Bench(given.pair, given.quick, given.exit_layer, *folders)
    for name in PAPERS if given.paper == "all" else [given.paper]:
        start = time.perf_counter()
        print(f"{name}, {given.pair} pair", file=sys.stderr, flush=True)
        text = table(PAPERS[name](bench))
        print(f"  {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        print(f"## {name}, {given.pair} pair\n\n{text}\n", flush=True)
        if given.write:
            write(name, given.pair, text)


if __name__ == "__main__":
    main()
