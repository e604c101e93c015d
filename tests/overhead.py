"""Does a round's work outside the models grow with the context? `python tests/overhead.py` prints microseconds a round."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from benchmark import ForwardClock
from families import make_model, near_copy, save

import specgen

LENGTHS = (100, 1000, 4000)
METHODS = ("ar", "sd", "svip", "lookup")


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        target = make_model("llama", num_hidden_layers=2, max_position_embeddings=4200)
        folders = save(target, Path(folder, "target")), save(near_copy(target), Path(folder, "draft"))
        pair = specgen.load(*folders, device="cpu", dtype="float32")
        inside = ForwardClock(pair)
        for method in METHODS:
            figures = {length: outside(pair, inside, method, length) for length in LENGTHS}
            print(f"{method:8}", "  ".join(f"{length:5} tokens: {value:6.0f} us" for length, value in figures.items()))


def outside(pair: specgen.Pair, inside: ForwardClock, method: str, length: int) -> float:
    """Median microseconds outside the forward passes of a round behind `length` tokens."""
    rng = random.Random(length)
    prompt = [rng.randrange(3, 40) for _ in range(length)]
    rounds = pair.rounds(prompt, method, specgen.SamplingParams(max_new_tokens=150, ignore_eos=True))
    samples = []
    for _ in range(8):  # the prefills and what they set up
        next(rounds)
    while True:
        inside.seconds, start = 0.0, time.perf_counter()
        if next(rounds, None) is None:
            return 1e6 * median(samples)
        samples.append(time.perf_counter() - start - inside.seconds)


if __name__ == "__main__":
    main()
