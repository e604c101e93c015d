"""PEARL beside `sd` with the same draft model, on any pair and device. Not a test: `python
tests/bench/measure_pearl.py --help`.

For each temperature, all methods decode each prompt in turn, several times: A B A B. Printed are
the tokens per second, the speed relative to plain decoding, and relative to `sd:k=5` with its 95 %
interval (a bootstrap over prompts); the mean accepted tokens between two rejections (PEARL, Table
4), and the tokens of a target pass. Before, the measured times of passes with what follows from
them: c, the window (Theorem 1), and whether the models' passes overlap or take turns, by the gain
that is expected at several acceptance rates.

With `--windows` also PEARL with windows that are given (Tables 5 and 6) and its ablations (Table
3). All greedy outputs have to equal plain decoding's, up to near ties of their logits in low
precision. Sampled runs have no seed: with one, the times of passes would decide nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import specgen
from specgen.base.types import SamplingParams
from specgen.compare.prompts import ListedPrompt, load_prompts
from specgen.compare.results import RESAMPLES, speedup_interval
from specgen.methods.pass_times import PassTimes
from specgen.pair.figures import Figures

if TYPE_CHECKING:
    from specgen.decoding.parallel_costs import ParallelCosts

PLAIN = "ar"
AUTO = "pearl"
BASE = "sd:k=5"
ABLATIONS = ("pearl:pre_verify=false", "pearl:post_verify=false")
ACCEPTANCES = (0.5, 0.7, 0.9)
MOST_WINDOWS = 12  # of a sweep
SWEEP = "auto"
ROW = "{:26}{:>9}{:>7}{:>9} {:13}{:>15}{:>8}"
HEADINGS = ("", "tokens/s", "x ar", f"x {BASE}", "95%", "mean accepted", "a pass")


@dataclass(slots=True)
class MethodRuns:
    """A method's figures over all runs, and its tokens and seconds by prompt."""

    figures: Figures
    tokens: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def add(self, prompt: ListedPrompt, run: Figures) -> None:
        self.tokens[prompt.index] = self.tokens.get(prompt.index, 0) + len(run.token_ids)
        self.seconds[prompt.index] = self.seconds.get(prompt.index, 0.0) + run.seconds

    def speedup_over(self, other: MethodRuns) -> tuple[float | None, float | None, float | None]:
        """Returns the speed over that of `other`, and both ends of its interval."""
        pairs = [
            (self.tokens[index], self.seconds[index], other.tokens[index], other.seconds[index])
            for index in self.tokens
        ]
        return speedup_interval(pairs, RESAMPLES)


def measure(
    pair: specgen.Pair,
    names: Sequence[str],
    prompts: Sequence[ListedPrompt],
    sampling: SamplingParams,
    repeats: int,
) -> dict[str, MethodRuns]:
    """Decodes each prompt `repeats` times with each of the methods `names` in turn, and returns
    their figures. The first prompt is decoded once more before, to warm up."""
    for name in names:
        decode(pair, name, prompts[0], sampling)

    runs = {name: MethodRuns(Figures(name)) for name in names}
    for prompt in prompts:
        for _ in range(repeats):
            outputs = {}
            for name in names:
                rounds = decode(pair, name, prompt, sampling)
                run = Figures(name, rounds)
                runs[name].add(prompt, run)
                outputs[name] = run.token_ids
                for round_ in rounds:
                    runs[name].figures.add(round_)
            if sampling.greedy:
                report_differences(outputs, prompt)
    return runs


def decode(
    pair: specgen.Pair, name: str, prompt: ListedPrompt, sampling: SamplingParams
) -> list[specgen.Round]:
    method, *settings = name.split(":")
    given: dict[str, Any] = dict(setting.split("=") for setting in settings)
    run = pair.prepare(pair.request(prompt.text, method, sampling, **given))
    pair.forget()
    return list(run.rounds())


def report_differences(outputs: Mapping[str, list[int]], prompt: ListedPrompt) -> None:
    different = [name for name, ids in outputs.items() if ids != outputs[PLAIN]]
    if different:
        print(f"NOT the same output: {', '.join(different)} on {prompt.label}")


def table(runs: Mapping[str, MethodRuns]) -> Iterator[str]:
    """Yields a line for each method."""
    yield ROW.format(*HEADINGS)
    for name, own in runs.items():
        speedup, _, _ = own.speedup_over(runs[PLAIN])
        gain, low, high = own.speedup_over(runs[BASE])
        accepted = own.figures.mean_accepted_run
        has_interval = low is not None and name != BASE
        yield ROW.format(
            name,
            f"{own.figures.tokens_per_second or 0:.1f}",
            f"{speedup:.2f}",
            f"{gain:.3f}",
            f"{low:.3f}-{high:.3f}" if has_interval else "",
            "" if accepted is None else f"{accepted:.1f}",
            f"{own.figures.block_efficiency or 0:.2f}",
        )


def describe(pair: specgen.Pair, costs: ParallelCosts) -> Iterator[str]:
    """Yields lines about the times of passes and what follows from them."""
    yield (
        f"{pair.target.name} on {pair.target.device}, {pair.target.dtype_name}, "
        f"{torch.get_num_threads()} CPU threads"
    )
    yield (
        f"beside the other model: a draft pass {costs.draft_pass * 1e3:.3f} ms, a target pass over "
        f"1 token {costs.single_pass * 1e3:.3f}, over {costs.width} {costs.target_pass * 1e3:.3f}; "
        f"c {costs.ratio:.2f}, window {costs.window.size}"
    )
    if costs.expected_gain is None:
        return
    yield (
        f"alone: a draft pass {costs.draft_alone * 1e3:.3f} ms, a target pass over 1 token "
        f"{costs.single_alone * 1e3:.3f}, over {costs.width} {costs.target_alone * 1e3:.3f}"
    )
    gains = ", ".join(f"{costs.gain(rate):.2f} at {rate:.0%}" for rate in ACCEPTANCES)
    choice = "passes overlap" if costs.overlaps else "the models take turns"
    yield f"expected speed of overlapping passes over passes in turn: {gains}: {choice}"


def windows_of(written: str, costs: ParallelCosts) -> list[int]:
    """Returns the windows that `--windows` names: `SWEEP` stands for at most `MOST_WINDOWS` from 1
    to 2c."""
    if written != SWEEP:
        return [int(size) for size in written.split(",") if size]
    largest = 2 * costs.window.size
    count = min(largest, MOST_WINDOWS)
    steps = max(count - 1, 1)
    return sorted({1 + round(number * (largest - 1) / steps) for number in range(count)})


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
    parser.add_argument("--repeats", type=int, default=3, help="runs of each method on each prompt")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperatures", default="0,1", help="between commas")
    parser.add_argument("--methods", default=f"svip,{AUTO}", help="between commas")
    parser.add_argument(
        "--windows",
        default="",
        help=f"windows to try with the ablations, between commas; {SWEEP}: from 1 to 2c",
    )
    given = parser.parse_args()
    prompts = load_prompts(given.prompts, limit=given.limit)
    greedy = SamplingParams(max_new_tokens=given.tokens, ignore_eos=True)
    options = {name: getattr(given, name) for name in ("device", "draft_device", "dtype")}
    with specgen.load(given.target, given.draft, **options) as pair:
        pair.warm_up()
        length = len(pair.tokenizer.encode(prompts[0].text)) + given.tokens // 2
        for temperature in map(float, given.temperatures.split(",")):
            sampling = replace(greedy, temperature=temperature)
            costs = pair.models.kept(PassTimes).costs(length, sampling)
            names = [PLAIN, BASE, *given.methods.split(",")]
            windows = windows_of(given.windows, costs)
            names += [f"{AUTO}:window={size}" for size in windows]
            names += ABLATIONS if windows else ()

            print(f"\ntemperature {temperature:g}, {len(prompts)} prompts x {given.repeats}")
            print("\n".join(describe(pair, costs)))
            runs = measure(pair, names, prompts, sampling, given.repeats)
            print("\n".join(table(runs)), flush=True)


if __name__ == "__main__":
    main()
