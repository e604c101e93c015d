"""PEARL by window size, on any pair and device. Not a test: `python tests/bench/measure_pearl.py
--help`.

Prints the speed for each window (PEARL, Tables 5 and 6), beside c, the measured ratio of pass
times, which Theorem 1 says is the best window; the ablations (Table 3) and the mean accepted tokens
(Table 4); and how much of what the measured pass times allow PEARL reaches: a round lasts no less
than the longer of its target pass and its draft. Runs are taken in turn, prompt by prompt. All
greedy outputs have to equal plain decoding's, up to near ties of their logits in low precision.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

import specgen
from specgen.base.types import SamplingParams
from specgen.compare.prompts import ListedPrompt, load_prompts
from specgen.methods.pass_times import PassTimes
from specgen.pair.figures import Figures

PLAIN = "ar"
AUTO = "pearl"
SEQUENTIAL = ("sd:k=5", "svip")
ABLATIONS = ("pearl:pre_verify=false", "pearl:post_verify=false")
MOST_WINDOWS = 12  # of the sweep where --windows names none


@dataclass(slots=True)
class MethodFigures:
    """A method's figures over all prompts and by category. `ratios` are speeds relative to plain
    decoding, one for each prompt."""

    overall: Figures
    by_category: dict[str, Figures] = field(default_factory=dict)
    ratios: list[float] = field(default_factory=list)


def measure(
    pair: specgen.Pair,
    names: Sequence[str],
    prompts: Sequence[ListedPrompt],
    sampling: SamplingParams,
) -> dict[str, MethodFigures]:
    """Decodes each prompt with each of the methods `names` in turn, and returns their figures. The
    first prompt is decoded once more before, to warm up."""
    figures = {name: MethodFigures(Figures(name)) for name in names}
    for position, prompt in enumerate([prompts[0], *prompts]):
        taken = {}
        outputs = {}
        for name in names:
            method, *settings = name.split(":")
            given: dict[str, Any] = dict(setting.split("=") for setting in settings)
            decoding = pair.prepare(pair.request(prompt.text, method, sampling, **given))
            pair.forget()
            rounds = list(decoding.rounds())
            run = Figures(name, rounds)
            taken[name] = run.seconds
            outputs[name] = run.token_ids
            if not position:
                continue
            for summary in (
                figures[name].overall,
                figures[name].by_category.setdefault(prompt.category, Figures(name)),
            ):
                for round_ in rounds:
                    summary.add(round_)
        for name in names if position else ():
            figures[name].ratios.append(taken[PLAIN] / taken[name])
        if different := [
            name for name in names if sampling.greedy and outputs[name] != outputs[PLAIN]
        ]:
            print(f"NOT the same output: {', '.join(different)} on {prompt.label}")
    return figures


def table(figures: Mapping[str, MethodFigures]) -> list[str]:
    """A line for each method, and the speeds by category where there are several."""
    categories = sorted({name for found in figures.values() for name in found.by_category})
    shown = categories if len(categories) > 1 else []
    heading = f"{'':26}{'tokens/s':>9}{'x ar':>7}{'mean accepted':>15}{'a pass':>8}" + "".join(
        f"{name[:10]:>11}" for name in shown
    )
    lines = [heading]
    for name, found in figures.items():
        summary = found.overall
        accepted = found.overall.mean_accepted_run
        line = f"{name:26}{summary.tokens_per_second or 0:9.1f}{median(found.ratios):7.2f}"
        line += f"{'' if accepted is None else f'{accepted:.1f}':>15}"
        line += f"{summary.block_efficiency or 0:8.2f}"
        lines.append(
            line
            + "".join(
                f"{found.by_category[category].tokens_per_second or 0:11.1f}" for category in shown
            )
        )
    return lines


def sweep(largest: int) -> list[int]:
    """At most `MOST_WINDOWS` windows from 1 to `largest`."""
    count = min(largest, MOST_WINDOWS)
    return sorted(
        {1 + round(number * (largest - 1) / max(count - 1, 1)) for number in range(count)}
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("--target", "--draft", "--draft-device"):
        parser.add_argument(name)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--prompts",
        type=Path,
        help="a file of prompts as for specgen compare; examples.yaml where missing",
    )
    parser.add_argument(
        "--limit", type=int, default=12, help="prompts, taken from the categories in turn"
    )
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--windows", default="", help="windows to try, between commas; from 1 to 2c where empty"
    )
    given = parser.parse_args()
    prompts = load_prompts(given.prompts, limit=given.limit)
    sampling = SamplingParams(
        max_new_tokens=given.tokens, temperature=given.temperature, ignore_eos=True, seed=0
    )
    options = {name: getattr(given, name) for name in ("device", "draft_device", "dtype")}
    with specgen.load(given.target, given.draft, **options) as pair:
        pair.warm_up()
        length = len(pair.tokenizer.encode(prompts[0].text)) + given.tokens // 2
        costs = pair.models.kept(PassTimes).costs(length, sampling)
        print(
            f"{pair.target.name} on {pair.target.device}, {pair.target.dtype_name}, "
            f"{torch.get_num_threads()} CPU threads; "
            f"draft pass {costs.draft_pass * 1e3:.2f} ms, target pass over 1 token "
            f"{costs.single_pass * 1e3:.2f} ms, "
            f"over {costs.width} {costs.target_pass * 1e3:.2f} ms; c {costs.ratio:.2f}, "
            f"window {costs.window.size}"
        )
        windows = [int(size) for size in given.windows.split(",") if size] or sweep(
            2 * costs.window.size
        )
        names = [
            PLAIN,
            *SEQUENTIAL,
            AUTO,
            *(f"pearl:window={size}" for size in windows),
            *ABLATIONS,
        ]
        print("\n".join(table(measure(pair, names, prompts, sampling))))


if __name__ == "__main__":
    main()
