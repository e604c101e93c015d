"""What MTAD gives and takes, next to its paper's baselines. Not a test: `python tests/measure_joint.py` prints tables.

Runs are taken in turn, prompt by prompt, seed by seed, so that a drifting machine is fair to all. Perplexity is the output's own
under the target at temperature 1, over all tokens of all runs, ± its deviation from seed to seed; "repeated" is the share of
4-grams that stood in the same output before, since a low perplexity can be bought by repeating.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import stdev

import torch
from benchmark import examples

import specgen
from specgen.base.energy import energy_meter_for
from specgen.base.types import Context, SamplingParams
from specgen.pair.figures import Summary
from specgen.tune.outcome import counted

PAPER = SamplingParams(temperature=1.0, top_k=20, top_p=0.9)


@dataclass(frozen=True)
class Row:
    """A method as written (`sd:k=4`), and how its tokens are chosen."""

    written: str
    sampling: SamplingParams = PAPER
    note: str = ""

    @property
    def label(self) -> str:
        return f"{self.written} {self.note}".strip()

    def settings(self) -> tuple[str, dict[str, str]]:
        name, *pairs = self.written.split(":")
        return name, dict(pair.split("=") for pair in pairs)


def main_rows() -> list[Row]:
    sampled = [
        Row(written) for written in ("ar", "sd:k=4", "bild", "spectr", "specinfer", "mtad:beam=sample", "mtad:beam=greedy")
    ]
    greedy = [Row(written, SamplingParams(), "greedy") for written in ("ar", "mtad")]
    return [*sampled, *greedy]


def beam_rows() -> list[Row]:
    return [Row(f"mtad:beam={beam}:beams={beams}") for beam in ("sample", "greedy") for beams in (1, 2, 4, 6, 8)]


def tau_rows() -> list[Row]:
    return [Row(f"mtad:beam=sample:tau={tau}") for tau in (0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1)]


def warp_rows() -> list[Row]:
    warps = [(20, 0.9), (20, 0.8), (10, 0.9), (10, 0.8)]
    names = ("ar", "sd:k=4", "mtad:beam=sample")
    return [Row(name, replace(PAPER, top_k=k, top_p=p), f"top-k {k}, top-p {p}") for k, p in warps for name in names]


TABLES: dict[str, Callable[[], list[Row]]] = {"main": main_rows, "beams": beam_rows, "tau": tau_rows, "warp": warp_rows}


class Figures:
    """One row's runs, folded."""

    def __init__(self) -> None:
        self.whole = Summary("")
        self.by_seed: dict[int, Summary] = defaultdict(lambda: Summary(""))
        self.grams = self.distinct = 0

    def add(self, seed: int, rounds: Iterable[specgen.Round], nats: float) -> None:
        tokens: list[int] = []
        for round_ in rounds:
            tokens += round_.token_ids
            for summary in (self.whole, self.by_seed[seed]):
                summary.add(round_)
        for summary in (self.whole, self.by_seed[seed]):
            summary.add_log_likelihood(nats)
        grams = [tuple(tokens[position : position + 4]) for position in range(len(tokens) - 3)]
        self.grams += len(grams)
        self.distinct += len(set(grams))

    def line(self, label: str) -> str:
        whole = self.whole
        perplexities = [summary.perplexity or float("nan") for summary in self.by_seed.values()]
        spread = f" ± {stdev(perplexities):.3f}" if len(perplexities) > 1 else ""
        repeated = 1 - self.distinct / max(self.grams, 1)
        per_pass = {phase: 1000 * seconds / whole.rounds for phase, seconds in whole.phase_seconds.items()}
        accepted = "" if whole.acceptance_rate is None else f"{whole.acceptance_rate:.0%}"
        return (
            f"| {label} | {whole.tokens_per_second:.1f} | {whole.block_efficiency:.2f} | {accepted} "
            f"| {whole.perplexity:.3f}{spread} | {repeated:.1%} "
            f"| {per_pass['draft']:.1f} + {per_pass['verify'] + per_pass['prefill']:.1f} + {per_pass['sample']:.1f} |"
        )


def measure(pair: specgen.Pair, rows: Sequence[Row], texts: Sequence[str], seeds: int, tokens: int) -> dict[str, Figures]:
    found = {row.label: Figures() for row in rows}
    runs = [(-1, texts[0]), *((seed, text) for seed in range(seeds) for text in texts)]
    for seed, text in runs:  # the first warms up
        for row in rows:
            name, settings = row.settings()
            pair.forget()
            sampling = replace(row.sampling, max_new_tokens=tokens, seed=max(seed, 0))
            plan = pair.plan(text, name, sampling, **settings)
            rounds = list(plan.run.rounds())
            ids = [token for round_ in rounds for token in round_.token_ids]
            if seed >= 0:
                found[row.label].add(seed, rounds, pair.log_likelihood(plan.info.prompt_ids, ids))
    return found


def verification_energy(pair: specgen.Pair) -> None:
    """Joules of a target pass by the number of tokens verified at once (the idea of MTAD's Table 2)."""
    meter = energy_meter_for([pair.target.device])
    runner, context = pair.target.runner(), Context(range(3, 67))
    print("\n| tokens verified at once | J/pass | J/token | ms/pass |\n|---|---|---|---|")
    for width in (1, 2, 4, 8, 16):
        draft = list(range(3, 2 + width))
        runner.logits(context, draft)
        meter.start()
        passes, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < 3:
            runner.logits(context, draft)
            passes += 1
        energy = meter.stop()
        taken = (time.perf_counter() - begin) / passes
        if energy.joules is None:
            print(f"energy: unavailable ({energy.reason})")
            return
        a_pass = energy.joules / passes
        print(f"| {width} | {a_pass:.3g} | {a_pass / width:.3g} | {1000 * taken:.2f} |")
    print(f"{energy.source}, {energy.idle_watts:.3g} W idle taken off")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", default=[*TABLES, "energy"], help=f"{', '.join(TABLES)}, energy")
    parser.add_argument("--prompts", type=int, default=28)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=0, help="torch's own choice where 0")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if unknown := [table for table in options.tables if table not in {*TABLES, "energy"}]:
        parser.exit(2, f"error: there is no table {unknown[0]!r}. There are {', '.join(TABLES)}, energy\n")
    if options.threads:
        torch.set_num_threads(options.threads)
    pair = specgen.load(device=options.device, dtype="float32")
    texts = examples(options.prompts)
    print(
        f"torch {torch.__version__}, {options.device}, {counted(torch.get_num_threads(), 'thread')}; "
        f"{counted(len(texts), 'prompt')}, "
        f"{options.seeds} seeds, at most {options.tokens} tokens"
    )
    for table in options.tables:
        if table == "energy":
            verification_energy(pair)
            continue
        found = measure(pair, TABLES[table](), texts, options.seeds, options.tokens)
        print(
            f"\n| {table} | tokens/s | tokens a pass | accepted | perplexity | repeated | ms a round: draft + verify + sample |"
        )
        print("|---|---|---|---|---|---|---|")
        for label, figures in found.items():
            print(figures.line(label), flush=True)


if __name__ == "__main__":
    main()
