"""Runs many generated cases and prints each failure with its repetition: python tests/fuzz.py --cases 10000 --seed 1

The cases run in a second process. If a case ends that process or stops it, this is a failure too, and the next case runs in a
new one. Every 41st case runs in a process of its own (see `fuzzing.run`).
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
PARTS = ("options", "outputs", "prompts", "traces", "profiles", "configs", "weights", "exits", "environment")
ALONE = 41  # prime to the number of parts


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part (repeatable)")
    parser.add_argument("--number", type=int, help="only this case of --part")
    parser.add_argument("--alone", action="store_true", help="each case in a process of its own")
    parser.add_argument("--keep", type=Path, help="copy the files of the case --number to this folder")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of the second process
    parser.add_argument("--begin", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.part = options.part or list(PARTS)
    return options


def run_cases(options: argparse.Namespace) -> int:
    """Runs the cases from number --begin on, and writes the number of each into the file `case` before it runs. Returns how many
    failed."""
    import fuzz_materials
    import fuzzing

    failures, start = 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="specgen-fuzz-models-") as folder:
        os.environ["SPECGEN_DATA"] = os.environ["SPECGEN_CACHE"] = f"{folder}/own"
        materials = fuzz_materials.make(Path(folder))
        for index in range(options.begin, options.cases):
            part, number = case_of(options, index)
            (options.folder / "case").write_text(str(index))
            faulthandler.dump_traceback_later(4 * fuzzing.SECONDS, exit=True)  # for what Python's signals cannot stop
            alone = options.alone or (options.number is None and index % ALONE == ALONE - 1)
            report = fuzzing.run_number(part, options.seed, number, materials, alone=alone, keep=options.keep)
            if report is not None:
                failures += 1
                print(report, flush=True)
            if index % 200 == 199:
                print(f"{index + 1} cases, {failures} failures, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    faulthandler.cancel_dump_traceback_later()
    return failures


def case_of(options: argparse.Namespace, index: int) -> tuple[str, int]:
    """The part and the number in it of a case."""
    number = index // len(options.part) if options.number is None else options.number
    return options.part[index % len(options.part)], number


def main() -> int:
    options = arguments()
    if options.number is not None:
        options.cases = len(options.part)
    if options.folder is not None:
        (options.folder / "failures").write_text(str(run_cases(options)))
        return 0
    failures, begin, start = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="specgen-fuzz-") as folder:
        while begin < options.cases:
            found = Path(folder) / "failures"
            found.unlink(missing_ok=True)
            command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder, "--begin", str(begin)]
            code = subprocess.run(command, check=False).returncode
            if found.exists():
                failures += int(found.read_text())
                break
            reached = Path(folder) / "case"
            if not reached.exists():
                return 2  # it could not begin, and has said why
            index = int(reached.read_text())
            part, number = case_of(options, index)
            print(f"== {part} {number}: the process ended with code {code}", flush=True)
            print(f"   repeat: python tests/fuzz.py --part {part} --seed {options.seed} --number {number}", flush=True)
            failures, begin = failures + 1, index + 1
    print(f"{options.cases} cases, {failures} failures, {time.monotonic() - start:.0f} s", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
