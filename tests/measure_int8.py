"""Measures what rounding a draft's weights gains: `python tests/measure_int8.py [-t TARGET -d DRAFT] [--dtypes float32,int8]`.

The dtypes take turns (A B A B ...), and medians are printed: the time of a draft pass over 1 token, the acceptance rate and the
tokens per second of `sd`. Not a test: it depends on the machine.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch

import specgen
from specgen.base.types import SamplingParams
from specgen.compare.prompts import load_prompts
from specgen.engine.timing import time_passes
from specgen.pair.pair import Pair


def tokens_per_second(pair: Pair, prompt: str, k: int, tokens: int) -> tuple[float, int, int]:
    """The speed of one run without its prefill, and how many tokens were drafted and accepted."""
    pair.forget()
    rounds = pair.generate(prompt, "sd", SamplingParams(max_new_tokens=tokens, ignore_eos=True), k=k).rounds
    seconds = sum(sum(each.seconds.values()) for each in rounds[1:])
    drafted, accepted = sum(len(each.draft.tokens) for each in rounds), sum(len(each.accepted_ids) for each in rounds)
    return sum(len(each.token_ids) for each in rounds[1:]) / seconds, drafted, accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-t", "--target")
    parser.add_argument("-d", "--draft")
    parser.add_argument("--dtypes", default="float32,int8,int4")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("-k", type=int, default=4)
    options = parser.parse_args()
    prompts = [prompt.text for prompt in load_prompts(None, limit=options.prompts)]
    pairs = {}
    for dtype in options.dtypes.split(","):
        pairs[dtype] = specgen.load(options.target, options.draft, device="cpu", dtype="float32", draft_dtype=dtype)
        begin = time.perf_counter()
        pairs[dtype].load_draft()
        print(f"{dtype}: draft loaded in {time.perf_counter() - begin:.2f} s")
    print(f"{torch.get_num_threads()} threads, k={options.k}, {len(prompts)} prompts, {options.tokens} tokens, medians of turns")
    passes: dict[str, list[float]] = {dtype: [] for dtype in pairs}
    speeds: dict[str, list[float]] = {dtype: [] for dtype in pairs}
    counts = dict.fromkeys(pairs, (0, 0))
    for _ in range(options.turns):
        for dtype, pair in pairs.items():
            assert pair.draft is not None
            passes[dtype].append(time_passes(pair.draft.runner(), [1], 64)[1])
        for prompt in prompts:
            for dtype, pair in pairs.items():
                speed, drafted, accepted = tokens_per_second(pair, prompt, options.k, options.tokens)
                speeds[dtype].append(speed)
                counts[dtype] = counts[dtype][0] + drafted, counts[dtype][1] + accepted
    first = next(iter(pairs))
    for dtype in pairs:
        share = counts[dtype][1] / max(1, counts[dtype][0])
        ratios = [one / other for one, other in zip(speeds[dtype], speeds[first], strict=True)]
        shorter = [other / one for one, other in zip(passes[dtype], passes[first], strict=True)]
        print(
            f"{dtype:9} draft pass {1e3 * median(passes[dtype]):8.3f} ms ({median(shorter):.2f}x), accepted {share:.1%}, "
            f"{median(speeds[dtype]):.1f} tokens/s ({median(ratios):.2f}x)"
        )


if __name__ == "__main__":
    main()
