"""How often exit layers of the bundled target say what it says, on its own greedy answers to `examples.yaml`, by category.

    python tests/measure_exit.py specgen/demo/exit [more folders] [--prompts FILE] [-n 128]

Training never saw these prompts. Behind it the mean length of a draft that the target would accept whole, over all places.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import torch

from specgen import demo
from specgen.compare.prompts import load_prompts
from specgen.engine.exit_files import Exit, load_exit
from specgen.engine.first_layers import FirstLayers
from specgen.engine.model_loading import LoadedModel, ModelSource, load_model, prepare
from specgen.training.generated_text import continuations
from specgen.training.training_loop import exit_rows


def load_target() -> LoadedModel:
    prepared = prepare(ModelSource(str(demo.folder("target")), "demo/target"), lambda _: None)
    return load_model(prepared, torch.device("cpu"), torch.float32, lambda _: None)


def answers(target: LoadedModel, prompts: Path | None, new_tokens: int) -> dict[str, list[tuple[list[int], int]]]:
    """The target's greedy answers by category: all ids, and how many of them are the prompt's."""
    found: dict[str, list[tuple[list[int], int]]] = defaultdict(list)
    for prompt in load_prompts(prompts):
        ids = target.tokenizer.encode(prompt.text)
        longest = min(len(ids) + new_tokens, target.context_limit)
        found[prompt.category].append((continuations(target, [ids], longest, greedy=True)[0], len(ids)))
    return found


def judge(first: FirstLayers, trained: Exit, ids: list[int], prompt: int) -> tuple[int, int, float]:
    """How often the exit is right behind the prompt, of how many times, and the mean run of right guesses from each place on."""
    logits = exit_rows(first, trained.layer, torch.tensor(ids))[0][prompt - 1 : -1]
    right = (logits.argmax(dim=-1) == torch.tensor(ids[prompt:])).tolist()
    run, runs = 0, []
    for good in reversed(right):
        run = run + 1 if good else 0
        runs.append(run)
    return sum(right), len(right), sum(runs) / len(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exits", type=Path, nargs="+")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("-n", type=int, default=128)
    options = parser.parse_args()
    target = load_target()
    by_category = answers(target, options.prompts, options.n)
    trained = [load_exit(path, target) for path in options.exits]
    print("agreement by category, their mean, mean run of right guesses")
    print(f"{'':40s}", *(f"{name:>8s}" for name in by_category), "    mean     run")
    depths = sorted({one.depth for one in trained}, reverse=True)
    for depth in depths:  # the deepest exits come first, as each call removes the layers after its depth
        first = FirstLayers(target.model, depth)
        for path, one in zip(options.exits, trained, strict=True):
            if one.depth != depth:
                continue
            shares, runs = [], []
            for texts in by_category.values():
                figures = [judge(first, one, ids, prompt) for ids, prompt in texts]
                shares.append(sum(f[0] for f in figures) / sum(f[1] for f in figures))
                runs += [f[2] for f in figures]
            print(f"{path!s:40.40s}", *(f"{share:8.3f}" for share in shares), f"{sum(shares) / len(shares):8.3f}", end=" ")
            print(f"{sum(runs) / len(runs):7.2f}")


if __name__ == "__main__":
    main()
