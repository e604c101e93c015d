"""Length policies: when does drafting stop? Any of them works on any drafter that can feed it (EESD Table 5, SVIP Tables 3, 4).

A policy is asked after each drafted token, which is kept whatever it says: only so does a policy that looks at the token itself
leave the output's distribution alone. After verification it learns how many were drafted and accepted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from specgen.errors import SpecgenError

Signals = frozenset[str]


@dataclass(slots=True)
class DraftedToken:
    """One drafted token as a policy sees it. `place` counts from 1; what the drafter was not asked to feed is NaN.

    `entropy` (nats) is that of the unwarped distribution; `prob` the token's own probability, in the distribution that it was
    drawn from or, in greedy decoding, the unwarped one. `agreement` is a predictor's: how likely the target says the same.
    """

    position: int
    entropy: float = math.nan
    prob: float = math.nan
    agreement: float = math.nan


class LengthPolicy(Protocol):
    """What stops a draft. `reason` says in a few words why the last one ended."""

    reason: str

    @property
    def signals(self) -> Signals: ...

    def keep_drafting(self, step: DraftedToken) -> bool: ...

    def observe(self, drafted: int, accepted: int) -> None: ...

    def state(self) -> Mapping[str, float] | None:
        """What it has learned so far, for a trace."""
        ...


class Fixed:
    """Always k tokens (Leviathan et al. 2023)."""

    signals: ClassVar[Signals] = frozenset()

    def __init__(self, k: int) -> None:
        self.k = k
        self.reason = f"limit {k}"

    def keep_drafting(self, step: DraftedToken) -> bool:
        return step.position < self.k

    def observe(self, drafted: int, accepted: int) -> None:
        pass

    def state(self) -> None:
        return None


class Always:
    """Never ends a draft: its limit stands elsewhere, as PEARL's window does."""

    signals: ClassVar[Signals] = frozenset()
    reason = ""

    def keep_drafting(self, step: DraftedToken) -> bool:
        return True

    def observe(self, drafted: int, accepted: int) -> None:
        pass

    def state(self) -> None:
        return None


class Heuristic:
    """Transformers' schedule: two more after a draft that was accepted whole, one less otherwise, never below one."""

    signals: ClassVar[Signals] = frozenset()

    def __init__(self, k: int, max_draft: int) -> None:
        self.k, self.max_draft = min(k, max_draft), max_draft
        self.reason = f"limit {self.k}"

    def keep_drafting(self, step: DraftedToken) -> bool:
        self.reason = f"limit {self.k}"
        return step.position < self.k

    def observe(self, drafted: int, accepted: int) -> None:
        if drafted:
            self.k = min(self.k + 2, self.max_draft) if accepted == drafted else max(self.k - 1, 1)

    def state(self) -> Mapping[str, float]:
        return {"k": self.k}


class Confidence:
    """Stop after a token that the draft itself gave a probability below the threshold (transformers' dynamic length)."""

    signals: ClassVar[Signals] = frozenset({"prob"})

    def __init__(self, threshold: float, max_draft: int) -> None:
        self.threshold, self.max_draft = threshold, max_draft
        self.reason = ""

    def keep_drafting(self, step: DraftedToken) -> bool:
        if step.prob < self.threshold:
            self.reason = f"prob {step.prob:.2f} < {self.threshold:.2f}"
            return False
        self.reason = f"limit {self.max_draft}"
        return step.position < self.max_draft

    def observe(self, drafted: int, accepted: int) -> None:
        pass

    def state(self) -> Mapping[str, float] | None:
        return None


class SVIP:
    """Stop where the draft's entropy says that acceptance is doubtful: sqrt(c * H) > threshold (SVIP section 3.2).

    With the authors' constant c, for which their printed thresholds hold. H is taken at temperature 1, in greedy decoding too.
    """

    signals: ClassVar[Signals] = frozenset({"entropy"})

    def __init__(self, threshold: float, c: float, max_draft: int) -> None:
        self.threshold, self.c, self.max_draft = threshold, c, max_draft
        self.reason = ""

    def keep_drafting(self, step: DraftedToken) -> bool:
        doubt = math.sqrt(self.c * step.entropy)
        if doubt > self.threshold:
            self.reason = f"√cH {doubt:.2f} > {self.threshold:.2f}"
            return False
        self.reason = f"limit {self.max_draft}"
        return step.position < self.max_draft

    def observe(self, drafted: int, accepted: int) -> None:
        pass

    def state(self) -> None:
        return None


class BetaTS:
    """Thompson sampling of the acceptance rate: go on with probability theta ~ Beta(alpha, beta) (EESD Algorithm 2, mended).

    The update counts the tokens that the target really judged: `accepted` successes in `min(accepted + 1, drafted)` trials. The
    printed one has no fixed point for an acceptance rate below 1.
    """

    signals: ClassVar[Signals] = frozenset()

    def __init__(self, alpha: float, beta: float, max_draft: int, seed: int) -> None:
        self.alpha, self.beta, self.max_draft = alpha, beta, max_draft
        self.reason = ""
        self._rng = random.Random(seed)

    def keep_drafting(self, step: DraftedToken) -> bool:
        theta = self._rng.betavariate(self.alpha, self.beta)
        if self._rng.random() >= theta:
            self.reason = f"bandit θ {theta:.2f}"
            return False
        self.reason = f"limit {self.max_draft}"
        return step.position < self.max_draft

    def observe(self, drafted: int, accepted: int) -> None:
        judged = min(accepted + 1, drafted)
        self.alpha += accepted
        self.beta += judged - accepted

    def state(self) -> Mapping[str, float]:
        return {"alpha": self.alpha, "beta": self.beta}


class CaliTS:
    """Thompson sampling calibrated by a predictor: theta ~ N(mu, sigma^2), clipped to [0, 1] (EESD Algorithm 3, mended).

    mu weighs the predictor's score theta_M of the token against theta_hat, the share of judged tokens that were accepted, with
    `theta0` as a prior of weight 1: the printed update forgets what was observed. Either part may be switched off (Table 4).
    """

    def __init__(
        self,
        sigma_model: float,
        sigma_sample: float,
        theta0: float,
        model_prediction: bool,
        sampling_prediction: bool,
        max_draft: int,
        seed: int,
    ) -> None:
        if not model_prediction and not sampling_prediction:
            raise SpecgenError("cali-ts has neither model_prediction nor sampling_prediction", "Leave one of them on")
        self.model_prediction, self.sampling_prediction = model_prediction, sampling_prediction
        self.signals: Signals = frozenset({"agreement"}) if model_prediction else frozenset()
        self.max_draft = max_draft
        self.reason = ""
        self._model_variance, self._sample_variance = sigma_model**2, sigma_sample**2
        self._rounds = 0
        self._accepted, self._judged = theta0, 1.0
        self._scores: list[float] = []  # theta_M of the draft's tokens so far
        self._agreement = math.nan  # their mean in the last draft
        self._rng = random.Random(seed)

    @property
    def theta_hat(self) -> float:
        return self._accepted / self._judged

    def posterior(self, agreement: float) -> tuple[float, float]:
        """mu and sigma^2 of theta, after as many rounds as were observed."""
        rounds, model, sample = self._rounds, self._model_variance, self._sample_variance
        if not self.model_prediction:
            return self.theta_hat, sample / max(rounds, 1)
        if not self.sampling_prediction:
            return agreement, model
        weight = sample + rounds * model
        return (sample * agreement + rounds * model * self.theta_hat) / weight, model * sample / weight

    def keep_drafting(self, step: DraftedToken) -> bool:
        self._scores.append(step.agreement)
        mean, variance = self.posterior(step.agreement)
        theta = min(max(self._rng.gauss(mean, math.sqrt(variance)), 0.0), 1.0)
        if self._rng.random() >= theta:
            self.reason = f"bandit θ {theta:.2f}"
            return False
        self.reason = f"limit {self.max_draft}"
        return step.position < self.max_draft

    def observe(self, drafted: int, accepted: int) -> None:
        if drafted:
            self._rounds += 1
            self._accepted += accepted
            self._judged += min(accepted + 1, drafted)
        if self._scores:
            self._agreement = sum(self._scores) / len(self._scores)
            self._scores.clear()

    def state(self) -> Mapping[str, float]:
        """With the mean and the deviation of theta at the mean score of the last draft, as soon as there is one."""
        learned = {"theta_hat": self.theta_hat, "rounds": self._rounds}
        mean, variance = self.posterior(self._agreement)
        return learned if math.isnan(mean) else learned | {"mean": mean, "deviation": math.sqrt(variance)}


class SelfSD(Confidence):
    """Stop after a token whose probability is under a threshold that adapts to the acceptance rate (Self-SD, section 3.4).

    The threshold goes up where fewer than 0.9 of the tokens are accepted, down where more are, unless the draft was as long as
    it may be: then it was not the threshold that ended it.
    """

    WANTED, STEP, MEMORY = 0.9, 0.01, 0.9
    _FIRST = 0.6

    def __init__(self, k: int) -> None:
        super().__init__(self._FIRST, k)
        self._accepted = self.WANTED

    def observe(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        self._accepted = 0.5 * self._accepted + 0.5 * accepted / drafted
        wanted = self.threshold
        if self._accepted < self.WANTED:
            wanted += self.STEP
        elif drafted < self.max_draft:
            wanted -= self.STEP
        self.threshold = self.MEMORY * self.threshold + (1 - self.MEMORY) * wanted

    def state(self) -> Mapping[str, float]:
        return {"threshold": self.threshold}
