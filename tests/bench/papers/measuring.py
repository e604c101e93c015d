"""Runs `specgen compare` and reads its trace: sums over runs, their ratios, and 95 % intervals."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

RESAMPLES = 2000
PLAIN = "ar"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"

    def above(self, limit: float = 1.0) -> str:
        """Returns the verdict on the claim that the figure is above `limit`."""
        if self.low > limit:
            return HOLDS
        return FAILS if self.high < limit else CLOSE

    def below(self, limit: float = 1.0) -> str:
        """Returns the verdict on the claim that the figure is below `limit`."""
        if self.high < limit:
            return HOLDS
        return FAILS if self.low > limit else CLOSE

    def near(self, figure: float) -> str:
        """Returns the verdict on the claim that `figure` predicts this one."""
        return HOLDS if self.low <= figure <= self.high else FAILS


HOLDS = "holds"
FAILS = "does not hold"
CLOSE = "too close to call"
UNMEASURED = "cannot be measured here"


@dataclass(slots=True)
class Run:
    """One output. `settings` are the method's, measured values included; `summary` is the trace's
    summary line; `drafts` are the drafted and accepted tokens of each round after the prompt's, and
    `rounds` the trace's round lines."""

    spec: str
    prompt: int
    repeat: int
    category: str
    prompt_text: str
    settings: dict[str, Any]
    summary: dict[str, Any] = field(default_factory=dict)
    drafts: list[tuple[int, int]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A ratio of two sums over runs. `is_exponential`: the figure is exp of the ratio."""

    numerator: Callable[[Run], float]
    denominator: Callable[[Run], float]
    is_exponential: bool = False

    def of(self, numerators: Any, denominators: Any) -> Any:
        ratio = numerators / np.maximum(denominators, 1e-12)
        return np.exp(ratio) if self.is_exponential else ratio


def _of(name: str) -> Callable[[Run], float]:
    return lambda run: float(run.summary[name] or 0)


def _neg_log_likelihood(run: Run) -> float:
    return math.log(run.summary["perplexity"]) * float(run.summary["new_tokens"])


SPEED = Quantity(_of("new_tokens"), _of("seconds"))
TOKENS_A_PASS = Quantity(_of("new_tokens"), _of("target_passes"))
ACCEPTANCE = Quantity(_of("accepted"), _of("drafted"))
DRAFT_LENGTH = Quantity(_of("drafted"), _of("drafts"))
ACCEPTED_A_REJECTION = Quantity(_of("accepted"), _of("rejections"))
# 2 v r / (v + r) with v = accepted / drafted and r = accepted / generated (EESD, section 4.1)
HARMONIC_MEAN = Quantity(
    lambda run: 2 * float(run.summary["accepted"]),
    lambda run: float(run.summary["drafted"] + run.summary["new_tokens"]),
)
PERPLEXITY = Quantity(_neg_log_likelihood, _of("new_tokens"), is_exponential=True)


def share_of_time(*phases: str) -> Quantity:
    return Quantity(
        lambda run: sum(run.summary["phase_seconds"][phase] for phase in phases), _of("seconds")
    )


@dataclass(frozen=True, slots=True)
class Costs:
    """What drafting and verifying one more token cost, in target passes over one token."""

    draft: float
    verify: float

    def __str__(self) -> str:
        return f"{self.draft:g} + {self.verify:g}"

    @property
    def settings(self) -> str:
        """These costs as settings of the policy `adaptive`."""
        return f"draft_cost={self.draft:g}:verify_cost={self.verify:g}"

    @property
    def speedup(self) -> Quantity:
        """The speedup over plain decoding at these costs, from counts alone."""
        cost = self.draft + self.verify
        return Quantity(
            lambda run: float(run.summary["new_tokens"] - 1),
            lambda run: sum(1 + cost * drafted for drafted, _ in run.drafts),
        )


@dataclass(slots=True)
class Measured:
    """The runs of a comparison by method as written. `command` is what a user types, `lines` are
    the JSON lines."""

    command: str
    runs: dict[str, list[Run]]
    lines: dict[str, dict[str, Any]]

    def of(self, quantity: Quantity, spec: str, *, by: str = "prompt") -> Estimate:
        """Returns the quantity of a method. The interval is a bootstrap over prompts, or over
        repeats (seeds) with `by="repeat"`."""
        drawn = self._drawn(quantity, spec, by)
        return _estimate(drawn)

    def ratio(self, quantity: Quantity, spec: str, base: str, *, by: str = "prompt") -> Estimate:
        """Returns the quantity of a method divided by that of another; both are drawn on the same
        prompts."""
        return _estimate(self._drawn(quantity, spec, by) / self._drawn(quantity, base, by))

    def best(self, quantity: Quantity, specs: Sequence[str]) -> str:
        return max(specs, key=lambda spec: self.of(quantity, spec).value)

    def _drawn(self, quantity: Quantity, spec: str, by: str) -> Any:
        """Returns the quantity over all runs (first), and over each bootstrap sample."""
        sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for run in self.runs[spec]:
            entry = sums[getattr(run, by)]
            entry[0] += quantity.numerator(run)
            entry[1] += quantity.denominator(run)
        table = np.array([sums[key] for key in sorted(sums)])
        drawn = np.random.default_rng(0).integers(0, len(table), (RESAMPLES, len(table)))
        totals = np.concatenate([table.sum(0)[None], table[drawn].sum(1)])
        return quantity.of(totals[:, 0], totals[:, 1])


def _estimate(drawn: Any) -> Estimate:
    low, high = np.quantile(drawn[1:], [0.025, 0.975])
    return Estimate(float(drawn[0]), float(low), float(high))


@dataclass(frozen=True, slots=True)
class Bench:
    """What to measure on: the pair (`bundled` or `published`), and how long. `exit_layer` is the
    folder of an exit layer for the published target, None where there is none."""

    pair: str
    quick: bool
    exit_layer: Path | None = None
    target: Path | None = None
    draft: Path | None = None

    @property
    def is_bundled(self) -> bool:
        return self.pair == "bundled"

    @property
    def repeats(self) -> int:
        return 1 if self.quick else 3

    @property
    def prompts(self) -> int:
        if self.is_bundled:
            return 36
        return 8 if self.quick else 16

    @property
    def fewer(self) -> int:
        """How many prompts, for what takes long."""
        return min(12, self.prompts) if self.quick else self.prompts

    @property
    def tokens(self) -> int:
        """The most new tokens for a prompt."""
        if self.is_bundled:
            return 160
        return 64 if self.quick else 128

    def compare(
        self,
        specs: Sequence[str],
        *options: str,
        prompts: int | None = None,
        tokens: int | None = None,
        repeats: int | None = None,
    ) -> Measured:
        """Runs `specgen compare` with the methods `specs`, with a seed where tokens are drawn.
        Raises RuntimeError if it fails."""
        sizes = {
            "--limit": self.prompts if prompts is None else prompts,
            "-n": self.tokens if tokens is None else tokens,
            "--repeats": self.repeats if repeats is None else repeats,
        }
        named = ["-m", ",".join(specs)]
        for option, size in sizes.items():
            named += [option, str(size)]
        named += options if self.is_bundled else ("--chat", *options)
        if "--temperature" in options:
            named += ["--seed", "0"]
        shown = shlex.join(["specgen", "compare", *named])
        if self.target is not None:
            shown += " -t TARGET -d DRAFT"
        if self.exit_layer is not None:
            shown += " --exit-layer EXIT"
        print(f"  {shown[:150]}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.jsonl"
            lines = _run("compare", *named, *self._models, "--quiet", "--trace", str(trace))
            methods = {line["method"]: line for line in lines if line["type"] == "method"}
            return Measured(shown, _read(trace), methods)

    def passes(self, *options: str) -> dict[str, Any]:
        """Returns the times of passes, and what follows from them, as `specgen inspect --measure`
        measures them. Raises RuntimeError if it fails."""
        print("  specgen inspect --measure", file=sys.stderr, flush=True)
        line = _run("inspect", "--measure", *self._models, *options)[-1]
        measured: dict[str, Any] = line["measured"]
        return measured

    @property
    def _models(self) -> list[str]:
        """The options that name the models."""
        given = []
        if self.target is not None and self.draft is not None:
            given += ["-t", str(self.target), "-d", str(self.draft)]
        if self.exit_layer is not None:
            given += ["--exit-layer", str(self.exit_layer)]
        return given


def _run(command: str, *arguments: str) -> list[dict[str, Any]]:
    """Runs a command of specgen, and returns its JSON lines."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(
        [sys.executable, "-m", "specgen", command, *arguments, "--json"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"specgen {command} failed ({done.returncode}): {done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def _read(trace: Path) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = defaultdict(list)
    run: Run | None = None
    with trace.open(encoding="utf-8") as file:
        for text in file:
            line = json.loads(text)
            if line["type"] == "start":
                place = line["prompt_index"], line["repeat"], line["category"]
                run = Run(line["spec"], *place, line["prompt_text"], line["settings"])
            elif line["type"] == "round" and run is not None:
                run.rounds.append(line)
                if line["mode"] != "prefill":
                    run.drafts.append((len(line["draft_ids"]), len(line["accepted_ids"])))
            elif line["type"] == "summary" and run is not None:
                run.summary = line
                runs[run.spec].append(run)
    return dict(runs)


@cache
def published_folders() -> tuple[Path, Path]:
    """Returns the folders of the published target and of its trained draft."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from published_model import draft_folder, target_folder

    return target_folder(), draft_folder()
