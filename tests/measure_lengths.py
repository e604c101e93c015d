"""Speedup by generation length (SVIP, Tables 2 and 6). Not a test: `python tests/measure_lengths.py` prints tables.

For each prompt and length all methods run in turn, so that a drifting machine is fair to all. A speedup is the median over the
prompts of plain decoding's seconds divided by the method's, prefill included in both. The paper samples at temperature 1 (Table
2) or decodes greedily (Table 6), with drafts of 5 tokens (Const.), transformers' heuristic, and SVIP, from 128 to 8K tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from benchmark import examples

import specgen
from specgen.base.errors import SpecgenError
from specgen.base.types import SamplingParams
from specgen.compare.method_specs import parse_spec
from specgen.pair.figures import Summary
from specgen.tune.outcome import counted

PLAIN = "ar"
METHODS = "sd:k=5,heuristic,svip"


@dataclass
class Cell:
    """A method's runs at one length: all rounds counted together, and each prompt's speedup."""

    summary: Summary
    speedups: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--lengths", default="32,64,128,256,512", help="new tokens, between commas")
    parser.add_argument("--methods", default=METHODS, help="with settings as in compare, between commas")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="torch's own choice where 0")
    parser.add_argument("-t", "--target", help="the bundled pair where there is none")
    parser.add_argument("-d", "--draft")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    for name in options.methods.split(","):
        try:
            parse_spec(name)
        except SpecgenError as error:
            parser.exit(2, f"error: --methods: {error}\n")
    lengths = [int(length) for length in options.lengths.split(",")]
    names = [PLAIN, *(name for name in options.methods.split(",") if name != PLAIN)]
    with specgen.load(options.target, options.draft, device=options.device, dtype=options.dtype) as pair:
        amount = f"{counted(torch.get_num_threads(), 'thread')}, {counted(options.prompts, 'prompt')}"
        print(f"{amount}, temperature {options.temperature:g}, in turn")
        cells = measure(pair, names, examples(options.prompts)[: options.prompts], lengths, options.temperature, options.seed)
    print_tables(cells, names, lengths)


def measure(
    pair: specgen.Pair, names: Sequence[str], texts: Sequence[str], lengths: Sequence[int], temperature: float, seed: int
) -> dict[tuple[str, int], Cell]:
    """Runs each method on each prompt with each length. The first prompt is run once more before, to warm up."""
    cells = {(name, length): Cell(Summary(name)) for name in names for length in lengths}
    for number, text in enumerate([texts[0], *texts]):
        for length in lengths if number else lengths[:1]:
            sampling = SamplingParams(max_new_tokens=length, temperature=temperature, seed=seed + number, ignore_eos=True)
            runs = {name: run(pair, name, text, sampling) for name in names}
            if wrong := [name for name in names if temperature == 0 and runs[name].token_ids != runs[PLAIN].token_ids]:
                print(f"NOT the same output at {length} tokens of prompt {number}: {', '.join(wrong)}")
            for name, summary in runs.items() if number else ():
                cell = cells[name, length]
                cell.summary.include({**summary.as_dict("", ""), "drafts": summary.drafts, "rejections": summary.rejections})
                cell.speedups.append(runs[PLAIN].seconds / summary.seconds)
    return cells


def run(pair: specgen.Pair, written: str, text: str, sampling: SamplingParams) -> Summary:
    name, *settings = written.split(":")
    pair.forget()
    given = dict(setting.split("=") for setting in settings)
    pair.prepare(text, name, sampling, **given)
    return Summary(name, pair.rounds(text, name, sampling, **given))


def print_tables(cells: dict[tuple[str, int], Cell], names: Sequence[str], lengths: Sequence[int]) -> None:
    figures: dict[str, Callable[[Cell], float | None]] = {
        "speedup over plain decoding": lambda cell: median(cell.speedups),
        "tokens a target pass": lambda cell: cell.summary.block_efficiency,
        "draft length": lambda cell: cell.summary.mean_draft_length,
        "acceptance rate": lambda cell: cell.summary.acceptance_rate,
    }
    width = max(len("new tokens"), *map(len, names))
    for title, figure in figures.items():
        print(f"\n{title}\n{'new tokens':<{width}}" + "".join(f"{length:>8}" for length in lengths))
        for name in names[1:]:
            values = [figure(cells[name, length]) for length in lengths]
            print(f"{name:<{width}}" + "".join(f"{'-' if value is None else f'{value:.2f}':>8}" for value in values))


if __name__ == "__main__":
    main()
