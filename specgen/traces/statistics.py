"""Statistics of recorded runs: acceptance by entropy, bounds of the acceptance probability, a bandit's posterior.

Imports no torch. A drafted token is *verified* where its status is accepted or rejected. Entropies and divergences are in nats.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from specgen.traces.summary import Summary
from specgen.traces.trace_reader import TracedRound, TracedRun
from specgen.types import Round, TokenStatus

EDGES = (
    0.0,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    math.inf,
)  # bin edges in nats, the same for all traces so that they can be compared
AUTHORS_C = 0.15  # SVIP's constant c, for runs without a setting of that name
_Z95 = 1.959964
_Z90 = 1.644854
_STATUSES = tuple(TokenStatus)


class DraftedTokens:
    """The drafted tokens that have an entropy, in arrays of equal length to save memory.

    `overlaps` (the sum of min(p, q)) and `divergences` (KL(q||p)) are NaN where they were not recorded.
    """

    def __init__(self) -> None:
        self.entropies, self.overlaps, self.divergences = array("d"), array("d"), array("d")
        self._statuses = bytearray()
        self.recording = False  # the run recorded both distributions, if not for every token

    def __len__(self) -> int:
        return len(self.entropies)

    def add(self, traced: TracedRound) -> None:
        entropies = traced.round.draft.entropies
        count = len(entropies)
        if not count:
            return
        self.recording |= bool(traced.overlap)
        self.entropies.extend(entropies)
        self.overlaps.extend(traced.overlap or [math.nan] * count)
        self.divergences.extend(traced.kl or [math.nan] * count)
        self._statuses.extend(_STATUSES.index(status) for status in traced.round.statuses)

    def status(self, position: int) -> TokenStatus:
        return _STATUSES[self._statuses[position]]

    def recorded(self) -> Iterator[int]:
        """Positions of the tokens with overlap and divergence."""
        for position in range(len(self)):
            if not (
                math.isnan(self.overlaps[position])
                or math.isnan(self.divergences[position])
                or math.isnan(self.entropies[position])
            ):
                yield position


@dataclass(frozen=True, slots=True)
class Bin:
    """Acceptance of the verified tokens whose draft entropy is in [low, high), with Wilson's 95 % interval."""

    low: float
    high: float
    verified: int
    accepted: int
    mean_entropy: float

    @property
    def rate(self) -> float:
        return self.accepted / self.verified

    @property
    def interval(self) -> tuple[float, float]:
        n, p, z = self.verified, self.rate, _Z95
        centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


@dataclass(frozen=True, slots=True)
class BoundsBin:
    """Medians over the tokens with an entropy in [low, high): acceptance probability, its two lower bounds, SVIP's estimate."""

    low: float
    high: float
    tokens: int
    entropy: float
    acceptance: float
    pinsker: float
    bretagnolle_huber: float
    estimate: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """The numbers of SVIP's Figures 3 and 4. `below_estimate` is the share of tokens whose acceptance probability is below SVIP's
    estimate 1 - sqrt(c H(q)); `entropy_ratio` is the median of H(q,p) / H(q), and `measured_c` the c that follows from it."""

    tokens: int
    c: float
    below_estimate: float
    entropy_ratio: float | None
    measured_c: float | None
    by_entropy: tuple[BoundsBin, ...]


@dataclass(frozen=True, slots=True)
class Posterior:
    """A bandit's posterior of the acceptance probability after round `index`: its mean and central 90 % interval."""

    index: int
    mean: float
    low: float
    high: float


def pinsker(divergence: float) -> float:
    """Pinsker's lower bound of the acceptance probability, 1 - sqrt(KL(q||p) / 2) (SVIP Eq. 5), at least 0."""
    return max(0.0, 1 - math.sqrt(max(divergence, 0.0) / 2))


def bretagnolle_huber(divergence: float) -> float:
    """The Bretagnolle-Huber lower bound of the acceptance probability, 1 - sqrt(1 - exp(-KL(q||p))) (SVIP, Appendix B)."""
    return max(0.0, 1 - math.sqrt(-math.expm1(-max(divergence, 0.0))))


def estimate(entropy: float, c: float) -> float:
    """SVIP's estimate of the acceptance probability, 1 - sqrt(c H(q)) (Eq. 6), at least 0.

    Not a bound: it assumes a constant ratio of cross-entropy to entropy.
    """
    return max(0.0, 1 - math.sqrt(max(c * entropy, 0.0)))


class TraceStatistics:
    """Statistics of one or more runs of one method. `c` is SVIP's constant, from the first run that has it as a setting."""

    def __init__(self, method: str) -> None:
        self.summary = Summary(method)
        self.tokens = DraftedTokens()
        self.runs = 0
        self.lengths, self.accepted_lengths = array("l"), array("l")  # tokens of each round after the prefill, run after run
        self.branches = False  # drafts are trees, or several chains at once
        self.prompt_tokens = 0
        self.speeds: list[float] = []  # tokens per second of each run
        self._c: float | None = None

    @property
    def c(self) -> float:
        return AUTHORS_C if self._c is None else self._c

    def add(self, run: TracedRun) -> None:
        self.runs += 1
        self.prompt_tokens += len(run.start["prompt_ids"])
        self._c = self._c if self._c is not None else setting(run, "c")
        tokens, seconds = self.summary.new_tokens, self.summary.seconds
        for traced in run.rounds:
            self.summary.add(traced.round)
            self._add_lengths(traced.round)
            self.tokens.add(traced)
        if not run.rounds and run.summary is not None:  # another program's run: only its summary is known
            self.summary.token_ids += run.summary["token_ids"]
            self.summary.rounds += known_number(run.summary, "target_passes")
            self.summary.drafted += known_number(run.summary, "drafted")
            self.summary.accepted += known_number(run.summary, "accepted")
            self.summary.drafts += known_number(run.summary, "drafts")
            self.summary.phase_seconds["other"] += known_number(run.summary, "seconds")
        if self.summary.seconds > seconds:
            self.speeds.append((self.summary.new_tokens - tokens) / (self.summary.seconds - seconds))

    def _add_lengths(self, round_: Round) -> None:
        draft = round_.draft
        self.branches |= any(parent != node - 1 for node, parent in enumerate(draft.parents))
        if round_.index:
            self.lengths.append(len(draft.tokens))
            self.accepted_lengths.append(len(round_.verdict.path))

    @property
    def mean_accepted_length(self) -> float | None:
        """Accepted tokens per round with a draft."""
        return self.summary.accepted / self.summary.drafts if self.summary.drafts else None

    def acceptance_by_entropy(self) -> list[Bin]:
        """Acceptance rate by the entropy of the draft distribution (SVIP, Figure 2), without bins that have no verified token."""
        found: dict[int, list[float]] = {}
        accepted: dict[int, int] = {}
        for position, entropy in enumerate(self.tokens.entropies):
            if self.tokens.status(position) is not TokenStatus.DISCARDED and not math.isnan(entropy):
                at = _bin(entropy)
                found.setdefault(at, []).append(entropy)
                accepted[at] = accepted.get(at, 0) + (self.tokens.status(position) is TokenStatus.ACCEPTED)
        return [Bin(EDGES[at], EDGES[at + 1], len(found[at]), accepted[at], fmean(found[at])) for at in sorted(found)]

    def bounds(self) -> Bounds | None:
        """SVIP's bounds on these tokens; None where overlap and divergence were not recorded."""
        tokens, positions = self.tokens, list(self.tokens.recorded())
        if not positions:
            return None
        by_bin: dict[int, list[int]] = {}
        for position in positions:
            by_bin.setdefault(_bin(tokens.entropies[position]), []).append(position)
        below = sum(tokens.overlaps[position] < estimate(tokens.entropies[position], self.c) for position in positions)
        # Where the entropy is close to 0 the ratio is numerical noise.
        ratios = [
            1 + tokens.divergences[position] / tokens.entropies[position]
            for position in positions
            if tokens.entropies[position] > 0.01
        ]
        ratio = median(ratios) if ratios else None
        return Bounds(
            len(positions),
            self.c,
            below / len(positions),
            ratio,
            None if ratio is None else (ratio - 1) / 2,
            tuple(self._bounds_bin(at, by_bin[at]) for at in sorted(by_bin)),
        )

    def _bounds_bin(self, at: int, positions: Sequence[int]) -> BoundsBin:
        tokens = self.tokens
        divergences = [tokens.divergences[position] for position in positions]
        entropies = [tokens.entropies[position] for position in positions]
        return BoundsBin(
            EDGES[at],
            EDGES[at + 1],
            len(positions),
            median(entropies),
            median(tokens.overlaps[position] for position in positions),
            median(map(pinsker, divergences)),
            median(map(bretagnolle_huber, divergences)),
            median(estimate(entropy, self.c) for entropy in entropies),
        )

    def as_dict(self) -> dict[str, Any]:
        """The statistics under the keys of `inspect --json`."""
        figures = self.summary.as_dict("", "")
        for name in ("text", "token_ids", "finish_reason"):
            del figures[name]
        bounds = self.bounds()
        return {
            **figures,
            "mean_draft_length": self.summary.mean_draft_length,
            "mean_accepted_length": self.mean_accepted_length,
            "acceptance_by_entropy": [_bin_dict(found) for found in self.acceptance_by_entropy()],
            "bounds": None if bounds is None else asdict(bounds, dict_factory=_without_infinity),
        }


def setting(run: TracedRun, name: str) -> float | None:
    """The run's setting of that name, if it is a number; else None."""
    value = run.start["settings"].get(name)
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None


def known_number(line: Mapping[str, Any], name: str) -> Any:
    """The value of a key that the reader does not check, 0 where it is no plausible number."""
    value = line.get(name)
    return value if isinstance(value, int | float) and 0 <= value < 1e12 else 0


def _bin(entropy: float) -> int:
    return next(position for position in range(len(EDGES) - 1) if entropy < EDGES[position + 1] or position == len(EDGES) - 2)


def _bin_dict(found: Bin) -> dict[str, Any]:
    low, high = found.interval
    counts = {"low": found.low, "high": found.high, "judged": found.verified, "accepted": found.accepted}
    return _without_infinity([*counts.items(), ("rate", found.rate), ("rate_low", low), ("rate_high", high)])


def _without_infinity(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A dictionary with None, as JSON's null, for the infinite upper edge of the last bin."""
    return {name: None if value == math.inf else value for name, value in items}


def posteriors(rounds: Iterable[Round], most: int = 120) -> list[Posterior]:
    """A bandit's posterior after at most `most` evenly spaced rounds, the last one included. Empty for other policies."""
    known = [round_ for round_ in rounds if _has_posterior(round_)]
    step = max(1, math.ceil(len(known) / most))
    return [_posterior(round_) for round_ in known[(len(known) - 1) % step :: step]]


def _has_posterior(round_: Round) -> bool:
    """Whether the policy's state has the parameters of a Beta distribution (Beta-TS) or of a normal one (Cali-TS)."""
    state = round_.policy_state or {}
    return (state.get("alpha", 0.0) > 0 and state.get("beta", 0.0) > 0) or _is_normal(state)


def _is_normal(state: Mapping[str, float]) -> bool:
    return 0 <= state.get("mean", -1.0) <= 1 and state.get("deviation", -1.0) >= 0


def _posterior(round_: Round) -> Posterior:
    state = round_.policy_state or {}
    if _is_normal(state):  # Cali-TS clips its samples to [0, 1]
        mean, half = state["mean"], _Z90 * state["deviation"]
        return Posterior(round_.index, mean, max(mean - half, 0.0), min(mean + half, 1.0))
    alpha, beta = state["alpha"], state["beta"]
    return Posterior(round_.index, alpha / (alpha + beta), beta_quantile(alpha, beta, 0.05), beta_quantile(alpha, beta, 0.95))


def beta_quantile(alpha: float, beta: float, share: float) -> float:
    """The quantile of Beta(alpha, beta) at probability `share`, by bisection, exact to 1e-6."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        if _beta_below(alpha, beta, middle) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _beta_below(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, the CDF of Beta(a, b), by its continued fraction (Lentz's method)."""
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1 - front * _beta_fraction(b, a, 1 - x) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    value = d
    for m in range(1, 400):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            c = (1 + term / c) or tiny
            d = 1 / ((1 + term * d) or tiny)
            value *= c * d
        if abs(c * d - 1) < 1e-10:
            break
    return value
