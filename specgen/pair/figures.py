"""Counts and metrics of recorded runs (generations), computed from their rounds: a round is a
target pass with the draft that it verified (in joint decoding several passes). Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field
from typing import Any

from specgen.base.measuring import Energy
from specgen.base.types import PHASES, Round

_COUNTS: Mapping[str, Callable[[Round], int]] = {
    "rounds": lambda round_: 1,
    "target_passes": lambda round_: round_.target_passes,
    "drafts": lambda round_: bool(round_.draft.tokens),
    "drafted": lambda round_: len(round_.draft.tokens),
    "accepted": lambda round_: len(round_.verdict.path),
    "copied": lambda round_: len(round_.draft.tokens) * round_.draft.is_copied,
    "copied_accepted": lambda round_: len(round_.verdict.path) * round_.draft.is_copied,
    "rejections": lambda round_: round_.verdict.source == "correction",
    "ties": lambda round_: round_.verdict.ties,
}
_METRICS = (
    *(
        "seconds",
        "tokens_per_second",
        "decode_tokens_per_second",
        "prompt_tokens_per_second",
        "rounds",
        "target_passes",
        "drafted",
        "accepted",
        "acceptance_rate",
        "draft_share",
    ),
    *("copied", "copied_accepted"),
    *("harmonic_mean", "block_efficiency", "mean_accepted_run", "perplexity", "joules_per_token"),
    "gross_joules_per_token",
)


@dataclass(slots=True)
class Figures:
    """Counts tokens, target passes and seconds over the rounds of one or more runs, and computes
    metrics from them. More rounds or whole runs can be added. Rates are fractions from 0 to 1, None
    if nothing was drafted.

    `drafts` counts the rounds with a draft. `copied` and `copied_accepted` count those of the
    `drafted` and the `accepted` tokens that were copied (`Draft.is_copied`). `ties` counts tokens
    that the target chose between equal logits (half precision). `log_likelihood` (nats) is that of
    the generated tokens under the target at temperature 1. `joules` are those beyond idle power;
    they and `gross_joules` are NaN if the energy of one run is unknown. `capture_seconds` is the
    part of the time that went into capturing CUDA graphs, which later runs need not do again.
    `unsplit_seconds` are those of runs without times by phase. `prompt_tokens` are those of the
    prompts that were run, because no cache held them; None: unknown or none. `prefill_seconds` is
    the time until the first tokens, of which there are `prefill_tokens`; NaN if it is unknown for
    one run. `parallel`: drafts were made during target passes (PEARL).
    """

    method: str
    given: InitVar[Iterable[Round]] = ()
    token_ids: list[int] = field(default_factory=list)
    rounds: int = 0
    target_passes: int = 0  # the prefill is one
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    copied: int = 0
    copied_accepted: int = 0
    rejections: int = 0
    ties: int = 0
    parallel: bool = False
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    unsplit_seconds: float = 0.0
    capture_seconds: float = 0.0
    first_token_seconds: float | None = None
    prefill_seconds: float = 0.0
    prefill_tokens: int = 0
    prompt_tokens: float | None = None
    log_likelihood: float | None = None
    energy: Energy | None = None
    joules: float | None = None
    gross_joules: float | None = None

    def __post_init__(self, given: Iterable[Round]) -> None:
        for round_ in given:
            self.add(round_)

    def add(self, round_: Round) -> None:
        if self.first_token_seconds is None:
            self.first_token_seconds = sum(round_.seconds.values())
            self.prefill_seconds += self.first_token_seconds
            self.prefill_tokens += len(round_.token_ids)
        counts = {name: count(round_) for name, count in _COUNTS.items()}
        self._add(counts, round_.token_ids, round_.seconds)
        self.parallel |= round_.mode in ("pre-verify", "post-verify")

    def include(self, line: Mapping[str, Any]) -> None:
        """Adds a whole run from its summary line in a trace, which must also have the key `drafts`,
        as comparisons write it.

        If the lines have perplexities, the `perplexity` of all runs is None as soon as one run with
        new tokens has None. The same holds for joules per token.
        """
        tokens = len(line["token_ids"])
        if tokens and "perplexity" in line:
            self.add_log_likelihood(-tokens * math.log(_or_nan(line["perplexity"])))
        if tokens and "joules_per_token" in line:
            self._add_joules(
                tokens * _or_nan(line["joules_per_token"]),
                tokens * _or_nan(line.get("gross_joules_per_token")),
            )
        first = _or_nan(line.get("first_token_seconds"))
        self.prefill_seconds += first
        self.prefill_tokens += bool(tokens)
        self.prompt_tokens = (self.prompt_tokens or 0) + first * _or_nan(
            line.get("prompt_tokens_per_second")
        )
        # lines of earlier versions lack them
        older = dict.fromkeys(_COUNTS, 0) | {"target_passes": line["rounds"]}
        self._add({**older, **line}, line["token_ids"], line["phase_seconds"] or {})
        self.unsplit_seconds += line["seconds"] if line["phase_seconds"] is None else 0.0

    def _add(
        self, counts: Mapping[str, Any], token_ids: Iterable[int], seconds: Mapping[str, float]
    ) -> None:
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + counts[name])
        self.token_ids += token_ids
        for phase, taken in seconds.items():
            self.phase_seconds[phase] += taken

    def add_log_likelihood(self, nats: float) -> None:
        """Adds the log-likelihood of one run's tokens. For a valid perplexity it has to be added
        for every run."""
        self.log_likelihood = nats + (self.log_likelihood or 0.0)

    def add_energy(self, energy: Energy) -> None:
        """Adds the energy (joules) that one run used. For valid joules per token it has to be added
        for every run."""
        self.energy = energy
        self._add_joules(_or_nan(energy.joules), _or_nan(energy.gross_joules))

    def _add_joules(self, joules: float, gross: float) -> None:
        self.joules = (self.joules or 0.0) + joules
        self.gross_joules = (self.gross_joules or 0.0) + gross

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def seconds(self) -> float:
        """Seconds of decoding, prefill included. The time that the caller spends between rounds is
        not counted."""
        return sum(self.phase_seconds.values()) + self.unsplit_seconds

    @property
    def tokens_per_second(self) -> float | None:
        return _ratio(self.new_tokens, self.seconds)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """The speed without the prompt: tokens after each output's first, divided by the time that
        they took."""
        if math.isnan(self.prefill_seconds):
            return None
        return _ratio(
            self.new_tokens - self.prefill_tokens or None, self.seconds - self.prefill_seconds
        )

    @property
    def prompt_tokens_per_second(self) -> float | None:
        """Tokens of the prompt that were run, divided by the time until the first token."""
        return (
            None
            if math.isnan(self.prefill_seconds)
            else _ratio(self.prompt_tokens, self.prefill_seconds)
        )

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted tokens divided by drafted tokens (EESD Eq. 11)."""
        return _ratio(self.accepted, self.drafted)

    @property
    def by_source(self) -> Sequence[tuple[str, str]]:
        """How many tokens were accepted of those drafted by each source, as `34/35`, and the source
        in words. Empty unless both a model and copies of the context have drafted."""
        of_model = self.drafted - self.copied
        if not self.copied or not of_model:
            return ()
        return (
            (f"{self.copied_accepted:,}/{self.copied:,}", "copied"),
            (f"{self.accepted - self.copied_accepted:,}/{of_model:,}", "by the model"),
        )

    @property
    def draft_share(self) -> float | None:
        """Accepted tokens divided by generated tokens (EESD Eq. 12)."""
        return _ratio(self.accepted, self.new_tokens) if self.drafted else None

    @property
    def harmonic_mean(self) -> float | None:
        """Harmonic mean of the acceptance rate and the draft share (accepted tokens divided by
        generated tokens)."""
        rate = self.acceptance_rate
        share = self.draft_share
        if rate is None or share is None:
            return None
        return 2 * rate * share / (rate + share) if rate + share else 0.0

    @property
    def block_efficiency(self) -> float | None:
        """Generated tokens per target pass; 1 for plain decoding."""
        return _ratio(self.new_tokens, self.target_passes)

    @property
    def mean_accepted_run(self) -> float | None:
        """Accepted tokens divided by rejections: the mean length of runs of accepted tokens, which
        may span several rounds (mean accepted tokens in PEARL's Table 4). None if nothing was
        rejected.

        Tokens accepted after an output's last rejection count too. The authors' code leaves them
        out, which makes an output with long runs look like one with short runs.
        """
        return _ratio(self.accepted, self.rejections)

    @property
    def perplexity(self) -> float | None:
        """The exponential of the mean negative log-likelihood of the generated tokens.

        None if it was not measured or overflows.
        """
        mean = (
            _ratio(-self.log_likelihood, self.new_tokens)
            if self.log_likelihood is not None
            else None
        )
        return math.exp(mean) if mean is not None and mean < 700 else None

    @property
    def joules_per_token(self) -> float | None:
        """Energy per generated token in joules, beyond what the idle machine uses. None if it was
        not measured or no energy counter exists."""
        return _ratio(self.joules, self.new_tokens)

    @property
    def gross_joules_per_token(self) -> float | None:
        """Energy per generated token in joules, with what the idle machine uses. None as in
        `joules_per_token`."""
        return _ratio(self.gross_joules, self.new_tokens)

    @property
    def mean_draft_length(self) -> float | None:
        """Drafted tokens per round that has a draft. None if no round has one."""
        return _ratio(self.drafted, self.drafts)

    def share_of_time(self, phase: str) -> float:
        return _ratio(self.phase_seconds[phase], self.seconds) or 0.0

    def as_dict(self, text: str, finish_reason: str) -> dict[str, Any]:
        """Returns the figures of one run as the summary line of a trace, without the key `type`.
        The keys are documented and do not change.

        `text` is the generated text, `finish_reason` why it ended.
        """
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
            "first_token_seconds": self.first_token_seconds,
            **({"capture_seconds": self.capture_seconds} if self.capture_seconds else {}),
        }


def _ratio(total: float | None, count: float) -> float | None:
    """`total` divided by `count`; None if the total is unknown (None, NaN) or the count is 0."""
    return None if total is None or math.isnan(total) or not count else total / count


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
