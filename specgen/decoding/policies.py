"""Length policies: rules that decide after each drafted token whether the draft continues.

A policy reads signals: numbers about a drafted token, such as the entropy of its distribution. It works with any drafter that
computes the signals it reads (EESD Table 5). The token stays in the draft whatever the policy decides: dropping a token because
of its own probability would change the output's distribution. After verification the policy learns how many tokens were accepted.

To add a policy, write a class here and list it in `POLICIES`. Imports no torch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import ClassVar

from specgen.base.errors import SpecgenError
from specgen.base.settings import Setting, Settings
from specgen.decoding.adaptive import Adaptive
from specgen.decoding.length_policy import DraftedToken, LengthPolicy, Signals, comparison

_TENTHS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_SVIP_THRESHOLDS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.85)


def _max_draft(default: int, *tuned: int) -> Setting:
    return Setting(default, "longest draft", 1, 1000, tuned=tuned)


class Fixed(LengthPolicy):
    """Ends each draft after k tokens (Leviathan et al. 2023)."""

    name = "fixed"
    source = "Leviathan et al. 2023"
    settings: ClassVar = {"k": Setting(5, "tokens in a draft; in a tree: levels", 1, 1000, tuned=range(1, 17))}

    def __init__(self, k: int) -> None:
        self.k = k

    def keep_drafting(self, token: DraftedToken) -> bool:
        return self._below(self.k, token)


class Heuristic(LengthPolicy):
    """The schedule of transformers: after a fully accepted draft the next is two tokens longer, otherwise one shorter.

    The length stays between 1 and `max_draft`.
    """

    name = "heuristic"
    source = "transformers' schedule"
    settings: ClassVar = {
        "k": Setting(5, "tokens in the first draft", 1, 1000, tuned=(2, 3, 5, 8)),
        "max_draft": _max_draft(40, 4, 6, 8, 12, 20, 40),
    }

    def __init__(self, k: int, max_draft: int) -> None:
        self.k, self.max_draft = min(k, max_draft), max_draft

    def keep_drafting(self, token: DraftedToken) -> bool:
        return self._below(self.k, token)

    def observe(self, drafted: int, accepted: int) -> None:
        if drafted:
            self.k = min(self.k + 2, self.max_draft) if accepted == drafted else max(self.k - 1, 1)

    def state(self) -> Mapping[str, float]:
        return {"k": self.k}


class Confidence(LengthPolicy):
    """Stop after a token whose draft probability is below the threshold (transformers' dynamic length)."""

    name = "confidence"
    source = "transformers' dynamic length"
    signals = frozenset({"prob"})
    settings: ClassVar = {
        "threshold": Setting(0.4, "stop after a token with a lower probability than this", 0, 1, tuned=_TENTHS),
        "max_draft": _max_draft(20, 4, 6, 8, 12, 20),
    }

    def __init__(self, threshold: float, max_draft: int) -> None:
        self.threshold, self.max_draft = threshold, max_draft

    def keep_drafting(self, token: DraftedToken) -> bool:
        if (prob := token["prob"]) < self.threshold:
            self.reason = f"prob {comparison(prob, '<', self.threshold)}"
            return False
        return self._below(self.max_draft, token)


class SVIP(LengthPolicy):
    """Stops after a token with sqrt(c * H) > threshold, where its acceptance is unlikely (SVIP, section 2.3, Algorithm 1).

    H is the entropy (nats) of the draft's distribution at temperature 1 without penalties, in greedy decoding too. c is the
    constant of Eq. 6. Algorithm 1 leaves it out, but the paper's thresholds assume the value in the authors' code, 0.15. Only
    threshold^2 / c matters, so `tune` varies only the threshold. Decides only after every n-th token (level, for a tree), n being
    `every`: on EAGLE-2's trees the paper decides after every second one.
    """

    name = "svip"
    source = "SVIP, section 2.3 and Algorithm 1"
    signals = frozenset({"entropy"})
    settings: ClassVar = {
        "threshold": Setting(0.4, "stop where sqrt(c * entropy) is above this", 0, 100, tuned=_SVIP_THRESHOLDS),
        "c": Setting(0.15, "the authors' constant for the cross-entropy's share", 0, 100, tuned=(0.15,)),
        "every": Setting(1, "decide only after every n-th token", 1, 1000),
        "max_draft": _max_draft(40, 4, 6, 8, 12, 20, 40),
    }

    def __init__(self, threshold: float, c: float, max_draft: int, every: int = 1) -> None:
        self.threshold, self.c, self.max_draft, self.every = threshold, c, max_draft, every

    def keep_drafting(self, token: DraftedToken) -> bool:
        scaled = math.sqrt(self.c * token["entropy"])
        if scaled > self.threshold and token.position % self.every == 0:
            self.reason = f"√cH {comparison(scaled, '>', self.threshold)}"
            return False
        return self._below(self.max_draft, token)


class ThompsonSampling(LengthPolicy):
    """Base of policies that sample an acceptance probability theta, and then draft another token with probability theta."""

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
    """Thompson sampling of the acceptance rate: theta ~ Beta(alpha, beta) (EESD, Algorithm 2, corrected).

    The update counts the tokens up to the first rejected one: `accepted` successes in `min(accepted + 1, drafted)` trials. The
    paper's printed update does not converge for an acceptance rate below 1.
    """

    name = "beta-ts"
    source = "EESD, Algorithm 2 (corrected)"
    settings: ClassVar = {
        "alpha": Setting(1.0, "prior successes", 1e-3, 1e6, tuned=(1.0, 2.0, 5.0, 10.0)),
        "beta": Setting(1.0, "prior failures", 1e-3, 1e6, tuned=(0.5, 1.0, 2.0, 5.0)),
        "max_draft": _max_draft(40, 6, 12, 40),
    }

    def __init__(self, alpha: float, beta: float, max_draft: int, seed: int) -> None:
        super().__init__(max_draft, seed)
        self.alpha, self.beta = alpha, beta

    def keep_drafting(self, token: DraftedToken) -> bool:
        return self._continue_with(self._rng.betavariate(self.alpha, self.beta), token)

    def observe(self, drafted: int, accepted: int) -> None:
        self.alpha += accepted
        self.beta += min(accepted + 1, drafted) - accepted

    def state(self) -> Mapping[str, float]:
        return {"alpha": self.alpha, "beta": self.beta}


class CaliTS(ThompsonSampling):
    """Thompson sampling calibrated by a predictor: theta ~ N(mu, sigma^2), clipped to [0, 1] (EESD, Algorithm 3, corrected).

    mu is a weighted mean of theta_M, the predictor's acceptance probability for the token, and theta_hat, the share of verified
    tokens accepted so far. `theta0` counts as one such token (the paper's printed update forgets earlier observations).
    `model_prediction` and `sampling_prediction` switch theta_M and theta_hat on (Table 4). Raises SpecgenError if both are off.
    """

    name = "cali-ts"
    source = "EESD, Algorithm 3 (corrected)"
    optional_signals: ClassVar = {"model_prediction": frozenset({"predicted_acceptance"})}
    settings: ClassVar = {
        "sigma_model": Setting(0.3, "standard deviation of the predictor's error", 1e-3, 10, tuned=(0.1, 0.3, 0.5)),
        "sigma_sample": Setting(3.0, "standard deviation of a round's acceptance rate", 1e-3, 10, tuned=(1.0, 3.0)),
        "theta0": Setting(0.7, "prior acceptance rate", 0, 1, tuned=(0.5, 0.7, 0.9)),
        "model_prediction": Setting(True, "use the predictor's score of each token"),
        "sampling_prediction": Setting(True, "use the acceptance rate so far"),
        "max_draft": _max_draft(40, 3, 5, 8, 40),
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
    ) -> None:
        if not model_prediction and not sampling_prediction:
            raise SpecgenError("cali-ts has neither model_prediction nor sampling_prediction", "Leave one of them on")
        super().__init__(max_draft, seed)
        self.model_prediction, self.sampling_prediction = model_prediction, sampling_prediction
        self.signals = self.signals_with({"model_prediction": model_prediction})
        self._model_variance, self._sample_variance = sigma_model**2, sigma_sample**2
        self._rounds = 0
        self._accepted, self._judged = theta0, 1.0
        self.predictions: list[float] = []  # theta_M of each token of the draft so far
        self._mean_score: float | None = None  # of the last draft

    @property
    def theta_hat(self) -> float:
        return self._accepted / self._judged

    def posterior(self, score: float | None) -> tuple[float, float]:
        """Computes mean and variance of theta from `score`, the predictor's theta_M for a token, and the drafts verified so far.

        `score` is None if `model_prediction` is off.
        """
        rounds, model, sample = self._rounds, self._model_variance, self._sample_variance
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
        return self._continue_with(min(max(self._rng.gauss(mean, math.sqrt(variance)), 0.0), 1.0), token)

    def observe(self, drafted: int, accepted: int) -> None:
        if drafted:
            self._rounds += 1
            self._accepted += accepted
            self._judged += min(accepted + 1, drafted)
        if self.predictions:
            self._mean_score = sum(self.predictions) / len(self.predictions)
            self.predictions.clear()

    def state(self) -> Mapping[str, float]:
        """theta_hat and the number of verified drafts; also theta's mean and standard deviation at the last mean theta_M.

        Mean and deviation are missing before the first draft if `model_prediction` is on.
        """
        learned = {"theta_hat": self.theta_hat, "rounds": self._rounds}
        if self.model_prediction and self._mean_score is None:
            return learned
        mean, variance = self.posterior(self._mean_score)
        return learned | {"mean": mean, "deviation": math.sqrt(variance)}


class SelfSD(Confidence):
    """Stop after a token whose probability is below a threshold that adapts to the acceptance rate (Self-SD, section 3.4).

    The threshold rises if less than 0.9 of the drafted tokens are accepted (a moving average), and falls otherwise. It does not
    fall after a draft of the maximal length `k`, because the threshold did not end that draft.
    """

    name = "selfsd"
    source = "Self-SD, section 3.4"
    settings: ClassVar = {"k": Setting(12, "longest draft", 1, 1000)}

    TARGET_RATE, STEP, MEMORY, INITIAL = 0.9, 0.01, 0.9, 0.6

    def __init__(self, k: int) -> None:
        super().__init__(self.INITIAL, k)
        self._rate = self.TARGET_RATE

    def observe(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        self._rate = 0.5 * self._rate + 0.5 * accepted / drafted
        wanted = self.threshold
        if self._rate < self.TARGET_RATE:
            wanted += self.STEP
        elif drafted < self.max_draft:
            wanted -= self.STEP
        self.threshold = self.MEMORY * self.threshold + (1 - self.MEMORY) * wanted

    def state(self) -> Mapping[str, float]:
        return {"threshold": self.threshold}


POLICIES: Mapping[str, type[LengthPolicy]] = {
    policy.name: policy for policy in (Fixed, Heuristic, Confidence, SVIP, BetaTS, CaliTS, SelfSD, Adaptive)
}


def signals_of(settings: Settings) -> Signals:
    """The names of the signals that the length policy with these settings reads; empty without a policy."""
    return POLICIES[settings.policy].signals_with(settings.values) if settings.policy is not None else frozenset()


def is_random(settings: Settings) -> bool:
    """Whether the length policy with these settings draws random numbers; false without a policy."""
    return settings.policy is not None and POLICIES[settings.policy].random
