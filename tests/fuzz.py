"""Runs many generated cases and prints each failure with its repetition: python tests/fuzz.py --cases 10000 --seed 1"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> int:
    import fuzz_cases
    import fuzz_materials
    import fuzzing

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=list(fuzz_cases.PARTS), action="append", help="only this part (repeatable)")
    parser.add_argument("--number", type=int, help="only this case of --part")
    parser.add_argument("--keep", type=Path, help="copy the files of the case --number to this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="specgen-fuzz-models-") as folder:
        os.environ["SPECGEN_DATA"] = os.environ["SPECGEN_CACHE"] = f"{folder}/own"
        materials = fuzz_materials.make(Path(folder))
        parts = options.part or list(fuzz_cases.PARTS)
        numbers = [options.number] if options.number is not None else range(options.cases // len(parts))
        counts: Counter[str] = Counter()
        begin = time.monotonic()
        for number in numbers:
            for part in parts:
                report = fuzzing.run_number(part, options.seed, number, materials, keep=options.keep)
                counts[part] += 1
                if report is not None:
                    counts["failures"] += 1
                    print(report, flush=True)
            if number % 50 == 49:
                print(f"{dict(counts)} in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    print(f"{dict(counts)} in {time.monotonic() - begin:.0f} s", file=sys.stderr)
    return 1 if counts["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
