"""Counts and metrics of runs, computed from their rounds. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from specgen.energy import Energy
from specgen.types import PHASES, Round

_METRICS = (
    *("seconds", "tokens_per_second", "rounds", "target_passes", "drafted", "accepted", "acceptance_rate", "draft_share"),
    *("harmonic_mean", "block_efficiency", "mean_accepted_run", "perplexity", "joules_per_token"),
)


class Summary:
    """Counts over `rounds` and over what is added later. Rates are fractions, None where nothing was drafted."""

    def __init__(self, method: str, rounds: Iterable[Round] = ()) -> None:
        self.method = method
        self.token_ids: list[int] = []
        self.rounds = 0
        self.drafts = 0  # rounds with a draft
        self.drafted = 0
        self.accepted = 0
        self.rejections = 0
        self.parallel = False  # drafts were made during target passes (PEARL)
        self.phase_seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.log_likelihood: float | None = None
        self.energy: Energy | None = None
        self.joules: float | None = None  # above idle, NaN if those of a run are unknown
        self.unsplit_seconds = 0.0  # of runs of other programs, which report no phases
        for round_ in rounds:
            self.add(round_)

    def add(self, round_: Round) -> None:
        self.rounds += 1
        self.token_ids += round_.token_ids
        self.drafts += bool(round_.draft.tokens)
        self.drafted += len(round_.draft.tokens)
        self.accepted += len(round_.verdict.path)
        self.rejections += round_.verdict.source == "correction"
        self.parallel |= round_.mode in ("pre-verify", "post-verify")
        for phase, seconds in round_.seconds.items():
            self.phase_seconds[phase] += seconds

    def add_log_likelihood(self, nats: float) -> None:
        """Add one run's log-likelihood under the target at temperature 1. For a valid perplexity every run has to be added."""
        self.log_likelihood = nats + (self.log_likelihood or 0.0)

    def add_energy(self, energy: Energy) -> None:
        """Add one run's energy."""
        self.energy = energy if self.energy is None else self.energy + energy
        self.joules = (self.joules or 0.0) + (math.nan if energy.joules is None else energy.joules)

    def include(self, line: Mapping[str, Any]) -> None:
        """Add a whole run by its summary line with the additional key `drafts`, as in comparisons.

        Where lines have perplexity and joules per token, those of the summary are None unless all runs with tokens have them.
        """
        tokens = len(line["token_ids"])
        if tokens and "perplexity" in line:
            self.add_log_likelihood(-tokens * math.log(_or_nan(line["perplexity"])))
        if tokens and "joules_per_token" in line:
            self.joules = (self.joules or 0.0) + tokens * _or_nan(line["joules_per_token"])
        self.rounds += line["rounds"]
        self.token_ids += line["token_ids"]
        self.drafts += line["drafts"]
        self.drafted += line["drafted"]
        self.accepted += line["accepted"]
        self.rejections += line.get("rejections", 0)
        if line["phase_seconds"] is None:
            self.unsplit_seconds += line["seconds"]
        else:
            for phase, seconds in line["phase_seconds"].items():
                self.phase_seconds[phase] += seconds

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def target_passes(self) -> int:
        """Each round has one target pass, the prefill included."""
        return self.rounds

    @property
    def seconds(self) -> float:
        """Time spent decoding, prefill included, without the time that the consumer spends between rounds."""
        return sum(self.phase_seconds.values()) + self.unsplit_seconds

    @property
    def tokens_per_second(self) -> float | None:
        return self.new_tokens / self.seconds if self.seconds else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens (EESD Eq. 11)."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def draft_share(self) -> float | None:
        """Accepted / generated tokens (EESD Eq. 12)."""
        return self.accepted / self.new_tokens if self.drafted and self.new_tokens else None

    @property
    def harmonic_mean(self) -> float | None:
        """Harmonic mean of acceptance rate and draft share."""
        rate, share = self.acceptance_rate, self.draft_share
        if rate is None or share is None:
            return None
        return 2 * rate * share / (rate + share) if rate + share else 0.0

    @property
    def block_efficiency(self) -> float | None:
        """Generated tokens per target pass; 1 for plain decoding."""
        return self.new_tokens / self.target_passes if self.target_passes else None

    @property
    def mean_accepted_run(self) -> float | None:
        """Accepted tokens per rejection, which may span several rounds (PEARL, Table 4). None without a rejection."""
        return self.accepted / self.rejections if self.rejections else None

    @property
    def perplexity(self) -> float | None:
        """exp of the mean negative log-likelihood of the generated tokens; None where it was not measured or overflows."""
        if self.log_likelihood is None or not self.new_tokens:
            return None
        mean = -self.log_likelihood / self.new_tokens
        return math.exp(mean) if mean < 700 else None

    @property
    def joules_per_token(self) -> float | None:
        """Energy above idle per generated token; None where there is no counter."""
        if self.joules is None or math.isnan(self.joules) or not self.new_tokens:
            return None
        return self.joules / self.new_tokens

    @property
    def mean_draft_length(self) -> float | None:
        """Drafted tokens per round with a draft."""
        return self.drafted / self.drafts if self.drafts else None

    def share_of_time(self, phase: str) -> float:
        return self.phase_seconds[phase] / self.seconds if self.seconds else 0.0

    def as_dict(self, text: str, finish_reason: str) -> dict[str, Any]:
        """The summary line of a trace, without its `type`. The keys do not change."""
        return {
            "method": self.method,
            "text": text,
            "token_ids": self.token_ids,
            "new_tokens": self.new_tokens,
            "finish_reason": finish_reason,
            **{name: getattr(self, name) for name in _METRICS},
            "energy": None if self.energy is None else asdict(self.energy),
            "phase_seconds": dict(self.phase_seconds),
        }


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
