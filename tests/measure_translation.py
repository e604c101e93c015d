"""Speed of drafts with tokenizers of their own for the bundled target. Not a test: `python tests/measure_translation.py`.

Makes the drafts of `foreign_drafts.py` in the folder `--folder`, unless they are there. All but `permuted` are distilled from the
target with `--steps` steps, on one thread, always from the same seeds; NAME-before is the draft before. Then, on each prompt in
turn, all methods run with each draft and with the bundled draft (`bundled`), so that a drifting machine is fair to all.

kappa is the share of the target's output whose tokens are also single tokens in the draft's tokenization of it, and `common` the
share that the draft's vocabulary has. Acceptance is accepted / drafted. The speedup is the median over the prompts of plain
decoding's seconds divided by the method's, prefill included in both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from benchmark import examples
from foreign_drafts import NAMES, distil_draft, make_draft
from measure_lengths import PLAIN, Cell, run
from training_helpers import Recorder

import specgen
from specgen import demo
from specgen.base.errors import SpecgenError
from specgen.base.types import SamplingParams
from specgen.pair.figures import Summary
from specgen.train.corpus import Part
from specgen.train.generated_text import GeneratedText
from specgen.train.training_task import TrainingProgress
from specgen.train.translated_text import overlap_shares

METHODS = "sd,svip,adaptive,pearl,sd:translation=text"
BUNDLED = "bundled"


class Printer(Recorder):
    """Prints a line now and then while a draft is distilled."""

    def training(self, progress: TrainingProgress) -> None:
        super().training(progress)
        if progress.step % 50 == 0:
            print(f"  step {progress.step}, loss {progress.loss:.3f}, {progress.seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("foreign-drafts"))
    parser.add_argument("--steps", type=int, default=120, help="of distillation")
    parser.add_argument("--drafts", nargs="+", default=[BUNDLED, *NAMES], help="folders in --folder, and bundled")
    parser.add_argument("--methods", default=METHODS, help="with settings as in compare, between commas")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.drafts:
        if name != BUNDLED and not (options.folder / name).is_dir():
            make(name, options.folder, options.steps)
    with ExitStack() as stack:
        pairs = {name: stack.enter_context(opened(name, options.folder)) for name in options.drafts}
        for temperature in map(float, options.temperatures.split(",")):
            sampling = SamplingParams(max_new_tokens=options.tokens, temperature=temperature, ignore_eos=True)
            measure(pairs, options.methods.split(","), examples(options.prompts)[: options.prompts], sampling)


def make(name: str, folder: Path, steps: int) -> None:
    """Writes the draft `name` into the folder; the one before distillation is kept beside it."""
    print(f"making {name}", flush=True)
    if name == NAMES[0]:
        make_draft(name, folder / name)
        return
    before = folder / f"{name}-before"
    if not before.is_dir():
        make_draft(name, before)
    figures = distil_draft(before, folder / name, steps, Printer())
    print(f"  {json.dumps(figures)}", flush=True)


def opened(name: str, folder: Path) -> specgen.Pair:
    draft = demo.folder("draft") if name == BUNDLED else folder / name
    return specgen.load(str(demo.folder("target")), str(draft), device="cpu", dtype="float32")


def measure(pairs: Mapping[str, specgen.Pair], methods: Sequence[str], texts: Sequence[str], sampling: SamplingParams) -> None:
    """Runs all methods with all pairs on each prompt in turn, and prints a table. The first prompt is run twice, to warm up."""
    cells = {(name, method): Cell(Summary(method)) for name in pairs for method in (PLAIN, *methods)}
    outputs: dict[str, list[GeneratedText]] = {name: [] for name in pairs}
    for number, text in enumerate([texts[0], *texts]):
        for name, pair in pairs.items():
            runs: dict[str, Summary] = {}
            for method in (PLAIN, *methods):
                try:
                    runs[method] = run(pair, method, text, replace(sampling, seed=number))
                except SpecgenError as error:
                    cells.pop((name, method), None)
                    print(f"{name}, {method}: {error}")
            plain = runs[PLAIN]
            if not number:
                continue
            outputs[name].append(as_generated(pair, text, plain))
            for method, summary in runs.items():
                if sampling.greedy and summary.token_ids != plain.token_ids:
                    print(f"NOT the same output: {name}, {method}, prompt {number}")
                counts = {**summary.as_dict("", ""), "drafts": summary.drafts, "rejections": summary.rejections}
                cells[name, method].summary.include(counts)
                cells[name, method].speedups.append(plain.seconds / summary.seconds)
    show(pairs, cells, outputs, sampling)


def as_generated(pair: specgen.Pair, text: str, plain: Summary) -> GeneratedText:
    prompt = pair.tokenizer.encode(text)
    ids = torch.tensor([*prompt, *plain.token_ids])
    return GeneratedText(ids, ids, None, len(prompt), True, Part.HELD_OUT)


def show(
    pairs: Mapping[str, specgen.Pair],
    cells: Mapping[tuple[str, str], Cell],
    outputs: Mapping[str, Sequence[GeneratedText]],
    sampling: SamplingParams,
) -> None:
    tokens = sum(len(text.ids) - text.prompt_length for text in outputs[next(iter(pairs))])
    print(f"\ntemperature {sampling.temperature:g}, {tokens} tokens, {torch.get_num_threads()} thread")
    print(f"{'draft':20}{'method':24}{'kappa':>7}{'common':>8}{'acceptance':>12}{'tokens/pass':>13}{'speedup':>9}")
    for (name, method), cell in cells.items():
        if method == PLAIN:
            continue
        draft = pairs[name].draft
        assert draft is not None
        shares = overlap_shares(draft.translation, outputs[name]) if draft.translation else {"kappa": 1.0, "common": 1.0}
        speedups = sorted(cell.speedups)
        middle = (speedups[(len(speedups) - 1) // 2] + speedups[len(speedups) // 2]) / 2
        figures = f"{shares['kappa']:7.3f}{shares['common']:8.3f}{cell.summary.acceptance_rate or 0:12.3f}"
        print(f"{name:20}{method:24}{figures}{cell.summary.block_efficiency or 0:13.2f}{middle:9.2f}", flush=True)


if __name__ == "__main__":
    main()
