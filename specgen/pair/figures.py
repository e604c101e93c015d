"""Counts and metrics of recorded runs (generations), computed from their rounds: a round is a target pass with the draft that it
verified (in joint decoding several passes). Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from specgen.base.energy import Energy
from specgen.base.types import PHASES, Round

_METRICS = (
    *("seconds", "tokens_per_second", "rounds", "target_passes", "drafted", "accepted", "acceptance_rate", "draft_share"),
    *("harmonic_mean", "block_efficiency", "mean_accepted_run", "perplexity", "joules_per_token"),
    "gross_joules_per_token",
)


class Summary:
    """Counts tokens, target passes and seconds over the rounds of one or more runs, and computes metrics from them. More rounds
    or whole runs can be added. Rates are fractions from 0 to 1, None if nothing was drafted."""

    def __init__(self, method: str, rounds: Iterable[Round] = ()) -> None:
        self.method = method
        self.token_ids: list[int] = []
        self.rounds = 0
        self.target_passes = 0  # the prefill is one
        self.drafts = 0  # rounds with a draft
        self.drafted = 0
        self.accepted = 0
        self.rejections = 0
        self.ties = 0  # tokens that the target chose between equal logits, in half precision
        self.parallel = False  # drafts were made during target passes (PEARL)
        self.phase_seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.log_likelihood: float | None = None
        self.energy: Energy | None = None
        self.joules: float | None = None  # beyond idle power; NaN if the energy of one run is unknown
        self.gross_joules: float | None = None  # idle power included; NaN as above
        self.capture_seconds = 0.0  # of `seconds`, for capturing CUDA graphs, which later runs need not do again
        self.unsplit_seconds = 0.0  # of runs without times by phase, such as transformers' own methods
        for round_ in rounds:
            self.add(round_)

    def add(self, round_: Round) -> None:
        self.rounds += 1
        self.target_passes += round_.target_passes
        self.token_ids += round_.token_ids
        self.drafts += bool(round_.draft.tokens)
        self.drafted += len(round_.draft.tokens)
        self.accepted += len(round_.verdict.path)
        self.rejections += round_.verdict.source == "correction"
        self.ties += round_.verdict.ties
        self.parallel |= round_.mode in ("pre-verify", "post-verify")
        for phase, seconds in round_.seconds.items():
            self.phase_seconds[phase] += seconds

    def add_log_likelihood(self, nats: float) -> None:
        """Adds the log-likelihood in nats of one run's generated tokens under the target at temperature 1. For a valid perplexity
        it has to be added for every run."""
        self.log_likelihood = nats + (self.log_likelihood or 0.0)

    def add_energy(self, energy: Energy) -> None:
        """Adds the energy that one run used."""
        self.energy = energy if self.energy is None else self.energy + energy
        self.joules = (self.joules or 0.0) + _or_nan(energy.joules)
        self.gross_joules = (self.gross_joules or 0.0) + _or_nan(energy.gross_joules)

    def include(self, line: Mapping[str, Any]) -> None:
        """Adds a whole run from its summary line in a trace, which must also have the key `drafts` (rounds with a draft), as
        comparisons write it.

        If lines have perplexity or joules per token, the total is None as soon as one run with tokens has None.
        """
        tokens = len(line["token_ids"])
        if tokens and "perplexity" in line:
            self.add_log_likelihood(-tokens * math.log(_or_nan(line["perplexity"])))
        if tokens and "joules_per_token" in line:
            self.joules = (self.joules or 0.0) + tokens * _or_nan(line["joules_per_token"])
            self.gross_joules = (self.gross_joules or 0.0) + tokens * _or_nan(line.get("gross_joules_per_token"))
        self.rounds += line["rounds"]
        self.target_passes += line.get("target_passes", line["rounds"])
        self.token_ids += line["token_ids"]
        self.drafts += line["drafts"]
        self.drafted += line["drafted"]
        self.accepted += line["accepted"]
        self.rejections += line.get("rejections", 0)
        self.ties += line.get("ties", 0)
        if line["phase_seconds"] is None:
            self.unsplit_seconds += line["seconds"]
        else:
            for phase, seconds in line["phase_seconds"].items():
                self.phase_seconds[phase] += seconds

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def seconds(self) -> float:
        """Seconds of decoding, prefill included. The time that the caller spends between rounds is not counted."""
        return sum(self.phase_seconds.values()) + self.unsplit_seconds

    @property
    def tokens_per_second(self) -> float | None:
        return self.new_tokens / self.seconds if self.seconds else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted tokens divided by drafted tokens (EESD Eq. 11)."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def draft_share(self) -> float | None:
        """Accepted tokens divided by generated tokens (EESD Eq. 12)."""
        return self.accepted / self.new_tokens if self.drafted and self.new_tokens else None

    @property
    def harmonic_mean(self) -> float | None:
        """Harmonic mean of the acceptance rate and the draft share (accepted tokens divided by generated tokens)."""
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
        """Accepted tokens per rejection, over round borders: the mean accepted tokens of PEARL's Table 4, for every method. None
        if nothing was rejected.

        Tokens accepted after an output's last rejection count. Without them, as in the authors' code, an output with long runs
        would look like one with short runs.
        """
        return self.accepted / self.rejections if self.rejections else None

    @property
    def perplexity(self) -> float | None:
        """The exponential of the mean negative log-likelihood of the generated tokens; None if it was not measured or overflows.

        The log-likelihood is the target's, at temperature 1.
        """
        if self.log_likelihood is None or not self.new_tokens:
            return None
        mean = -self.log_likelihood / self.new_tokens
        return math.exp(mean) if mean < 700 else None

    @property
    def joules_per_token(self) -> float | None:
        """Energy per generated token in joules, beyond what the idle machine uses. None if it was not measured or no energy
        counter exists."""
        return self._per_token(self.joules)

    @property
    def gross_joules_per_token(self) -> float | None:
        """The same without taking off what the idle machine uses."""
        return self._per_token(self.gross_joules)

    def _per_token(self, total: float | None) -> float | None:
        return None if total is None or math.isnan(total) or not self.new_tokens else total / self.new_tokens

    @property
    def mean_draft_length(self) -> float | None:
        """Drafted tokens per round that has a draft. None if no round has one."""
        return self.drafted / self.drafts if self.drafts else None

    def share_of_time(self, phase: str) -> float:
        return self.phase_seconds[phase] / self.seconds if self.seconds else 0.0

    def as_dict(self, text: str, finish_reason: str) -> dict[str, Any]:
        """The summary as the summary line of a trace, without the key `type`. `text` is the generated text. The keys do not
        change."""
        return {
            "method": self.method,
            "text": text,
            "token_ids": self.token_ids,
            "new_tokens": self.new_tokens,
            "finish_reason": finish_reason,
            **{name: getattr(self, name) for name in _METRICS},
            "ties": self.ties,
            "energy": None if self.energy is None else asdict(self.energy),
            "phase_seconds": dict(self.phase_seconds),
            **({"capture_seconds": self.capture_seconds} if self.capture_seconds else {}),
        }


def speed_without_prefill(rounds: Iterable[Round]) -> float:
    """Returns the tokens per second of all these rounds but prefills; 0 without any other round."""
    tokens, seconds = 0, 0.0
    for round_ in rounds:
        if round_.mode != "prefill":
            tokens += len(round_.token_ids)
            seconds += sum(round_.seconds.values())
    return tokens / seconds if seconds else 0.0


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
