"""Runs many prompts through one pair with every lossless method in turn, some of them interrupted, and counts what is left.

As a program, on the bundled pair: python tests/soak.py --runs 1000 --tokens 24
With --traced it also shows which lines of Python hold more memory at the end than after the first 50 runs.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import specgen
from specgen.methods import METHODS
from specgen.pair.pair import Pair

SETTINGS: dict[str, dict[str, object]] = {"pearl": {"window": 3}, "selfsd": {"skip": "1"}}  # else the time of a pass decides
EVERY = 10  # a run of so many is interrupted
WARM = 50  # runs after which memory has to be flat


@dataclass(frozen=True)
class Counts:
    """What a process holds: `objects` of the garbage collector; in bytes `rss`, and `traced` by tracemalloc if that runs."""

    threads: int
    children: int
    descriptors: int
    shared_mappings: int
    objects: int
    rss: int
    traced: int

    @classmethod
    def now(cls) -> Counts:
        for _ in range(3):
            gc.collect()
        own = Path("/proc/self")
        children = [each for task in (own / "task").iterdir() for each in (task / "children").read_text().split()]
        shared = sum("memfd:" in line or "/dev/shm/" in line for line in (own / "maps").read_text().splitlines())
        rss = int((own / "statm").read_text().split()[1]) * resource.getpagesize()
        descriptors = len(os.listdir(own / "fd")) - 1  # without the one that lists them
        traced = tracemalloc.get_traced_memory()[0]
        return cls(threading.active_count(), len(children), descriptors, shared, len(gc.get_objects()), rss, traced)


@dataclass(frozen=True)
class Run:
    """One run of a soak: how it decodes, and how it is interrupted (None: it is not)."""

    method: str
    prompt: int
    sampling: specgen.SamplingParams
    interruption: str | None
    after: int  # rounds, or calls of functions


@dataclass(frozen=True)
class Soaked:
    """The counts at the beginning, when warm and at the end of the runs, and after the pair was closed; wrong outputs. `grown`
    are the lines of Python that hold more memory at the end than when warm, the first the most; empty without tracemalloc."""

    start: Counts
    warm: Counts
    end: Counts
    closed: Counts
    runs: int
    interrupted: dict[str, int]
    wrong: list[Run]
    grown: list[str]


@contextmanager
def keyboard_interrupt(calls: int) -> Iterator[None]:
    """Raises KeyboardInterrupt at a call of a function of specgen's, the `calls`-th in the block: in the middle of a round."""
    left = calls

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if event != "call" or not str(frame.f_globals.get("__name__", "")).startswith("specgen."):
            return
        left -= 1
        if left <= 0 and not _in_destructor(frame):  # there, Python only prints it
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


def _in_destructor(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in ("__del__", "close", "__exit__"):
            return True
        frame = frame.f_back
    return False


def schedule(count: int, prompts: int, tokens: int, seed: int = 0, *, heads: bool = True) -> list[Run]:
    """The runs: every lossless method in turn, greedy and sampled, every tenth interrupted in one of three ways.

    Without `heads`, methods that need a head are left out.
    """
    rng = Random(seed)
    methods = [name for name, method in METHODS.items() if method.lossless and (heads or not method.head)]
    kinds = ("ctrl-c", "closed", "dropped")
    runs = []
    for index in range(count):
        sampled = index // len(methods) % 2 == 1
        sampling = specgen.SamplingParams(tokens, temperature=float(sampled), seed=index % 7, ignore_eos=index % 3 == 0)
        kind = kinds[index // EVERY % len(kinds)] if index % EVERY == EVERY - 1 else None
        after = rng.randrange(1, 40 * tokens) if kind == "ctrl-c" else rng.randrange(4)
        runs.append(Run(methods[index % len(methods)], rng.randrange(prompts), sampling, kind, after))
    return runs


def decode(pair: Pair, run: Run, prompt: str) -> list[int] | None:
    """The token ids of a run. None if it was interrupted."""
    settings = SETTINGS.get(run.method, {})
    if run.interruption == "ctrl-c":
        try:
            with keyboard_interrupt(run.after):
                return pair.generate(prompt, run.method, run.sampling, **settings).token_ids
        except KeyboardInterrupt:
            return None
    rounds = pair.rounds(prompt, run.method, run.sampling, **settings)
    if run.interruption is not None:
        for _ in islice(rounds, run.after):
            pass
        if run.interruption == "closed":
            rounds.close()  # type: ignore[attr-defined]
        return None
    made: list[int] = []
    for round_ in rounds:
        made += round_.accepted_ids
        made += [round_.verdict.token] if round_.verdict.token is not None else []
    return made


def soak(
    make_pair: Any,
    prompts: Sequence[str],
    runs: Sequence[Run],
    warm: int = WARM,
    progress: Callable[[int], object] = lambda _: None,
) -> Soaked:
    """Runs everything on one pair, then each run that was not interrupted on a fresh one, and compares the token ids.

    `progress` is called after each run on the first pair with the number of runs so far.
    """
    start = Counts.now()
    outputs: list[str | None] = [None] * len(runs)  # strings: the garbage collector counts lists
    interrupted: dict[str, int] = {}
    counts, held = {}, {}
    with make_pair() as pair:
        for index, run in enumerate(runs, start=1):
            made = decode(pair, run, prompts[run.prompt])
            if made is None:
                interrupted[str(run.interruption)] = interrupted.get(str(run.interruption), 0) + 1
            else:
                outputs[index - 1] = str(made)
            progress(index)
            if index in (warm, len(runs)):
                counts[index] = Counts.now()
                held[index] = tracemalloc.take_snapshot() if tracemalloc.is_tracing() else None
    del pair
    before, after = held[warm], held[len(runs)]
    grown = [str(each) for each in after.compare_to(before, "lineno")] if before is not None and after is not None else []
    del before, after, held
    closed = Counts.now()
    known: dict[object, str] = {}
    wrong = []
    with make_pair() as fresh:
        for run, output in zip(runs, outputs, strict=True):
            key = run.method, run.prompt, run.sampling
            if output is not None and key not in known:
                fresh.forget()
                known[key] = str(decode(fresh, Run(*key, None, 0), prompts[run.prompt]))
            if output is not None and output != known[key]:
                wrong.append(run)
    return Soaked(start, counts[warm], counts[len(runs)], closed, len(runs), interrupted, wrong, grown)


def main() -> int:
    from specgen.compare.prompts import load_prompts

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traced", action="store_true", help="trace Python's allocations, which takes memory itself")
    parser.add_argument("--every", type=int, default=250, help="show the memory after so many runs, again and again")
    options = parser.parse_args()
    if options.traced:
        tracemalloc.start(1)
    prompts = [prompt.text for prompt in load_prompts(None)]

    def bundled() -> Pair:
        return specgen.load(device="cpu", dtype="float32")

    def show(index: int) -> None:
        if index == WARM or index % options.every == 0:
            print(f"{index} runs: rss {Counts.now().rss / 2**20:.1f} MiB", flush=True)

    found = soak(bundled, prompts, schedule(options.runs, len(prompts), options.tokens, options.seed), progress=show)
    print(f"{found.runs} runs on {len(prompts)} prompts, {found.interrupted} interrupted")
    print(f"{len(found.wrong)} outputs differ from a fresh pair's")
    for name in ("start", "warm", "end", "closed"):
        counts = asdict(getattr(found, name))
        sizes = [f"{key} {counts.pop(key) / 2**20:.1f} MiB" for key in ("rss", "traced")]
        print(f"{name:7}", *(f"{key} {value}" for key, value in counts.items()), *sizes)
    for line in found.grown[:10]:
        print("grown:", line)
    for run in found.wrong[:10]:
        print("differs:", run)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
