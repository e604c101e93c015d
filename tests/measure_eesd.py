"""Measure EESD's length policies and its predictor on the bundled pair by counts, which do not depend on the machine's load.

    python tests/measure_eesd.py calibration [--exit FOLDER ...]
    python tests/measure_eesd.py policies [--exit FOLDER]
    python tests/measure_eesd.py METHOD:SETTING=VALUE ... [--exit FOLDER]

`calibration` runs `eesd-cali` and compares the predictor's scores with what happened to the tokens that the target judged.
`policies` has the rows of EESD's Tables 4 (parts of Cali-TS), 5 (fixed lengths and policies) and 7 (trees). All runs are greedy,
on the prompts of `examples.yaml` that `compare` takes (`--tuning`: on those that `tune` takes), with `--seeds` different seeds
of the policy for each prompt. The models' outputs are kept while a prompt is run, so that no token is computed twice.

The columns are EESD's: the acceptance rate v_d (accepted of drafted), the draft share r_d (accepted of generated), their harmonic
mean HM with its difference from the first row's (and a 95 % bootstrap interval over prompts), tokens per target pass, the mean
draft length, and the speedup that EESD's Eq. 14 predicts from draft costs of 0.07 (the paper's 70B model), of `--cost`, and of
the ratio measured here. Eq. 14 holds for chains only.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, cast

import torch

import specgen
from specgen.base.errors import SpecgenError
from specgen.base.types import Context, Round, SamplingParams
from specgen.compare.method_specs import parse_spec
from specgen.compare.prompts import Prompt, load_prompts
from specgen.decoding.components import Components
from specgen.decoding.run import Clock
from specgen.engine.parts.exit_files import load_exit
from specgen.methods import factory
from specgen.methods import table as methods
from specgen.pair.pair import Pair
from specgen.train.predictor_training import CALIBRATION_BINS, measure
from specgen.tune.simulated_runs import MemoisedRunner, RecordedPredictor

ROWS = [
    ("Table 4", "eesd-beta"),
    ("", "eesd-cali"),
    ("model alone", "eesd-cali:sampling_prediction=false"),
    ("sampling alone", "eesd-cali:model_prediction=false"),
    ("w/o TS", "eesd-fixed:k=10"),
    ("Table 5", "eesd-fixed:k=2"),
    *(("", f"eesd-fixed:k={k}") for k in (3, 4, 5, 6, 8)),
    ("", "eesd-fixed:policy=heuristic"),
    ("", "eesd-fixed:policy=confidence"),
    ("", "eesd-fixed:policy=svip"),
    ("Table 7", "eesd-tree:policy=beta-ts"),
    ("", "eesd-tree"),
]


@dataclass(frozen=True, slots=True)
class Counts:
    generated: int
    drafted: int
    accepted: int
    passes: int


class RecordingPredictor(RecordedPredictor):
    """Keeps the scores of each draft."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.drafts: list[list[float]] = []

    def begin(self, context: Context) -> None:
        super().begin(context)
        self.drafts.append([])

    def score(self, draft_row: torch.Tensor, position: int) -> torch.Tensor:
        score = super().score(draft_row, position)
        self.drafts[-1].append(float(score))
        return score


class PromptRuns:
    """Runs of EESD's methods on one prompt."""

    def __init__(self, pair: Pair, prompt: Prompt, new_tokens: int) -> None:
        self._pair, self._new_tokens = pair, new_tokens
        self._sampling = SamplingParams(max_new_tokens=new_tokens)
        self._ids = pair.tokenizer.encode(prompt.text)
        early = pair.exits.runners(methods.find("eesd-cali"))
        self.output = pair.generate(self._ids, "ar", self._sampling).token_ids
        hidden = early.target.logits(Context(self._ids), self.output).hidden_states
        assert hidden is not None
        self._hidden = hidden.clone()
        self._target, self._draft = MemoisedRunner(early.target), MemoisedRunner(early.draft)
        self.predictor: RecordingPredictor | None = None

    def rounds(self, written: str, seed: int) -> Iterator[Round]:
        spec, layer = parse_spec(written), self._pair.exit_layer
        method = methods.find(spec.name)
        settings = methods.resolve(method, spec.settings, has_predictor=True)
        assert layer is not None
        assert layer.predictor is not None
        self.predictor = RecordingPredictor(layer.predictor, self._hidden)
        components = Components(
            cast(Any, self._target),
            self._draft,
            self._sampling,
            self._pair.target.eos_ids,
            self._target.vocab_size,
            seed,
            acceptance_predictor=self.predictor,
        )
        run = factory.make_run(method, settings, components, Context(self._ids), self._new_tokens, None, Clock(None))
        tokens = []
        for round_ in run.rounds():
            tokens += round_.token_ids
            yield round_
        assert tokens == self.output, f"{written} changed the output"

    def counts(self, written: str, seed: int) -> Counts:
        rounds = list(self.rounds(written, seed))
        return Counts(
            sum(len(round_.token_ids) for round_ in rounds),
            sum(len(round_.draft.tokens) for round_ in rounds),
            sum(len(round_.accepted_ids) for round_ in rounds),
            len(rounds),
        )


def total(counts: Sequence[Counts]) -> Counts:
    return Counts(*(sum(getattr(one, name) for one in counts) for name in Counts.__slots__))


def figures(counts: Counts) -> tuple[float, float, float]:
    """v_d, r_d and HM (EESD, Eqs. 11 and 12)."""
    v, r = counts.accepted / max(counts.drafted, 1), counts.accepted / counts.generated
    return v, r, 2 * v * r / max(v + r, 1e-9)


def predicted_speedup(counts: Counts, cost: float) -> float:
    """EESD's Eq. 14; `cost` is the time of a draft pass over that of a target pass."""
    v, r, _ = figures(counts)
    return v / ((cost - v) * r + v)


def difference(of: Sequence[Counts], base: Sequence[Counts]) -> str:
    """The difference in HM, in points, with a 95 % bootstrap interval over prompts; the entries of both belong to prompts."""
    rng, found = Random(0), []
    for _ in range(1000):
        chosen = rng.choices(range(len(of)), k=len(of))
        found.append(figures(total([of[i] for i in chosen]))[2] - figures(total([base[i] for i in chosen]))[2])
    found.sort()
    middle = figures(total(of))[2] - figures(total(base))[2]
    return f"{100 * middle:+5.1f} ({100 * found[25]:+.1f} to {100 * found[974]:+.1f})"


def measured_cost(pair: Pair) -> float:
    """The median time of an exit's draft pass over the median time of a target pass for one token."""
    sampling = SamplingParams(max_new_tokens=64, ignore_eos=True)
    prompt = load_prompts(None)[0].text
    drafts, passes = [], []
    for _ in range(3):
        for round_ in pair.rounds(prompt, "eesd-fixed", sampling, k=5):
            if len(round_.draft.tokens) == 5:
                drafts.append(round_.seconds["draft"] / 5)
        passes += [round_.seconds["verify"] for round_ in pair.rounds(prompt, "ar", sampling)][1:]
    return median(drafts) / median(passes)


def opened(folder: Path | None) -> Pair:
    pair = specgen.load(device="cpu", dtype="float32")
    if folder is not None:
        pair.found_exit, pair.exit_layer = None, load_exit(folder, pair.target)
    return pair


def show_policies(rows: Sequence[tuple[str, str]], options: argparse.Namespace) -> None:
    pair = opened(options.exit[0])
    counts: dict[str, list[Counts]] = {written: [] for _, written in rows}
    failed: dict[str, str] = {}
    for prompt in load_prompts(None, limit=options.limit, for_tuning=options.tuning):
        runs = PromptRuns(pair, prompt, options.n)
        for written, found in counts.items():
            try:
                found.append(total([runs.counts(written, 1000 * prompt.index + seed) for seed in range(options.seeds)]))
            except SpecgenError as error:
                failed[written] = str(error)
    costs = (0.07, options.cost, measured_cost(pair))
    costs_title = " ".join(f"{f'c={cost:.2f}':>6s}" for cost in costs)
    print(f"{'':15s}{'':38s}   v_d   r_d    HM  HM less the first's     tokens/pass  length  {costs_title}")
    for title, written in rows:
        if written in failed:
            print(f"{title:15s}{written:38s} {failed[written]}")
            continue
        all_of = total(counts[written])
        v, r, hm = figures(all_of)
        speedups = " ".join(f"{predicted_speedup(all_of, cost):6.3f}" for cost in costs)
        speedups = "" if written.startswith("eesd-tree") else speedups
        compared = difference(counts[written], counts[rows[0][1]])
        row = f"{title:15s}{written:38s} {v:5.3f} {r:5.3f} {100 * hm:5.1f}  {compared:23s}"
        print(f"{row} {all_of.generated / all_of.passes:9.3f} {all_of.drafted / all_of.passes:9.2f}  {speedups}")


def show_calibration(options: argparse.Namespace) -> None:
    for folder in options.exit:
        pair = opened(folder)
        scores: dict[str, list[float]] = {}
        accepted: dict[str, list[bool]] = {}
        for prompt in load_prompts(None, limit=options.limit, for_tuning=options.tuning):
            runs = PromptRuns(pair, prompt, options.n)
            for seed in range(options.seeds):
                drafts = [round_ for round_ in runs.rounds("eesd-cali", 1000 * prompt.index + seed) if round_.draft.tokens]
                assert runs.predictor is not None
                for draft, round_ in zip(runs.predictor.drafts, drafts, strict=True):
                    judged = min(len(round_.accepted_ids) + 1, len(round_.draft.tokens))
                    for name in (prompt.category, "all"):
                        scores.setdefault(name, []).extend(draft[:judged])
                        accepted.setdefault(name, []).extend(index < len(round_.accepted_ids) for index in range(judged))
        print(f"{folder or 'the bundled exit'}: tokens that the target judged in rounds of eesd-cali")
        for name in scores:
            found = measure(torch.tensor(scores[name]), torch.tensor(accepted[name]))
            print(f"  {name:5s} {len(scores[name]):6d}", *(f"{key} {value:.3f}" for key, value in found.items()))
        print("  by score: " + reliability(scores["all"], accepted["all"]))


def reliability(scores: Sequence[float], accepted: Sequence[bool]) -> str:
    """Mean score, accepted share and number of tokens of each interval of the score."""
    shown = []
    for number in range(CALIBRATION_BINS):
        chosen = [i for i, score in enumerate(scores) if min(int(score * CALIBRATION_BINS), CALIBRATION_BINS - 1) == number]
        if chosen:
            mean, share = (sum(values[i] for i in chosen) / len(chosen) for values in (scores, accepted))
            shown.append(f"{mean:.2f}/{share:.2f} ({len(chosen)})")
    return "  ".join(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", nargs="+", help="calibration, policies, or methods with their settings")
    parser.add_argument("--exit", type=Path, nargs="+", default=[None], help="folders of exit layers (default: the bundled one)")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--tuning", action="store_true", help="the prompts of examples.yaml that tune takes, to choose settings")
    parser.add_argument("--limit", type=int)
    parser.add_argument("-n", type=int, default=64)
    parser.add_argument("--cost", type=float, default=0.2)
    options = parser.parse_args()
    if options.measured == ["calibration"]:
        show_calibration(options)
    else:
        rows = ROWS if options.measured == ["policies"] else [("", written) for written in options.measured]
        show_policies(rows, options)


if __name__ == "__main__":
    main()
