"""Measure exit layers of the bundled target: greedy agreement with it on its own answers to `examples.yaml`, by category.

    python tests/measure_exit.py specgen/demo/exit [more folders] [--prompts FILE] [-n 128]

The prompts are not in the training data. The last column is the mean length of the longest fully accepted draft, over all
positions at which a draft could start.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import torch
from training_helpers import opened

from specgen import demo
from specgen.base.types import Context
from specgen.compare.prompts import load_prompts
from specgen.engine.model_loading import LoadedModel
from specgen.engine.model_runner import ModelRunner
from specgen.engine.parts.early_exit import EarlyExit
from specgen.engine.parts.exit_files import load_exit
from specgen.train.batched_generation import continuations


def answers(target: LoadedModel, prompts: Path | None, new_tokens: int) -> dict[str, list[tuple[list[int], int]]]:
    """The target's greedy answers by category: the ids of prompt and answer, and the prompt's length."""
    by_category: dict[str, list[tuple[list[int], int]]] = defaultdict(list)
    for prompt in load_prompts(prompts):
        ids = target.tokenizer.encode(prompt.text)
        max_tokens = min(len(ids) + new_tokens, target.context_limit)
        by_category[prompt.category].append((continuations(target, [ids], max_tokens, greedy=True)[0], len(ids)))
    return by_category


def measure(drafts: ModelRunner, ids: list[int], prompt_length: int) -> tuple[int, int, float]:
    """The number of matching tokens, the number of tokens, and the mean run of matches that starts at a token."""
    logits = drafts.logits(Context(ids[:prompt_length]), ids[prompt_length:-1]).logits
    matches = (logits.argmax(dim=-1) == torch.tensor(ids[prompt_length:])).tolist()
    run, runs = 0, []
    for matched in reversed(matches):
        run = run + 1 if matched else 0
        runs.append(run)
    return sum(matches), len(matches), sum(runs) / len(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exits", type=Path, nargs="+")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("-n", type=int, default=128)
    options = parser.parse_args()
    target = opened(demo.folder("target"))
    by_category = answers(target, options.prompts, options.n)
    print("greedy agreement by category, mean over categories, mean run of matches")
    print(f"{'':40s}", *(f"{name:>8s}" for name in by_category), "    mean     run")
    for path in options.exits:
        trained = load_exit(path, target)
        drafts = EarlyExit(target.model, trained.layer, trained.description.after).draft
        shares, runs = [], []
        for texts in by_category.values():
            figures = [measure(drafts, ids, prompt_length) for ids, prompt_length in texts]
            shares.append(sum(f[0] for f in figures) / sum(f[1] for f in figures))
            runs += [f[2] for f in figures]
        print(f"{path!s:40.40s}", *(f"{share:8.3f}" for share in shares), f"{sum(shares) / len(shares):8.3f}", end=" ")
        print(f"{sum(runs) / len(runs):7.2f}")


if __name__ == "__main__":
    main()
