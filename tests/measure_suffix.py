"""What does `suffix` cost, and what does it gain over `lookup`? Not a test: `python tests/measure_suffix.py` prints three tables.

The first one has microseconds: of indexing a token, and of a query with a draft of 8 tokens, each the median over `--repeats`
passes over real token ids of the demo corpus and over repetitive ones. A query's cost is given in percent of the target's pass
over one token too (`--pass-ms`, without it measured).

The second one compares the estimated probabilities of tokens with the share that is accepted, in greedy decoding.

The third one has counts, which do not depend on the machine: a target pass costs 1, each verified token `--verify-cost` more,
and drafting nothing. The texts: `target` are outputs of the bundled target, which repeats itself if it must not end; `edits` are
texts of the corpus, followed by themselves with a change (the outputs are given, no model runs); `examples` the target's outputs
after the prompts of `compare`; `prose` the corpus itself; `never` tokens of which many recur, but no two tokens in a row. The
last two show what drafting loses where nothing is repeated. Useless are drafted tokens that were not accepted.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import specgen
from specgen.base.types import Context, SamplingParams
from specgen.compare.prompts import load_prompts
from specgen.decoding.adaptive import Adaptive
from specgen.decoding.costs.round_costs import CostTable, Curve, RoundCosts
from specgen.decoding.suffix_index import SuffixIndex
from specgen.methods import table as methods
from specgen.pair.pair import Pair
from specgen.tune.recorded_drafts import ReferenceOutput, record_reference
from specgen.tune.simulation import PairMeasurements, simulate

METHODS = "lookup lookup:k=10 suffix suffix:k=32:factor=1:min_prob=0.1"
CORPUS = ("classes.py", "classics.txt", "conversations.py", "documents.py", "exercises.py", "standard_library.py")
LAMP = '''class Lamp:
    """A lamp with a color and a price."""

    def __init__(self, color, price):
        self.color = color
        self.price = price

    def get_color(self):
        """Return the color."""
        return self.color'''
CUBES = '''def sum_of_cubes(numbers):
    """Return the sum of the cubes of the numbers."""
    total = 0'''
REPEATED = (
    f"{LAMP}\n\n\n{LAMP.replace('amp', 'adder').removesuffix('return self.color').rstrip()}",
    f"{LAMP}\n\n\n{LAMP[:60].rstrip()}",
    f"{CUBES}\n    for number in numbers:\n        total += number ** 3\n    return total\n\n\n{CUBES}",
    f"{CUBES}\n    return total\n\n\n{CUBES.replace('cubes', 'squares')}",
    "".join(f"{number} * 7 = {7 * number}.\n" for number in range(11, 19)) + "19",
    "".join(f"{number} + 6 = {number + 6}.\n" for number in range(11, 19)) + "19",
    "User: What is the capital of France?\nAssistant: The capital of France is Paris.\n" * 3 + "User:",
    "User: What is 34 plus 65?\nAssistant: 34 + 65 = 99.\nUser: What is 31 plus 65?\nAssistant:",
    "def letters(text):\n    counts = {}\n    counts['a'] = 0\n    counts['b'] = 0\n    counts['c'] =",
    "[1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2,",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=METHODS.split(), help=f"NAME or NAME:SETTING=VALUE; default: {METHODS}")
    parser.add_argument("--verify-cost", type=float, nargs="+", default=[0.02, 0.06])
    parser.add_argument("--tokens", type=int, default=200, help="of each output of the target")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pass-ms", type=float, help="milliseconds of the target's pass over one token; default: measured")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with specgen.load(device="cpu", dtype="float32") as pair:
        ids = [pair.tokenizer.encode(corpus_text(name)) for name in CORPUS]
        single = options.pass_ms / 1000 if options.pass_ms else pass_seconds(pair, options.repeats)
        texts = texts_of(pair, ids, options.tokens)
    costs = index_costs(ids, single, options.repeats)
    counts = {
        f"verify cost {cost:g}": {
            name: {text: count(name, references, cost) for text, references in texts.items()} for name in options.methods
        }
        for cost in options.verify_cost
    }
    estimates = {name: calibration(references) for name, references in texts.items()}
    if options.json:
        found = {"pass_ms": single * 1000, "costs": costs, "estimates": estimates, "counts": counts}
        print(json.dumps(found, indent=2))
    else:
        show(costs, single, estimates, counts)


def pass_seconds(pair: Pair, repeats: int) -> float:
    """Measures the target's pass over one token after 256 tokens."""
    runner, context, seconds = pair.runners[0], Context([5] * 256), []
    runner.logits(context)
    for _ in range(20 * repeats):
        start = perf_counter()
        runner.logits(context)  # all but the last token are cached
        seconds.append(perf_counter() - start)
    return median(seconds)


def texts_of(pair: Pair, corpus: Sequence[Sequence[int]], tokens: int) -> dict[str, list[ReferenceOutput]]:
    """Returns the prompts with their outputs, by the name of the set."""
    encode = pair.tokenizer.encode
    endless = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    plain = SamplingParams(max_new_tokens=tokens)
    return {
        "target": [record_reference(pair, encode(text), endless) for text in REPEATED],
        "edits": [edit for name in CORPUS for edit in edits(pair, corpus_text(name))],
        "examples": [record_reference(pair, encode(prompt.text), plain) for prompt in load_prompts(None)],
        "prose": [given(ids[at:][:200], ids[at + 200 :][:300]) for ids in corpus for at in range(0, len(ids) - 500, 1000)],
        "never": [given((ids := unrepeated(400, seed))[:100], ids[100:]) for seed in range(8)],
    }


def corpus_text(name: str) -> str:
    return files("specgen.demo.corpus").joinpath(name).read_text("utf-8")


def edits(pair: Pair, text: str) -> Iterable[ReferenceOutput]:
    """Yields tasks to write a part of `text` again, with one changed line, a renamed word, and without two lines."""
    text = text[600:1700].strip()
    lines = text.split("\n")
    middle = len(lines) // 2
    words: list[str] = re.findall(r"\b[a-z_]{4,}\b", text)
    changed = [
        [*lines[:middle], lines[middle] + " and more", *lines[middle + 1 :]],
        re.sub(rf"\b{max(words, key=words.count)}\b", "value", text).split("\n"),
        [*lines[:middle], *lines[middle + 2 :]],
    ]
    for wanted in changed:
        task = f"{text}\n\nThe same with a change:\n"
        prompt = pair.tokenizer.encode(task)
        yield given(prompt, pair.tokenizer.encode(task + "\n".join(wanted))[len(prompt) :])


def unrepeated(length: int, seed: int) -> list[int]:
    """Returns random tokens out of 60, none of which follows the same token twice."""
    random, seen, ids = Random(seed), set[tuple[int, int]](), [0]
    while len(ids) < length:
        pair = ids[-1], random.randrange(60)
        if pair not in seen:
            seen.add(pair)
            ids.append(pair[1])
    return ids


def given(prompt: Sequence[int], output: Sequence[int]) -> ReferenceOutput:
    return ReferenceOutput(list(prompt), list(output), len(output), frozenset(), 0.0, 0.0)


def count(written: str, references: Sequence[ReferenceOutput], verify_cost: float) -> dict[str, float]:
    """Simulates a method on the outputs. The pass over a prompt, one in each run, is not counted."""
    name, *pairs = written.split(":")
    settings: dict[str, object] = dict(pair.split("=", 1) for pair in pairs)
    table = {"echo": RoundCosts(CostTable({1: Curve({0: 0.0, 1: 0.0})}), CostTable({1: Curve({1: 1.0, 2: 1.0 + verify_cost})}))}
    if methods.resolve(methods.find(name), settings).policy == Adaptive.name:
        settings |= {"draft_cost": 0, "verify_cost": verify_cost}
    summary, runs = simulate(PairMeasurements(references, {}, table), name, settings), len(references)
    passes, tokens = summary.rounds - runs, summary.new_tokens - runs
    return {
        "tokens_per_pass": tokens / passes,
        "useless_per_pass": (summary.drafted - summary.accepted) / passes,
        "speedup": tokens / (passes + verify_cost * summary.drafted),
    }


def calibration(references: Sequence[ReferenceOutput]) -> dict[str, str]:
    """Returns the share of accepted tokens and their number, by intervals of the estimated probability.

    Each continuation is followed to its first token that is not accepted, at each position of the outputs.
    """
    judged: dict[str, list[bool]] = {}
    for reference in references:
        index, ids, length = SuffixIndex(), [*reference.prompt_ids, *reference.token_ids], len(reference.prompt_ids)
        index.extend(ids[:length])
        for end in range(length, len(ids)):
            if (found := index.find(ids[:end])) is not None:
                agreed, ended = found.agreement(ids[end : end + 16])
                for position in range(agreed + ended):
                    low = min(int(5 * found.probs[position]), 4) / 5
                    judged.setdefault(f"{low:.1f}-{low + 0.2:.1f}", []).append(position < agreed)
            index.extend([ids[end]])
    return {interval: f"{sum(each) / len(each):.2f} of {len(each)}" for interval, each in sorted(judged.items())}


def index_costs(corpus: Sequence[Sequence[int]], single: float, repeats: int) -> dict[str, dict[str, float]]:
    """Measures microseconds of indexing a token (as in a run, two at a time) and of a query with 8 drafted tokens."""
    text = [token for ids in corpus for token in ids]
    block = Random(0)
    data = {
        "corpus": text,
        "block of 500 again and again": [block.randrange(4096) for _ in range(500)] * (len(text) // 500),
        "one token": [7] * len(text),
    }
    return {name: costs_of(ids, single, repeats) for name, ids in data.items()}


def costs_of(ids: Sequence[int], single: float, repeats: int) -> dict[str, float]:
    def indexed() -> None:
        index = SuffixIndex()
        for start in range(0, len(ids), 2):
            index.extend(ids[start : start + 2])

    index = SuffixIndex()
    index.extend(ids)
    ends = range(len(ids) // 2, len(ids), max(1, len(ids) // 2000))

    def asked() -> None:
        for end in ends:
            if (found := index.find(ids[max(0, end - 64) : end])) is not None:
                for _ in range(8):
                    found.extend()

    token, query = timed(indexed, repeats) / len(ids), timed(asked, repeats) / len(ends)
    return {"tokens": len(ids), "us_per_token": token * 1e6, "us_per_query": query * 1e6, "query_of_pass": query / single}


def timed(work: Callable[[], None], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = perf_counter()
        work()
        seconds.append(perf_counter() - start)
    return median(seconds)


def show(
    costs: Mapping[str, Mapping[str, float]],
    single: float,
    estimates: Mapping[str, Mapping[str, str]],
    counts: Mapping[str, Mapping[str, Any]],
) -> None:
    print(f"the target's pass over one token: {single * 1000:.2f} ms")
    print(f"{'':30}{'tokens':>8}{'us a token':>12}{'us a query':>12}{'of a pass':>11}")
    for name, row in costs.items():
        print(f"{name:30}{row['tokens']:8,.0f}{row['us_per_token']:12.2f}{row['us_per_query']:12.1f}{row['query_of_pass']:11.1%}")
    print("\naccepted, by the estimated probability")
    for name, shares in estimates.items():
        print(f"{name:10}" + "  ".join(f"{interval}: {share}" for interval, share in shares.items()))
    for cost, table in counts.items():
        print(f"\n{cost}: tokens a pass, useless a pass, speedup")
        for name, row in table.items():
            cells = (
                f"{text} {each['tokens_per_pass']:5.2f} {each['useless_per_pass']:5.2f} x{each['speedup']:<6.3f}"
                for text, each in row.items()
            )
            print(f"{name}\n    {'  '.join(cells)}")


if __name__ == "__main__":
    main()
