"""Measures how long `specgen generate` takes from a cold start to its first output and to its end,
and how much memory it needs.

    python tests/bench/measure_start.py [--target MODEL --draft MODEL] [--repeats 7]

Each command runs in a new process, and the commands take turns, so that a drifting machine is fair
to all. They are compared with `python -c "import torch"`. Times are medians, in seconds; memory is
the sum of the peaks of the command and of its draft worker.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

PROMPT = "def fibonacci(n):"
METHODS = ("ar", "sd", "svip", "pearl")
TORCH = "import torch"
DEFAULT = "no method named"
DRAFT_ALONE = "ar, draft as target"
DEMO_DRAFT = Path(__file__).resolve().parents[2] / "specgen" / "demo" / "draft"
MOST_AFTER_TORCH = 0.6
MOST_AFTER_SD = 0.5
MOST_MEMORY = 1.1


class Start(NamedTuple):
    """The seconds from the start of a process to its `first` byte on stdout (its end if it writes
    none) and to its `end`, and its seconds of `processor` time, which include child processes that
    ended before it."""

    first: float
    end: float
    processor: float


def timed(command: Sequence[str]) -> Start:
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    has_output = bool(os.read(process.stdout.fileno(), 1))
    first = time.perf_counter() - begin
    process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    end = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {' '.join(command)}")
    return Start(first if has_output else end, end, used.ru_utime + used.ru_stime)


def peak_megabytes(command: Sequence[str]) -> float:
    """Runs a command and returns the sum of the peaks of resident memory (MiB) of its process and
    of its draft worker."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    peaks: dict[int, float] = {}
    while process.poll() is None:
        peaks |= {pid: peak for pid in family(process.pid) if (peak := peak_of(pid)) is not None}
        time.sleep(0.01)
    return sum(peaks.values())


def family(pid: int) -> list[int]:
    """The process and its draft worker. Other children (such as `uname`) share this process's pages
    until they start."""
    found = [pid]
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if b"specgen.workers" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


def peak_of(pid: int) -> float | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), None)


def commands(target: str | None, draft: str | None) -> dict[str, list[str]]:
    """The command lines to measure, by name."""
    specgen = [sys.executable, "-m", "specgen"]
    models = [] if target is None else ["--target", target, *(["--draft", draft] if draft else [])]
    generate = [*specgen, "generate", PROMPT, "-n", "1", "--ignore-eos"]
    given = {
        name: [*generate, *models, "-m", name]
        for name in METHODS
        if name == "ar" or target is None or draft
    }
    alone = [*generate, "--target", draft or str(DEMO_DRAFT), "-m", "ar"]
    given = {DEFAULT: [*generate, *models], **given}
    return {
        TORCH: [sys.executable, "-c", "import torch"],
        **given,
        DRAFT_ALONE: alone,
        "--help": [*specgen, "--help"],
    }


def report(starts: Mapping[str, Sequence[Start]], memory: Mapping[str, float]) -> None:
    middle = {
        name: Start(*(median(values) for values in zip(*taken, strict=True)))
        for name, taken in starts.items()
    }
    print(f"{'':22}{'first byte':>12}{'end':>9}{'processor':>11}{'peak MB':>10}")
    for name, start in middle.items():
        print(
            f"{name:22}{start.first:12.2f}{start.end:9.2f}{start.processor:11.2f}{memory[name]:10.0f}"
        )
    print()
    for name in METHODS:
        if name in middle:
            later = middle[name].end - middle[TORCH].end
            print(
                f"{name:6} ends {later:+.2f} s after `{TORCH}` (at most "
                f"{MOST_AFTER_TORCH:+.2f} for sd)"
            )
    if "pearl" not in middle:
        return
    print(
        f"pearl ends {middle['pearl'].end - middle['sd'].end:+.2f} s after sd (at most "
        f"{MOST_AFTER_SD:+.2f})"
    )
    share = memory["pearl"] / (memory["ar"] + memory[DRAFT_ALONE])
    print(
        f"pearl's processes need {share:.2f} of the memory of the target and the draft, "
        f"each alone (at most {MOST_MEMORY:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    measured = commands(options.target, options.draft)
    # also warms the file cache
    memory = {name: peak_megabytes(command) for name, command in measured.items()}
    starts: dict[str, list[Start]] = {name: [] for name in measured}
    for _ in range(options.repeats):
        for name, command in measured.items():
            starts[name].append(timed(command))
    report(starts, memory)


if __name__ == "__main__":
    main()
