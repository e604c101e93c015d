"""Does `adaptive` reach the best length policy in hindsight? Not a test: `python
tests/bench/measure_adaptive.py` prints tables.

Speed is computed from counts, which do not depend on the machine: a target pass costs 1, each
drafted token the draft cost and the verification cost. For each drafter, all fixed settings of
`sd`, `confidence`, `svip` and `heuristic` are simulated after the target's outputs, and `adaptive`
for each draft cost. The table has, for each cost, the speedup over plain decoding of the best fixed
setting in hindsight, of svip, sd:k=5 and adaptive, and adaptive's speedup divided by the best
one's with its 95 % interval (a bootstrap over prompts).

With `--calibration` two tables for each temperature show instead whether adaptive's predictions
hold: the probability that a drafted token is accepted if those before it are, and the probability
that it is accepted at all (the product up to it), each beside the share that was accepted.

The drafters: `model` is the bundled draft model, `near` the target with noise added to its weights,
`unrelated` a model with the draft's shape and random weights, `exit` the bundled exit layer;
`eagle`, `glide`, `medusa` and `block` are the bundled heads, which draft chains, and `eagle-tree`
drafts EAGLE's tree; `lookup` and `suffix` copy text, and their draft cost is 0. The prompts are
those of `examples.yaml` that `compare` takes; half 1 is for development, half 2 for final figures.
Plain decoding (`ar`) is one of the fixed settings. When sampling, one run of each prompt is not
enough (a ratio then varies by 0.015): give `--seeds`. With `--real` the best setting, svip, sd:k=5
and adaptive are really run too, and their rounds counted.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

import specgen
from specgen.base.types import SamplingParams
from specgen.compare.prompts import ListedPrompt, load_prompts
from specgen.compare.results import RESAMPLES, speedup_interval
from specgen.decoding.costs import CostTable, Curve, RoundCosts
from specgen.methods import POLICIES
from specgen.pair.figures import Figures
from specgen.pair.pair import Pair
from specgen.traces.statistics import Judged, calibration_of, judged_predictions
from specgen.tune.round_timing import record_reference
from specgen.tune.simulator import Simulator
from specgen.view.comparison import sampling_in_words

if TYPE_CHECKING:
    from specgen.base.settings import Settings
    from specgen.base.types import Round
    from specgen.decoding.run import Run, Schedule
    from specgen.methods.base import Method

POLICY = "adaptive"
PLAIN = "ar"
COSTS = "0.03,0.06,0.12,0.2,0.45"
LONGEST = 16
NOISE = 0.3  # standard deviation of the noise in `near`, in units of each weight matrix's own

Given = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Drafter:
    """A method, and the settings that make it draft as wanted. `copies`: it drafts without a model.
    `in_blocks`: it makes a draft in one pass, which costs as much as one token of others."""

    method: str
    given: Given = field(default_factory=dict)
    copies: bool = False
    in_blocks: bool = False


DRAFTERS = {
    "model": Drafter("sd"),
    "near": Drafter("sd"),
    "unrelated": Drafter("sd"),
    "exit": Drafter("eesd-fixed"),
    "eagle": Drafter("eagle", {"width": 1}),
    "eagle-tree": Drafter("eagle"),
    "glide": Drafter("glide"),
    "medusa": Drafter("medusa", {"nodes": 0}),
    "block": Drafter("block", in_blocks=True),
    "lookup": Drafter("lookup", copies=True),
    "suffix": Drafter("suffix", copies=True),
}


@dataclass(frozen=True, slots=True)
class Counts:
    """What runs took, without the passes over their prompts and the tokens of these. `draft_passes`
    are levels of drafts, or drafts where one pass makes a whole one."""

    tokens: int = 0
    passes: int = 0
    draft_passes: int = 0
    drafted: int = 0

    @classmethod
    def of_run(cls, rounds: Sequence[Round], draft_passes: int) -> Counts:
        summary = Figures("", rounds)
        return cls(summary.new_tokens - 1, summary.rounds - 1, draft_passes, summary.drafted)

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.tokens + other.tokens,
            self.passes + other.passes,
            self.draft_passes + other.draft_passes,
            self.drafted + other.drafted,
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs in units of a target pass over one token: of a draft pass, and of verifying a further
    token in a target pass. `in_blocks`: one draft pass makes a whole draft."""

    draft: float
    verify: float
    in_blocks: bool

    def of(self, counts: Counts) -> float:
        drafting = counts.draft_passes * self.draft
        return counts.passes + drafting + counts.drafted * self.verify

    def speedup(self, by_prompt: Sequence[Counts]) -> float:
        """Returns the speedup over plain decoding: new tokens per unit of cost."""
        total = sum(by_prompt, Counts())
        return total.tokens / self.of(total)

    def as_table(self) -> RoundCosts:
        points = {1: self.draft, 2: self.draft} if self.in_blocks else {0: 0.0, 1: self.draft}
        verification = Curve({1: 1.0, 2: 1.0 + self.verify})
        return RoundCosts(CostTable({1: Curve(points)}), CostTable({1: verification}))

    @property
    def of_token(self) -> float:
        """The value of the setting `draft_cost`."""
        return 0.0 if self.in_blocks else self.draft


class CountingSimulator(Simulator):
    """Simulates rounds that take `table`, in trees too. `rounds` are those of each run since it was
    emptied."""

    table: RoundCosts
    rounds: list[list[Round]]

    def _costs_of(self, method: Method, settings: Settings) -> RoundCosts:
        return self.table

    def _run(self, *arguments: Any) -> Run:
        run = super()._run(*arguments)
        self.rounds.append([])
        return replace(run, schedule=recorded(run.schedule, self.rounds[-1]))


def recorded(schedule: Schedule, rounds: list[Round]) -> Schedule:
    """Returns the schedule; `rounds` then gets each round that it yields."""

    def yield_rounds(run: Run) -> Iterator[Round]:
        for round_ in schedule(run):
            rounds.append(round_)
            yield round_

    return yield_rounds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "drafters", nargs="*", default=["model"], help=f"{', '.join(DRAFTERS)}; default: model"
    )
    parser.add_argument("--half", choices=("1", "2", "all"), default="1")
    parser.add_argument(
        "--tuning", action="store_true", help="the prompts that tune takes, in place of compare's"
    )
    parser.add_argument("--prompts", type=Path, help="a file of prompts in place of examples.yaml")
    parser.add_argument("--limit", type=int, help="only so many prompts of the half")
    parser.add_argument("--temperatures", default="0,1", help="between commas")
    parser.add_argument(
        "--calibration", action="store_true", help="do the predicted probabilities hold?"
    )
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each prompt, when sampling")
    parser.add_argument("--draft-costs", default=COSTS, help="between commas")
    parser.add_argument("--verify-cost", type=float, default=0.02)
    parser.add_argument(
        "--noise", type=float, default=NOISE, help="of `near`, in units of each matrix's deviation"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help=f"other settings of {POLICY}"
    )
    parser.add_argument(
        "--real", action="store_true", help="run the decoder too, to check the simulation"
    )
    options = parser.parse_args()
    if unknown := sorted(set(options.drafters) - set(DRAFTERS)):
        parser.exit(2, f"error: there is no drafter {unknown[0]!r}: take {', '.join(DRAFTERS)}\n")
    if POLICY not in POLICIES:
        parser.exit(2, f"error: this version of specgen has no length policy {POLICY!r}\n")
    prompts = load_prompts(options.prompts, for_tuning=options.tuning)
    prompts = prompts if options.half == "all" else prompts[int(options.half) - 1 :: 2]
    prompts = prompts[: options.limit]
    with tempfile.TemporaryDirectory() as folder:
        for drafter in options.drafters:
            for temperature in map(float, options.temperatures.split(",")):
                measurement = Measurement(drafter, prompts, options, temperature, Path(folder))
                measurement.show()


class Measurement:
    """Compares the length policies on one drafter and some prompts. `folder` is for models that
    have to be made."""

    def __init__(
        self,
        drafter: str,
        prompts: Sequence[ListedPrompt],
        options: argparse.Namespace,
        temperature: float,
        folder: Path,
    ) -> None:
        self._drafter = drafter
        self._prompts = prompts
        self._folder = folder
        self._noise = options.noise
        self._kind = DRAFTERS[drafter]
        written = "0" if self._kind.copies else options.draft_costs
        self._costs = [
            Costs(float(cost), options.verify_cost, self._kind.in_blocks)
            for cost in written.split(",")
        ]
        params = SamplingParams(
            max_new_tokens=options.tokens,
            temperature=temperature,
            top_p=options.top_p,
            min_p=options.min_p,
        )
        seeds = range(1 if params.greedy else options.seeds)
        self._samplings = [
            replace(params, seed=1000 * seed + prompt.index) for seed in seeds for prompt in prompts
        ]
        self._is_real = options.real
        self._is_calibration = options.calibration
        self._given = dict(setting.split("=", 1) for setting in options.set)

    def show(self) -> None:
        """Simulates and prints the tables."""
        with self._open() as pair:
            simulator = self._simulated(pair)
            if self._is_calibration:
                self._show_calibration(simulator)
            else:
                self._show_speedups(simulator)

    def _show_calibration(self, simulator: CountingSimulator) -> None:
        sampling = sampling_in_words(self._samplings[0])
        for costs in self._costs:
            self._simulate(simulator, self._adaptive(costs), costs)
            rounds = [round_ for run in simulator.rounds for round_ in run]
            where = f"{self._drafter}, {sampling}, draft cost {costs.draft:g}"
            for name, predictions in PREDICTIONS.items():
                judged = [pair for round_ in rounds for pair in predictions(round_)]
                print(f"\n{where}: {name}")
                print("\n".join(calibration_table(judged)), flush=True)

    def _adaptive(self, costs: Costs) -> Given:
        """Returns the settings of the policy where drafts have these costs."""
        return {
            "policy": POLICY,
            "draft_cost": costs.of_token,
            "verify_cost": costs.verify,
            **self._given,
        }

    def _show_speedups(self, simulator: CountingSimulator) -> None:
        runs = len(self._samplings)
        fixed = {
            name: self._simulate(simulator, given, self._costs[0]) for name, given in self._fixed()
        }
        sampling = self._samplings[0]
        tokens = sum(fixed["sd:k=5"], Counts()).tokens
        amount = f"{len(self._prompts)} prompts, {runs} runs, {tokens} tokens"
        print(
            f"\n{self._drafter}, {sampling_in_words(sampling)}: {amount}, "
            f"verification cost {self._costs[0].verify:g}"
        )
        print(
            f"{'draft cost':>10} {'best':>6} {'setting':22} {'svip':>6} {'sd:k=5':>7} "
            f"{POLICY:>9} {'ratio':>6} {'95%':11} {'drafted':>8}"
        )
        for costs in self._costs:
            speedups = {name: costs.speedup(counts) for name, counts in fixed.items()}
            speedups[PLAIN] = 1.0
            best = max(speedups, key=lambda name: speedups[name])
            given = self._adaptive(costs)
            counts = self._simulate(simulator, given, costs)
            own = costs.speedup(counts)
            ratio = self._ratio(costs, counts, fixed.get(best))
            total = sum(counts, Counts())
            svip = f"{speedups['svip']:6.3f}" if "svip" in speedups else f"{'-':>6}"
            row = (
                f"{costs.draft:10g} {speedups[best]:6.3f} {best:22} {svip} "
                f"{speedups['sd:k=5']:7.3f} {own:9.3f}"
            )
            print(
                f"{row} {ratio} {total.drafted / max(total.passes, 1):8.2f}",
                flush=True,
            )
            if self._is_real:
                compared = dict(self._fixed())
                compared = {
                    name: compared[name] for name in (best, "svip", "sd:k=5") if name in compared
                } | {POLICY: given}
                self._show_real(compared, costs, {**speedups, POLICY: own})

    def _fixed(self) -> Iterator[tuple[str, Given]]:
        """The fixed settings with their names: the grids that `tune` searches, without limits on a
        draft's length."""
        yield from ((f"sd:k={k}", {"k": k}) for k in range(1, LONGEST + 1))
        yield "heuristic", {"policy": "heuristic"}
        if self._drafter == "suffix":
            yield from (
                (f"min_prob={value}", {"k": LONGEST, "min_prob": value})
                for value in (0.05, 0.1, 0.2, 0.4)
            )
        if self._kind.copies:
            return
        yield "svip", {"policy": "svip"}
        for policy in ("confidence", "svip"):
            tuned = POLICIES[policy].settings["threshold"].tuned
            yield from (
                (f"{policy}:threshold={value}", {"policy": policy, "threshold": value})
                for value in tuned
            )

    def _simulated(self, pair: Pair) -> CountingSimulator:
        """Returns a simulator of the pair's runs, with the target's output in each run as its
        references."""
        references = []
        for number, sampling in enumerate(self._samplings):
            ids = pair.tokenizer.encode(self._prompts[number % len(self._prompts)].text)
            reference = record_reference(pair, ids, sampling)
            references.append(replace(reference, prefill_seconds=0.0))
        return CountingSimulator(pair, references, self._samplings[0], {})

    def _ratio(self, costs: Costs, own: Sequence[Counts], best: Sequence[Counts] | None) -> str:
        """Returns the speedup of `own`, counts by prompt, divided by that of `best` (None: plain
        decoding), with its interval."""
        if best is None:
            best = [Counts(counts.tokens, counts.tokens) for counts in own]
        pairs = [
            (counts.tokens, costs.of(counts), other.tokens, costs.of(other))
            for counts, other in zip(own, best, strict=True)
        ]
        ratio, low, high = speedup_interval(pairs, RESAMPLES)
        interval = "" if low is None else f"{low:.3f}-{high:.3f}"
        return f"{ratio:6.3f} {interval:11}"

    def _simulate(self, simulator: CountingSimulator, given: Given, costs: Costs) -> list[Counts]:
        """Simulates all runs with the settings `given`. Returns their counts by prompt."""
        simulator.table = costs.as_table()
        simulator.rounds = []
        simulator.run(self._kind.method, {**self._kind.given, **given})

        by_prompt = [Counts()] * len(self._prompts)
        for number, rounds in enumerate(simulator.rounds):
            passes = 0.0
            if costs.draft:
                passes = sum(round_.seconds["draft"] for round_ in rounds) / costs.draft
            by_prompt[number % len(by_prompt)] += Counts.of_run(rounds, round(passes))
        return by_prompt

    def _show_real(
        self, compared: Mapping[str, Given], costs: Costs, simulated: Mapping[str, float]
    ) -> None:
        """Runs the real decoder with each of the settings in `compared`. Prints the speedup
        computed from the counts of its rounds, beside the `simulated` one."""
        for name, given in compared.items():
            total = Counts()
            with self._open() as pair:  # a new one, so that nothing was learned yet
                for number, sampling in enumerate(self._samplings):
                    text = self._prompts[number % len(self._prompts)].text
                    settings: dict[str, Any] = {**self._kind.given, **given}
                    rounds = list(pair.rounds(text, self._kind.method, sampling, **settings))
                    levels = [round_.draft.levels for round_ in rounds]
                    passes = sum(map(bool, levels)) if costs.in_blocks else sum(levels)
                    total += Counts.of_run(rounds, passes)
            real = costs.speedup([total])
            print(
                (
                    f"{'':10} really {name}: {real:.3f}, simulated {simulated[name]:.3f} "
                    f"({real / simulated[name]:.3f})"
                ),
                flush=True,
            )

    def _open(self) -> Pair:
        """Loads the bundled target with the drafter. `near` and `unrelated` are written to the
        folder once."""
        if self._drafter not in ("near", "unrelated"):
            return specgen.load(device="cpu", dtype="float32")
        changed = self._folder / self._drafter
        with specgen.load(device="cpu", dtype="float32") as pair:
            assert pair.draft is not None
            target = Path(pair.target.folder)
            draft = Path(pair.draft.folder)
        if not changed.exists():
            if self._drafter == "near":
                _write_noisy(target, changed, keep=1.0, noise=self._noise)
            else:
                _write_noisy(draft, changed, keep=0.0, noise=1.0)
        return specgen.load(str(target), str(changed), device="cpu", dtype="float32")


def survivals(round_: Round) -> Iterator[Judged]:
    """Yields for each drafted token (level) of a chain the predicted probability that it and all
    before it are accepted, with whether they were."""
    accepted = len(round_.verdict.path)
    for position, survival in enumerate(accumulate(round_.draft.predicted, mul)):
        if not math.isnan(survival):
            yield survival, position < accepted


PREDICTIONS: dict[str, Callable[[Round], Iterator[Judged]]] = {
    "a token, if those before it are accepted": judged_predictions,
    "a token with all before it": survivals,
}


def calibration_table(judged: Sequence[Judged]) -> Iterator[str]:
    """Yields a line for each tenth of the predicted probability, and one for all."""
    row = "{:>9} {:>9} {:>7} {:13} {:>6}"
    yield row.format("", "predicted", "seen", "95%", "tokens")
    found = calibration_of(judged)
    if found is None:
        return
    for bin_ in found["bins"]:
        yield row.format(
            f"{bin_['low']:.1f}-{bin_['high']:.1f}",
            f"{bin_['predicted']:.3f}",
            f"{bin_['rate']:.3f}",
            f"{bin_['rate_low']:.3f}-{bin_['rate_high']:.3f}",
            bin_["judged"],
        )
    yield row.format(
        "all", f"{found['predicted']:.3f}", f"{found['rate']:.3f}", "", found["judged"]
    )
    yield f"mean distance of the bins: {found['error']:.3f}"


def _write_noisy(model: Path, copy: Path, *, keep: float, noise: float) -> None:
    """Writes a copy of a model in which each weight matrix is `keep` times itself plus normal
    noise.

    The noise's standard deviation is `noise` times the matrix's own.
    """
    shutil.copytree(model, copy)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(copy / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() == 2:
            drawn = torch.randn(weight.shape, generator=generator) * weight.float().std()
            weights[name] = (keep * weight.float() + noise * drawn).to(weight.dtype).contiguous()
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
