"""EESD's length policies: Thompson sampling of the acceptance rate (EESD, section 3.3). Imports no
torch.

The paper's Q_d are the drafted tokens of a round and Q_v the accepted ones; t is the number of
tokens accepted so far.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import ClassVar

from specgen.base.errors import SpecgenError
from specgen.base.settings import Setting
from specgen.decoding.policy_base import DraftedToken, LengthPolicy, longest_draft_setting
from specgen.methods.base import Grid
from specgen.methods.model_drafts import ChainMethod

CORRECTED = "corrected"
PRINTED = "printed"
RULE = {
    "rule": Setting(
        CORRECTED,
        "count accepted and rejected tokens, or update as the paper prints",
        choices=(CORRECTED, PRINTED),
    )
}


class ThompsonSampling(LengthPolicy):
    """Base of policies that sample theta, the probability that a token is accepted, after each
    drafted token, and then draft another one with probability theta (EESD, Algorithm 1)."""

    random = True

    def __init__(self, max_draft: int, seed: int) -> None:
        self.max_draft = max_draft
        self._rng = random.Random(seed)

    def _continue_with(self, theta: float, token: DraftedToken) -> bool:
        if self._rng.random() >= theta:
            self.reason = f"bandit θ {theta:.2f}"
            return False
        return self._below(self.max_draft, token)


class BetaTS(ThompsonSampling):
    """Thompson sampling of the acceptance rate: theta ~ Beta(alpha, beta) (EESD, Algorithm 2,
    corrected).

    After each verification alpha += r and beta += n - r, where r of n judged tokens were accepted:

        printed:  r = |Q_v| - 1,  n = min(|Q_v| + 1, |Q_d|)
        here:     r = |Q_v|,      n = min(|Q_v| + 1, |Q_d|)

    With the printed r, an acceptance rate below 1 makes alpha fall until it is negative. The
    setting `rule=printed` uses it all the same; theta is 0 while alpha is not positive.
    """

    name = "beta-ts"
    source = "EESD, Algorithm 2 (corrected)"
    settings: ClassVar = {
        "alpha": Setting(1.0, "prior successes", 1e-3, 1e6, tuned=(1.0, 2.0, 5.0, 10.0)),
        "beta": Setting(1.0, "prior failures", 1e-3, 1e6, tuned=(0.5, 1.0, 2.0, 5.0)),
        "max_draft": longest_draft_setting(40, 6, 12, 40),
        **RULE,
    }

    def __init__(
        self, alpha: float, beta: float, max_draft: int, seed: int, rule: str = CORRECTED
    ) -> None:
        super().__init__(max_draft, seed)
        self.alpha = alpha
        self.beta = beta
        self._is_printed = rule == PRINTED

    def keep_drafting(self, token: DraftedToken) -> bool:
        theta = 0.0
        if self.alpha > 0:
            theta = self._rng.betavariate(self.alpha, self.beta)
        return self._continue_with(theta, token)

    def observe(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        successes = accepted - 1 if self._is_printed else accepted
        self.alpha += successes
        self.beta += min(accepted + 1, drafted) - successes

    def state(self) -> Mapping[str, float]:
        return {"alpha": self.alpha, "beta": self.beta}


class CaliTS(ThompsonSampling):
    """Thompson sampling calibrated by a predictor: theta ~ N(mu, sigma^2), clipped to [0, 1] (EESD,
    Algorithm 3, corrected).

    With n verified drafts so far, sigma_M the setting `sigma_model`, sigma_S the setting
    `sigma_sample`, and theta_M the predictor's acceptance probability for the token:

        mu      = (sigma_S^2 * theta_M + n * sigma_M^2 * theta_hat) / (sigma_S^2 + n * sigma_M^2)
        sigma^2 = sigma_M^2 * sigma_S^2 / (sigma_S^2 + n * sigma_M^2)            (Eq. 6 and 7)

    theta_hat estimates the acceptance rate. The setting `theta0` is its first value:

        printed:  theta_hat = (theta_hat * (t - |Q_v| + 1) + |Q_v|) / (t + 1)    (Eq. 8)
        here:     theta_hat = (theta0 + accepted) / (1 + judged)

    `accepted` and `judged` are sums over all rounds of |Q_v| and min(|Q_v| + 1, |Q_d|). The printed
    update counts no rejections: it is (t + theta0) / (t + 1) whatever happens. The setting
    `rule=printed` uses it all the same.

    Table 4 switches one of the two estimates off. With `sampling_prediction` off, theta is drawn
    from N(theta_M, sigma_M^2); with `model_prediction` off, from N(theta_hat, sigma_S^2 / n), with
    n at least 1. Raises SpecgenError if both settings are off.
    """

    name = "cali-ts"
    source = "EESD, Algorithm 3 (corrected)"
    optional_signals: ClassVar = {"model_prediction": frozenset({"predicted_acceptance"})}
    settings: ClassVar = {
        "sigma_model": Setting(
            0.3, "standard deviation of the predictor's error", 1e-3, 10, tuned=(0.1, 0.3, 0.5)
        ),
        "sigma_sample": Setting(
            3.0, "standard deviation of a round's acceptance rate", 1e-3, 10, tuned=(1.0, 3.0)
        ),
        "theta0": Setting(0.7, "prior acceptance rate", 0, 1, tuned=(0.5, 0.7, 0.9)),
        "model_prediction": Setting(True, "use the predictor's score of each token"),
        "sampling_prediction": Setting(True, "use the acceptance rate so far"),
        "max_draft": longest_draft_setting(40, 3, 5, 8, 40),
        **RULE,
    }

    def __init__(
        self,
        sigma_model: float,
        sigma_sample: float,
        theta0: float,
        model_prediction: bool,
        sampling_prediction: bool,
        max_draft: int,
        seed: int,
        rule: str = CORRECTED,
    ) -> None:
        if not model_prediction and not sampling_prediction:
            raise SpecgenError(
                "cali-ts has neither model_prediction nor sampling_prediction",
                "Leave one of them on",
            )
        super().__init__(max_draft, seed)
        self.model_prediction = model_prediction
        self.sampling_prediction = sampling_prediction
        self.signals = self.signals_with({"model_prediction": model_prediction})
        self._model_variance = sigma_model**2
        self._sample_variance = sigma_sample**2
        self._is_printed = rule == PRINTED
        self._rounds = 0
        self._accepted = theta0
        self._judged = 1.0
        self.predictions: list[float] = []  # theta_M of each token of the draft so far
        self._mean_score: float | None = None  # of the last draft

    @property
    def theta_hat(self) -> float:
        return self._accepted / self._judged

    def posterior(self, score: float | None) -> tuple[float, float]:
        """Computes mean and variance of theta from `score`, the predictor's theta_M for a token,
        and the drafts verified so far.

        `score` is None if `model_prediction` is off.
        """
        rounds = self._rounds
        model = self._model_variance
        sample = self._sample_variance
        if not self.model_prediction or score is None:
            return self.theta_hat, sample / max(rounds, 1)
        if not self.sampling_prediction:
            return score, model
        weight = sample + rounds * model
        return (sample * score + rounds * model * self.theta_hat) / weight, model * sample / weight

    def keep_drafting(self, token: DraftedToken) -> bool:
        score = None
        if self.model_prediction:
            score = token["predicted_acceptance"]
            self.predictions.append(score)
        mean, variance = self.posterior(score)
        return self._continue_with(
            min(max(self._rng.gauss(mean, math.sqrt(variance)), 0.0), 1.0), token
        )

    def observe(self, drafted: int, accepted: int) -> None:
        if drafted:
            self._rounds += 1
            self._accepted += accepted
            self._judged += accepted if self._is_printed else min(accepted + 1, drafted)
        if self.predictions:
            self._mean_score = sum(self.predictions) / len(self.predictions)
            self.predictions.clear()

    def state(self) -> Mapping[str, float]:
        """theta_hat and the number of verified drafts (`rounds`), and the mean and standard
        deviation of theta.

        The last two are computed for the mean theta_M of the last draft. If `model_prediction` is
        on, they are missing before the first draft.
        """
        learned = {"theta_hat": self.theta_hat, "rounds": self._rounds}
        if self.model_prediction and self._mean_score is None:
            return learned
        mean, variance = self.posterior(self._mean_score)
        return learned | {"mean": mean, "deviation": math.sqrt(variance)}


class BetaTSMethod(ChainMethod):
    name = "beta-ts"
    paper = "EESD, Table 5"
    policy = "beta-ts"


# what is tried for an exit layer
CALI_TS_GRID: Grid = {
    "policy": ("cali-ts",),
    "sigma_model": (0.1, 0.3, 0.5),
    "sigma_sample": (1.0, 3.0),
    "theta0": (0.5, 0.7, 0.9),
    "max_draft": (3, 5, 8, 40),
}
BETA_TS_GRID: Grid = {
    "policy": ("beta-ts",),
    "alpha": (1.0, 2.0, 5.0),
    "beta": (0.5, 1.0, 2.0, 5.0),
    "max_draft": (4, 8, 40),
}
