"""Runs many prompts through one pair with every lossless method in turn, some of them interrupted,
and counts what is left.

python tests/bench/soak.py --runs 1000 --tokens 24     (the bundled pair; exit code 1 if outputs
differ or something is left)
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, NamedTuple

import specgen
from specgen.methods import METHODS
from specgen.pair.pair import Pair

# else the time of a pass decides
SETTINGS: dict[str, dict[str, object]] = {"pearl": {"window": 3}, "selfsd": {"skip": "1"}}
EVERY = 10  # a run of so many is interrupted
WARM = 50  # runs after which memory has to be flat
KINDS = ("ctrl-c", "closed", "dropped")


class Run(NamedTuple):
    """One run: how it decodes, and the kind of its interruption (None: there is none) `after` so
    many rounds or function calls."""

    method: str
    prompt: str
    sampling: specgen.SamplingParams
    interruption: str | None = None
    after: int = 0


def counts() -> dict[str, int]:
    """The numbers of threads, child processes, open files, shared mappings, objects and MiB that
    this process has now."""
    for _ in range(3):
        gc.collect()
    own = Path("/proc/self")
    return {
        "threads": threading.active_count(),
        "children": sum(
            len((task / "children").read_text().split()) for task in (own / "task").iterdir()
        ),
        "descriptors": len(os.listdir(own / "fd")),
        "shared mappings": sum(
            "memfd:" in line or "/dev/shm/" in line
            for line in (own / "maps").read_text().splitlines()
        ),
        "objects": len(gc.get_objects()),
        "resident MiB": int((own / "statm").read_text().split()[1]) * resource.getpagesize() >> 20,
    }


@contextmanager
def keyboard_interrupt(calls: int) -> Iterator[None]:
    """Raises KeyboardInterrupt at the `calls`-th call of a function of specgen's in the block: in
    the middle of a round."""
    left = calls

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if event == "call" and str(frame.f_globals.get("__name__", "")).startswith("specgen."):
            left -= 1
            if left <= 0 and not any(
                name in ("__del__", "close", "__exit__") for name in names_around(frame)
            ):
                sys.setprofile(None)  # in a destructor, Python only prints it
                raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


def names_around(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


def schedule(count: int, prompts: list[str], tokens: int, seed: int) -> list[Run]:
    """Every lossless method in turn, greedy and sampled, every tenth run interrupted in one of
    three ways."""
    rng = Random(seed)
    methods = [name for name, method in METHODS.items() if method.lossless]
    runs = []
    for index in range(count):
        sampled = float(index // len(methods) % 2)
        sampling = specgen.SamplingParams(
            tokens, temperature=sampled, seed=index % 7, ignore_eos=index % 3 == 0
        )
        kind = KINDS[index // EVERY % len(KINDS)] if index % EVERY == EVERY - 1 else None
        after = rng.randrange(1, 40 * tokens) if kind == "ctrl-c" else rng.randrange(4)
        runs.append(Run(methods[index % len(methods)], rng.choice(prompts), sampling, kind, after))
    return runs


def decode(pair: Pair, run: Run) -> str | None:
    """Makes a run and returns its token ids as text, because lists would be counted as objects.
    None if it was interrupted."""
    settings = SETTINGS.get(run.method, {})
    if run.interruption in ("closed", "dropped"):
        rounds = pair.rounds(run.prompt, run.method, run.sampling, **settings)
        list(islice(rounds, run.after))
        if run.interruption == "closed":
            rounds.close()  # type: ignore[attr-defined]
        return None
    try:
        with keyboard_interrupt(run.after if run.interruption else sys.maxsize):
            return str(pair.generate(run.prompt, run.method, run.sampling, **settings).token_ids)
    except KeyboardInterrupt:
        return None


def main() -> int:
    from specgen.compare.prompts import load_prompts

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    runs = schedule(
        options.runs, [prompt.text for prompt in load_prompts(None)], options.tokens, options.seed
    )
    held = {"start": counts()}
    made = []
    with specgen.load(device="cpu", dtype="float32") as pair:
        for index, run in enumerate(runs, start=1):
            made.append(decode(pair, run))
            if index in (WARM, len(runs)):
                held[f"after {index} runs"] = counts()
    del pair
    held["closed"] = counts()
    wrong = 0
    with specgen.load(device="cpu", dtype="float32") as fresh:
        for run, output in zip(runs, made, strict=True):
            fresh.forget()
            if output is not None and decode(fresh, run._replace(interruption=None)) != output:
                wrong += 1
                print("differs:", run)
    print(
        f"{len(runs)} runs, {made.count(None)} interrupted, {wrong} outputs differ from a "
        "fresh pair's"
    )
    for name, found in held.items():
        print(f"{name:16}", *(f"{key} {value}" for key, value in found.items()))
    left = [
        name
        for name in ("children", "descriptors", "shared mappings")
        if held["closed"][name] > held["start"][name]
    ]
    print("left when closed:", *(left or ["nothing"]))
    return 1 if wrong or left else 0


if __name__ == "__main__":
    sys.exit(main())
