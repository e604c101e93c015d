"""PEARL against what its measured costs allow. Not a test: `python tests/measure_pearl.py` prints figures.

Every configuration decodes each prompt in turn; figures are medians over the prompts, in multiples of plain decoding. The sum
behind them: each round can last no less than the longer of its target pass and its drafts, by the costs that chose the window.
Their total over what the rounds really took is the share that was reached; the rest is handing over, contention and sampling.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from statistics import median
from typing import Any

import torch
from benchmark import examples, held_out

import specgen
from specgen.cost_model.pearl_window import ParallelCosts, Window
from specgen.types import Round, SamplingParams

ABLATIONS = ("pearl:pre_verify=false", "pearl:post_verify=false", "pearl:policy=svip")


def pass_seconds(costs: ParallelCosts, width: int) -> float:
    """A target pass over `width` tokens, between the two that were measured."""
    slope = (costs.target_pass - costs.single_pass) / max(costs.width - 1, 1)
    return costs.single_pass + slope * (width - 1)


def allowed_seconds(rounds: list[Round], costs: ParallelCosts, window: Window, tokens: int) -> float:
    """The least that the rounds behind the prefill can have taken."""
    total, pending, made = 0.0, 0, 1
    for round_ in rounds[1:]:
        drafted = min(window.beside(pending + 1), tokens - made - pending)
        total += max(pass_seconds(costs, pending + 1), drafted * costs.draft_pass)
        made += len(round_.token_ids)
        pending = max(drafted - 1, 0) if round_.verdict.token is None else 0
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--windows", default="", help="windows to try, between commas; from 1 to 2c where empty")
    options = parser.parse_args()
    texts = (held_out if options.held_out else examples)(options.prompts)
    sampling = SamplingParams(max_new_tokens=options.tokens, ignore_eos=True)
    with specgen.load(device="cpu", dtype="float32") as pair:
        costs = pair.parallel_costs(len(pair.tokenizer.encode(texts[0])) + options.tokens // 2, sampling)
        print(
            f"{torch.get_num_threads()} threads; draft pass {costs.draft_pass * 1e3:.2f} ms, target pass over 1 token "
            f"{costs.single_pass * 1e3:.2f} ms, over {costs.width} {costs.target_pass * 1e3:.2f} ms; c {costs.ratio:.2f}, "
            f"window {costs.window.size}, {costs.window.first} beside a pass over one"
        )
        windows = [int(size) for size in options.windows.split(",") if size] or range(1, 2 * costs.window.size + 1)
        names = ["ar", "sd:k=5", "sd:k=8", "sd:k=12", "svip", "pearl", *(f"pearl:window={size}" for size in windows), *ABLATIONS]
        compare(pair, names, texts, sampling)


def compare(pair: specgen.Pair, names: list[str], texts: list[str], sampling: SamplingParams) -> None:
    speedups: dict[str, list[float]] = defaultdict(list)
    seconds: dict[str, float] = defaultdict(float)
    reached: list[float] = []
    busy: list[float] = []
    summaries = []
    for position, text in enumerate([texts[0], *texts]):
        taken, outputs = {}, {}
        for name in names:
            method, *settings = name.split(":")
            pair.forget()
            given: dict[str, Any] = dict(setting.split("=") for setting in settings)
            pair.prepare(text, method, sampling, **given)
            plan = pair.plan(text, method, sampling, **given)
            rounds = list(plan.run.rounds())
            taken[name] = sum(sum(round_.seconds.values()) for round_ in rounds)
            outputs[name] = [token for round_ in rounds for token in round_.token_ids]
            if name == "pearl" and position and plan.info.costs is not None:
                behind = sum(sum(round_.seconds.values()) for round_ in rounds[1:])
                reached.append(allowed_seconds(rounds, plan.info.costs, plan.info.costs.window, sampling.max_new_tokens) / behind)
                busy.append(sum(round_.seconds["verify"] for round_ in rounds[1:]) / behind)
                accepted = sum(len(round_.verdict.path) for round_ in rounds)
                refused = sum(round_.verdict.source == "correction" for round_ in rounds)
                summaries.append((accepted, refused, len(rounds), len(outputs[name])))
        different = [name for name in names if outputs[name] != outputs["ar"]]
        if different:
            print(f"NOT the same output: {', '.join(different)} on prompt {position}")
        if position:  # the first warms up
            for name in names:
                speedups[name].append(taken["ar"] / taken[name])
                seconds[name] += taken[name]
    for name in names:
        total = len(texts) * sampling.max_new_tokens / seconds[name]
        print(f"{name:26} {median(speedups[name]):5.2f} x ar   {total:6.1f} tokens/s over all prompts")
    accepted, refused, passes, made = map(sum, zip(*summaries, strict=True))
    print(
        f"pearl: {median(reached):.1%} of what its costs allow (from {min(reached):.1%} to {max(reached):.1%}); target at work "
        f"{median(busy):.1%} of the time; {made / passes:.2f} tokens a pass, {accepted / refused:.1f} accepted until a rejection"
    )


if __name__ == "__main__":
    main()
